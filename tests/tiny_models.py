"""Random tiny models, and hand-made steps that drive a device with no books."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from reprieve.model.config import Architecture, ModelConfig
from reprieve.model.weights import LayerWeights, ModelWeights
from reprieve.step import READ_ARGMAX, READ_NOTHING, Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from device_kinds import LogitDevice, LogitTicket


@dataclass(frozen=True, eq=False)
class ArrayTensor:
    """A `Tensor` that lies in memory."""

    name: str
    values: NDArray[np.float32]
    dtype: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def raw(self) -> NDArray[np.uint8]:
        return self.values.view(np.uint8)

    def float32(self) -> NDArray[np.float32]:
        return self.values.copy()


def tiny_config(
    heads: tuple[int, int, int] = (4, 2, 16),
    architecture: Architecture = "llama",
    *,
    vocab_size: int = 61,
    hidden: int = 48,
) -> ModelConfig:
    """Return a model of two layers with `heads` = (heads, KV heads, head size)."""
    num_heads, num_kv_heads, head_size = heads
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden + 32,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        context_length=512,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
    )


def tiny_weights(config: ModelConfig, seed: int = 0, extra_vocab: int = 0) -> ModelWeights:
    """Return random weights: biases for qwen2, QK norm for qwen3, tied embeddings for all but llama.

    `extra_vocab` rows are added to the vocabulary, as padded checkpoints have them.
    """
    random = np.random.default_rng(seed)
    hidden, inner, head_size = config.hidden_size, config.intermediate_size, config.head_size
    q_size, kv_size = config.num_heads * head_size, config.num_kv_heads * head_size

    def matrix(name: str, outputs: int, inputs: int) -> ArrayTensor:
        values = random.standard_normal((outputs, inputs)) * 1.5 / np.sqrt(inputs)
        return ArrayTensor(name, values.astype(np.float32))

    def vector(name: str, size: int, around: float) -> ArrayTensor:
        return ArrayTensor(name, (around + 0.1 * random.standard_normal(size)).astype(np.float32))

    def layer(at: int) -> LayerWeights:
        name = f"layer {at} ".__add__
        biases = config.architecture == "qwen2"
        norms = config.architecture == "qwen3"
        return LayerWeights(
            attention_norm=vector(name("attention_norm"), hidden, 1),
            q=matrix(name("q"), q_size, hidden),
            k=matrix(name("k"), kv_size, hidden),
            v=matrix(name("v"), kv_size, hidden),
            o=matrix(name("o"), hidden, q_size),
            mlp_norm=vector(name("mlp_norm"), hidden, 1),
            gate=matrix(name("gate"), inner, hidden),
            up=matrix(name("up"), inner, hidden),
            down=matrix(name("down"), hidden, inner),
            q_bias=vector(name("q_bias"), q_size, 0) if biases else None,
            k_bias=vector(name("k_bias"), kv_size, 0) if biases else None,
            v_bias=vector(name("v_bias"), kv_size, 0) if biases else None,
            q_norm=vector(name("q_norm"), head_size, 1) if norms else None,
            k_norm=vector(name("k_norm"), head_size, 1) if norms else None,
        )

    width = config.vocab_size + extra_vocab
    embedding = matrix("embedding", width, hidden)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layer(at) for at in range(config.num_layers)),
        final_norm=vector("final_norm", hidden, 1),
        output=matrix("output", width, hidden) if config.architecture == "llama" else embedding,
    )


def mask_of(allowed: Iterable[int], vocab_size: int) -> NDArray[np.uint32]:
    """Return the packed mask [words] that allows these ids of `vocab_size` and no other."""
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


@dataclass
class Row:
    """One row of a hand-made step: the tokens of the sequence in `slot` from position `start`, or [FROM_FEED]."""

    slot: int
    start: int
    tokens: list[int]
    read: bool = True


def make_step(
    rows: list[Row],
    table_changes: list[tuple[int, int, int]],
    *,
    bans: Sequence[tuple[int, int, int]] = (),
    masks: Mapping[int, NDArray[np.uint32]] | None = None,
) -> Step:
    """Return the step of `rows`, given in ascending slot order; `masks` are by row, all of one width."""
    lengths = [len(row.tokens) for row in rows]
    starts = [row.start for row in rows]
    masks = masks or {}
    return Step(
        token_ids=np.array([token for row in rows for token in row.tokens], np.int32),
        positions=np.array([row.start + i for row in rows for i in range(len(row.tokens))], np.int32),
        seqs=np.array([row.slot for row in rows], np.uint64),
        slots=np.array([row.slot for row in rows], np.int32),
        starts=np.array(starts, np.int32),
        num_new=np.array(lengths, np.int32),
        kv_lengths=np.array(starts, np.int32) + np.array(lengths, np.int32),
        readback=np.array([READ_ARGMAX if row.read else READ_NOTHING for row in rows], np.uint8),
        table_changes=np.array(table_changes, np.int32).reshape(-1, 3),
        bans=np.array(bans, np.int32).reshape(-1, 3),
        mask_rows=np.array(sorted(masks), np.int32),
        masks=np.stack([masks[row] for row in sorted(masks)]) if masks else np.zeros((0, 0), np.uint32),
    )


@dataclass
class Runner:
    """Drives a device by hand: blocks are given out in a shuffled order, one table per slot."""

    device: LogitDevice
    block_size: int
    free: list[int]
    tables: dict[int, list[int]] = field(default_factory=dict)
    changes: list[tuple[int, int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, device: LogitDevice, seed: int = 0) -> Runner:
        blocks = np.random.default_rng(seed).permutation(device.num_blocks)
        return cls(device, device.block_size, blocks.tolist())

    def grow(self, slot: int, length: int) -> None:
        """Give `slot` the blocks of `length` positions."""
        table = self.tables.setdefault(slot, [])
        while len(table) * self.block_size < length:
            block = self.free.pop()
            self.changes.append((slot, len(table), block))
            table.append(block)

    def release(self, slot: int) -> list[int]:
        """Take the blocks of `slot` back, and return them in table order."""
        blocks = self.tables.pop(slot)
        self.free[:0] = blocks
        return blocks

    def launch(
        self,
        rows: list[Row],
        *,
        bans: Sequence[tuple[int, int, int]] = (),
        masks: Mapping[int, NDArray[np.uint32]] | None = None,
    ) -> LogitTicket:
        """Give `rows` the blocks that they need, and launch them."""
        for row in rows:
            self.grow(row.slot, row.start + len(row.tokens))
        ticket = self.device.launch(make_step(rows, self.changes, bans=bans, masks=masks))
        self.changes.clear()
        return ticket

    def run(self, rows: list[Row]) -> dict[int, NDArray[np.float32]]:
        """Launch and settle `rows`; return, by slot, the logits of those that are read back."""
        ticket = self.launch(rows)
        ticket.settle()
        slots = ticket.step.slots[ticket.logit_rows].tolist()
        return dict(zip(slots, ticket.logits, strict=True))
