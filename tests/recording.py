"""A device that records the logits of every token that it samples, and the solo run that they are compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from reprieve import Done, Engine, Failed, LoadedModel, Paused, Request, Resumed, Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from device_kinds import LogitDevice, LogitTicket
    from reprieve.device.kv_pool import KvKind
    from reprieve.loading import DeviceSettings
    from reprieve.request import Event
    from reprieve.step import Step


class RecordingDevice:
    """Passes everything on to a device, and keeps the bits of the logits by (sequence, position).

    It waits for each step at its launch. Over-runs are kept too, so there may be more than tokens were delivered.
    """

    def __init__(self, device: LogitDevice) -> None:
        self._device = device
        self.default_depth = device.default_depth
        self.block_bytes = device.block_bytes
        self.kv_dtype = device.kv_dtype
        self.kv_shape = device.kv_shape
        self.logits: dict[tuple[int, int], bytes] = {}

    def launch(self, step: Step) -> LogitTicket:
        ticket = self._device.launch(step)
        for row, logits in zip(ticket.logit_rows.tolist(), ticket.logits, strict=True):
            where = (int(step.seqs[row]), int(step.kv_lengths[row]))
            bits = logits.tobytes()
            assert self.logits.setdefault(where, bits) == bits, f"sampled twice, with other logits: {where}"
        return ticket

    def gather(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        return self._device.gather(blocks)

    def scatter(self, blocks: Sequence[int], image: NDArray[np.uint8]) -> None:
        self._device.scatter(blocks, image)

    def probe(self) -> None:
        self._device.probe()

    def close(self) -> None:
        self._device.close()


def recorded(model: LoadedModel) -> tuple[LoadedModel, list[RecordingDevice]]:
    """Return a model whose devices record, and the list to which they are added as engines make them."""
    devices: list[RecordingDevice] = []

    def make_device(settings: DeviceSettings) -> RecordingDevice:
        device = RecordingDevice(model.make_device(settings))  # type: ignore[arg-type]  # one that keeps its logits
        devices.append(device)
        return device

    return replace(model, make_device=make_device), devices


@dataclass(frozen=True)
class Answer:
    """What a request came to: its tokens, how it ended, and the logits of each token."""

    tokens: list[int]
    finish_reason: str | None
    text: str
    logits: list[bytes]


def logits_of(device: RecordingDevice, seq: int, count: int) -> list[bytes]:
    """Return the logits of the first `count` tokens of sequence `seq`, in order; what comes after are over-runs."""
    return [bits for (owner, _), bits in sorted(device.logits.items()) if owner == seq][:count]


def solo_run(
    model: LoadedModel, request: Request, block_size: int = 16, kv: KvKind | Literal["auto"] = "auto"
) -> Answer:
    """Answer `request` alone, in a pool that is never short."""
    recording, devices = recorded(model)
    with Engine(recording, kv=kv, kv_blocks=max(2048 // block_size, 64), block_size=block_size, max_slots=1) as engine:
        handle = engine.submit(request)
        text = handle.result()
        assert not handle.stats.parks_by_spill + handle.stats.parks_by_replay
        return Answer(handle.tokens, handle.finish_reason, text, logits_of(devices[0], 0, len(handle.tokens)))


def check_stream(events: Sequence[Event], answer: Answer) -> None:
    """Assert that a stream has no gap and no repeat, pauses that end, one last event, and the answer's text."""
    tokens = [event for event in events if isinstance(event, Token)]
    assert [token.index for token in tokens] == list(range(len(answer.tokens)))
    assert [token.id for token in tokens] == answer.tokens
    last = events[-1]
    assert isinstance(last, Done | Failed)
    assert (last.finish_reason if isinstance(last, Done) else last.code) == answer.finish_reason
    assert not any(isinstance(event, Done | Failed) for event in events[:-1])
    assert "".join(token.text for token in tokens) + last.text == answer.text
    paused = False
    for event in events:
        if isinstance(event, Paused | Resumed):
            assert isinstance(event, Resumed) == paused, "Paused and Resumed do not alternate"
            paused = not paused
        elif isinstance(event, Token):
            assert not paused, "a token came during a pause"


def check_nothing_left(engine: Engine) -> None:
    """Settle what is in flight, and assert that no block, slot, image or sequence is left over."""
    engine.run()
    engine._books.check()
    engine._store.check()
    snapshot = engine.snapshot()
    assert snapshot.free_blocks == snapshot.num_blocks
    assert snapshot.fenced_blocks == 0
    assert not any(snapshot.slots)
    assert not snapshot.waiting
    assert snapshot.host_bytes == 0
    assert engine._books.num_live == 0
    assert len(engine._journal) == 0
