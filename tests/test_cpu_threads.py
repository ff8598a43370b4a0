"""The CPU device's threads: how many, beside which others, and across a fork."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from device_kinds import CPU, DeviceKind
from engine_kit import alone, ask, tiny_model
from reprieve import Engine
from reprieve.device.cpu import checked_threads
from reprieve.device.row_tiles import same_bits
from reprieve.errors import InvalidArgument
from reprieve.loading import from_weights, load
from reprieve.step import FROM_FEED
from tiny_models import Row, Runner, make_step, tiny_config, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from reprieve.step import Ticket

HERE = Path(__file__).parent


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, "2", 2**40])
def test_a_number_of_threads_that_cannot_be_is_refused_before_a_model_is_looked_for(threads: object) -> None:
    said = f"threads: must be None or an integer from 1 to 1024, not {threads!r}"
    config = tiny_config()
    model = tiny_weights(config)
    weights = CPU.weights(config, model)
    for call in (
        lambda: load("./absent.gguf", threads=threads),  # type: ignore[arg-type]
        lambda: Engine("./absent.gguf", threads=threads),  # type: ignore[arg-type]
        lambda: from_weights("tiny", config, model, threads=threads),  # type: ignore[arg-type]
        lambda: DeviceKind("cpu", threads).device(weights),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert str(caught.value) == said


def test_threads_are_those_asked_for_or_one_per_core() -> None:
    config = tiny_config()
    model = tiny_weights(config)
    assert from_weights("tiny", config, model).threads == checked_threads(None) >= 1
    assert from_weights("tiny", config, model, threads=np.int64(3)).threads == 3  # type: ignore[arg-type]
    assert from_weights("tiny", config, model, device="reference").threads == 1
    with pytest.raises(InvalidArgument, match="threads: is 2, and the reference device computes with one thread"):
        from_weights("tiny", config, model, device="reference", threads=2)


@pytest.mark.parametrize("threads", [5, 16, 64])
def test_more_threads_than_there_is_work_give_the_same_bits(threads: int) -> None:
    config = tiny_config(vocab_size=3)
    weights = CPU.weights(config, tiny_weights(config))
    many, one = (Runner.of(DeviceKind("cpu", count).device(weights)) for count in (threads, 1))
    for at, tokens in ((0, [1, 2, 0, 1]), (4, [2]), (5, [1])):
        assert same_bits(many.run([Row(0, at, tokens)])[0], one.run([Row(0, at, tokens)])[0])


def test_two_devices_share_weights_and_nothing_else() -> None:
    config = tiny_config()
    weights = CPU.weights(config, tiny_weights(config))
    first, second = (
        Runner.of(DeviceKind("cpu", threads).device(weights, 9, 4, 2), seed) for seed, threads in ((1, 2), (2, 1))
    )
    alone_bits = Runner.of(CPU.device(weights, 9, 4, 2)).run([Row(0, 0, [3, 1, 4])])[0]
    for runner in (first, second):
        runner.run([Row(1, 0, [5, 9, 2, 6])])
        assert same_bits(runner.run([Row(0, 0, [3, 1, 4])])[0], alone_bits)
    first.device.close()
    assert same_bits(second.run([Row(0, 0, [3, 1, 4])])[0], alone_bits)


@pytest.mark.parametrize("threads", [1, 2])
def test_engines_in_two_python_threads_at_once_answer_as_alone(threads: int) -> None:
    model = tiny_model(kind=DeviceKind("cpu", threads))
    answers: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        with Engine(model, kv_blocks=30, block_size=4, max_slots=4) as engine:
            handles = [engine.submit(ask(9 + number, 20, seed)) for seed in range(6)]
            engine.run()
            answers[number] = [handle.tokens for handle in handles]

    workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for number in range(2):
        assert answers[number] == [alone(ask(9 + number, 20, seed)).tokens for seed in range(6)]


def check_costs_nothing_at_rest() -> None:
    """Assert that all threads of this process sleep. Nothing but time shows it, so this waits."""
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_are_asleep_between_steps(threads: int) -> None:
    config = tiny_config()
    kind = DeviceKind("cpu", threads)
    device = kind.device(kind.weights(config, tiny_weights(config)))
    device.launch(make_step([Row(0, 0, [1, 2, 3])], [(0, 0, 0)])).settle()
    check_costs_nothing_at_rest()
    device.launch(make_step([Row(0, 3, [4])], [])).settle()
    check_costs_nothing_at_rest()


def test_engines_that_are_idle_cost_nothing() -> None:
    model = tiny_model(kind=DeviceKind("cpu", 2))
    with Engine(model, kv_blocks=30, block_size=4) as first, Engine(model, kv_blocks=30, block_size=4) as second:
        handles = [engine.submit(ask(9, 20)) for engine in (first, second)]
        for _ in range(5):  # one after the other, in the middle of decoding
            first.step()
            second.step()
        check_costs_nothing_at_rest()
        for engine, handle in zip((first, second), handles, strict=True):
            engine.run()
            assert handle.tokens == alone(ask(9, 20)).tokens
        check_costs_nothing_at_rest()


def test_python_goes_on_while_a_step_is_waited_for() -> None:
    """A step of a tenth of a second or so; another thread runs meanwhile, as the GIL is given up."""
    config = tiny_config((8, 8, 64), hidden=512)
    device = CPU.device(CPU.weights(config, tiny_weights(config)), num_blocks=100)
    step = make_step([Row(0, 0, [1] * 400)], [(0, index, index) for index in range(100)])
    waits: list[tuple[str, Callable[[], object]]] = [
        ("settle", lambda: device.launch(step).settle()),
        ("logits", lambda: device.launch(step).logits),
        ("gather", lambda: (device.launch(step), device.gather([0]))),
        ("scatter", lambda: (device.launch(step), device.scatter([99], np.zeros(device.block_bytes, np.uint8)))),
        ("close", lambda: (device.launch(step), device.close())),
    ]
    for name, wait in waits:
        assert ran_meanwhile(wait), name


def ran_meanwhile(wait: Callable[[], object]) -> bool:
    """Return whether this thread went on while another was in `wait`."""
    started, done = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        wait()
        done.set()

    worker = threading.Thread(target=work)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody is made to give the GIL up
    try:
        worker.start()
        started.wait()
        went_on = not done.is_set()
    finally:
        sys.setswitchinterval(interval)
    worker.join()
    return went_on


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("depth", [2, 3, 7])
def test_steps_in_flight_give_the_bits_of_one_at_a_time(threads: int, depth: int) -> None:
    config = tiny_config()
    weights = CPU.weights(config, tiny_weights(config))
    one, many = Runner.of(CPU.device(weights, 60), 3), Runner.of(DeviceKind("cpu", threads).device(weights, 60), 3)
    prompts = [[1, 2, 3], [4] * 9, [5]]
    newest = [one.launch([Row(slot, 0, tokens)]).settle().tokens[0] for slot, tokens in enumerate(prompts)]
    in_flight: deque[tuple[Ticket, list[int]]] = deque()
    for slot, tokens in enumerate(prompts):
        in_flight.append((many.launch([Row(slot, 0, tokens)]), [int(newest[slot])]))
    for at in range(30):
        slots = [slot for slot in range(3) if (at + slot) % 4]  # each sits out in turn
        places = [len(prompts[slot]) + sum((before + slot) % 4 > 0 for before in range(at)) for slot in slots]
        given = [Row(slot, place, [int(newest[slot])]) for slot, place in zip(slots, places, strict=True)]
        tokens = one.launch(given).settle().tokens.tolist()
        for slot, token in zip(slots, tokens, strict=True):
            newest[slot] = token
        while len(in_flight) >= depth:
            ticket, expected = in_flight.popleft()
            assert ticket.settle().tokens.tolist() == expected
        fed = [Row(slot, place, [FROM_FEED]) for slot, place in zip(slots, places, strict=True)]
        in_flight.append((many.launch(fed), tokens))
    for ticket, expected in in_flight:
        assert ticket.settle().tokens.tolist() == expected
    assert np.array_equal(one.device.gather(range(60)), many.device.gather(range(60)))


@pytest.mark.parametrize("when", ["before", "after", "unused"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_forked_process_decodes_as_its_parent_does(when: str, threads: int) -> None:
    # Newer Pythons warn of any fork in a process with threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(HERE / "fork_case.py"), when, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    expected = [token for length in (40, 9) for token in alone(ask(length, 24, seed=length)).tokens]
    assert [list(map(int, line.split())) for line in lines] == [expected] * 4


def test_threads_that_cannot_be_started_fail_the_step_and_not_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    if sys.platform != "linux":
        with capsys.disabled():
            print("\nleft out: threads that cannot be started, as this system has no such limit")  # noqa: T201
        return
    done = subprocess.run(
        [sys.executable, str(HERE / "few_threads_case.py")], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first == "step_failed"
    assert list(map(int, second.split())) == alone(ask(5, 9)).tokens
