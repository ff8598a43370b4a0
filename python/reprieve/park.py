"""Owns how a sequence gives way and comes back: spill or replay, restore or replay."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

from reprieve.errors import (
    BooksMisused,
    CannotPark,
    DeviceLost,
    HostStoreFull,
    ImageCorrupt,
    KvExhausted,
    RequestFinished,
    StepFailed,
)
from reprieve.image_store import HostStore, ImageHeader
from reprieve.latch import classified
from reprieve.step import NothingInFlight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reprieve.request import FinishReason, ParkBy, PauseReason
    from reprieve.step import Books, Device, InFlight

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Park:
    """How and why a sequence gave way.

    `positions` of committed KV were spilled, in `spilled_bytes`, or dropped and are to be replayed. `parked_by` is the
    sequence that comes in or grows in its place, if there is one; `ahead` is how many wait before it.
    """

    by: ParkBy
    reason: PauseReason
    positions: int
    spilled_bytes: int
    ahead: int
    parked_by: int | None = None


class Listener(Protocol):
    """Who is told what happens to sequences. Called last, once everything has changed.

    A listener must not call the books or the parker from inside.
    """

    def started(self, seq: int) -> None:
        """Say that a queued sequence came in."""

    def parked(self, seq: int, park: Park) -> None:
        """Say that a sequence gave way."""

    def resumed(self, seq: int, by: Literal["restore", "replay"], restored_bytes: int) -> None:
        """Say that a parked sequence came back; "replay" also where its image could not be restored."""

    def ended(self, seq: int, code: FinishReason, cause: BaseException | None) -> None:
        """Say that a sequence ended before it was done: it is released already."""


class NullListener:
    """Listens to nothing: for people with a loop of their own that asks the books instead."""

    def started(self, seq: int) -> None:
        """Do nothing."""

    def parked(self, seq: int, park: Park) -> None:
        """Do nothing."""

    def resumed(self, seq: int, by: Literal["restore", "replay"], restored_bytes: int) -> None:
        """Do nothing."""

    def ended(self, seq: int, code: FinishReason, cause: BaseException | None) -> None:
        """Do nothing."""


class Parker:
    """Parks and resumes the sequences of one set of books, on one device, with one store for the spilled.

    A refused or failed call leaves books and store as they were; `DeviceLost` goes through. Where the device fails
    in any other way, the sequence goes the other way, or ends alone. Raises `InvalidArgument` for a device whose
    `kv_dtype`, `kv_shape` or `block_bytes` the header of an image cannot hold.
    """

    def __init__(self, books: Books, device: Device, store: HostStore, listener: Listener) -> None:
        self._books = books
        self._device = device
        self._store = store
        self._listener = listener
        # What a header cannot hold shows here and not at the first spill.
        ImageHeader(device.kv_dtype, device.kv_shape, num_blocks=1, committed=1, num_bytes=device.block_bytes)

    @property
    def spill_blocks(self) -> int:
        """How many blocks of images the store could still take; no more than the pool has."""
        return min(self._store.free_bytes // self._device.block_bytes, self._books.num_blocks)

    # Giving way.

    def is_resident(self, seq: int) -> bool:
        """Return whether `seq` has slot and blocks."""
        return self._books.state(seq) in {"prefilling", "decoding"}

    def park(
        self, seq: int, reason: PauseReason, by: ParkBy | None = None, parked_by: int | None = None
    ) -> ParkBy | None:
        """Park a resident sequence; return how, or None (and no change) if it is queued or parked already.

        It is spilled if it has an image and the image fits the budget, else it is replayed. `by` asks for one of the
        ways; the other is taken where that one is not open. The blocks are copied before they are given away; what a
        step in flight computes of it is discarded. `parked_by` is the sequence for which it gives way.
        Raises `CannotPark` if neither way is open, `RequestFinished`, what the books raise for an unknown sequence, and
        `DeviceLost`; then nothing has changed.
        """
        if not self.is_resident(seq):
            if self._books.state(seq) == "finished":
                raise RequestFinished(seq)
            return None
        replayable = self._books.can_replay(seq)
        # With nothing committed there is no image.
        if self._books.committed(seq) > 0 and (by != "replay" or not replayable):
            refusal = self._copy(seq)
            if refusal is None:
                self._give_away(seq, "spill", reason, parked_by)
                return "spill"
            if not replayable:
                raise CannotPark(seq, f"it is not replayable, and cannot be spilled: {refusal!r}") from refusal
            # A full store is the plan; a copy that fails is not.
            level = logging.DEBUG if isinstance(refusal, HostStoreFull) else logging.WARNING
            _LOG.log(level, "sequence %d cannot be spilled, it will be replayed: %s", seq, refusal)
        self._give_away(seq, "replay", reason, parked_by)
        return "replay"

    def make_room(self, shortage: KvExhausted) -> bool:
        """Make one resident sequence leave, so that the step that met `shortage` can be tried again.

        False, and nothing has changed, if a step in flight must be settled before it.

        The victim is parked. If nobody can give way, the first row that cannot grow ends with `capacity`. If the
        victim can be parked in neither way after all (its copy failed), one that needs no copy gives way in its
        place, and without one the victim ends with `step_failed`: whatever happens, somebody leaves.
        """
        victim = self._books.victim(self.spill_blocks)
        if victim == "settle":
            return False
        if victim is None:
            # Its tokens are right, so its blocks may be reused.
            self._leave(self._books.capacity_row(), "capacity", shortage)
            return True
        growing = self._books.growing()
        try:
            parked = self.park(victim, "exhausted", parked_by=_another(victim, growing))
        except CannotPark as refusal:
            other = self._books.victim(0)
            if other == "settle":
                return False
            if other is None or other == victim:
                self._leave(victim, "step_failed", refusal)
                return True
            parked = self.park(other, "exhausted", "replay", _another(other, growing))
        if parked is None:
            raise BooksMisused(f"the books chose sequence {victim} as a victim, which is not resident") from shortage
        return True

    def end(self, seq: int, code: FinishReason, cause: BaseException | None = None, *, reuse: bool = False) -> bool:
        """Release a sequence in any state, image included, and say so; False if it had ended before."""
        was_live = self._books.release(seq, reuse=reuse)
        self._store.drop(seq)
        if not was_live:
            return False
        _LOG.info("sequence %d ended with %s: %r", seq, code, cause)
        self._listener.ended(seq, code, cause)
        return True

    # Coming back.

    def bring_in(self, in_flight: InFlight | None = None) -> int:
        """Admit whoever fits; return how many. Called once per engine step, before its first `reserve`.

        For a head of strictly higher priority others are parked first, and a step in flight that needs them is settled
        before that. One parked in here for another is not admitted in here, so each round settles one of the steps in
        flight or admits somebody who did not give way to it, and the loop ends. It also ends where a planned victim
        cannot be parked after all: the head then waits for the next step.
        """
        admitted = 0
        gave_way: set[int] = set()
        in_flight = NothingInFlight() if in_flight is None else in_flight
        while (plan := self._books.next_arrival(self.spill_blocks)) is not None:
            if plan.seq in gave_way:
                break
            if plan.settle_first:
                if not in_flight.settle_oldest():
                    raise BooksMisused("the books wait for a step in flight, and there is none")
                continue
            try:
                for victim, by in plan.victims:
                    self.park(victim, "priority", by, plan.seq)
                    gave_way.add(victim)
            except CannotPark as refusal:
                _LOG.warning("sequence %d waits: %s", plan.seq, refusal)
                break
            self._admit(plan.seq)
            admitted += 1
        return admitted

    def _admit(self, seq: int) -> None:
        """Let one waiting sequence in."""
        arrival = self._books.admit(seq)
        if arrival == "restore":
            self._restore(seq)
        elif arrival == "replay":
            self._back(seq, "replay", 0)
        else:
            self._listener.started(seq)

    def _restore(self, seq: int) -> None:
        """Write the image of `seq` into its new blocks; without a sound image it replays in place, or ends."""
        blocks = self._books.image_blocks(seq)
        try:
            payload = self._store.get(seq, self._header(seq, blocks))
            self._device.scatter(blocks, payload)
        except ImageCorrupt as corrupt:
            self._do_without_image(seq, corrupt)
        except Exception as error:  # noqa: BLE001 any, to be classified
            failure = classified(self._device, error)
            self._do_without_image(seq, failure)
            if isinstance(failure, DeviceLost):
                raise failure from failure.__cause__
        except BaseException as interrupt:
            self._do_without_image(seq, interrupt)
            raise
        else:
            self._store.drop(seq)  # pinned until here
            self._back(seq, "restore", payload.nbytes)

    def _do_without_image(self, seq: int, cause: BaseException) -> None:
        """Let an admitted sequence replay where it is, or end it if its tokens alone do not rebuild its KV."""
        if self._books.can_replay(seq):
            self._books.drop_image(seq)
            self._store.drop(seq)
            _LOG.warning("sequence %d could not be restored and is replayed: %r", seq, cause)
            self._back(seq, "replay", 0)
        else:
            self.end(seq, "device_lost" if isinstance(cause, DeviceLost) else "step_failed", cause)

    # The parts.

    def _header(self, seq: int, blocks: Sequence[int]) -> ImageHeader:
        """Return the header of an image that holds `blocks` of `seq`."""
        return ImageHeader(
            dtype=self._device.kv_dtype,
            block_shape=self._device.kv_shape,
            num_blocks=len(blocks),
            committed=self._books.committed(seq),
            num_bytes=len(blocks) * self._device.block_bytes,
        )

    def _copy(self, seq: int) -> HostStoreFull | StepFailed | None:
        """Copy the image of `seq` into the store; on refusal nothing stays booked, and what refused is returned."""
        blocks = self._books.image_blocks(seq)
        header = self._header(seq, blocks)
        # A resident has none; one that an interrupt left behind would be taken for it.
        self._store.drop(seq)
        self._store.unbook(seq)
        try:
            self._store.book(seq, header.num_bytes)
        except HostStoreFull as full:
            return full
        except BaseException:
            self._store.unbook(seq)
            raise
        try:
            self._store.put(seq, header, self._device.gather(blocks))  # syncs
        except Exception as error:  # noqa: BLE001 any, to be classified
            self._store.unbook(seq)
            failure = classified(self._device, error)
            if isinstance(failure, DeviceLost):
                raise failure from failure.__cause__
            return failure
        except BaseException:
            self._store.unbook(seq)
            raise
        return None

    def _give_away(self, seq: int, by: ParkBy, reason: PauseReason, parked_by: int | None) -> None:
        """Take slot and blocks of `seq`, whose image is in the store if `by` is "spill"."""
        slot, positions, num_blocks = (
            self._books.slot(seq),
            self._books.committed(seq),
            len(self._books.image_blocks(seq)),
        )
        num_bytes = num_blocks * self._device.block_bytes if by == "spill" else 0
        try:
            self._books.park(seq, by)
        except BaseException:
            self._store.drop(seq)
            raise
        if _LOG.isEnabledFor(logging.INFO):
            generated, stay = self._books.generated(seq), self._books.residents()
            text = "parked sequence %d by %s (%s): slot %s, %d blocks of KV, %d tokens generated; sequences %s stay"
            _LOG.info(text, seq, by, reason, slot, num_blocks, generated, stay)
        ahead = self._books.waiting().index(seq)
        self._listener.parked(seq, Park(by, reason, positions, num_bytes, ahead, parked_by))

    def _back(self, seq: int, by: Literal["restore", "replay"], restored_bytes: int) -> None:
        """Say that `seq` is resident again."""
        if _LOG.isEnabledFor(logging.INFO):
            text = "resumed sequence %d by %s: slot %s, %d blocks free, %d tokens generated; residents are %s"
            books = self._books
            _LOG.info(text, seq, by, books.slot(seq), books.free_blocks, books.generated(seq), books.residents())
        self._listener.resumed(seq, by, restored_bytes)

    def _leave(self, seq: int, code: FinishReason, cause: Exception) -> None:
        """End the resident sequence that the books named; its blocks may be reused where nothing failed."""
        if not self.end(seq, code, cause, reuse=code == "capacity"):
            raise BooksMisused(f"the books named sequence {seq} to end, which had ended before") from cause


def _another(victim: int, seqs: Sequence[int]) -> int | None:
    """Return the first of `seqs` that is not the victim, or None."""
    return next((seq for seq in seqs if seq != victim), None)
