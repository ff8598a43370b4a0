"""Stop strings: nothing of a stop text leaks, and a false alarm is given out in full."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_vocab
from reprieve.errors import InvalidArgument
from reprieve.text import StopStrings, TextStream

CHUNKS = st.lists(st.text("ab", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def cut_by_search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Find the stop text that is complete first, the longest of those, by trying every place."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_stop_text_in_pieces_never_leaks() -> None:
    stops = StopStrings(["DEFGHIJ"])
    assert [stops.push(chunk) for chunk in ("abcDEF", "G", "HI", "J and more")] == ["abc", "", "", ""]
    assert stops.matched == "DEFGHIJ"
    assert stops.push("after") == ""
    assert stops.finish() == ""


def test_a_false_alarm_is_given_out_in_full() -> None:
    stops = StopStrings(["DEFGHIJ"])
    assert [stops.push(chunk) for chunk in ("DEF", "G", "X")] == ["", "", "DEFGX"]
    assert stops.matched is None
    assert stops.finish() == ""


def test_what_is_held_back_at_the_end_is_given_out() -> None:
    stops = StopStrings(["DEFGHIJ"])
    assert stops.push("xDE") == "x"
    assert stops.finish() == "DE"
    assert stops.matched is None


def test_a_false_alarm_that_hides_a_stop_text_is_seen() -> None:
    stops = StopStrings(["aab"])
    assert [stops.push(letter) for letter in "aaab"] == ["", "", "a", ""]
    assert stops.matched == "aab"


def test_the_stop_text_complete_first_wins_and_the_longest_of_those() -> None:
    first = StopStrings(["abcd", "bc"])
    assert (first.push("xabcd"), first.matched) == ("xa", "bc")
    longest = StopStrings(["c", "bc", "xyz"])
    assert (longest.push("abc"), longest.matched) == ("a", "bc")


@settings(deadline=None)
@given(CHUNKS, STOPS)
def test_any_chunks_give_what_one_search_of_the_whole_text_gives(chunks: list[str], stops: list[str]) -> None:
    watcher = StopStrings(stops)
    out = [watcher.push(chunk) for chunk in chunks] + [watcher.finish()]
    assert ("".join(out), watcher.matched) == cut_by_search("".join(chunks), stops)


@settings(deadline=None)
@given(CHUNKS, STOPS)
def test_no_more_is_held_back_than_could_begin_a_stop_text(chunks: list[str], stops: list[str]) -> None:
    watcher = StopStrings(stops)
    text = out = ""
    for chunk in chunks:
        text += chunk
        out += watcher.push(chunk)
        if watcher.matched is not None:
            break
        held = text.removeprefix(out)
        assert out + held == text
        beginnings = [stop[:length] for stop in stops for length in range(1, len(stop) + 1)]
        assert held == max((end for end in beginnings if text.endswith(end)), key=len, default="")


def test_the_cost_does_not_grow_with_what_is_held_back() -> None:
    def seconds(length: int) -> float:
        watcher = StopStrings(["a" * length + "b"])
        began = time.process_time()
        for _ in range(2 * length):  # the second half is one false alarm after another
            watcher.push("a")
        return time.process_time() - began

    few, many = min(seconds(1_000) for _ in range(5)), min(seconds(20_000) for _ in range(2))
    assert many < 20 * few * 6  # linear is 20 times, rescanning would be 400 times


@pytest.mark.parametrize("stops", [[""], ["a", ""], "ab"])
def test_an_empty_stop_text_is_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidArgument, match="not empty") as caught:
        StopStrings(stops)
    assert caught.value.field == "stop"


def test_a_stream_without_stop_texts_gives_everything_at_once() -> None:
    stream = TextStream(tiny_vocab.byte_level())
    ids = tiny_vocab.byte_ids(b"hello")
    assert [stream.push(token_id) for token_id in ids] == list("hello")
    assert (stream.finish(), stream.stopped) == ("", None)


def test_a_stream_stops_inside_a_token_and_gives_nothing_more() -> None:
    tokenizer = tiny_vocab.byte_level()
    stream = TextStream(tokenizer, ["llo w"])
    ids = tokenizer.encode("hello world", special=False)
    assert "".join(map(stream.push, ids)) == "he"
    assert stream.stopped == "llo w"
    assert stream.finish() == ""


def test_a_stream_that_ends_inside_a_character_gives_out_what_was_held_before_it() -> None:
    stream = TextStream(tiny_vocab.byte_level(), ["end of it"])
    ids = tiny_vocab.byte_ids(b"end \xf0\x9f")
    assert "".join(map(stream.push, ids)) == ""
    assert stream.finish() == "end \ufffd"


@settings(deadline=None)
@given(st.binary(max_size=20), st.lists(st.sampled_from(["a", "ab", "é", "\ufffd", "b\ufffd"]), max_size=3))
def test_a_stream_gives_the_decoded_tokens_up_to_the_stop_text(data: bytes, stops: list[str]) -> None:
    tokenizer = tiny_vocab.byte_level()
    stream = TextStream(tokenizer, stops)
    ids = tiny_vocab.byte_ids(data)
    out = "".join(map(stream.push, ids)) + stream.finish()
    assert (out, stream.stopped) == cut_by_search(tokenizer.decode(ids), stops)
