"""Fixtures that several test files share."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from reprieve import LoadedModel, load
from reprieve.hub import demo_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_interrupts() -> Iterator[None]:
    """Take SIGINT as a terminal's program does: one that was started in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo's GGUF file, fetched into the user's cache if it is not there."""
    return demo_model()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> LoadedModel:
    """SmolLM2-135M-Instruct on the CPU device, with the weights of the file, in Q4_1; loaded once."""
    return load(smollm2_path, device="cpu")


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path) -> LoadedModel:
    """The same on the reference device, in float32."""
    return load(smollm2_path, device="reference")
