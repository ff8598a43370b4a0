"""What a tokenizer is made of, whatever file it came from, and how pieces spell bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import tokenizers

SPACE_MARK: Final = "▁"
"""How SentencePiece writes a space inside a piece."""

_BYTE_PIECE_LENGTH: Final = len("<0x00>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The parts of a tokenizer.

    backend       turns text into ids
    pieces        [num_ids] bytes that each id adds to a text; b"" for control tokens and for ids that name no token
    special_ids   ids of the control tokens
    vocab_size    ids that name a token
    bos_id        id that begins a text, None where there is none
    add_bos       whether a raw prompt gets it
    prefix_space  whether encoding puts a space before a text, which decoding from its start takes away again
    """

    backend: tokenizers.Tokenizer
    pieces: tuple[bytes, ...]
    special_ids: frozenset[int]
    vocab_size: int
    bos_id: int | None
    add_bos: bool
    prefix_space: bool


def byte_letters() -> dict[str, int]:
    """Return the letter by which byte-level BPE writes each byte, as letter -> byte.

    Printable Latin-1 stands for itself; the others take U+0100 and up, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return letters


def byte_level_bytes(piece: str, letters: dict[str, int]) -> bytes:
    """Return the bytes of a byte-level piece; a piece with other letters in it is plain text."""
    try:
        return bytes(map(letters.__getitem__, piece))
    except KeyError:
        return piece.encode("utf-8")


def sentencepiece_bytes(piece: str) -> bytes:
    """Return the bytes of a SentencePiece piece: `<0xNN>` is one byte, the space mark is a space."""
    if len(piece) == _BYTE_PIECE_LENGTH and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace(SPACE_MARK, " ").encode("utf-8")
