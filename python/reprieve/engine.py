"""The engine: the one place that joins books, device, parking, text and events."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from reprieve._native import Ledger
from reprieve.batch import generate
from reprieve.config import EngineConfig
from reprieve.constraint import MaskFeed, Masks
from reprieve.delivery import Delivery
from reprieve.errors import (
    CannotPark,
    DeviceLost,
    EngineClosed,
    InvalidArgument,
    RequestFinished,
    UnknownRequest,
)
from reprieve.exclusive import Exclusive, exclusive
from reprieve.handle import Handle
from reprieve.image_store import HostStore
from reprieve.intake import Intake
from reprieve.journal import Journal, Live
from reprieve.lane import Lane
from reprieve.latch import FaultLatch
from reprieve.loading import KV_TYPES, LoadedModel, load
from reprieve.park import Parker
from reprieve.request import as_request
from reprieve.stats import EngineSnapshot, EngineStats, Progress, SlotView
from reprieve.trace import PoolRecord, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    from reprieve.device.kv_pool import KvKind
    from reprieve.model.weights import Rounding
    from reprieve.request import FinishReason, ParkBy, Request

_LOG: Final = logging.getLogger(__name__)

_STALLED_PASSES: Final = 16
"""Passes with work but no launch after which the watchdog ends the request that should have come next."""

_MOST_WAIT_S: Final = 0.005
"""Seconds for which a step without rows waits for masks, before others have their turn again."""

_UNBOUNDED: Final = 2**63 - 1
"""A budget that the context always ends before."""


class Engine(Exclusive):
    """Decodes requests through KV exhaustion.

    `model` is whatever `load` takes (with `device`, `weights` and `threads`), or a model that it loaded, which several
    engines may share. `kv` is the element type of the KV pool ("auto": "f16" on the CPU device, "f32" on the
    reference); the other `settings` are those of `EngineConfig`. `clock` gives seconds that never go back;
    `on_device_lost` is called once, when everybody has ended, if the device fails for good; what happens is told to
    `trace`. The attributes `config`, `model`, `kv` and `depth` (the steps in flight) say what it was made with.

    Calls come from one thread at a time: a second one gets `EngineBusy`. Ctrl-C is taken at the end of a call, when
    every sequence is in one state; a second Ctrl-C waits for no more than the device, and what it breaks off may be
    told to a stream twice or not at all: close the engine then. A context manager: leaving it closes the engine.
    Raises `InvalidArgument` for a bad setting, and what `load` raises.
    """

    def __init__(  # noqa: PLR0913  keywords, each with a default
        self,
        model: str | Path | LoadedModel,
        *,
        device: str | None = None,
        weights: Rounding | None = None,
        threads: int | None = None,
        kv: KvKind | Literal["auto"] = "auto",
        clock: Callable[[], float] = time.monotonic,
        on_device_lost: Callable[[DeviceLost], None] | None = None,
        trace: Trace | None = None,
        config: EngineConfig | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.config = EngineConfig.of(config, settings)
        if kv not in KV_TYPES:
            raise InvalidArgument("kv", f"must be one of {', '.join(KV_TYPES)}, not {kv!r}")
        for name, function in (("clock", clock), ("on_device_lost", on_device_lost)):
            if not callable(function) and (function is not None or name == "clock"):
                raise InvalidArgument(name, f"must be a function, not {function!r}")
        if trace is not None and not isinstance(trace, Trace):
            raise InvalidArgument("trace", f"must be a Trace, which writes itself to a file later, not {trace!r}")
        self.model = _loaded(model, device, weights, threads)
        self.kv: KvKind = self.model.kv if kv == "auto" else kv
        context_length = self.model.context_length(self.config)
        self._on_device_lost = on_device_lost
        self._latch = FaultLatch(self._end_all_as_lost)
        self._stalled_passes = 0
        self._is_closed = False
        self._trace = trace
        self._store = HostStore(self.config.host_kv_bytes)
        self._device = self.model.new_device(self.config, self.kv)
        try:
            self.depth = self.config.depth or self._device.default_depth
            self._books = _books(self.config, self.model, context_length)
            shape = self._books.step_shape()
            timer = time.perf_counter if trace is None else trace.now
            self._masks = Masks(shape.mask_words, self.model.config.vocab_size)
            self._journal = Journal(clock, trace, self._masks.forget)
            self._intake = Intake(self.model.text, self._journal)
            self._parker = Parker(self._books, self._device, self._store, self._journal)
            self._delivery = Delivery(
                self._parker,
                self._journal,
                self._masks,
                num_slots=self.config.max_slots,
                between=self._force_parks,
                trace=trace,
                timer=timer,
            )
            self._lane = Lane(
                self._books,
                self._device,
                self._parker,
                self._delivery,
                depth=self.depth,
                shape=shape,
                seconds=self._journal.stats,
                masks=MaskFeed(self._masks, self._books, self._parker),
                timer=timer,
            )
        except BaseException:
            self._device.close()
            raise

    @property
    def stats(self) -> EngineStats:
        """Totals since the engine was made."""
        return self._journal.stats

    # Requests.

    @exclusive
    def submit(self, /, request: Request | str | Sequence[int], **fields: Any) -> Handle:
        """Queue a request, or a prompt with the other `fields` of a `Request`; return its stream.

        Raises, before anything changed: `InvalidArgument` that names the field (`NeverFits` for a prompt that the whole
        pool could not hold), `DeviceLost`, `EngineClosed`.
        """
        self._require_open()
        self._delivery.run()
        asked = as_request(request, fields)
        request_id = self._intake.id_of(asked)
        prompt = self._intake.prompt_of(asked)
        stream = self._intake.stream_of(asked)
        eos = () if asked.ignore_eos else self.model.config.eos_ids
        budget = asked.max_new_tokens
        deadline = None if asked.deadline_s is None else self._journal.now() + asked.deadline_s
        seq = self._books.submit(
            prompt,
            max_new_tokens=_UNBOUNDED if budget is None else min(budget, _UNBOUNDED),
            priority=asked.priority,
            stop_token_ids=[*asked.stop_token_ids, *eos],
            constrained=asked.mask is not None,
            min_tokens=min(asked.min_tokens, _UNBOUNDED),
            banned_token_ids=asked.banned_token_ids,
            think_tokens=asked.think_tokens,
        )
        # Everything that can fail is above this line.
        handle = Handle(asked, request_id, prompt, self._advance)
        self._journal.open(Live(seq, handle, stream, deadline, asked.max_pause_s))
        if asked.mask is not None:
            self._masks.open(seq, asked.mask)
            self._masks.ask(seq, ())
        return handle

    @exclusive
    def cancel(self, request: Handle | str) -> None:
        """End a request with `cancelled`, whatever it is doing. `UnknownRequest` if no such request is live.

        No-op on a handle whose request has ended.
        """
        self._delivery.run()
        if isinstance(request, Handle) and request.is_finished:
            return
        self._end(self._live(request), "cancelled")

    @exclusive
    def park(self, request: Handle | str, by: ParkBy | None = None) -> ParkBy | None:
        """Park a resident request by hand; return how, or None (and no change) if it is queued or parked already.

        `by` asks for a way; over the byte budget it is replayed. It comes back by itself in its turn. Raises
        `CannotPark`, `UnknownRequest`, `RequestFinished`, `DeviceLost`, with nothing changed.
        """
        if by not in (None, "spill", "replay"):
            raise InvalidArgument("by", f'must be None, "spill" or "replay", not {by!r}')
        self._delivery.run()
        live = self._live(request)
        try:
            return self._parker.park(live.seq, "by_hand", by)
        except CannotPark as refusal:
            # An engine's callers know requests, not sequences.
            raise CannotPark(live.handle.id, refusal.reason) from refusal
        except DeviceLost as lost:
            self._lane.salvage()
            self._latch.trip(lost)
            raise

    @exclusive
    def resume(self, request: Handle | str) -> bool:
        """Move a parked or queued request to the front of its priority; it comes in when it fits.

        False, and no change, if it is resident. Raises `UnknownRequest`, `RequestFinished`.
        """
        self._delivery.run()
        return self._books.resume(self._live(request).seq)

    @property
    def awaits_masks(self) -> bool:
        """Whether some request waits for a mask that is being computed."""
        return self._masks.num_pending > 0

    # Steps.

    @exclusive
    def step(self) -> Progress:
        """Let in who fits, launch steps until as many are in flight as there may be, settle the oldest, deliver it.

        A step that fails ends its own rows with `step_failed`; a lost device ends every live request with
        `device_lost`, and then the engine takes no more. Once nobody is live, what is still in flight is settled.
        """
        self._require_open(lost_is_open=True)
        self._delivery.run()  # what an interrupt left
        if self._latch.lost is not None and len(self._journal):
            self._end_all(self._latch.lost)  # likewise
        ended = self._expire()
        before = len(self._journal)
        if not before and not self._lane.num_in_flight:
            return Progress("progressed" if ended else "idle")
        try:
            self._lane.bring_in()
            launched = self._lane.fill() or (self._await_masks() and self._lane.fill())
            self._trace_pool()
            if not self._lane.settle_oldest() and not launched:
                return self._without_launch(progressed=ended or len(self._journal) < before)
            self._trace_pool()
        except DeviceLost as lost:
            self._latch.trip(lost)
        except BaseException:
            # An interrupt, or a bug: whatever it broke off, no reservation stays behind.
            self._lane.recover()
            raise
        self._stalled_passes = 0
        return Progress("progressed")

    def run(self) -> None:
        """Step until no request is live and no step in flight.

        It ends, as each pass makes progress or counts towards the watchdog.
        """
        while len(self._journal) or self._lane.num_in_flight:
            self.step()

    def generate(
        self, requests: Iterable[Request | str | Sequence[int]], *, progress: bool | None = None, **fields: Any
    ) -> list[Handle]:
        """Answer many requests, or prompts with the other `fields` of a `Request`; return their handles, in that order.

        `progress` shows a bar on standard error, None only where that is a terminal. A request that fails says so in
        its handle, and the rest go on. Raises `InvalidArgument` that names the place of a bad request, before anything
        is computed, and what `submit` and `step` raise; then those that are left are cancelled.
        """
        return generate(self, requests, fields, progress=progress)

    @exclusive
    def drain(self) -> None:
        """Settle all steps in flight and deliver their tokens; launch none."""
        self._delivery.run()
        try:
            self._lane.drain()
        except DeviceLost as lost:
            self._latch.trip(lost)
        except BaseException:
            self._lane.recover()
            raise

    @exclusive
    def snapshot(self) -> EngineSnapshot:
        """Return who sits where and who waits."""
        slots: list[SlotView | None] = [None] * self.config.max_slots
        for seq in self._books.residents():
            slot = self._books.slot(seq)
            if slot is not None and (live := self._journal.by_seq(seq)) is not None:
                slots[slot] = SlotView(
                    live.handle.id,
                    self._books.state(seq),
                    self._books.held_blocks(seq),
                    self._books.generated(seq),
                )
        waiting = (self._journal.by_seq(seq) for seq in self._books.waiting())
        return EngineSnapshot(
            tuple(slots),
            tuple(live.handle.id for live in waiting if live is not None),
            self._books.num_blocks,
            self._books.free_blocks,
            self._store.used_bytes,
            self._books.fenced_blocks,
            self._lane.num_in_flight,
        )

    # The end.

    @exclusive
    def close(self) -> None:
        """End every live request with `cancelled` and give the device's memory back. Idempotent.

        Waits up to a second for masks that are being computed; a function that takes longer is left to itself.
        """
        if self._is_closed and not len(self._journal):
            return
        self._is_closed = True
        try:
            self.drain()
            for live in self._journal:
                self._end(live, "cancelled")
        finally:
            try:
                self._device.close()
            finally:
                self._masks.close()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the engine."""
        self.close()

    # The parts.

    def _advance(self, handle: Handle) -> None:
        """Make one step for somebody who waits for an event of `handle`."""
        if self.step().state == "idle" and not handle.is_finished:
            raise RuntimeError(f"request {handle.id!r} has not ended, and the engine has no work: a bug")

    def _require_open(self, *, lost_is_open: bool = False) -> None:
        if self._is_closed:
            raise EngineClosed("the engine is closed")
        if self._latch.lost is not None and not lost_is_open:
            raise DeviceLost("the device is lost; make a new engine") from self._latch.lost

    def _live(self, request: Handle | str) -> Live:
        """Return the live request that is meant."""
        request_id = request.id if isinstance(request, Handle) else request
        if isinstance(request, Handle) and request.is_finished:
            raise RequestFinished(request_id)
        live = self._journal.by_id(request_id)
        if live is None or (isinstance(request, Handle) and live.handle is not request):
            raise UnknownRequest(request_id)
        return live

    def _end(self, live: Live, reason: FinishReason, cause: BaseException | None = None) -> None:
        """End a live request whose committed KV is sound."""
        if not self._parker.end(live.seq, reason, cause, reuse=reason != "device_lost"):
            # The books let go of it before its stream was told.
            self._journal.finish(live, reason, cause)

    def _expire(self) -> bool:
        """End whoever is past its deadline, wherever it is; return whether there was one."""
        ended = False
        # Each round ends one request, so the loop ends.
        while (due := self._journal.deadlines.due(self._journal.now())) is not None:
            seq, expiry = due
            live = self._journal.by_seq(seq)
            if live is None:
                raise RuntimeError(f"sequence {seq} has ended, and still has a {expiry}: a bug")
            self._end(live, expiry)
            ended = True
        return ended

    def _end_all(self, lost: DeviceLost) -> None:
        """End every live request with `device_lost`."""
        self._lane.recover()
        for live in self._journal:
            self._end(live, "device_lost", lost)

    def _end_all_as_lost(self, lost: DeviceLost) -> None:
        """End everybody, and only then tell the caller. Called by the latch, once."""
        self._end_all(lost)
        if self._on_device_lost is not None:
            self._on_device_lost(lost)

    def _without_launch(self, *, progressed: bool) -> Progress:
        """Say why nothing was launched; the watchdog ends a request that has made no progress for too long."""
        if progressed or not len(self._journal):
            self._stalled_passes = 0
            return Progress("progressed" if progressed else "idle")
        until = self._journal.deadlines.next()
        if self._masks.num_pending:
            self._stalled_passes = 0  # a function of the caller's may take its time
            return Progress("waiting", next(iter(self._journal)).handle.id, until)
        order = [*self._books.waiting(), *self._books.residents()]
        live = next((found for seq in order if (found := self._journal.by_seq(seq)) is not None), None)
        live = next(iter(self._journal)) if live is None else live
        self._stalled_passes += 1
        if self._stalled_passes >= _STALLED_PASSES:
            _LOG.error("request %s made no progress in %d passes and ends", live.handle.id, self._stalled_passes)
            self._stalled_passes = 0
            self._end(live, "no_progress")
            return Progress("progressed")
        return Progress("waiting", live.handle.id, until)

    def _await_masks(self) -> bool:
        """Wait for a mask, for a while, if nothing else is to be done; return whether one may have come."""
        if self._lane.num_in_flight or not self._masks.num_pending:
            return False
        until = self._journal.deadlines.next()
        left = _MOST_WAIT_S if until is None else min(until - self._journal.now(), _MOST_WAIT_S)
        return self._masks.wait(lambda: False, max(left, 0.0))

    def _trace_pool(self) -> None:
        """Tell the trace how full the pool is."""
        if self._trace is None:
            return
        free, fenced, waiting = self._books.free_blocks, self._books.fenced_blocks, self._books.waiting()
        paused = sum(self._books.state(seq) != "queued" for seq in waiting)
        held = self._books.num_blocks - free - fenced
        self._trace.pool(PoolRecord(self._trace.now(), held, free, fenced, len(waiting), paused))

    def _force_parks(self, seqs: list[int]) -> None:
        """Park each of the sequences whose newest token is one after which the settings ask for it, if it can be."""
        every = self.config.force_park_every
        if not every:
            return
        for seq in seqs:
            if self._journal.by_seq(seq) is None or self._books.generated(seq) % every:
                continue
            try:
                self._parker.park(seq, "forced", self.config.force_park_by)
            except CannotPark as refusal:
                _LOG.info("not parked: %s", refusal)


def _loaded(
    model: str | Path | LoadedModel, device: str | None, weights: Rounding | None, threads: int | None
) -> LoadedModel:
    """Return `model` loaded; with what it is loaded can be said only once."""
    if not isinstance(model, LoadedModel):
        return load(model, device=device or "auto", weights=weights or "file", threads=threads)
    for name, value in (("device", device), ("weights", weights), ("threads", threads)):
        if value is not None:
            raise InvalidArgument(name, f"is {value!r}, given beside a model that is loaded already; give it to load()")
    return model


def _books(config: EngineConfig, model: LoadedModel, context_length: int) -> Ledger:
    """Return empty books for `model`."""
    return Ledger(
        num_blocks=config.kv_blocks,
        block_size=config.block_size,
        num_slots=config.max_slots,
        context_length=context_length,
        vocab_size=model.config.vocab_size,
        step_tokens=config.step_tokens,
        row_tile=model.row_tile,
        head_room=config.head_room,
        immunity_tokens=config.immunity_tokens,
        victim=config.victim,
        park_constrained=config.park_constrained,
    )
