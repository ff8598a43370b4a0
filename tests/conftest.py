"""Fixtures that several test files share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reprieve import LoadedModel, load
from reprieve.hub import demo_model

if TYPE_CHECKING:
    from pathlib import Path


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
