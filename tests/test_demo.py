"""The demo: both ways of parking always occur, and every answer equals the one given alone."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any, Final

import pytest

from engine_kit import ask, position_bytes, tiny_model
from reprieve import Engine
from reprieve.cli import main, runner
from reprieve.cli.arguments import parse
from reprieve.cli.demo import QUESTIONS, SETTINGS, demo_plan
from trace_kit import of_phase, read

if TYPE_CHECKING:
    from pathlib import Path

    from reprieve import LoadedModel

PROMPT_TOKENS: Final = {
    "tides": 37, "paris": 37, "sky": 40, "haiku": 37, "bread": 37, "primes": 37, "bees": 38, "sleep": 37
}  # fmt: skip
ANSWER_TOKENS: Final = {
    "tides": 56, "paris": 8, "sky": 48, "haiku": 40, "bread": 56, "primes": 24, "bees": 48, "sleep": 64
}  # fmt: skip
"""What SmolLM2-135M answers: two of them stop by themselves."""

SMOLLM2_POSITION_BYTES: Final = 30 * 2 * 3 * 64 * 2
"""Layers, keys and values, KV heads, head size, float16."""


def parks_of(answers: dict[str, int]) -> tuple[int, int]:
    """Return the parks by spill and by replay when answers of these lengths share the demo's pool.

    Who parks when follows from lengths alone, so a tiny model shows it.
    """
    host_positions = SETTINGS["host_kv_bytes"] // SMOLLM2_POSITION_BYTES
    settings: dict[str, Any] = SETTINGS | {"host_kv_bytes": host_positions * position_bytes(tiny_model())}
    with Engine(tiny_model(), **settings) as engine:
        handles = [engine.submit(ask(PROMPT_TOKENS[name], tokens)) for name, tokens in answers.items()]
        engine.run()
    assert {handle.finish_reason for handle in handles} == {"length"}
    return (
        sum(handle.stats.parks_by_spill for handle in handles),
        sum(handle.stats.parks_by_replay for handle in handles),
    )


def test_the_demo_takes_no_settings_but_the_depth_and_where_to_write() -> None:
    assert parse(["demo"]) == demo_plan()
    assert parse(["demo", "--json", "-"]) == demo_plan("-")
    assert parse(["demo", "--trace", "t"]) == demo_plan(trace_path="t")
    assert demo_plan(trace_path="t").trace_path == "t"
    assert parse(["demo", "--depth", "3"]).settings == SETTINGS | {"depth": 3}
    assert demo_plan().check_alone
    assert demo_plan().settings == SETTINGS


def test_the_pool_holds_about_a_third_of_what_they_need() -> None:
    size = SETTINGS["block_size"]
    needed = sum(-(-(PROMPT_TOKENS[name] + tokens - 1) // size) for name, tokens in ANSWER_TOKENS.items())
    assert needed == 83
    assert 0.3 < SETTINGS["kv_blocks"] / needed < 0.37


def test_both_ways_occur_even_where_rounding_makes_answers_shorter() -> None:
    assert parks_of(ANSWER_TOKENS) == (3, 3)
    chance = random.Random(7)
    for _ in range(12):
        answers = {name: chance.randint(tokens * 2 // 3, tokens) for name, tokens in ANSWER_TOKENS.items()}
        spills, replays = parks_of(answers)
        assert spills > 0, answers
        assert replays > 0, answers


@pytest.mark.smollm2
def test_the_demo_parks_both_ways_and_says_yes_eight_times(
    smollm2: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "load", lambda path, **_: smollm2)  # the same file, loaded already
    file, trace = tmp_path / "demo.json", tmp_path / "trace.json"
    assert main(["demo", "--json", str(file), "--trace", str(trace)]) == 0
    requests = json.loads(file.read_text("utf-8"))["requests"]
    assert {request["id"]: len(request["prompt_tokens"]) for request in requests} == PROMPT_TOKENS
    assert [request["same_as_alone"] for request in requests] == [True] * 8
    spills = sum(request["parks"]["spill"] for request in requests)
    replays = sum(request["parks"]["replay"] for request in requests)
    assert spills > 0
    assert replays > 0
    assert len(of_phase(read(trace), "B")) == spills + replays
    lengths = {len(request["tokens"]) for request in requests}
    assert min(lengths) * 4 < max(lengths) <= max(budget for _, budget in QUESTIONS.values())
    out = capsys.readouterr().out
    assert len(re.findall(r" yes *$", out, re.MULTILINE)) == 8
    last_line = out.splitlines()[-1]
    assert last_line.startswith(f"{spills} parks by spill and {replays} by replay in ")
    assert last_line.endswith("every answer (8 of 8) equals the one that its request gives alone.")
