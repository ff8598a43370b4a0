"""What callers submit, read for one model: a request's id, its prompt as token ids, the stream of its text."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from reprieve.errors import InvalidArgument
from reprieve.text import TextStream

if TYPE_CHECKING:
    from reprieve.journal import Journal
    from reprieve.request import Request
    from reprieve.text import Text


class Intake:
    """Reads requests for a model with the text side `text` (None: token ids alone); live ones are in `journal`."""

    def __init__(self, text: Text | None, journal: Journal) -> None:
        self._text = text
        self._journal = journal
        self._numbers = itertools.count()

    def id_of(self, request: Request) -> str:
        """Return the id that the request asks for, or a new one; `InvalidArgument` if a live request has it."""
        if request.id is not None:
            if self._journal.by_id(request.id) is not None:
                raise InvalidArgument("id", f"{request.id!r} is the id of a live request")
            return request.id
        return next(name for n in self._numbers if self._journal.by_id(name := f"request-{n}") is None)

    def prompt_of(self, request: Request) -> list[int]:
        """Return the token ids of the prompt; `InvalidArgument` for text where there is no tokenizer."""
        if not isinstance(request.prompt, str):
            return list(request.prompt)
        if self._text is None:
            raise InvalidArgument("prompt", "is text, and the model has no tokenizer; give token ids")
        return self._text.encode_prompt(request.prompt, chat=request.chat)

    def stream_of(self, request: Request) -> TextStream | None:
        """Return the stream of what it generates; `InvalidArgument` for stop texts where there is no tokenizer."""
        if self._text is not None:
            return TextStream(self._text.tokenizer, request.stop)
        if request.stop:
            raise InvalidArgument("stop", "are texts, and the model has no tokenizer; use stop_token_ids")
        return None
