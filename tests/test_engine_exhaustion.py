"""The engine when its blocks run out: who gives way, who waits, who ends, and what never starts."""

from __future__ import annotations

import pytest

from engine_kit import alone, ask, check_as_alone, position_bytes, tiny_model
from recording import check_nothing_left
from reprieve import Engine, Request
from reprieve.errors import InvalidArgument, NeverFits


def check_serves_on(engine: Engine) -> None:
    check_nothing_left(engine)
    handle = engine.submit(ask(5, 3, seed=99))
    handle.result()
    check_as_alone(handle)
    check_nothing_left(engine)


def test_what_never_fits_is_refused_at_submit_and_holds_nobody_up() -> None:
    with Engine(tiny_model(), kv_blocks=49, block_size=16) as engine:
        for seed in range(5):
            with pytest.raises(NeverFits, match="needs 63 KV blocks, the pool has 49") as refusal:
                engine.submit(ask(1002, 4, seed))
            assert (refusal.value.needed, refusal.value.total) == (63, 49)
        short = engine.submit(ask(6, 4))
        engine.run()
        check_as_alone(short)
        assert engine.stats.steps == 4
        assert engine.step().state == "idle"
        check_serves_on(engine)


def test_a_shortage_is_counted_in_blocks_so_exactly_two_of_six_give_way() -> None:
    with Engine(tiny_model(), kv_blocks=14, block_size=4, max_slots=6, head_room=0, depth=1) as engine:
        handles = [engine.submit(ask(7, 8, seed)) for seed in range(6)]
        engine.step()  # six prefills of 7: 12 blocks
        engine.step()  # position 7: KV length 8, all blocks full
        assert [engine._books.committed(seq) for seq in range(6)] == [8] * 6
        assert engine.snapshot().free_blocks == 2
        engine.step()
        assert [handle.is_paused for handle in handles] == [True, True, False, False, False, False]
        assert [len(handle.tokens) for handle in handles] == [2, 2, 3, 3, 3, 3]
        engine.run()
        check_as_alone(*handles)
        check_serves_on(engine)


def test_a_lone_sequence_that_fills_the_pool_ends_with_its_tokens_and_capacity() -> None:
    request = ask(20, 40)
    with Engine(tiny_model(), kv_blocks=8, block_size=4) as engine:
        handle = engine.submit(request)
        engine.run()
        # 32 positions: 20 of the prompt and 12 fed tokens; the 13th was sampled from the last of them.
        assert handle.tokens == alone(request).tokens[:13]
        assert (handle.finish_reason, handle.is_retryable) == ("capacity", True)
        check_serves_on(engine)


def test_with_its_stop_id_before_the_limit_it_succeeds() -> None:
    tokens = alone(ask(20, 40)).tokens
    sixth = next(i for i in range(5, 12) if tokens[i] not in tokens[:i])
    with Engine(tiny_model(), kv_blocks=8, block_size=4) as engine:
        handle = engine.submit(ask(20, 40, stop_token_ids=(tokens[sixth],)))
        engine.run()
        assert (handle.tokens, handle.finish_reason) == (tokens[: sixth + 1], "stop")
        check_serves_on(engine)


def test_a_victim_is_found_although_everybody_is_immune() -> None:
    with Engine(tiny_model(), kv_blocks=14, block_size=4, max_slots=4, immunity_tokens=10**6, head_room=0) as engine:
        handles = [engine.submit(ask(9, 40, seed)) for seed in range(4)]
        engine.run()
        assert max(handle.stats.parks_by_spill for handle in handles) > 1, "somebody gave way while immune"
        check_as_alone(*handles)
        check_serves_on(engine)


def test_a_prompt_that_fills_the_pool_to_the_last_block_comes_in_alone() -> None:
    with Engine(tiny_model(), kv_blocks=8, block_size=4, head_room=3) as engine:
        handles = [engine.submit(ask(32, 1, seed)) for seed in range(2)]
        engine.step()
        assert engine.snapshot().waiting == (handles[1].id,), "two prompts never count the same free blocks"
        engine.run()
        assert engine.stats.parks_by_spill + engine.stats.parks_by_replay == 0
        check_as_alone(*handles)
        check_serves_on(engine)


def test_exactly_the_budget_asks_for_no_further_block() -> None:
    with Engine(tiny_model(), kv_blocks=4, block_size=4) as engine:
        handle = engine.submit(ask(13, 4))
        engine.run()
        assert handle.finish_reason == "length"
        assert engine.stats.parks_by_spill + engine.stats.parks_by_replay == 0
        check_as_alone(handle)
        check_serves_on(engine)


@pytest.mark.parametrize("host_blocks", [0, 2])
def test_with_the_host_store_full_victims_are_replayed(host_blocks: int) -> None:
    host_kv_bytes = host_blocks * 4 * position_bytes(tiny_model())
    with Engine(tiny_model(), kv_blocks=24, block_size=4, max_slots=4, host_kv_bytes=host_kv_bytes) as engine:
        handles = [engine.submit(ask(18, 30, seed)) for seed in range(6)]
        while len(engine._journal):
            engine.step()
            assert engine.snapshot().host_bytes <= host_kv_bytes
        assert engine.stats.parks_by_replay >= 3
        assert engine.stats.tokens_replayed > 0
        check_as_alone(*handles)
        check_serves_on(engine)


def test_who_waits_to_replay_comes_in_once_and_thrashes_nobody() -> None:
    with Engine(
        tiny_model(), kv_blocks=16, block_size=4, step_tokens=9, host_kv_bytes=0, max_slots=2, immunity_tokens=0
    ) as engine:
        p = engine.submit(ask(30, 16, seed=2))
        while len(p.tokens) < 11:
            engine.step()
        assert engine._books.committed(0) == 40
        a = engine.submit(ask(43, 9, seed=1, priority=1))
        engine.park(p, "replay")
        while len(a.tokens) < 2:
            engine.step()
        assert engine._books.committed(1) == 44
        # Its 10 blocks and two of head-room are not free before A is done.
        while not a.is_finished:
            assert engine.snapshot().waiting == (p.id,)
            engine.step()
        engine.run()
        assert engine.stats.tokens_replayed == 40
        assert (a.stats.parks_by_replay, p.stats.parks_by_replay) == (0, 1)
        check_as_alone(a, p)
        check_serves_on(engine)


def test_a_huge_budget_does_not_keep_short_requests_waiting() -> None:
    with Engine(tiny_model(), kv_blocks=64, block_size=4, max_slots=4, depth=1) as engine:
        huge = engine.submit(Request((1, 2, 3), max_new_tokens=2**40, ignore_eos=True))
        short = [engine.submit(ask(4, 3, seed)) for seed in range(10)]
        for _ in range(12):
            engine.step()
        assert all(handle.finish_reason == "length" for handle in short)
        assert huge.finish_reason is None
        engine.cancel(huge)
        check_as_alone(*short)
        check_serves_on(engine)


def test_a_prompt_longer_than_the_context_is_refused_and_shorter_ones_end_at_it() -> None:
    model = tiny_model(context_length=64)
    with Engine(model, kv_blocks=40, block_size=4) as engine:
        for length, tokens in ((62, 3), (63, 2), (64, 1)):
            handle = engine.submit(ask(length, 4))
            engine.run()
            assert (len(handle.tokens), handle.finish_reason) == (tokens, "length")
            assert handle.tokens == alone(ask(length, 4), model).tokens
        for length in (65, 10**6):
            with pytest.raises(InvalidArgument, match=f"prompt: has {length} tokens, the context holds 64"):
                engine.submit((5,) * length, max_new_tokens=4)
        check_nothing_left(engine)
