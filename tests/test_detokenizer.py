"""The detokenizer: joined chunks equal the one-shot decode, U+FFFD only for what really is invalid."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_vocab
from reprieve.errors import InvalidArgument
from reprieve.text import Detokenizer
from tiny_vocab import byte_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reprieve.text import Tokenizer

BYTES = tiny_vocab.byte_level()
SPACED = tiny_vocab.sentencepiece()


def chunks(tokenizer: Tokenizer, ids: Sequence[int], *, start: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, start=start)
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.finish()]


def test_a_character_over_two_tokens_comes_out_whole() -> None:
    llama = BYTES.encode("\U0001f999", special=False)
    assert [BYTES.token_bytes(token_id) for token_id in llama] == [b"\xf0\x9f", b"\xa6\x99"]
    assert chunks(BYTES, llama) == ["", "\U0001f999", ""]
    assert chunks(BYTES, byte_ids(b"\xc4\x8f")) == ["", "\u010f", ""]


def test_an_end_inside_a_character_gives_one_replacement() -> None:
    ids = BYTES.encode("\U0001f999", special=False)[:1]
    assert chunks(BYTES, ids) == ["", "\ufffd"]
    assert BYTES.decode(ids) == "\ufffd"


def test_an_invalid_byte_is_replaced_at_once() -> None:
    assert chunks(BYTES, byte_ids(b"a\xffb")) == ["a", "\ufffd", "b", ""]


def test_a_broken_character_is_replaced_and_what_broke_it_is_kept() -> None:
    assert chunks(BYTES, byte_ids(b"\xf0\x9fA")) == ["", "", "\ufffdA", ""]


def test_a_pause_between_the_halves_changes_nothing() -> None:
    first, second = BYTES.encode("\U0001f999", special=False)
    before = Detokenizer(BYTES)
    assert before.push(first) == ""
    after = copy.copy(before)  # what is kept over the pause is plain data
    assert after.push(second) == "\U0001f999"
    assert before.push(second) == "\U0001f999"


def test_control_tokens_give_no_text_even_inside_a_character() -> None:
    ids = [tiny_vocab.END, *byte_ids(b"\xc3"), tiny_vocab.USER, tiny_vocab.UNUSED_ID, *byte_ids(b"\xa9")]
    assert "".join(chunks(BYTES, ids)) == BYTES.decode(ids) == "é"


def test_user_defined_tokens_are_text() -> None:
    assert chunks(BYTES, [tiny_vocab.TOOL]) == ["<tool>", ""]


def test_finish_leaves_nothing_behind() -> None:
    detokenizer = Detokenizer(BYTES)
    detokenizer.push(byte_ids(b"\xf0")[0])
    assert [detokenizer.finish(), detokenizer.finish()] == ["\ufffd", ""]


@pytest.mark.parametrize("token_id", [-1, BYTES.num_ids, 2**31, 5279552648203111001])
def test_an_id_outside_the_vocabulary_is_refused_and_changes_nothing(token_id: int) -> None:
    detokenizer = Detokenizer(BYTES)
    detokenizer.push(byte_ids(b"\xc3")[0])
    with pytest.raises(InvalidArgument, match=f"{token_id} is not one .* 0 to {BYTES.num_ids - 1}"):
        detokenizer.push(token_id)
    assert detokenizer.push(byte_ids(b"\xa9")[0]) == "é"


def test_the_space_before_a_text_goes_only_at_its_start() -> None:
    ids = SPACED.encode("the the", special=False)
    assert chunks(SPACED, ids, start=True) == ["the", " the", ""]
    assert chunks(SPACED, ids) == [" the", " the", ""]
    assert chunks(SPACED, [1, *ids], start=True) == ["", "the", " the", ""]


def test_sentencepiece_bytes_make_characters() -> None:
    ids = SPACED.encode("é", special=False)
    assert chunks(SPACED, ids, start=True) == ["", "", "é", ""]


@settings(deadline=None)
@given(st.lists(st.integers(0, BYTES.num_ids - 1), max_size=30), st.booleans())
def test_byte_level_chunks_join_to_the_one_shot_decode(ids: list[int], start: bool) -> None:
    assert "".join(chunks(BYTES, ids, start=start)) == BYTES.decode(ids, start=start)


@settings(deadline=None)
@given(st.lists(st.integers(0, SPACED.num_ids - 1), max_size=30), st.booleans())
def test_sentencepiece_chunks_join_to_the_one_shot_decode(ids: list[int], start: bool) -> None:
    assert "".join(chunks(SPACED, ids, start=start)) == SPACED.decode(ids, start=start)


@settings(deadline=None)
@given(st.text(max_size=20), st.integers(0, 80))
def test_the_replacement_character_never_comes_before_the_end_of_valid_text(text: str, cut: int) -> None:
    text = text.replace("\ufffd", "")
    data = text.encode("utf-8")[:cut]
    *before, last = chunks(BYTES, byte_ids(data))
    assert "\ufffd" not in "".join(before)
    assert text.startswith("".join(before))
    assert last in {"", "\ufffd"}
