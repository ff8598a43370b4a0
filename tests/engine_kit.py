"""What the engine's tests share: tiny models, random prompts, a clock that is set by hand, a device that fails."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from device_kinds import CPU
from recording import Answer, check_stream, recorded, solo_run
from reprieve import Engine, Handle, LoadedModel, Request
from reprieve.errors import DeviceLost
from reprieve.loading import from_weights
from tiny_models import tiny_config, tiny_weights

if TYPE_CHECKING:
    from device_kinds import DeviceKind, LogitTicket
    from recording import RecordingDevice
    from reprieve.model.config import Architecture
    from reprieve.step import Step

VOCAB = 61


def position_bytes(model: LoadedModel) -> int:
    """Return the bytes of a position in the KV pool that an engine on `model` has where nothing is said."""
    config = model.config
    return config.num_layers * 2 * config.num_kv_heads * config.head_size * (4 if model.kv == "f32" else 2)


@functools.cache
def tiny_model(
    architecture: Architecture = "llama",
    heads: tuple[int, int, int] = (4, 2, 16),
    context_length: int = 2048,
    kind: DeviceKind = CPU,
) -> LoadedModel:
    """Return a random model of two layers, loaded once."""
    config = replace(tiny_config(heads, architecture), eos_ids=(7, 11), context_length=context_length)
    weights = tiny_weights(config, seed=3)
    return from_weights("tiny", config, weights, device=kind.name, threads=kind.threads)


@functools.cache
def alone(request: Request, model: LoadedModel | None = None) -> Answer:
    """Return what `request` comes to alone."""
    return solo_run(
        model or tiny_model(), replace(request, id=None, priority=0, deadline_s=None, max_pause_s=None), block_size=4
    )


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Return a random prompt."""
    return tuple(np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist())


def ask(length: int, budget: int, seed: int = 0, **fields: object) -> Request:
    """Return a request for exactly `budget` tokens."""
    return Request(prompt(length, seed), max_new_tokens=budget, ignore_eos=True, **fields)  # type: ignore[arg-type]


class Clock:
    """Time as the test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Faults:
    """What the next launch, gather, scatter or probe of a faulty device raises; None lets it pass."""

    def __init__(self) -> None:
        self.launch: BaseException | None = None
        self.gather: BaseException | None = None
        self.is_lost = False


def faulty_engine(**settings: object) -> tuple[Engine, Faults, RecordingDevice]:
    """Return an engine on a recording device that fails on command."""
    recording, devices = recorded(tiny_model())
    engine = Engine(recording, **settings)  # type: ignore[arg-type]
    faults, device = Faults(), devices[0]
    launch, gather = device.launch, device.gather

    def faulty_launch(step: Step) -> LogitTicket:
        error, faults.launch = faults.launch, None
        if error is not None:
            raise error
        return launch(step)

    def faulty_gather(blocks: object) -> object:
        error, faults.gather = faults.gather, None
        if error is not None:
            raise error
        return gather(blocks)  # type: ignore[arg-type]

    def probe() -> None:
        if faults.is_lost:
            raise DeviceLost("pulled out")

    device.launch = faulty_launch  # type: ignore[method-assign]
    device.gather = faulty_gather  # type: ignore[method-assign,assignment]
    device.probe = probe  # type: ignore[method-assign]
    return engine, faults, device


def small_engine(**settings: Any) -> Engine:
    """Return an engine of 40 blocks of 4 positions, 4 slots and depth 2, where nothing else is said."""
    return Engine(tiny_model(), **{"kv_blocks": 40, "block_size": 4, "max_slots": 4, "depth": 2} | settings)


def check_as_alone(*handles: Handle) -> None:
    """Assert that each stream, none of it taken yet, is that of its request alone."""
    for handle in handles:
        check_stream(handle.take_events(), alone(handle.request))
