"""A batch of requests: its order, its refusals, its progress bar, and what Ctrl-C leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine_kit import ask, check_as_alone, faulty_engine, prompt, small_engine
from recording import check_nothing_left
from reprieve import Request
from reprieve.batch import generate
from reprieve.errors import EngineClosed, InvalidArgument, NeverFits
from reprieve.stats import Progress

if TYPE_CHECKING:
    from reprieve import Engine


def test_a_batch_returns_its_handles_in_order_each_as_alone() -> None:
    with small_engine(kv_blocks=16) as engine:
        requests = [ask(3 + seed, 24 - seed, seed) for seed in range(9)]
        handles = generate(engine, iter(requests), {})
        assert [handle.request for handle in handles] == requests
        assert engine.stats.parks_by_spill, "there was pressure"
        check_as_alone(*handles)
        assert generate(engine, [], {}) == []
        check_nothing_left(engine)


def test_prompts_share_the_other_fields() -> None:
    with small_engine() as engine:
        handles = generate(engine, [prompt(4), [3, 1, 4]], {"max_new_tokens": 5, "ignore_eos": True})
        assert [len(handle.tokens) for handle in handles] == [5, 5]
        check_as_alone(*handles)


def test_other_requests_of_the_engine_go_on_meanwhile() -> None:
    with small_engine() as engine:
        other = engine.submit(ask(5, 30))
        generate(engine, [ask(4, 10)], {})
        assert 9 <= len(other.tokens) < 30
        engine.run()
        check_as_alone(other)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (Request([10**9]), "requests[2].prompt"),
        (ask(700, 2), "requests[2].prompt"),
        ([], "requests[2].prompt"),
        (7, "requests[2].prompt"),
        (ask(3, 2, id="taken"), "requests[2].id"),
    ],
)
def test_one_bad_request_names_its_place_and_nothing_of_the_batch_is_computed(bad: Request, field: str) -> None:
    with small_engine() as engine:
        other = engine.submit(ask(5, 6, id="taken"))
        with pytest.raises(InvalidArgument) as refusal:
            generate(engine, [ask(3, 3), ask(4, 3), bad, ask(5, 3)], {})
        assert refusal.value.field == field
        assert isinstance(refusal.value, NeverFits) == (bad == ask(700, 2))
        assert engine.stats.steps == 0
        assert engine.snapshot().waiting == ("taken",)
        engine.run()
        check_as_alone(other)
        check_nothing_left(engine)


@pytest.mark.parametrize(
    ("requests", "fields", "progress", "field"),
    [
        ("text", {}, None, "requests"),
        (ask(3, 3), {}, None, "requests"),
        ([1, 2, 3], {}, None, "requests[0].prompt"),
        ([ask(3, 3)], {"priority": 1}, None, "requests[0].priority"),
        ([prompt(3)], {"magic": 1}, None, "requests[0].magic"),
        ([prompt(3)], {}, "yes", "progress"),
    ],
)
def test_bad_arguments_are_named(requests: list[Request], fields: dict[str, int], progress: bool, field: str) -> None:
    with small_engine() as engine:
        with pytest.raises(InvalidArgument) as refusal:
            generate(engine, requests, fields, progress=progress)
        assert refusal.value.field == field
        check_nothing_left(engine)
    with pytest.raises(EngineClosed):
        generate(engine, [ask(3, 3)], {})


def test_ctrl_c_cancels_what_is_left_and_nothing_else() -> None:
    engine, faults, _ = faulty_engine(kv_blocks=40, block_size=4, max_slots=4)
    with engine:
        other = engine.submit(ask(5, 20))
        step = engine.step

        def interrupted() -> Progress:
            if engine.stats.steps == 6:
                faults.launch = KeyboardInterrupt()
            return step()

        engine.step = interrupted  # type: ignore[method-assign]
        requests = [ask(4, 3, id="short"), ask(4, 50, id="long"), ask(4, 50), ask(4, 50), ask(4, 50, id="queued")]
        with pytest.raises(KeyboardInterrupt):
            generate(engine, requests, {})
        engine.step = step  # type: ignore[method-assign]
        snapshot = engine.snapshot()
        assert [slot.request_id for slot in snapshot.slots if slot is not None] == [other.id]
        assert not snapshot.waiting
        engine.run()
        check_as_alone(other)
        check_nothing_left(engine)


def test_a_step_that_says_idle_before_the_end_is_a_bug_and_not_a_hang() -> None:
    with small_engine() as engine:
        engine.step = lambda: Progress("idle")  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="'mine' has not ended"):
            generate(engine, [ask(3, 3, id="mine")], {})
        check_nothing_left(engine)


def shown(engine: Engine, capsys: pytest.CaptureFixture[str], progress: bool | None) -> str:
    """Return what a batch of three writes to standard error."""
    generate(engine, [ask(9, 20, seed) for seed in range(3)], {}, progress=progress)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_the_bar_counts_requests_tokens_and_parks_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with small_engine(kv_blocks=12) as engine:
        err = shown(engine, capsys, progress=True)
        parks = engine.stats.parks_by_spill + engine.stats.parks_by_replay
        assert parks
        assert f"3/3 requests · 60 tokens · {parks} parks" in " ".join(err.split())


@pytest.mark.parametrize("progress", [None, False])
def test_there_is_no_bar_where_there_is_no_terminal_or_none_is_wanted(
    capsys: pytest.CaptureFixture[str], progress: bool | None
) -> None:
    with small_engine() as engine:
        assert shown(engine, capsys, progress) == ""


def test_a_terminal_gets_a_bar_unless_none_is_wanted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    with small_engine() as engine:
        assert "3/3 requests" in shown(engine, capsys, progress=None)
        assert shown(engine, capsys, progress=False) == ""
