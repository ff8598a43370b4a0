"""The command line with a model: what it refuses, what it writes, what it shows and what it ends with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal

import pytest
from rich.console import Console

from cli_kit import generate, prompts_file, refusal
from model_files import random_weights, small_config, write_folder, write_gguf
from reprieve import Engine, __version__, load
from reprieve.cli import runner
from reprieve.cli.arguments import parse
from reprieve.cli.report import Report
from reprieve.cli.runner import ample_blocks, run
from reprieve.cli.view import LiveView, printable
from reprieve.config import EngineConfig
from reprieve.request import Request
from reprieve.stats import EngineSnapshot, SlotView
from tiny_vocab import byte_level_metadata
from trace_kit import of_phase, read

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = "{% for message in messages %}<|user|>{{ message['content'] }}<|end|>{% endfor %}"
CONTEXT = 256
POSITION_BYTES = 2 * 2 * 2 * 16 * 2
"""Of the model below: layers, keys and values, KV heads, head size, float16."""


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model that knows text and chat."""
    keys = byte_level_metadata()
    config = small_config(vocab_size=len(keys["tokenizer.ggml.tokens"]), context_length=CONTEXT, eos_ids=(0,), bos_id=1)  # type: ignore[arg-type]
    keys = keys | {"tokenizer.chat_template": TEMPLATE}
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", config, random_weights(config), keys=keys)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model that knows token ids alone."""
    config = small_config(eos_ids=())
    return write_folder(tmp_path_factory.mktemp("folder") / "tiny", config, random_weights(config))


def some_lines(count: int = 6) -> list[object]:
    return [{"id": f"r{i}", "prompt": list(range(10 + i, 22 + 2 * i)), "max_new_tokens": 30 + i} for i in range(count)]


# What the model must say about them.


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": "text"}, "prompt: is text, and the model has no tokenizer"),
        ({"prompt": [128]}, "prompt: "),
        ({"prompt": [1] * 257}, "prompt: "),
        ({"prompt": [1] * 200}, "prompt: needs 13 KV blocks, the pool has 8 in all"),
    ],
)
def test_a_prompt_that_the_model_cannot_take_is_refused_before_any_is_answered(
    line: object, said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prompts_file(tmp_path, {"prompt": [1, 2]}, line)
    assert f"{path}:2: {said}" in refusal(capsys, folder, "--prompts", path, "--kv-blocks", 8)


def test_a_damaged_model_is_refused_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    assert f"{tmp_path}/bad.gguf: " in refusal(capsys, tmp_path / "bad.gguf", "--prompt", "a")


def test_more_memory_than_there_is_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def engine(*_: object, **__: object) -> Engine:
        raise MemoryError("Unable to allocate 1.5 PiB")

    monkeypatch.setattr(runner, "Engine", engine)
    said = refusal(capsys, folder, "--prompts", prompts_file(tmp_path, {"prompt": [1]}))
    assert said == "reprieve: error: not enough memory: Unable to allocate 1.5 PiB\n"


def test_prompts_are_chat_where_the_model_knows_how(gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert generate(gguf, "--prompt", "hello", "--max-new", 1, "--json", out) == 0
    [request] = json.loads(out.read_text("utf-8"))["requests"]
    text = load(gguf).text
    assert text is not None
    assert request["prompt_tokens"] == text.encode_prompt("hello", chat=True)
    path = prompts_file(tmp_path, {"prompt": "hello"}, {"prompt": "hello", "chat": True})
    assert generate(gguf, "--prompts", path, "--max-new", 1, "--json", out) == 0
    raw, chat = json.loads(out.read_text("utf-8"))["requests"]
    assert raw["prompt_tokens"] == text.encode_prompt("hello")
    assert chat["prompt_tokens"] == request["prompt_tokens"]


# What it gives.

SCHEMA: dict[str, Any] = {
    "version": str,
    "model": str,
    "device": str,
    "threads": int,
    "weights": str,
    "kv": str,
    "host_kv_bytes": int,
    "pool": {"blocks": int, "block_size": int, "blocks_needed": int},
    "depth": int,
    "steps": int,
    "over_runs": int,
    "decode_tokens_per_s": float,
    "requests": [
        {
            "id": str,
            "prompt_tokens": [int],
            "tokens": [int],
            "text": str,
            "finish_reason": str,
            "parks": {"spill": int, "replay": int},
            "replayed_tokens": int,
            "spilled_bytes": int,
            "over_runs": int,
            "longest_pause_s": float,
            "same_as_alone": (bool, type(None)),
        }
    ],
}


def check(value: object, schema: Any) -> None:
    """Assert that a JSON value has the shape of `schema`, keys in the same order."""
    if isinstance(schema, dict):
        assert isinstance(value, dict)
        assert list(value) == list(schema)
        for key, inner in schema.items():
            check(value[key], inner)
    elif isinstance(schema, list):
        assert isinstance(value, list)
        assert value
        for item in value:
            check(item, schema[0])
    else:
        assert type(value) in (schema if isinstance(schema, tuple) else (schema,))


def test_json_to_stdout_is_all_that_is_there(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = prompts_file(tmp_path, *some_lines())
    settings = [
        "--kv-blocks",
        "14",
        "--block-size",
        "4",
        "--immunity",
        "2",
        "--head-room",
        "0",
        "--ignore-eos",
        "--check-alone",
    ]
    status = generate(gguf, "--prompts", path, *settings, "--host-kv-bytes", 30 * POSITION_BYTES, "--json", "-")
    out, err = capsys.readouterr()
    assert status == 0, err
    report = json.loads(out)
    check(report, SCHEMA)
    assert report["version"] == __version__
    assert (report["device"], report["weights"], report["kv"]) == ("cpu", "file", "f16")
    # A prompt of 12 + i and a budget of 30 + i, whose last token is never fed.
    needed = sum(-(-(12 + i + 30 + i - 1) // 4) for i in range(6))
    assert report["pool"] == {"blocks": 14, "block_size": 4, "blocks_needed": needed}
    assert report["host_kv_bytes"] == 30 * POSITION_BYTES
    assert [request["id"] for request in report["requests"]] == [f"r{i}" for i in range(6)]
    for i, request in enumerate(report["requests"]):
        assert request["prompt_tokens"] == list(range(10 + i, 22 + 2 * i))
        assert len(request["tokens"]) == 30 + i
        assert request["finish_reason"] == "length"
        assert request["same_as_alone"] is True
        assert (request["parks"]["replay"] > 0) == (request["replayed_tokens"] > 0)
        assert (request["parks"]["spill"] > 0) == (request["spilled_bytes"] > 0)
    assert sum(request["parks"]["spill"] for request in report["requests"]) > 0
    assert sum(request["parks"]["replay"] for request in report["requests"]) > 0
    assert "every answer (6 of 6) equals" in err


def test_without_check_alone_nobody_says_that_they_are_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert generate(folder, "--prompts", prompts_file(tmp_path, *some_lines(2)), "--json", out) == 0
    report = json.loads(out.read_text("utf-8"))
    check(report, SCHEMA)
    assert [request["same_as_alone"] for request in report["requests"]] == [None, None]
    assert [request["text"] for request in report["requests"]] == ["", ""]
    assert "equals" not in capsys.readouterr().out


def test_without_a_pool_size_nobody_gives_way(gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    path = prompts_file(tmp_path, *some_lines())
    for slots in (2, 6):
        assert generate(gguf, "--prompts", path, "--ignore-eos", "--json", out, "--max-slots", slots) == 0
        report = json.loads(out.read_text("utf-8"))
        assert all(request["parks"] == {"spill": 0, "replay": 0} for request in report["requests"])


def test_ample_blocks_count_only_those_that_can_be_resident_together(gguf: Path) -> None:
    model = load(gguf)
    config = EngineConfig(block_size=16, max_slots=2, head_room=3)
    requests = [Request([1] * 10, max_new_tokens=budget) for budget in (7, 8, None)]
    # 16 positions are 1 block, 17 are 2, the whole context is 16.
    assert ample_blocks(model, config, requests[:1]) == 1 + 3
    assert ample_blocks(model, config, requests) == 2 + 16 + 2 * 3


def test_the_depth_is_the_one_asked_for_or_the_devices_own(folder: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "out.json", prompts_file(tmp_path, *some_lines(2))
    said = []
    for depth in ([], ["--depth", "1"], ["--depth", "3"]):
        assert generate(folder, "--prompts", path, "--check-alone", "--json", out, *depth) == 0
        report = json.loads(out.read_text("utf-8"))
        said.append(report["depth"])
        assert [request["same_as_alone"] for request in report["requests"]] == [True, True]
    with Engine(folder) as engine:
        assert said == [engine.depth, 1, 3]


def test_over_runs_are_in_the_sentence_where_there_are_any(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prompts_file(tmp_path, *some_lines(1))
    for count, said in ((0, " steps."), (7, " steps with 7 over-runs.")):
        monkeypatch.setattr(runner, "Report", lambda over_runs, count=count, **rest: Report(over_runs=count, **rest))
        assert generate(folder, "--prompts", path, "--depth", 1) == 0
        assert capsys.readouterr().out.splitlines()[-1].endswith(said)


def test_the_trace_is_of_all_requests_together(folder: Path, tmp_path: Path) -> None:
    out, trace, path = tmp_path / "out.json", tmp_path / "trace.json", prompts_file(tmp_path, *some_lines())
    options = ("--kv-blocks", 14, "--block-size", 4, "--immunity", 2, "--check-alone", "--json", out, "--trace", trace)
    assert generate(folder, "--prompts", path, *options) == 0
    requests = json.loads(out.read_text("utf-8"))["requests"]
    events = read(trace)
    parks = [sum(request["parks"].values()) for request in requests]
    assert sum(parks) > 0
    pauses = of_phase(events, "B")
    assert parks == [sum(pause["args"]["request"] == f"r{i}" for pause in pauses) for i in range(6)]
    assert [event["name"] for event in of_phase(events, "i")].count("r3: length") == 1


def test_a_run_that_is_broken_off_leaves_its_trace(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Engine.step

    def step(engine: Engine) -> object:
        if engine.stats.steps == 3:
            raise KeyboardInterrupt
        return steps(engine)

    monkeypatch.setattr(Engine, "step", step)
    trace = tmp_path / "trace.json"
    assert generate(folder, "--prompts", prompts_file(tmp_path, *some_lines(2)), "--trace", trace) == 130
    events = read(trace)
    assert {event["args"]["step"] for event in of_phase(events, "X")} >= {1, 2, 3}
    assert [event["args"]["finish_reason"] for event in of_phase(events, "i")] == ["cancelled"] * 2


def test_a_trace_that_cannot_be_written_is_said_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prompts_file(tmp_path, *some_lines(1))
    assert generate(folder, "--prompts", path, "--trace", "/dev/full") == 2
    assert capsys.readouterr().err == "reprieve: error: --trace: cannot write /dev/full: No space left on device\n"


@pytest.mark.parametrize("by", ["spill", "replay"])
def test_forced_parks_are_made_in_the_way_that_is_asked_for(
    by: Literal["spill", "replay"], folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    path = prompts_file(tmp_path, *some_lines(2))
    forced = ["--force-park-every", 5, "--park-by", by]
    assert generate(folder, "--prompts", path, *forced, "--check-alone", "--json", out) == 0
    other = "replay" if by == "spill" else "spill"
    for request in json.loads(out.read_text("utf-8"))["requests"]:
        assert request["parks"] == {by: (len(request["tokens"]) - 1) // 5, other: 0}
        assert request["same_as_alone"] is True


def test_lines_tell_what_happens(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = prompts_file(tmp_path, {"id": "[bold]a", "prompt": "hello", "max_new_tokens": 12})
    status = generate(gguf, "--prompts", path, "--ignore-eos", "--force-park-every", 5, "--check-alone")
    out = capsys.readouterr().out
    assert status == 0
    assert "[bold]a gave way by spill (forced)\n" in out
    assert "[bold]a is back after " in out
    assert "[bold]a ended by length after 12 tokens\n" in out
    assert "alone: [bold]a (1 of 1)\n" in out
    row = next(line for line in out.splitlines() if line.startswith(" [bold]a  "))
    assert row.split() == ["[bold]a", "12", "length", "2", "0", "0", row.split()[6], "s", "yes"]
    assert "\x1b" not in out


# What it ends with.


def test_a_difference_from_running_alone_is_status_1(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = runner.run_alone

    def wrong(setup: Any, request: Request, advance: Any) -> Any:
        tokens, reason = right(setup, request, advance)
        if request.id == "r1":
            return [*tokens[:-1], tokens[-1] ^ 1], reason
        return (tokens, "stop") if request.id == "r2" else (tokens, reason)

    monkeypatch.setattr(runner, "run_alone", wrong)
    out = tmp_path / "out.json"
    path = prompts_file(tmp_path, *some_lines(3))
    assert generate(folder, "--prompts", path, "--check-alone", "--json", out) == 1
    report = json.loads(out.read_text("utf-8"))
    assert [request["same_as_alone"] for request in report["requests"]] == [True, False, False]
    assert "2 of 3 differ from what they give alone: r1, r2." in capsys.readouterr().out


def test_a_failed_request_is_status_1_and_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prompts_file(tmp_path, {"id": "big", "prompt": [1] * 12, "max_new_tokens": 50}, {"prompt": [2]})
    assert generate(folder, "--prompts", path, "--kv-blocks", 2, "--max-new", 2) == 1
    assert "1 of 2 failed: big (capacity)." in capsys.readouterr().out


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_interrupt_is_status_130_and_gives_the_terminal_back(
    is_terminal: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = StringIO()
    monkeypatch.setattr("reprieve.cli._Console", lambda **_: Console(file=screen, force_terminal=is_terminal))
    steps = Engine.step
    closed: list[Engine] = []
    close = Engine.close

    def step(engine: Engine) -> object:
        if engine.stats.steps == 3:
            raise KeyboardInterrupt
        return steps(engine)

    def note_close(engine: Engine) -> None:
        closed.append(engine)
        close(engine)

    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr(Engine, "close", note_close)
    assert generate(folder, "--prompts", prompts_file(tmp_path, *some_lines(2))) == 130
    assert capsys.readouterr().err == "reprieve: interrupted\n"
    assert len(closed) == 1
    hidden, shown = screen.getvalue().rfind("\x1b[?25l"), screen.getvalue().rfind("\x1b[?25h")
    assert (hidden >= 0) == is_terminal
    assert shown > hidden or not is_terminal


def test_a_signal_ends_the_program_in_one_line(folder: Path, tmp_path: Path) -> None:
    lines = [{"id": f"r{i}", "prompt": [1], "max_new_tokens": 250} for i in range(64)]  # seconds of work
    command = [sys.executable, "-m", "reprieve", "generate", str(folder), "--prompts", prompts_file(tmp_path, *lines)]
    command += ["--device", "reference"]  # the CPU device might be done before the signal
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline().startswith("tiny on the reference device, 1 thread.")
        program.send_signal(signal.SIGINT)
        _, complaints = program.communicate(timeout=60)
    assert (program.returncode, complaints) == (130, "reprieve: interrupted\n")


def test_the_output_survives_a_terminal_that_knows_only_ascii(folder: Path, tmp_path: Path) -> None:
    path = prompts_file(tmp_path, {"id": "\u00e9", "prompt": [1], "max_new_tokens": 2})
    command = [sys.executable, "-m", "reprieve", "generate", str(folder), "--prompts", path]
    done = subprocess.run(
        command, capture_output=True, check=False, env={"PYTHONIOENCODING": "ascii", "OPENBLAS_NUM_THREADS": "1"}
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"? ended by length after 2 tokens" in done.stdout


# The live view.


def test_on_a_terminal_slots_and_pool_are_shown(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reprieve.cli.view._REFRESH_S", 0.0)
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    lines = prompts_file(tmp_path, *some_lines(4))
    plan = parse(
        f"generate {gguf} --prompts {lines} --kv-blocks 12 --block-size 4 --max-slots 3 --step-tokens 8".split()
    )
    assert run(plan, console) == 0
    shown = screen.getvalue()
    for what in ("of 12 blocks used", "decoding", "prefilling", "r3 (new)", "gave way by spill (exhausted)", "is back"):
        assert what in shown, what
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0


def test_the_picture_says_who_sits_where_and_who_waits_how() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80, color_system=None)
    view = LiveView(console)
    view._parked["parked"] = "replay"
    slots = None, SlotView("one", "decoding", 7, 31), None
    snapshot = EngineSnapshot(slots, ("parked", "fresh"), 10, 3, 2_500_000, fenced_blocks=0, steps_in_flight=1)
    with console.capture() as captured:
        console.print(view.picture(snapshot, 42))
    lines = captured.get().splitlines()
    assert lines[0].startswith("step   42  pool ━━━━")
    assert lines[0].endswith("7 of 10 blocks used, 3 free")
    assert lines[4].split() == ["0", "free"]
    assert lines[5].split() == ["1", "one", "decoding", "7", "━" * 16, "31"]
    assert lines[6].strip() == ""  # slot 2 was never taken
    assert "waiting: parked (replay), fresh (new); 2.5 MB spilled" in lines
    with console.capture() as captured:
        console.print(view.picture(replace(snapshot, fenced_blocks=2), 43))
    assert captured.get().splitlines()[0].endswith("5 of 10 blocks used, 3 free, 2 fenced")


def test_what_a_model_writes_does_not_steer_the_terminal() -> None:
    assert printable("a\x1b[31mb\r\n\tc\x9b2J\x7f") == "a\ufffd[31mb\ufffd\n\tc\ufffd2J\ufffd"


def test_an_answer_cut_short_by_capacity_is_compared_as_far_as_it_goes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = prompts_file(tmp_path, {"id": "big", "prompt": [1] * 12, "max_new_tokens": 50}), tmp_path / "out.json"
    options = ("--kv-blocks", 2, "--check-alone", "--ignore-eos", "--json", out)
    assert generate(folder, "--prompts", path, *options) == 1
    (request,) = json.loads(out.read_text("utf-8"))["requests"]
    assert (request["finish_reason"], request["same_as_alone"]) == ("capacity", True)
    said = capsys.readouterr().out
    assert "1 of 1 failed: big (capacity)" in said
    assert "differ" not in said


@pytest.mark.parametrize("extra", [[], ["--json", "-"]])
def test_nobody_reading_the_output_is_a_status_of_its_own(extra: list[str], folder: Path, tmp_path: Path) -> None:
    path = prompts_file(tmp_path, {"prompt": [2]})
    command = [sys.executable, "-m", "reprieve", "generate", str(folder), "--prompts", str(path), "--max-new", "2"]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        run = subprocess.run([*command, *extra], stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (run.returncode, "Traceback" in run.stderr) == (141, False), run.stderr
