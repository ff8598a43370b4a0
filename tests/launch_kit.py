"""Crowded rigs for the tests of the retry loop, and the ways in which a step can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reprieve.errors import DeviceLost, KvExhausted, StepAborted, StepFailed
from scripted import Rig

if TYPE_CHECKING:
    from scripted_entry import Entry

FAULTS: list[tuple[BaseException, BaseException | None, type[BaseException]]] = [
    (StepFailed("no"), None, StepAborted),
    (DeviceLost("gone"), None, DeviceLost),
    (ValueError("device lost, out of memory"), None, StepAborted),
    (MemoryError(), None, StepAborted),
    (KvExhausted(1, 0), None, StepAborted),
    (ValueError("all is well"), DeviceLost("gone"), DeviceLost),
    (ValueError("all is well"), OSError("a probe that is broken too"), DeviceLost),
    (KeyboardInterrupt(), None, KeyboardInterrupt),
    (SystemExit(3), None, SystemExit),
    (ValueError("then"), KeyboardInterrupt(), KeyboardInterrupt),
]


BUDGET = 9


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 1000, length)]


def crowded(parks: int) -> Rig:
    """Return a rig of six sequences at KV length 8, whose next step exhausts the pool exactly `parks` times.

    Each holds 2 blocks of 4 and needs a third: with 12 + 6 blocks all can grow. Whoever leaves gives back two and
    needs none, so each park makes up for three blocks.
    """
    num_blocks = {0: 18, 1: 16, 2: 13}[parks]
    rig = Rig(num_blocks=num_blocks)
    for seed in range(6):
        rig.books.submit(prompt(seed, 7), BUDGET)
    assert rig.step()  # the prompts
    assert rig.step()  # position 7: block 2 is full
    assert [entry.committed for entry in rig.books.entries.values()] == [8] * 6
    rig.device.launched.clear()
    return rig


def fails(
    rig: Rig, call: str, error: BaseException, nth: int | None = None, probe: BaseException | None = None
) -> None:
    """Make the device's next (or `nth`) `call` raise `error`, and its probe raise `probe`."""
    wanted = rig.device.counts[call] if nth is None else nth

    def fault(name: str, count: int) -> BaseException | None:
        if name == "probe":
            return probe
        return error if (name, count) == (call, wanted) else None

    rig.device.fault = fault


def by_row(rig: Rig) -> list[Entry]:
    return rig.books._residents()
