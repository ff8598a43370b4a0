"""Detokenizer: token ids to text, one at a time."""

from __future__ import annotations

from codecs import utf_8_decode
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reprieve.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing list of tokens.

    All that was given out, joined, equals `Tokenizer.decode` of the whole list with the same `start`. What it keeps
    between tokens is the first bytes of one incomplete character, 3 at most.
    """

    __slots__ = ("_at_start", "_pending", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, start: bool = False) -> None:
        self._tokenizer = tokenizer
        self._pending = b""
        self._at_start = start and tokenizer.prefix_space

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is complete with it.

        Raises `InvalidArgument` where there is no such id, and has then changed nothing.
        """
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            data = data.removeprefix(b" ")
            self._at_start = False
        data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)  # False: more bytes may follow
        self._pending = data[used:]
        return text

    def finish(self) -> str:
        """Return what is left: U+FFFD where the tokens end inside a character."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text
