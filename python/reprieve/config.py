"""The settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, TypeAlias

from reprieve.errors import InvalidRequest

if TYPE_CHECKING:
    from reprieve.request import ParkBy

VictimPolicy: TypeAlias = Literal["fewest_generated", "newest", "largest"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an engine; `Engine(model, **settings)` takes the same names.

    kv_blocks         blocks in the KV pool
    block_size        positions in a block
    max_slots         most sequences resident at once
    step_tokens       tokens a step aims at: decodes first, then chunks of prefill and replay
    host_kv_bytes     bytes of spilled KV kept on the host; 0 parks by replay alone
    head_room         blocks that must stay free per resident sequence when one comes in
    immunity_tokens   tokens a resumed sequence generates before it can be a victim again
    victim            policy that picks who gives way
    park_constrained  whether constrained sequences may be parked at all
    context_length    most positions of a sequence; None for the model's own
    force_park_every  park each sequence after every so many tokens that it generates, to try it out; 0 never does
    force_park_by     how: "spill" or "replay"; None for the way that would be taken anyway

    Raises `InvalidRequest` (a `ValueError`) that names the setting.
    """

    kv_blocks: int = 256
    block_size: int = 16
    max_slots: int = 16
    step_tokens: int = 128
    host_kv_bytes: int = 256 * 2**20
    head_room: int = 1
    immunity_tokens: int = 64
    victim: VictimPolicy = "fewest_generated"
    park_constrained: bool = True
    context_length: int | None = None
    force_park_every: int = 0
    force_park_by: ParkBy | None = None

    def __post_init__(self) -> None:
        """Check each setting alone; what depends on the model is checked when the engine is made."""
        at_least = {
            "kv_blocks": 1,
            "block_size": 1,
            "max_slots": 1,
            "step_tokens": 1,
            "host_kv_bytes": 0,
            "head_room": 0,
            "immunity_tokens": 0,
            "context_length": 1,
            "force_park_every": 0,
        }
        for setting in fields(self):
            lowest = at_least.get(setting.name)
            value = getattr(self, setting.name)
            if lowest is None or (value is None and setting.name == "context_length"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise InvalidRequest(setting.name, f"must be an integer of at least {lowest}, not {value!r}")
        if self.victim not in {"fewest_generated", "newest", "largest"}:
            raise InvalidRequest("victim", f'must be "fewest_generated", "newest" or "largest", not {self.victim!r}')
        if self.force_park_by not in {None, "spill", "replay"}:
            raise InvalidRequest("force_park_by", f'must be None, "spill" or "replay", not {self.force_park_by!r}')
