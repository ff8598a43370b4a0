"""Hand-made vocabularies, as a GGUF header would describe them, small enough to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from reprieve.text import Tokenizer
from reprieve.text.vocabulary import byte_letters

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PATH: Final = Path("tiny.gguf")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

END, USER, TOOL, UNUSED_ID = 0, 1, 2, 3
SPECIALS: Final = (("<|end|>", CONTROL), ("<|user|>", CONTROL), ("<tool>", USER_DEFINED), ("[PAD]", UNUSED))
FIRST_BYTE: Final = len(SPECIALS)

# Pairs of bytes, joined in this order. The first two cut a llama (F0 9F A6 99) in the middle.
MERGES: Final[tuple[tuple[bytes, bytes], ...]] = (
    (b"\xf0", b"\x9f"),
    (b"\xa6", b"\x99"),
    (b"h", b"e"),
    (b"l", b"l"),
    (b"he", b"ll"),
    (b"hell", b"o"),
    (b" ", b"w"),
    (b"1", b"2"),
    (b"12", b"3"),
    (b"123", b"4"),
    (b"'", b"S"),
    (b"\xc3", b"\xa9"),
    (b"\n", b"\n"),
)
WORD: Final = b"qxz"  # a token that no merge makes


def write_bytes(data: bytes) -> str:
    """Write bytes as a byte-level vocabulary does."""
    letters = {byte: letter for letter, byte in byte_letters().items()}
    return "".join(letters[byte] for byte in data)


def byte_level_metadata(pre: str | None = "gpt-2", **changes: object) -> dict[str, object]:
    """Return the header of a byte-level vocabulary; `changes` replace or add keys under tokenizer.ggml."""
    pieces = [bytes([byte]) for byte in range(256)] + [left + right for left, right in MERGES] + [WORD]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [token for token, _ in SPECIALS] + [write_bytes(piece) for piece in pieces],
        "tokenizer.ggml.token_type": [kind for _, kind in SPECIALS] + [NORMAL] * len(pieces),
        "tokenizer.ggml.merges": [f"{write_bytes(left)} {write_bytes(right)}" for left, right in MERGES],
        "tokenizer.ggml.bos_token_id": USER,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.add_bos_token": False,
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    metadata.update({f"tokenizer.ggml.{name}": value for name, value in changes.items()})
    return metadata


def byte_level(pre: str = "gpt-2", **changes: object) -> Tokenizer:
    """Return the tokenizer of `byte_level_metadata`."""
    return Tokenizer.from_gguf(PATH, byte_level_metadata(pre, **changes))


def byte_ids(data: Iterable[int]) -> list[int]:
    """Return the ids of single bytes in `byte_level`."""
    return [FIRST_BYTE + byte for byte in data]


SP_SPECIALS: Final = (("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL))
SP_PIECES: Final = ("▁t", "he", "▁the", "in", "er", "▁a", "th", "ing", "▁▁", "ab", "ba", "▁th")
"""Pieces of more than one letter, best score first."""
SP_LETTERS: Final = "▁abeghinrst"


def sentencepiece_metadata(scores: Sequence[float] | None = None, **changes: object) -> dict[str, object]:
    """Return the header of a SentencePiece vocabulary; `scores` are those of `SP_PIECES` and then of `SP_LETTERS`."""
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [*SP_PIECES, *SP_LETTERS]
    of_words = [-float(rank) for rank in range(len(words))] if scores is None else list(scores)
    kinds = [kind for _, kind in SP_SPECIALS]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token for token, _ in SP_SPECIALS] + byte_pieces + words,
        "tokenizer.ggml.token_type": kinds + [BYTE] * 256 + [NORMAL] * len(words),
        "tokenizer.ggml.scores": [0.0] * (len(kinds) + 256) + of_words,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    metadata.update({f"tokenizer.ggml.{name}": value for name, value in changes.items()})
    return metadata


def sentencepiece(**changes: object) -> Tokenizer:
    """Return the tokenizer of `sentencepiece_metadata`."""
    return Tokenizer.from_gguf(PATH, sentencepiece_metadata(**changes))  # type: ignore[arg-type]


def words(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text, special=False)]


def save(tokenizer: Tokenizer, folder: Path, **parts: object) -> Path:
    """Write tokenizer.json with some of its parts replaced."""
    content = json.loads(tokenizer._backend.to_str())
    content.update(parts)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content), "utf-8")
    return path
