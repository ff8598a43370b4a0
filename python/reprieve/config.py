"""The settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from reprieve.errors import InvalidArgument
from reprieve.request import integer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reprieve.request import ParkBy

MOST_DEPTH: Final = 3
"""Steps in flight at most; each costs a set of buffers, and what it computes for nobody where a sequence ends."""

_BOUNDS: Final = {
    "kv_blocks": (1, 2**31 - 1),
    "block_size": (1, 2**31 - 1),
    "max_slots": (1, 2**20),
    "step_tokens": (1, 2**24),
    "host_kv_bytes": (0, 2**63 - 1),
    "head_room": (0, 2**31 - 1),
    "immunity_tokens": (0, 2**63 - 1),
    "context_length": (1, 2**31 - 1),
    "force_park_every": (0, 2**63 - 1),
    "depth": (1, MOST_DEPTH),
}
"""The least and the most that each number may be: what the books can count with."""

VictimPolicy: TypeAlias = Literal["fewest_generated", "newest", "largest"]


@dataclass(frozen=True, slots=True, kw_only=True)
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
    depth             steps in flight: with 2 or 3 the next one is launched before the last one's tokens are known; None
                      for what is best on the device. It changes no bit of anybody's output

    Raises `InvalidArgument` (a `ValueError`) that names the setting.
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
    depth: int | None = None

    def __post_init__(self) -> None:
        """Check each setting alone; what depends on the model is checked when the engine is made."""
        for setting, (least, most) in _BOUNDS.items():
            value = getattr(self, setting)
            if value is not None or setting not in {"context_length", "depth"}:
                # The class is frozen for everybody else.
                object.__setattr__(self, setting, integer(setting, value, least, most))
        if self.victim not in ("fewest_generated", "newest", "largest"):
            raise InvalidArgument("victim", f'must be "fewest_generated", "newest" or "largest", not {self.victim!r}')
        if not isinstance(self.park_constrained, bool):
            raise InvalidArgument("park_constrained", f"must be True or False, not {self.park_constrained!r}")
        if self.force_park_by not in (None, "spill", "replay"):
            raise InvalidArgument("force_park_by", f'must be None, "spill" or "replay", not {self.force_park_by!r}')

    @classmethod
    def of(cls, config: EngineConfig | None, settings: Mapping[str, Any]) -> EngineConfig:
        """Return `config`, or one of `settings`; `InvalidArgument` for an unknown setting or for both."""
        known = cls.__dataclass_fields__
        for name in settings:
            if name not in known:
                raise InvalidArgument(name, f"is no setting; there are {', '.join(known)}")
        if config is None:
            return cls(**settings)
        if not isinstance(config, cls):
            raise InvalidArgument("config", f"must be an EngineConfig, not {config!r}")
        if settings:
            raise InvalidArgument(next(iter(settings)), "is given beside config; put it into the config")
        return config
