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
    """SmolLM2-135M-Instruct on the reference device, with the values of the file; loaded once."""
    return load(smollm2_path)
