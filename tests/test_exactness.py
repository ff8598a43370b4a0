"""A token's bits depend on its own sequence alone: whatever else is in the batch, in the pool, or happened before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from device_kinds import CPU, KINDS, REFERENCE, DeviceKind, each_kind
from encoded import encode, with_matrices
from reprieve._native import cpu_instructions
from reprieve.device.reference_weights import ReferenceWeights
from reprieve.device.row_tiles import same_bits
from reprieve.step import FROM_FEED
from tiny_models import Row, Runner, tiny_config, tiny_weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from device_kinds import DeviceWeights, LogitDevice, LogitTicket
    from reprieve.device.kv_pool import KvKind
    from reprieve.model.config import Architecture, ModelConfig
    from reprieve.model.weights import ModelWeights, Tensor

NUM_BLOCK_POSITIONS = 400  # positions in each pool
WIDE = 512  # hidden size of the one model that is not tiny
LENGTHS = (141, 37, 18, 9, 3)  # of the sequences; the first goes past one KV tile of 128


@dataclass(frozen=True)
class Case:
    """One model and pool of the matrix."""

    heads: tuple[int, int, int]
    architecture: Architecture
    kv: KvKind
    block_size: int
    hidden: int = 48
    weights: str = "F32"

    @property
    def name(self) -> str:
        heads = "x".join(map(str, self.heads))
        return f"{self.architecture}-{heads}-{self.kv}-block{self.block_size}-hidden{self.hidden}-{self.weights}"

    def device(self, kind: DeviceKind, weights: DeviceWeights) -> LogitDevice:
        return kind.device(weights, -(-NUM_BLOCK_POSITIONS // self.block_size), self.block_size, 8, self.kv)

    def model(self) -> tuple[ModelConfig, ModelWeights]:
        config = tiny_config(self.heads, self.architecture, hidden=self.hidden)
        model = tiny_weights(config, seed=self.block_size)
        return config, with_matrices(model, lambda tensor: encode(tensor, self.weights))


CASES = [
    Case((4, 2, 16), "llama", "f32", 1),
    Case((9, 3, 8), "llama", "f16", 1),
    Case((6, 6, 8), "qwen2", "bf16", 1),
    Case((9, 3, 8), "qwen3", "f32", 4),
    Case((4, 1, 16), "qwen2", "f16", 4),
    Case((4, 2, 16), "qwen3", "bf16", 4),
    Case((14, 2, 8), "qwen2", "f32", 16),
    Case((4, 2, 16), "qwen3", "f16", 16),
    Case((9, 3, 8), "mistral", "bf16", 16),
    # Wide enough that OpenBLAS shares a tile's product among threads.
    Case((9, 3, 64), "llama", "f32", 16, hidden=WIDE),
]

# What the reference computes with is float32 in any case.
ENCODED_CASES = [
    Case((4, 2, 16), "llama", "f16", 16, hidden=64, weights=weights)
    for weights in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@dataclass(frozen=True)
class Solo:
    """What each sequence gives when it is decoded alone, a token at a time, in a pool of zeros."""

    weights: DeviceWeights
    tokens: list[list[int]]
    logits: list[NDArray[np.float32]]  # per sequence [length, vocab]


def solo(case: Case, kind: DeviceKind) -> Solo:
    """Return the oracle of `case` for all that must have the bits of `kind`: the CPU's has one thread."""
    return _solo(case, kind.oracle)


@lru_cache(maxsize=2 * len(CASES))
def _solo(case: Case, kind: DeviceKind) -> Solo:
    weights = kind.weights(*case.model())
    random = np.random.default_rng(7)
    tokens = [random.integers(0, weights.config.vocab_size, length).tolist() for length in LENGTHS]
    logits = []
    for sequence in tokens:
        runner = Runner.of(case.device(kind, weights))
        steps = [runner.run([Row(0, at, [token])])[0] for at, token in enumerate(sequence)]
        logits.append(np.stack(steps))
    return Solo(weights, tokens, logits)


def run_mixed(runner: Runner, oracle: Solo, seed: int) -> list[str]:
    """Run all sequences together in random chunks and company; return where logits differ from the oracle's."""
    random = np.random.default_rng(seed)
    slots = random.permutation(8)[: len(LENGTHS)].tolist()
    done = [0] * len(LENGTHS)
    differences: list[str] = []
    while any(at < length for at, length in zip(done, LENGTHS, strict=True)):  # each round moves one on at least
        going = [i for i, length in enumerate(LENGTHS) if done[i] < length]
        chosen = [i for i in going if random.random() < 0.8] or going[:1]
        rows = []
        for i in sorted(chosen, key=lambda i: slots[i]):
            chunk = 1 if random.random() < 0.5 else int(random.integers(1, 24))
            rows.append(Row(slots[i], done[i], oracle.tokens[i][done[i] : done[i] + chunk], read=random.random() < 0.8))
            done[i] += len(rows[-1].tokens)
        logits = runner.run(rows)
        differences += [
            f"sequence {i} at {done[i] - 1}"
            for i in chosen
            if slots[i] in logits and not same_bits(logits[slots[i]], oracle.logits[i][done[i] - 1])
        ]
    return differences


def replay(runner: Runner, slot: int, tokens: list[int], chunk: int) -> NDArray[np.float32]:
    """Prefill `tokens` in chunks, the last of which may be shorter; return the last token's logits."""
    for at in range(0, len(tokens), chunk):
        logits = runner.run([Row(slot, at, tokens[at : at + chunk])])
    return logits[slot]


@each_kind
@each_case
def test_mixed_batches_give_the_bits_of_a_solo_run(case: Case, kind: DeviceKind) -> None:
    oracle = solo(case, kind)
    for seed in range(2):
        assert run_mixed(Runner.of(case.device(kind, oracle.weights), seed), oracle, seed) == []


@each_kind
@each_case
@pytest.mark.parametrize("filling", [np.nan, 1e30])
def test_what_a_block_held_before_never_shows(case: Case, filling: float, kind: DeviceKind) -> None:
    oracle = solo(case, kind)
    device = case.device(kind, oracle.weights)
    fill(device, filling)
    assert run_mixed(Runner.of(device, 3), oracle, seed=3) == []


def fill(device: LogitDevice, filling: float) -> None:
    """Fill the whole pool with one value of its type; 1e30 is infinite in f16."""
    with np.errstate(over="ignore"):
        value = np.array([filling], np.float16 if device.kv_dtype == "f16" else np.float32)
    # The upper half of a float32 is the bfloat16 nearest to zero.
    item = value.view(np.uint8)[2:] if device.kv_dtype == "bf16" else value.view(np.uint8)
    blocks = range(device.num_blocks)
    device.scatter(blocks, np.tile(item, len(blocks) * device.block_bytes // len(item)))


@each_kind
@each_case
def test_any_chunking_of_a_replay_writes_the_same_kv_and_gives_the_same_logits(case: Case, kind: DeviceKind) -> None:
    oracle = solo(case, kind)
    tokens = oracle.tokens[0]
    images = []
    for seed, chunk in enumerate((1, 2, 7, 8, 61, len(tokens))):
        device = case.device(kind, oracle.weights)
        runner = Runner.of(device, seed)
        assert same_bits(replay(runner, seed, tokens, chunk), oracle.logits[0][-1])
        images.append(device.gather(runner.tables[seed]))
    for image in images[1:]:
        assert np.array_equal(image, images[0])


@each_kind
def test_the_block_size_never_shows(kind: DeviceKind) -> None:
    for case in (CASES[0], CASES[-1]):
        oracle = solo(case, kind)
        for block_size in (1, 3, 4, 16, 128, 200):
            runner = Runner.of(replace(case, block_size=block_size).device(kind, oracle.weights))
            assert same_bits(replay(runner, 0, oracle.tokens[0], 20), oracle.logits[0][-1])


@each_kind
@each_case
def test_restored_blocks_elsewhere_go_on_with_the_same_bits(case: Case, kind: DeviceKind) -> None:
    oracle = solo(case, kind)
    tokens, half = oracle.tokens[1], 19
    device = case.device(kind, oracle.weights)
    runner = Runner.of(device)
    replay(runner, 2, tokens[:half], 5)
    image = device.gather(runner.tables[2])
    runner.release(2)
    fill(device, np.nan)
    runner.grow(5, len(tokens))
    device.scatter(runner.tables[5][: -(-half // case.block_size)], image)
    image[:] = 255  # the caller may overwrite it
    for at in range(half, len(tokens)):
        assert same_bits(runner.run([Row(5, at, [tokens[at]])])[5], oracle.logits[1][at])


def feed_on(runner: Runner, prompts: list[list[int]], seed: int) -> list[list[tuple[int, NDArray[np.float32]]]]:
    """Return by sequence 8 sampled tokens, each with its logits, where all inputs after the prompts come from the feed.

    The prompts come in one after another, among decodes of those before; two steps are in flight, but for the logits.
    """
    random = np.random.default_rng(seed)
    slots = sorted(random.permutation(8)[: len(prompts)].tolist())
    logits: list[list[NDArray[np.float32]]] = [[] for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    flying: deque[tuple[list[int], LogitTicket]] = deque()

    def settle_oldest() -> None:
        sequences, ticket = flying.popleft()
        for i, token in zip(sequences, ticket.settle().tokens.tolist(), strict=True):
            tokens[i].append(token)

    while any(len(each) < 8 for each in logits):  # each round samples a token at least
        newcomers = [i for i, each in enumerate(logits) if not each][:1]
        feeding = [i for i, each in enumerate(logits) if 0 < len(each) < 8]
        chosen = [i for i in feeding if random.random() < 0.7] or ([] if newcomers else feeding[:1])
        rows = [Row(slots[i], len(prompts[i]) + len(logits[i]) - 1, [FROM_FEED]) for i in chosen]
        rows += [Row(slots[i], 0, prompts[i]) for i in newcomers]
        ticket = runner.launch(rows)
        flying.append((chosen + newcomers, ticket))
        for i, values in zip(chosen + newcomers, ticket.logits, strict=True):
            logits[i].append(values)
        if len(flying) == 2:
            settle_oldest()
    while flying:
        settle_oldest()
    return [list(zip(*each, strict=True)) for each in zip(tokens, logits, strict=True)]


@each_kind
@each_case
def test_what_feeds_on_itself_in_a_mixed_batch_has_the_bits_of_a_solo_run(case: Case, kind: DeviceKind) -> None:
    oracle = solo(case, kind)
    prompts = [oracle.tokens[i] for i in (4, 1, 3)]
    answers = feed_on(Runner.of(case.device(kind, oracle.weights), 4), prompts, seed=4)
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = Runner.of(case.device(kind.oracle, oracle.weights))
        replay(alone, 0, prompt[:-1], 3)
        token = prompt[-1]
        for at, (sampled, logits) in enumerate(answer, len(prompt) - 1):
            expected = alone.run([Row(0, at, [token])])[0]
            assert same_bits(logits, expected), at
            assert sampled == expected[: oracle.weights.config.vocab_size].argmax()
            token = sampled


class RowDependentWeights(ReferenceWeights):
    """A negative control: the order of a reduction depends on how many rows there are."""

    def linear(self, x: NDArray[np.float32], weight: Tensor, bias: Tensor | None) -> NDArray[np.float32]:
        matrix = self[weight]
        half = len(matrix) // 2 if len(x) > 1 else 0
        result: NDArray[Any] = x[:, :half] @ matrix[:half] + x[:, half:] @ matrix[half:]
        return result if bias is None else result + self[bias]


def test_a_product_that_depends_on_the_batch_is_found() -> None:
    case = CASES[0]
    faulty = RowDependentWeights(*case.model())
    assert run_mixed(Runner.of(case.device(REFERENCE, faulty)), solo(case, REFERENCE), seed=0) != []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name == "cpu"], ids=str)
@pytest.mark.parametrize("case", ENCODED_CASES, ids=lambda case: case.weights)
def test_every_type_of_weights_is_exact(case: Case, kind: DeviceKind) -> None:
    oracle = solo(case, kind)
    for seed in range(3):
        assert run_mixed(Runner.of(case.device(kind, oracle.weights), seed), oracle, seed) == []


def test_every_instruction_set_gives_the_bits_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    sets = cpu_instructions()
    for case in (*CASES, *ENCODED_CASES):
        oracle = solo(case, CPU)
        for name in sets:
            kind = DeviceKind("cpu", 2, name)
            assert run_mixed(Runner.of(case.device(kind, oracle.weights), 5), oracle, seed=5) == [], name
    with capsys.disabled():
        print(f"\ninstruction sets that this machine has: {', '.join(sets)}")  # noqa: T201  others were left out
    assert sets[-1] in {"portable", "neon"}
    assert len(set(sets)) == len(sets)
