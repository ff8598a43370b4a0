"""Owns the verdict on a failure, the step's or the device's, and the latch that keeps a lost device lost."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from reprieve.errors import DeviceLost, StepFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from reprieve.step import Device

_LOG: Final = logging.getLogger(__name__)


def classified(device: Device, error: Exception) -> StepFailed | DeviceLost:
    """Return what `error`, raised by a call on the device, means: to be raised, or handled, by the caller.

    `StepFailed` and `DeviceLost` are returned as they are. For any other exception the device is asked, never the
    text: if it answers its probe, only the step has failed. What is returned then has `error` as its cause.
    """
    if isinstance(error, StepFailed | DeviceLost):
        return error
    shown = f"{type(error).__name__}: {error}"
    verdict: StepFailed | DeviceLost
    try:
        device.probe()
    except DeviceLost as lost:
        verdict = lost
    except Exception:  # noqa: BLE001 whatever a probe raises, it did not answer
        verdict = DeviceLost(f"the device raised {shown}, and then its probe failed")
    else:
        verdict = StepFailed(f"the device raised {shown}, and still answers its probe")
    verdict.__cause__ = error
    return verdict


class FaultLatch:
    """Set once, when the device is lost; the first reason stays.

    `on_lost` is called once, from `trip`, for the caller's own shutdown. If it raises, that is logged and changes
    nothing. `trip` may be called from any thread.
    """

    def __init__(self, on_lost: Callable[[DeviceLost], None] | None = None) -> None:
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._lost: DeviceLost | None = None

    @property
    def lost(self) -> DeviceLost | None:
        """Why the device was lost, or None while it works."""
        return self._lost

    def trip(self, lost: DeviceLost) -> None:
        """Set the latch. No-op if it is set already."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = lost
        _LOG.error("the device is lost: %r", lost)
        if self._on_lost is None:
            return
        try:
            self._on_lost(lost)
        except Exception:  # noqa: BLE001 the callback is the caller's
            _LOG.exception("the callback for the lost device raised")
