"""Damaged tokenizer files: whatever they hold, only errors of this package come out."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

import tiny_vocab
from reprieve.errors import InvalidArgument, ModelFileError, ReprieveError, UnsupportedTokenizer
from reprieve.text import Text, Tokenizer, load_text
from tiny_vocab import WORD, byte_level, byte_level_metadata, save, sentencepiece, sentencepiece_metadata, words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GOLDEN = Path(__file__).parent / "data" / "smollm2_greedy.json"
BYTES = byte_level()
SPACED = sentencepiece()


def parts_of(tokenizer: Tokenizer, **model: object) -> dict[str, Any]:
    """Return what tokenizer.json holds, with some parts of its model replaced."""
    parts: dict[str, Any] = json.loads(tokenizer._backend.to_str())
    parts["model"].update(model)
    return parts


def with_ids(changes: Mapping[str, int]) -> dict[str, Any]:
    parts = parts_of(BYTES)
    parts["model"]["vocab"].update(changes)
    return parts


@pytest.mark.parametrize("token_id", [66_084, 2**28, 2**31, 2**32 - 1])
def test_an_id_far_above_the_number_of_tokens_is_refused(token_id: int, tmp_path: Path) -> None:
    path = save(BYTES, tmp_path, **with_ids({tiny_vocab.write_bytes(WORD): token_id}))
    with pytest.raises(ModelFileError, match=f"has the id {token_id}, and with 274 tokens ids must be below 66084"):
        Tokenizer.from_file(path)


def test_ids_may_have_gaps(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(save(BYTES, tmp_path, **with_ids({tiny_vocab.write_bytes(WORD): 66_083})))
    assert (tokenizer.num_ids, tokenizer.vocab_size) == (66_084, 274)
    assert tokenizer.decode([66_083, BYTES.num_ids, BYTES.encode("h", special=False)[0]]) == "qxzh"


def test_two_tokens_of_one_id_are_refused(tmp_path: Path) -> None:
    path = save(BYTES, tmp_path, **with_ids({"first": 1000, "second": 1000}))
    with pytest.raises(ModelFileError, match="gives the id 1000 to two tokens, 'first' and 'second'"):
        Tokenizer.from_file(path)


def test_a_file_without_tokens_is_refused(tmp_path: Path) -> None:
    path = save(BYTES, tmp_path, model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[])
    with pytest.raises(ModelFileError, match="vocabulary without tokens"):
        Tokenizer.from_file(path)


def template(bos_id: int, name: str = "X") -> dict[str, object]:
    """Return a post-processor that puts `bos_id` before a text, known to it by `name`."""
    single = [{"SpecialToken": {"id": "X", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    known = {name: {"id": name, "ids": [bos_id], "tokens": [name]}}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": known}


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, "is not a tokenizer"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}}, "cannot encode the text 'a'"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "cannot encode the text 'a'"),
        ({"post_processor": template(tiny_vocab.USER, "Y")}, "cannot encode the text 'a'"),
        ({"post_processor": template(2**31)}, "puts the id 2147483648 before a prompt, and its ids end at 273"),
    ],
)
def test_a_file_over_which_the_library_panics_is_refused(
    parts: dict[str, object], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=rf"tokenizer\.json: {problem}"):
        Tokenizer.from_file(save(BYTES, tmp_path, **parts))


@pytest.mark.parametrize("prefix", ["##", "é", "x"])
def test_a_file_that_marks_pieces_inside_words_is_refused_before_the_library_sees_it(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(BYTES, tmp_path, **parts_of(BYTES, continuing_subword_prefix=prefix))
    monkeypatch.setattr(tokenizers, "Tokenizer", None)  # one of these aborts the process, and no test could fail
    with pytest.raises(UnsupportedTokenizer, match=f"its continuing_subword_prefix is '{prefix}'"):
        Tokenizer.from_file(path)


def test_a_model_that_splits_at_random_is_refused(tmp_path: Path) -> None:
    path = save(BYTES, tmp_path, **parts_of(BYTES, dropout=0.1))
    with pytest.raises(UnsupportedTokenizer, match=r"its dropout is 0\.1"):
        Tokenizer.from_file(path)


def test_an_empty_mark_of_pieces_inside_words_is_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(save(BYTES, tmp_path, **parts_of(BYTES, continuing_subword_prefix="")))
    assert words(tokenizer, "hello") == [b"hello"]


def test_a_key_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    path = save(BYTES, tmp_path)
    path.write_text('{"model": {},' + path.read_text("utf-8")[1:], "utf-8")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: has the key 'model' twice"):
        Tokenizer.from_file(path)


def test_a_header_over_which_the_library_panics_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*args: object, **options: object) -> None:
        raise BaseException("slice index")  # noqa: TRY002  # what a panic is to Python

    monkeypatch.setattr(models, "BPE", panic)
    with pytest.raises(UnsupportedTokenizer, match="merges do not fit its tokens: slice index"):
        byte_level()


@pytest.mark.parametrize("way_out", [KeyboardInterrupt, SystemExit])
def test_a_wish_to_stop_is_no_damage(way_out: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **options: object) -> None:
        raise way_out

    monkeypatch.setattr(models, "BPE", stop)
    with pytest.raises(way_out):
        byte_level()


def test_a_text_over_which_the_library_panics_is_refused_and_the_next_is_read(tmp_path: Path) -> None:
    path = save(BYTES, tmp_path, normalizer={"type": "Prepend", "prepend": ""})
    tokenizer = Tokenizer.from_file(path, {"add_bos_token": False})
    with pytest.raises(InvalidArgument, match="the model's tokenizer fails on it") as caught:
        tokenizer.encode("hello", special=False)
    assert caught.value.field == "prompt"
    assert tokenizer.encode("<tool>", special=False) == [tiny_vocab.TOOL]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[" * 100_000, "is not JSON"),
        ('{"a":' * 100_000, "is not JSON"),
        ('{"a":' + "9" * 5000 + "}", "is not JSON"),
        ('"text"', "holds a str"),
    ],
)
def test_a_config_that_is_no_json_object_is_named(content: str, problem: str, tmp_path: Path) -> None:
    save(BYTES, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content, "utf-8")
    with pytest.raises(ModelFileError, match=rf"tokenizer_config\.json: {problem}"):
        load_text(tmp_path)


def test_half_a_surrogate_pair_as_bos_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"cannot look up the bos_token '\\ud800'"):
        Tokenizer.from_file(save(BYTES, tmp_path), {"bos_token": "\ud800"})


def test_a_score_that_is_not_a_number_is_refused() -> None:
    scores = [float("nan"), *(-float(rank) for rank in range(1, 23))]
    with pytest.raises(UnsupportedTokenizer, match="the score of its piece '▁t' is not a number"):
        Tokenizer.from_gguf(tiny_vocab.PATH, sentencepiece_metadata(scores))


def test_a_very_long_piece_is_read_in_bounded_memory() -> None:
    metadata = sentencepiece_metadata()
    for name, value in (("tokens", "x" * 200_000), ("token_type", tiny_vocab.NORMAL), ("scores", -99.0)):
        items = metadata[f"tokenizer.ggml.{name}"]
        assert isinstance(items, list)
        items.append(value)
    tokenizer = Tokenizer.from_gguf(tiny_vocab.PATH, metadata)  # cut at every place, it takes 40 GB
    assert words(tokenizer, "the") == words(SPACED, "the")


TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
CONFIG = {
    "bos_token": "<|user|>",
    "eos_token": {"content": "<|end|>"},
    "add_bos_token": True,
    "chat_template": TEMPLATE,
}
SP_DECODER = [{"type": "ByteFallback"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
FILES = (
    {**parts_of(BYTES), "post_processor": template(tiny_vocab.USER)},
    {**parts_of(SPACED), "decoder": {"type": "Sequence", "decoders": SP_DECODER}},
)
HEADERS = (byte_level_metadata("qwen2"), sentencepiece_metadata())

ODD = st.one_of(
    st.sampled_from([None, True, -1, 0, 1, 5, 2**28, 2**31, 2**32, 10**30, 0.5, float("nan"), float("-inf")]),
    st.sampled_from(
        ["", "##", "x", "a b", "\ud800", "<|user|>", "<|end|>", "h e", "AAAAAA==", "bert", "llama", "{% for %}"]
    ),
    st.sampled_from(["{{ 1 + none }}", "{{" + "(" * 2000, "{{" + "9" * 5000 + "}}", "{% if a %}" * 40, "\0"]),
    st.sampled_from([[], {}, [1], [[]], ["a", "b"], [{"name": [1]}], [{"name": "default", "template": 5}]]),
    st.sampled_from([{"content": 5}, {"type": "Fuse"}, {"type": "FixedLength", "length": 0}, {"type": ["x"]}]),
    st.sampled_from([{"type": "Prepend", "prepend": ""}, {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}]),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
)


@st.composite
def damaged(draw: st.DrawFn, wholes: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Draw one of `wholes` with one to three values in it replaced, taken out or doubled."""
    content: dict[str, Any] = deepcopy(draw(st.sampled_from(wholes)))
    for _ in range(draw(st.integers(1, 3))):
        place: Any = content
        while place:
            key = draw(st.sampled_from(list(place)) if isinstance(place, dict) else st.integers(0, len(place) - 1))
            if not isinstance(place[key], (dict, list)) or draw(st.booleans()):
                damage(draw, place, key)
                break
            place = place[key]
    return content


def damage(draw: st.DrawFn, place: Any, key: Any) -> None:
    """Change what `place` holds at `key`."""
    way = draw(st.sampled_from(["replace", "replace", "delete", "double"]))
    if way == "replace":
        place[key] = deepcopy(draw(ODD))
    elif way == "delete":
        del place[key]
    elif isinstance(place, list):
        place.append(place[key])
    else:
        place[draw(st.text(max_size=2))] = place[key]


def use(load: Callable[[], Text | None]) -> None:
    """Load and use a model's text, where it is not refused."""
    try:
        text = load()
    except ReprieveError:
        return
    if text is None:
        return
    for prompt in ("hello the 12", "é🦙"):
        for chat in (False, True):
            try:
                ids = text.encode_prompt(prompt, chat=chat)
            except InvalidArgument as refusal:
                assert refusal.field in {"chat", "prompt"}  # noqa: PT017  # most examples are not refused
                continue
            text.tokenizer.decode(ids)  # raises for an id that is none


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@settings(deadline=None, max_examples=200)
@given(content=damaged(FILES))
def test_no_tokenizer_file_raises_anything_else(content: dict[str, Any], folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    (folder / "tokenizer_config.json").write_text("{}", "utf-8")
    use(lambda: load_text(folder))


@settings(deadline=None, max_examples=200)
@given(config=damaged((CONFIG, {**CONFIG, "chat_template": [{"name": "default", "template": TEMPLATE}]})))
def test_no_tokenizer_config_raises_anything_else(config: dict[str, Any], folder: Path) -> None:
    save(BYTES, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    use(lambda: load_text(folder))


@settings(deadline=None, max_examples=200)
@given(metadata=damaged(tuple({**header, "tokenizer.chat_template": TEMPLATE} for header in HEADERS)))
def test_no_gguf_header_raises_anything_else(metadata: dict[str, Any]) -> None:
    use(lambda: load_text(tiny_vocab.PATH, metadata))
