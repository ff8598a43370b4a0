"""The vocabulary in a tokenizer.json file."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import tokenizers

from reprieve.errors import ModelFileError, UnsupportedTokenizer
from reprieve.text.guard import library_guard, parse_json_object
from reprieve.text.vocabulary import Vocabulary, byte_letters, byte_level_bytes, sentencepiece_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_PROBE: Final = "a"  # a text that shows what the file's own settings put around a prompt

# Ids may have gaps, and the table of pieces has a place for each id: at most this many for each token, and these.
_PLACES_PER_TOKEN: Final = 2
_SPARE_PLACES: Final = 65_536


def json_vocabulary(path: Path, config: Mapping[str, object]) -> Vocabulary:
    """Read tokenizer.json at `path`; `config` is what tokenizer_config.json says, which wins over it.

    Raises `ModelFileError` where the file cannot be read or contradicts itself, and `UnsupportedTokenizer` where its
    tokens do not say which bytes they stand for.
    """
    try:
        source = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise ModelFileError(path, f"cannot be read: {failure}") from failure
    parts = parse_json_object(path, source)
    _refuse_unsafe(path, parts.get("model"))
    with library_guard(partial(ModelFileError, path), "is not a tokenizer"):
        backend = tokenizers.Tokenizer.from_str(source)
    backend.no_truncation()
    backend.no_padding()
    stages = _decoder_stages(parts.get("decoder"))
    pieces, special_ids = _pieces(path, backend, {stage.get("type") for stage in stages})
    bos_id, add_bos = _bos(path, backend, config)
    if bos_id is not None and bos_id >= len(pieces):
        raise ModelFileError(path, f"puts the id {bos_id} before a prompt, and its ids end at {len(pieces) - 1}")
    return Vocabulary(
        backend=backend,
        pieces=pieces,
        special_ids=special_ids,
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        bos_id=bos_id,
        add_bos=add_bos,
        prefix_space=any(map(_takes_space, stages)),
    )


def token_text(entry: object) -> str | None:
    """Return the text of a special token as tokenizer_config.json writes it: a string, or an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _refuse_unsafe(path: Path, model: Any) -> None:
    """Refuse a model that splits a text at random, or a BPE model that marks the pieces inside a word.

    Such pieces are not the bytes that they stand for. And the library cuts the mark off merges without a look: where it
    cuts through a character, the whole process may abort.
    """
    if not isinstance(model, dict):
        return
    dropout = model.get("dropout")
    if dropout:
        raise UnsupportedTokenizer(path, f"its dropout is {dropout!r}: the same text would give other tokens each time")
    prefix = model.get("continuing_subword_prefix")
    if prefix and model.get("type") != "WordPiece":  # which has no merges to cut
        raise UnsupportedTokenizer(path, f"its continuing_subword_prefix is {prefix!r}, and only an empty one is known")


def _decoder_stages(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [stage for part in decoder.get("decoders", ()) for stage in _decoder_stages(part)]
    return [decoder]


def _takes_space(stage: dict[str, Any]) -> bool:
    """Tell whether a decoder stage takes one space away from the start of a text."""
    if stage.get("type") == "Strip":
        return stage.get("content") == " " and stage.get("start") == 1
    return stage.get("type") == "Metaspace" and stage.get("prepend_scheme", "always") != "never"


def _pieces(path: Path, backend: tokenizers.Tokenizer, stages: set[Any]) -> tuple[tuple[bytes, ...], frozenset[int]]:
    """Return the bytes of every id, and the ids of the special tokens."""
    by_id = _tokens_by_id(path, backend)
    added = backend.get_added_tokens_decoder()
    letters = byte_letters() if "ByteLevel" in stages else None
    if letters is None and not stages & {"ByteFallback", "Metaspace"}:
        names = ", ".join(sorted(map(str, stages))) or "none"
        raise UnsupportedTokenizer(path, f"its decoder ({names}) is neither byte-level nor SentencePiece's")
    pieces = [b""] * (max(by_id) + 1)
    for token_id, token in by_id.items():
        if token_id in added:
            pieces[token_id] = b"" if added[token_id].special else _added_bytes(token, letters)
        else:
            pieces[token_id] = sentencepiece_bytes(token) if letters is None else byte_level_bytes(token, letters)
    return tuple(pieces), frozenset(token_id for token_id, token in added.items() if token.special)


def _tokens_by_id(path: Path, backend: tokenizers.Tokenizer) -> dict[int, str]:
    """Return the token of each id. Raises `ModelFileError` for ids that two tokens share or that lie far out."""
    ids = backend.get_vocab(with_added_tokens=True)
    if not ids:
        raise ModelFileError(path, "has a vocabulary without tokens")
    by_id: dict[int, str] = {}
    for token, token_id in ids.items():
        other = by_id.setdefault(token_id, token)
        if other != token:
            names = " and ".join(sorted(map(repr, (other, token))))
            raise ModelFileError(path, f"gives the id {token_id} to two tokens, {names}")
    most = _PLACES_PER_TOKEN * len(ids) + _SPARE_PLACES
    if max(by_id) >= most:
        raise ModelFileError(path, f"has the id {max(by_id)}, and with {len(ids)} tokens ids must be below {most}")
    return by_id


def _added_bytes(token: str, letters: dict[str, int] | None) -> bytes:
    return token.encode("utf-8") if letters is not None else sentencepiece_bytes(token)


def _bos(path: Path, backend: tokenizers.Tokenizer, config: Mapping[str, object]) -> tuple[int | None, bool]:
    """Return the id that begins a text, and whether a raw prompt gets it."""
    text = token_text(config.get("bos_token"))
    with library_guard(partial(ModelFileError, path), f"cannot look up the bos_token {text!r}"):
        bos_id = None if text is None else backend.token_to_id(text)
    wanted = config.get("add_bos_token")
    if isinstance(wanted, bool):
        if wanted and bos_id is None:
            raise UnsupportedTokenizer(path, f"add_bos_token is set, but bos_token is {text!r}")
        return bos_id, wanted
    with library_guard(partial(ModelFileError, path), f"cannot encode the text {_PROBE!r}"):
        plain = backend.encode(_PROBE, add_special_tokens=False).ids
        around = backend.encode(_PROBE, add_special_tokens=True).ids
    before = next((at for at in range(len(around)) if around[at : at + len(plain)] == plain), 0)
    if before > 1:
        raise UnsupportedTokenizer(path, f"it puts {before} tokens before a prompt; at most one is known here")
    return (around[0], True) if before else (bos_id, False)
