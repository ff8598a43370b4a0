"""The shape of a model: what `config.json` or the header of a GGUF file say about it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Architecture: TypeAlias = Literal["llama", "mistral", "qwen2", "qwen3"]

MAX_SIZE = 2**31 - 1  # of any one size or count: positions, ids and rows are 32-bit on devices

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "context_length",
)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched: "linear" by `factor`, or "llama3" with all of its numbers.

    Raises `ValueError` that names the field.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192

    def __post_init__(self) -> None:
        """Check that no frequency becomes zero, negative, infinite or NaN."""
        if self.kind not in {"linear", "llama3"}:
            raise ValueError(f'kind must be "linear" or "llama3", not {self.kind!r}')
        for field, value in (
            ("factor", self.factor),
            ("low_freq_factor", self.low_freq_factor),
            ("original_context_length", self.original_context_length),
        ):
            if not 0 < value < math.inf:
                raise ValueError(f"{field} must be more than 0, not {value}")
        if not self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must be more than low_freq_factor {self.low_freq_factor}"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What an architecture needs to know; counts are of the whole model, sizes are of one head, layer or token.

    `rope_factors` [head_size / 2], where a file carries them, divide the rotary frequencies one by one.

    Raises `ValueError` that names the field.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rope_factors: tuple[float, ...] | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    def __post_init__(self) -> None:
        """Check each number alone, then those that must agree."""
        for field in _COUNTS:
            value = getattr(self, field)
            if not 1 <= value <= MAX_SIZE:
                raise ValueError(f"{field} must be from 1 to {MAX_SIZE}, not {value}")
        for field in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, field)
            if not 0 < value < math.inf:
                raise ValueError(f"{field} must be more than 0, not {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_size % 2:
            raise ValueError(f"head_size must be even, not {self.head_size}")
        for field, token in (("bos_id", self.bos_id), *(("eos_ids", token) for token in self.eos_ids)):
            if token is not None and not 0 <= token < self.vocab_size:
                raise ValueError(f"{field}: {token} is outside the vocabulary of {self.vocab_size} tokens")
        if self.rope_factors is not None:
            _check_rope_factors(self.rope_factors, self.head_size // 2)


def _check_rope_factors(factors: tuple[float, ...], num_pairs: int) -> None:
    """Raise `ValueError` unless there is one positive factor for each pair of a head."""
    if len(factors) != num_pairs:
        raise ValueError(f"rope_factors must be {num_pairs} numbers, not {len(factors)}")
    for index, factor in enumerate(factors):
        if not 0 < factor < math.inf:
            raise ValueError(f"rope_factors[{index}] must be more than 0, not {factor}")


def rope_frequencies(config: ModelConfig) -> NDArray[np.float64]:
    """Return the rotary angle per position, in radians, of each pair of a head: float64 [head_size / 2].

    Pair i is elements i and i + head_size / 2. Scaling and the file's own factors are applied.
    """
    exponents = np.arange(0, config.head_size, 2, dtype=np.float64) / config.head_size
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None:
        frequencies = _llama3(frequencies, scaling)
    if config.rope_factors is not None:
        frequencies = frequencies / np.asarray(config.rope_factors, dtype=np.float64)
    return np.ascontiguousarray(frequencies, dtype=np.float64)


def rope_tables(config: ModelConfig, num_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cos and sin of each pair's angle at each position: [num_positions, head_size / 2] f32, from float64."""
    angles = np.outer(np.arange(num_positions), rope_frequencies(config))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _llama3(frequencies: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    """Slow the low frequencies by `factor`, keep the high ones, and blend in between.

    "Low" is less than `low_freq_factor` turns in the original context, "high" more than `high_freq_factor`.
    """
    turns = scaling.original_context_length * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
