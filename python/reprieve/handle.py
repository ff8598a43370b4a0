"""A submitted request as its caller sees it: an iterator of events, and what has come so far."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from reprieve.errors import RequestFailed
from reprieve.request import DONE_REASONS, RETRYABLE, Done, Failed, Paused, RequestStats, Resumed, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reprieve.request import Event, FinishReason, Request


class Handle:
    """The stream of one request.

    Iterating gives its events and steps the engine while there are none; the last one is `Done` or `Failed`.
    `id` names it, `request` is what was submitted, `prompt_tokens` are the ids of its prompt, `tokens` those generated
    so far (a stop id included), `text` the text given out so far, `stats` what happened to it, `finish_reason` and
    `cause` how it ended.
    """

    def __init__(
        self, request: Request, request_id: str, prompt_tokens: Sequence[int], advance: Callable[[Handle], object]
    ) -> None:
        self.request = request
        self.id = request_id
        self.prompt_tokens = tuple(prompt_tokens)
        self.tokens: list[int] = []
        self.stats = RequestStats(prompt_tokens=len(self.prompt_tokens))
        self.finish_reason: FinishReason | None = None
        self.cause: BaseException | None = None
        self._text: list[str] = []
        self._events: deque[Event] = deque()
        self._advance = advance
        self._is_paused = False

    @property
    def text(self) -> str:
        """The text given out so far."""
        return "".join(self._text)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    @property
    def is_paused(self) -> bool:
        """Whether it gave way and has not come back yet."""
        return self._is_paused

    @property
    def is_retryable(self) -> bool:
        """Whether it has ended in a way in which trying again makes sense."""
        return self.finish_reason is not None and RETRYABLE[self.finish_reason]

    def __repr__(self) -> str:
        """Return the request's id, where it is, and how many tokens it has."""
        state = self.finish_reason or ("paused" if self._is_paused else "live")
        return f"<Handle {self.id!r}: {state}, {len(self.tokens)} tokens>"

    def __iter__(self) -> Handle:
        """Return itself."""
        return self

    def __next__(self) -> Event:
        """Return the next event, stepping the engine until there is one."""
        while not self._events:
            if self.is_finished:
                raise StopIteration
            self.advance()
        return self._events.popleft()

    def advance(self) -> None:
        """Step the engine once, for a request that has not ended."""
        self._advance(self)

    def take_events(self) -> list[Event]:
        """Return the events that have come and were not taken yet; steps nothing."""
        taken = list(self._events)
        self._events.clear()
        return taken

    def result(self) -> str:
        """Step the engine until the request has ended; return its whole text. Its events can still be taken.

        Raises `RequestFailed` if it failed: its text until then is in the error. It ends, as every engine step makes
        progress or counts towards the watchdog.
        """
        while not self.is_finished:
            self.advance()
        return self.answer()

    def answer(self) -> str:
        """Return the whole text of a request that has ended; raises `RequestFailed` if it failed. Steps nothing."""
        reason = self.finish_reason
        if reason is not None and reason not in DONE_REASONS:
            raise RequestFailed(self.id, reason, self.is_retryable, self.text) from self.cause
        return self.text

    def _push(self, event: Event) -> None:
        """Add an event and what it changes. For the journal."""
        match event:
            case Token(id=token_id, text=text):
                self.tokens.append(token_id)
                self.stats.tokens_generated += 1
                self._text.append(text)
            case Paused():
                self._is_paused = True
            case Resumed():
                self._is_paused = False
            case Done(finish_reason=reason, text=text):
                self.finish_reason = reason
                self._text.append(text)
            case Failed(code=code, cause=cause, text=text):
                self.finish_reason = code
                self.cause = cause
                self._text.append(text)
        self._events.append(event)
