"""Tokenizers: from tokenizer.json and from a GGUF header, exact or refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tokenizers
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, processors

import tiny_vocab
from reprieve.errors import InvalidArgument, ModelFileError, UnsupportedTokenizer
from reprieve.text import Text, TextStream, Tokenizer, load_text
from tiny_vocab import byte_level, byte_level_metadata, save, sentencepiece, sentencepiece_metadata, words

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = Path(__file__).parent / "data" / "smollm2_greedy.json"
BYTES = byte_level()
SPACED = sentencepiece()


# Byte-level vocabularies.


@pytest.mark.parametrize("pre", ["smollm", "starcoder", "refact"])
def test_smollm_splits_digits_one_by_one(pre: str) -> None:
    assert words(byte_level(pre), "hello 1234") == [b"hello", b" ", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("pre", ["gpt-2", "phi-2"])
def test_gpt2_keeps_numbers_together_and_contractions_in_lower_case(pre: str) -> None:
    assert words(byte_level(pre), "1234") == [b"1234"]
    assert words(byte_level(pre), "x'S") == [b"x", b"'", b"S"]
    assert words(byte_level(pre), "qxz") == [b"q", b"x", b"z"]


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3"])
def test_llama3_takes_three_digits_and_whole_words_that_are_tokens(pre: str) -> None:
    assert words(byte_level(pre), "1234") == [b"123", b"4"]
    assert words(byte_level(pre), "x'S") == [b"x", b"'S"]
    assert words(byte_level(pre), "qxz") == [b"qxz"]
    assert words(byte_level(pre), "e\u0301") == [b"e", b"\xcc", b"\x81"]


def test_qwen2_takes_single_digits_and_composes_characters() -> None:
    assert words(byte_level("qwen2"), "1234") == [b"1", b"2", b"3", b"4"]
    assert words(byte_level("qwen2"), "x'S") == [b"x", b"'S"]
    assert words(byte_level("qwen2"), "qxz") == [b"q", b"x", b"z"]
    assert words(byte_level("qwen2"), "e\u0301") == [b"\xc3\xa9"]


def test_line_ends_stay_with_what_the_rule_says() -> None:
    assert words(byte_level("qwen2"), "x!\n\nx") == [b"x", b"!", b"\n\n", b"x"]
    assert words(byte_level("gpt-2"), "x!\n\nx") == [b"x", b"!", b"\n", b"\n", b"x"]


@settings(deadline=None)
@given(st.text(max_size=40), st.sampled_from([BYTES, byte_level("smollm"), byte_level("llama-bpe")]))
def test_byte_level_text_round_trips(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, special=False)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode("utf-8")


def test_control_tokens_in_a_text_count_only_when_asked_for() -> None:
    assert BYTES.encode("<|user|>he<|end|>", special=True) == [tiny_vocab.USER, BYTES.encode("he", special=False)[0], 0]
    plain = BYTES.encode("<|user|>", special=False)
    assert not set(plain) & BYTES.special_ids
    assert BYTES.decode(plain) == "<|user|>"


@pytest.mark.parametrize("special", [True, False])
def test_user_defined_tokens_in_a_text_always_count(special: bool) -> None:
    assert BYTES.encode("<tool>", special=special) == [tiny_vocab.TOOL]


def test_sizes_count_ids_and_tokens() -> None:
    assert BYTES.num_ids == BYTES.vocab_size == len(tiny_vocab.SPECIALS) + 256 + len(tiny_vocab.MERGES) + 1
    assert BYTES.special_ids == {tiny_vocab.END, tiny_vocab.USER}


@pytest.mark.parametrize("token_id", [-1, BYTES.num_ids, 2**31, 5279552648203111001])
def test_an_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    for call in (BYTES.token_bytes, lambda token_id: BYTES.decode([token_id])):
        with pytest.raises(InvalidArgument, match=f"{token_id} is not one of .* 0 to {BYTES.num_ids - 1}"):
            call(token_id)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="character 2") as caught:
        BYTES.encode("ab\ud83e", special=False)
    assert caught.value.field == "prompt"


# SentencePiece vocabularies.


def join_by_score(text: str) -> list[bytes]:
    """Join the pair with the best score, leftmost first, until there is none; spell the rest in bytes."""
    rank = {piece: index for index, piece in enumerate(tiny_vocab.SP_PIECES)}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(rank[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in rank]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    known = {*tiny_vocab.SP_PIECES, *tiny_vocab.SP_LETTERS}
    spelled = [
        [part] if part in known else [part.encode()[at : at + 1] for at in range(len(part.encode()))] for part in parts
    ]
    return [piece.replace("▁", " ").encode() if isinstance(piece, str) else piece for part in spelled for piece in part]


def test_sentencepiece_puts_a_space_before_and_joins_by_score() -> None:
    assert words(SPACED, "the thing") == [b" the", b" th", b"ing"]
    assert SPACED.decode(SPACED.encode("the thing", special=False), start=True) == "the thing"


def test_sentencepiece_without_prefix_space_leaves_a_text_as_it_is() -> None:
    tokenizer = sentencepiece(add_space_prefix=False)
    assert words(tokenizer, "the") == [b"t", b"he"]
    assert tokenizer.decode(tokenizer.encode(" a", special=False), start=True) == " a"


def test_sentencepiece_falls_back_to_bytes() -> None:
    assert words(SPACED, "é") == [b" ", b"\xc3", b"\xa9"]
    assert words(SPACED, "<0x41>")[-1] == b">"


@settings(deadline=None, max_examples=300)
@given(st.text("abeghinrst é<", max_size=20))
def test_sentencepiece_joins_as_the_slow_rule_does(text: str) -> None:
    assert words(SPACED, text) == join_by_score(text)


@settings(deadline=None)
@given(st.text(max_size=30).filter(lambda text: "▁" not in text))
def test_sentencepiece_text_round_trips(text: str) -> None:
    assert SPACED.decode(SPACED.encode(text, special=False), start=True) == text


def test_sentencepiece_control_tokens_count_only_when_asked_for() -> None:
    assert SPACED.encode("a</s>", special=True)[-1] == 2
    assert 2 not in SPACED.encode("a</s>", special=False)
    assert SPACED.decode([0, 1, 2]) == ""


# BOS.


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (byte_level(), False),
        (byte_level(add_bos_token=True), True),
        (byte_level("llama-bpe", add_bos_token=None), False),
        (sentencepiece(), True),
        (sentencepiece(add_bos_token=False), False),
    ],
)
def test_a_raw_prompt_begins_with_bos_where_the_header_says_so(tokenizer: Tokenizer, expected: bool) -> None:
    ids = Text(tokenizer).encode_prompt("a<|end|>")
    assert (ids[0] == tokenizer.bos_id) is expected
    assert ids[expected:] == tokenizer.encode("a<|end|>", special=False)


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", True), ("qwen2", False), ("smollm", False)])
def test_bos_has_the_default_of_the_pre_tokenizer(pre: str, expected: bool) -> None:
    metadata = byte_level_metadata(pre)
    del metadata["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_gguf(tiny_vocab.PATH, metadata).add_bos is expected


# Headers that are refused.


@pytest.mark.parametrize("pre", [None, "default", "deepseek-llm", "no-such-thing", 7])
def test_an_unknown_pre_tokenizer_is_refused_with_advice(pre: str | None) -> None:
    with pytest.raises(UnsupportedTokenizer, match=r"splits text .*not known.*tokenizer\.json next to") as caught:
        Tokenizer.from_gguf(tiny_vocab.PATH, byte_level_metadata(pre))
    assert caught.value.path == "tiny.gguf"
    assert repr(pre) in caught.value.problem


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", None, 3])
def test_an_unknown_kind_of_vocabulary_is_refused_with_advice(model: object) -> None:
    with pytest.raises(UnsupportedTokenizer, match=r"of the kind .*tokenizer\.json next to"):
        Tokenizer.from_gguf(tiny_vocab.PATH, byte_level_metadata(model=model))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tokens": None}, "no list tokenizer.ggml.tokens of str"),
        ({"tokens": ["a", 3]}, "no list tokenizer.ggml.tokens of str"),
        ({"tokens": []}, "vocabulary is empty"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "'a' more than once"),
        ({"token_type": None}, "no list tokenizer.ggml.token_type of int"),
        ({"token_type": [1, 1, 1]}, "tokens and 3 token types"),
        ({"merges": None}, "no list tokenizer.ggml.merges of str"),
        ({"merges": ["ab"]}, "the merge 'ab' is not two pieces"),
        ({"merges": ["a b c"]}, "the merge 'a b c' is not two pieces"),
        ({"merges": ["a zz"]}, "merges do not fit its tokens"),
        ({"bos_token_id": 10**6}, "bos_token_id 1000000 is not one of its"),
        ({"bos_token_id": None, "add_bos_token": True}, "header names none"),
    ],
)
def test_an_incomplete_header_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match=problem):
        Tokenizer.from_gguf(tiny_vocab.PATH, byte_level_metadata(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scores", "problem"),
    [
        ([-1000.0] * 23, "'▁t' and 'he' share the score -1000.0"),
        ([-1.0], "tokens and 260 scores"),
    ],
)
def test_scores_that_leave_the_order_open_are_refused(scores: list[float], problem: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match=problem):
        Tokenizer.from_gguf(tiny_vocab.PATH, sentencepiece_metadata(scores))


def test_empty_tokens_keep_their_ids_and_give_no_text() -> None:
    metadata = byte_level_metadata()
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    metadata["tokenizer.ggml.tokens"] = [*tokens, "", ""]
    metadata["tokenizer.ggml.token_type"] = [*kinds, tiny_vocab.UNUSED, tiny_vocab.UNUSED]
    tokenizer = Tokenizer.from_gguf(tiny_vocab.PATH, metadata)
    assert tokenizer.num_ids == len(tokens) + 2
    assert tokenizer.decode([tokenizer.num_ids - 1, tokenizer.num_ids - 2]) == ""


# tokenizer.json.


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_a_file_gives_the_tokens_and_bytes_of_the_header_it_was_made_from(
    make: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    header = make()
    decoder = {
        "type": "Sequence",
        "decoders": [{"type": "ByteFallback"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
    }
    parts: dict[str, object] = {"decoder": decoder} if header.prefix_space else {}
    tokenizer = Tokenizer.from_file(save(header, tmp_path, **parts))
    assert tokenizer.num_ids == header.num_ids
    assert tokenizer.prefix_space is header.prefix_space
    silent = header.special_ids | {tiny_vocab.UNUSED_ID}  # tokenizer.json has no word for unused
    assert tokenizer.special_ids == header.special_ids
    for token_id in set(range(header.num_ids)) - silent:
        assert tokenizer.token_bytes(token_id) == header.token_bytes(token_id)
    for text in ("hello the 1234 é", "<|user|>a<|end|>", "<s>a</s>"):
        for special in (True, False):
            assert tokenizer.encode(text, special=special) == header.encode(text, special=special)


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}, True),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}, False),
        ({"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}, True),
        ({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}, False),
    ],
)
def test_the_decoder_of_a_file_says_whether_a_text_loses_its_first_space(
    decoder: dict[str, object], expected: bool, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(save(SPACED, tmp_path, decoder=decoder))
    ids = SPACED.encode("the", special=False)
    assert tokenizer.prefix_space is expected
    assert tokenizer.decode(ids, start=True) == ("the" if expected else " the")


def test_a_file_that_cuts_or_pads_texts_does_not_do_so_here(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(BYTES._backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert tokenizer.encode("abcdef", special=False) == BYTES.encode("abcdef", special=False)


def with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single="<|user|> $A <|end|>", special_tokens=[("<|user|>", tiny_vocab.USER), ("<|end|>", tiny_vocab.END)]
    )
    return backend


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (tiny_vocab.USER, True)),
        ({"add_bos_token": False, "bos_token": "<|end|>"}, (tiny_vocab.END, False)),
        ({"add_bos_token": True, "bos_token": {"content": "<|end|>"}}, (tiny_vocab.END, True)),
    ],
)
def test_bos_is_what_the_file_puts_before_a_text_unless_the_config_says_otherwise(
    config: dict[str, object], expected: tuple[int, bool], tmp_path: Path
) -> None:
    with_bos(tokenizers.Tokenizer.from_str(BYTES._backend.to_str())).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json", config)
    assert (tokenizer.bos_id, tokenizer.add_bos) == expected
    assert tokenizer.encode("a", special=True) == BYTES.encode("a", special=True)


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.from_file(path)
    path.write_text("{", "utf-8")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: is not JSON"):
        Tokenizer.from_file(path)
    path.write_text("{}", "utf-8")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: is not a tokenizer"):
        Tokenizer.from_file(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ModelFileError, match="cannot be read"):
        Tokenizer.from_file(path)
    pieces = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))  # noqa: S106  # no password
    pieces.decoder = decoders.WordPiece()
    pieces.save(str(path))
    with pytest.raises(UnsupportedTokenizer, match=r"decoder \(WordPiece\)"):
        Tokenizer.from_file(path)
    save(BYTES, tmp_path)
    with pytest.raises(UnsupportedTokenizer, match="add_bos_token is set, but bos_token is 'zz'"):
        Tokenizer.from_file(path, {"add_bos_token": True, "bos_token": "zz"})


# Where a model keeps its text.


def test_a_folder_without_a_tokenizer_takes_token_ids_only(tmp_path: Path) -> None:
    assert load_text(tmp_path) is None
    assert load_text(tmp_path / "model.gguf", {}) is None
    assert load_text(tmp_path / "model.gguf", {"tokenizer.ggml.model": "no_vocab"}) is None


def rendered(text: Text | None) -> str | None:
    assert text is not None
    return None if text.chat_template is None else text.chat_template.render([{"role": "user", "content": "x"}])


def test_a_folder_gives_its_template_from_the_jinja_file_first(tmp_path: Path) -> None:
    save(BYTES, tmp_path)
    assert rendered(load_text(tmp_path)) is None
    config: dict[str, object] = {"bos_token": {"content": "<|user|>"}, "chat_template": "config {{ bos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    assert rendered(load_text(tmp_path)) == "config <|user|>"
    config["chat_template"] = [{"name": "tools", "template": "t"}, {"name": "default", "template": "named"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    assert rendered(load_text(tmp_path)) == "named"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}", "utf-8")
    assert rendered(load_text(tmp_path)) == "file <|user|>"


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_config_is_named(content: str, tmp_path: Path) -> None:
    save(BYTES, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content, "utf-8")
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json"):
        load_text(tmp_path)


def test_a_gguf_file_gives_its_own_vocabulary_and_template(tmp_path: Path) -> None:
    metadata = byte_level_metadata("smollm")
    metadata["tokenizer.chat_template"] = "{{ bos_token }} {{ eos_token }}"
    text = load_text(tmp_path / "model.gguf", metadata)
    assert rendered(text) == "<|user|> <|end|>"
    assert text is not None
    assert words(text.tokenizer, "12") == [b"1", b"2"]


def test_a_tokenizer_file_next_to_a_gguf_file_comes_first(tmp_path: Path) -> None:
    save(BYTES, tmp_path)
    metadata = byte_level_metadata("no-such-thing")
    metadata["tokenizer.chat_template"] = "{{ bos_token }}"
    text = load_text(tmp_path / "model.gguf", metadata)
    assert rendered(text) == "<|user|>"
    assert text is not None
    assert words(text.tokenizer, "hello") == [b"hello"]


def test_a_tokenizer_file_of_another_model_is_refused(tmp_path: Path) -> None:
    save(BYTES, tmp_path)
    with pytest.raises(UnsupportedTokenizer, match=f"up to {BYTES.num_ids - 1}, the GGUF file next to it has 1 tokens"):
        load_text(tmp_path / "model.gguf", byte_level_metadata(tokens=["a"]))


# The real vocabulary.


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Text:
    fields = GGUFReader(smollm2_path).fields
    metadata = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
    text = load_text(smollm2_path, metadata)
    assert text is not None
    return text


@pytest.mark.smollm2
def test_smollm2_gives_the_golden_prompt_tokens_and_answers(smollm2: Text) -> None:
    prompts = json.loads(GOLDEN.read_text("utf-8"))["prompts"]
    assert sorted({prompt["kind"] for prompt in prompts}) == ["chat", "raw"]
    assert len(prompts) == 12
    for prompt in prompts:
        assert smollm2.encode_prompt(prompt["text"], chat=prompt["kind"] == "chat") == prompt["prompt_tokens"]
        stream = TextStream(smollm2.tokenizer, ["<|im_end|>"])
        answer = "".join(map(stream.push, prompt["tokens"])) + stream.finish()
        assert answer == prompt["answer"].removesuffix("<|im_end|>")
        assert answer == smollm2.tokenizer.decode(prompt["tokens"])


@pytest.mark.smollm2
def test_smollm2_has_49152_ids_and_no_bos(smollm2: Text) -> None:
    tokenizer = smollm2.tokenizer
    assert (tokenizer.num_ids, tokenizer.vocab_size, tokenizer.add_bos) == (49152, 49152, False)
    assert tokenizer.special_ids == set(range(17))


@pytest.mark.smollm2
@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_smollm2_chunks_join_to_the_one_shot_decode(smollm2: Text, ids: list[int]) -> None:
    stream = TextStream(smollm2.tokenizer)
    assert "".join(map(stream.push, ids)) + stream.finish() == smollm2.tokenizer.decode(ids)


# This vocabulary has no tokens for a few control characters and for most planes above the second.
WRITABLE = st.characters(min_codepoint=0x20, max_codepoint=0x1FFFF, exclude_categories=["Cs"])


@pytest.mark.smollm2
@settings(deadline=None)
@given(text=st.text(WRITABLE, max_size=40))
def test_smollm2_text_round_trips(smollm2: Text, text: str) -> None:
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text, special=False)) == text
