"""What a caller submits, and the events that come back."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

from reprieve.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

FinishReason: TypeAlias = Literal[
    "stop",
    "length",
    "capacity",
    "deadline",
    "cancelled",
    "max_pause",
    "no_progress",
    "constraint",
    "nan",
    "step_failed",
    "device_lost",
]

RETRYABLE: Final[dict[FinishReason, bool]] = {
    "stop": False,
    "length": False,
    "capacity": True,  # elsewhere: it filled the whole pool, or could not grow while nobody could give way
    "deadline": True,
    "cancelled": False,
    "max_pause": True,
    "no_progress": True,
    "constraint": False,
    "nan": False,
    "step_failed": True,
    "device_lost": True,
}
"""How a request can end (the list is closed), and whether trying again makes sense."""

DONE_REASONS: Final[frozenset[FinishReason]] = frozenset({"stop", "length", "cancelled"})
"""The reasons that end a stream with `Done`; all others end it with `Failed`."""

ParkBy: TypeAlias = Literal["spill", "replay"]
"""How a sequence is taken off the device: its KV is kept on the host, or dropped and computed again later."""

PauseReason: TypeAlias = Literal["exhausted", "priority", "by_hand", "forced"]

Mask: TypeAlias = "Callable[[tuple[int, ...]], NDArray[np.uint32] | NDArray[np.int32] | None]"
"""Tells from the tokens generated so far which may come next: bit v % 32 of word v / 32 is set if token v may.

The words are one row, at least as many as the vocabulary needs; whatever NumPy takes for such an array will do. None
means that anything may come, words that are all zero that nothing may.
"""

MAX_BANS: Final = 16
"""The most ids that can be kept from a token without a mask."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be answered.

    `prompt` is text, or token ids. `max_new_tokens` is the budget, None for as many as the context allows; it is never
    reserved in advance. A higher `priority` is more urgent. `deadline_s` is how many seconds after submit the request
    ends with `deadline`, parked or not. `stop` are texts that end it and are not given out; `stop_token_ids` end it
    as the model's own end-of-sequence ids do, which `ignore_eos` switches off. `chat` puts a text prompt through the
    model's chat template as the user's message. `id` must be unique among live requests; None picks one.
    `max_pause_s` is the longest that it may be parked at a stretch, in seconds; then it ends with `max_pause`.

    What may be generated: none of `banned_token_ids`; no id that ends it until there are `min_tokens` tokens; neither
    of `think_tokens`, the ids that start and end thinking, once the second was generated. These are at most 16 ids
    together, the model's own that `min_tokens` keeps away included, and hold nothing up. `mask` says for each token
    which ids are allowed. It is called after each token in a thread of its own, one call at a time for one request; it
    may be slow, but must not call the engine. What it raises, and a mask that is none, ends the request with
    `constraint`.

    Raises `InvalidArgument` that names the field.
    """

    prompt: str | Sequence[int]
    _: KW_ONLY
    max_new_tokens: int | None = 128
    id: str | None = None
    chat: bool = False
    priority: int = 0
    deadline_s: float | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_pause_s: float | None = None
    min_tokens: int = 0
    banned_token_ids: Sequence[int] = ()
    think_tokens: tuple[int, int] | None = None
    mask: Mask | None = field(default=None, hash=False)  # a function may be an object that has no hash

    def __post_init__(self) -> None:
        """Check what can be checked without a model; sequences become tuples, numbers plain ones."""
        set_field = functools.partial(object.__setattr__, self)  # the class is frozen for everybody else
        if not isinstance(self.prompt, str):
            set_field("prompt", _token_ids("prompt", self.prompt))
        if len(self.prompt) == 0:
            raise InvalidArgument("prompt", "is empty; it needs at least one token")
        for flag in ("chat", "ignore_eos"):
            if not isinstance(getattr(self, flag), bool):
                raise InvalidArgument(flag, f"must be True or False, not {getattr(self, flag)!r}")
        if self.chat and not isinstance(self.prompt, str):
            raise InvalidArgument("chat", "a chat template applies to a text prompt, not to token ids")
        if self.max_new_tokens is not None:
            set_field("max_new_tokens", integer("max_new_tokens", self.max_new_tokens, 1))
        if self.id is not None and not isinstance(self.id, str):
            raise InvalidArgument("id", f"must be None or a text, not {self.id!r}")
        set_field("priority", integer("priority", self.priority, -(2**31), 2**31 - 1))
        for limit in ("deadline_s", "max_pause_s"):
            if getattr(self, limit) is not None:
                set_field(limit, _seconds(limit, getattr(self, limit)))
        set_field("stop", _texts("stop", self.stop))
        self._check_what_may_be_generated()

    def _check_what_may_be_generated(self) -> None:
        """Check mask, bans, stop ids and `min_tokens`, and the numbers of them against each other."""
        set_field = functools.partial(object.__setattr__, self)
        for ids in ("stop_token_ids", "banned_token_ids"):
            set_field(ids, _token_ids(ids, getattr(self, ids)))
        if self.think_tokens is not None:
            set_field("think_tokens", _pair("think_tokens", self.think_tokens))
        set_field("min_tokens", integer("min_tokens", self.min_tokens, 0))
        if self.mask is not None and (not callable(self.mask) or inspect.iscoroutinefunction(self.mask)):
            raise InvalidArgument("mask", f"must be None or a function that is not asynchronous, not {self.mask!r}")
        if self.max_new_tokens is not None and self.min_tokens > self.max_new_tokens:
            raise InvalidArgument("min_tokens", f"is {self.min_tokens}, above max_new_tokens, {self.max_new_tokens}")
        kept_away = {*self.banned_token_ids, *(self.think_tokens or ())}
        if len(kept_away) > MAX_BANS:
            among = "" if self.think_tokens is None else ", think_tokens included"
            raise InvalidArgument("banned_token_ids", f"are {len(kept_away)} ids{among}; at most {MAX_BANS} can be")
        kept_away |= set(self.stop_token_ids)
        if self.min_tokens and len(kept_away) > MAX_BANS:
            problem = f"keeps stop_token_ids away, {len(kept_away)} ids with the banned ones; at most {MAX_BANS} can be"
            raise InvalidArgument("min_tokens", problem)


def as_request(request: Request | str | Sequence[int], fields: Mapping[str, Any]) -> Request:
    """Return `request`, or the request of a prompt with the other `fields`; raises `InvalidArgument`."""
    if isinstance(request, Request):
        if fields:
            raise InvalidArgument(next(iter(fields)), "is given beside a Request; put it into the Request")
        return request
    for name in fields:
        if name not in Request.__dataclass_fields__:
            known = ", ".join(Request.__dataclass_fields__)
            raise InvalidArgument(name, f"is no field of a request; there are {known}")
    return Request(request, **fields)


def integer(field: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Return `value` as a plain integer from `least` to `most`; `InvalidArgument` that names `field` if it is none."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidArgument(field, f"must be an integer, not {value!r}")
    try:
        number = operator.index(value)
    except TypeError:  # an array of several
        raise InvalidArgument(field, f"must be an integer, not {value!r}") from None
    if (least is not None and number < least) or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidArgument(field, f"must be an integer {bounds}, not {number}")
    return number


def _seconds(field: str, value: object) -> float:
    try:
        seconds = float(value)  # type: ignore[arg-type]  # that it may not be one is the question
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(field, f"must be a number of seconds, not {value!r}") from None
    if not seconds > 0:  # refuses NaN as well
        raise InvalidArgument(field, f"must be more than 0 seconds, not {value!r}")
    return seconds


def _token_ids(field: str, values: object) -> tuple[int, ...]:
    if isinstance(values, str | bytes | Mapping | AbstractSet) or not isinstance(values, Iterable):
        raise InvalidArgument(field, f"must be a sequence of token ids, not {values!r}")
    try:
        ids = tuple(values)
    except TypeError:  # an array of no dimension
        raise InvalidArgument(field, f"must be a sequence of token ids, not {values!r}") from None
    return tuple(integer(f"{field}[{index}]", token_id) for index, token_id in enumerate(ids))


def _pair(field: str, values: object) -> tuple[int, int]:
    match _token_ids(field, values):
        case (start, end) if start != end:
            return start, end
        case ids:
            raise InvalidArgument(field, f"must be two ids that differ, start and end, not {ids}")


def _texts(field: str, values: object) -> tuple[str, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidArgument(field, f"must be a sequence of texts, not {values!r}")
    texts = tuple(values)
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise InvalidArgument(f"{field}[{index}]", f"must be a text that is not empty, not {text!r}")
    return texts


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    `index` counts from 0. `text` is what can be given out now: it lags behind while a character is incomplete or
    while what has come could be the beginning of a stop text. `text` is "" where there is no tokenizer.
    """

    id: int
    index: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Paused:
    """The request gave way: it was parked, by spill or replay, and will come back.

    `ahead_of_you` is how many requests stand before it in the order of coming in. `parked_by` is the id of the request
    that came in or grew in its place, where there is one.
    """

    reason: PauseReason
    by: ParkBy
    ahead_of_you: int = 0
    parked_by: str | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """The request is back, after `paused_s` seconds."""

    paused_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of a request that ended as it should: "stop", "length" or "cancelled".

    `text` is what was still held back; all `text` of a stream joined is the whole answer.
    """

    finish_reason: FinishReason
    text: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that could not go on. Its tokens up to here are right, and delivered.

    `code` is one of the other finish reasons, `retryable` whether trying again makes sense, `cause` the exception.
    """

    code: FinishReason
    retryable: bool
    cause: BaseException | None = None
    text: str = ""


Event: TypeAlias = Token | Paused | Resumed | Done | Failed


@dataclass(slots=True)
class Tally:
    """What is counted for each request, and for all of an engine; bytes are KV payload, pauses seconds of its clock.

    `steps` are those that committed something of it, `over_runs` the rows that were computed ahead and discarded,
    `sat_out` the rows that waited for the host while a step went without them. `parks_by_reason` counts what
    `parks_by_spill` and `parks_by_replay` count together.
    """

    tokens_generated: int = 0
    steps: int = 0
    over_runs: int = 0
    sat_out: int = 0
    tokens_replayed: int = 0
    parks_by_spill: int = 0
    parks_by_replay: int = 0
    parks_by_reason: dict[PauseReason, int] = field(default_factory=dict)
    spilled_bytes: int = 0
    restored_bytes: int = 0
    longest_pause_s: float = 0.0
    total_pause_s: float = 0.0

    def copy(self) -> Self:
        """Return a snapshot of it, which stays as it is; from any thread, as each field is copied whole."""
        return type(self)(**{name: copy.copy(getattr(self, name)) for name in self.__dataclass_fields__})


@dataclass(slots=True)
class RequestStats(Tally):
    """What happened to one request so far; `parked_for` counts its parks by the id of whoever they made room for."""

    prompt_tokens: int = 0
    parked_for: dict[str, int] = field(default_factory=dict)
