"""Typed access to the loosely typed settings of a model file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reprieve.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_LARGEST = 1e308
_MESSAGE_LENGTH = 80  # characters of a value that an error shows


@dataclass(frozen=True, slots=True)
class Fields:
    """The settings in `values`, whose keys all begin with `prefix`; every error names the file and the key.

    A setting that is null counts as absent. An absent one gives the default, or `ModelFileError` where there is none.
    """

    path: Path
    values: Mapping[str, object]
    prefix: str = ""

    def get(self, key: str) -> object:
        """Return the setting as it is, or None where it is absent."""
        return self.values.get(self.prefix + key)

    def wrong(self, key: str, problem: str) -> ModelFileError:
        """Return the error that says what is wrong with the setting `key`."""
        return ModelFileError(self.path, f"{self.prefix}{key} {problem}")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number. Raises `ModelFileError` where it is missing or something else."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, f"must be a whole number, not {_shown(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number. Raises `ModelFileError` where it is missing or something else."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong(key, "is missing")
        # Compared first, then converted: a larger whole number has no float. `not <=` refuses NaN as well.
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            raise self.wrong(key, f"must be a finite number, not {_shown(value)}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a truth value. Raises `ModelFileError` where it is something else."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, f"must be true or false, not {_shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text. Raises `ModelFileError` where it is missing or something else."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong(key, "is missing")
        if not isinstance(value, str):
            raise self.wrong(key, f"must be a text, not {_shown(value)}")
        return value


def _shown(value: object) -> str:
    """Return `value` as an error message can show it: not longer than a line."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return f"a whole number of about 10**{int(math.log10(abs(value)))}"  # repr() refuses over 4,300 digits
    text = repr(value)
    return text if len(text) <= _MESSAGE_LENGTH else f"{text[:_MESSAGE_LENGTH]}..."
