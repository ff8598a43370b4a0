"""TextStream: the text that one request gives out, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reprieve.text.detokenizer import Detokenizer
from reprieve.text.stops import StopStrings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reprieve.text.tokenizer import Tokenizer


class TextStream:
    """Tokens in, text out, up to the first stop text.

    All that was given out, joined, is the answer: the decoded tokens, cut before the stop text that was complete first.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, start: bool = False) -> None:
        self._detokenizer = Detokenizer(tokenizer, start=start)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> str | None:
        """The stop text that was found, or None."""
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that can be given out now; "" once stopped.

        Raises `InvalidArgument` where there is no such id, and has then changed nothing.
        """
        return self._stops.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Return what was still held back; "" once stopped."""
        text = self._stops.push(self._detokenizer.finish())
        return text + self._stops.finish()
