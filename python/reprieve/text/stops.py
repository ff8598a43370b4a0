"""StopStrings: holds text back while it could be the beginning of a stop text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reprieve.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopStrings:
    """Finds the first of some stop texts in a text that comes in chunks.

    The stop text that is complete first wins, and of those complete at one character the longest; how the text is cut
    into chunks plays no part. It is an Aho-Corasick automaton: the cost of all chunks is linear in their length.

    Raises `InvalidArgument` where a stop text is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(stops):
            raise InvalidArgument("stop", f"must be a sequence of texts that are not empty, not {stops!r}")
        self.matched: str | None = None
        """The stop text that was found."""
        # Nodes are the beginnings of stop texts, 0 the empty one. The node of the longest end of the text so far that
        # begins a stop text spells what is held back.
        self._node = 0
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]  # letters of a node
        self._spelling = [""]  # a stop text that begins with a node's letters
        self._found: list[str | None] = [None]  # longest stop text that a node's letters end with
        self._fallback = [0]  # node of the longest shorter end of a node's letters
        self._add(stops)

    def push(self, text: str) -> str:
        """Take the next chunk and return what can be given out now: nothing after, and nothing of, a stop text."""
        if self.matched is not None:
            return ""
        held = self._node
        for index, letter in enumerate(text):
            self._advance(letter)
            self.matched = self._found[self._node]
            if self.matched is not None:
                self._node = 0
                return self._given(held, text, index + 1 - len(self.matched))
        return self._given(held, text, len(text) - self._depth[self._node])

    def finish(self) -> str:
        """Return what was held back in vain: the text has ended."""
        held, self._node = self._node, 0
        return self._given(held, "", 0)

    def _given(self, held: int, text: str, end: int) -> str:
        """Return the letters of the node `held` and `text` behind them, up to place `end` of `text`.

        A negative end leaves off the last of the held letters. The cost is that of the letters returned.
        """
        depth = self._depth[held]
        return self._spelling[held][: depth + min(end, 0)] + text[: max(end, 0)]

    def _advance(self, letter: str) -> None:
        """Go to the node of the longest end of the text; each fallback is shorter, so the loop ends."""
        node = self._node
        while node and letter not in self._children[node]:
            node = self._fallback[node]
        self._node = self._children[node].get(letter, 0)

    def _add(self, stops: Sequence[str]) -> None:
        """Build the nodes, all of one length before the next, so that fallbacks exist when they are needed."""
        level = [(0, stop) for stop in dict.fromkeys(stops)]  # (node of the letters so far, stop text)
        depth = 0
        while level:
            depth += 1
            level = [(self._child(node, stop, depth), stop) for node, stop in level]
            for node, stop in level:
                if len(stop) == depth:
                    self._found[node] = stop
            level = [(node, stop) for node, stop in level if len(stop) > depth]

    def _child(self, parent: int, stop: str, depth: int) -> int:
        """Return the node of the first `depth` letters of `stop`, made where it is new; each fallback is shorter."""
        letter = stop[depth - 1]
        children = self._children[parent]
        if letter in children:
            return children[letter]
        fallback = self._fallback[parent]
        while fallback and letter not in self._children[fallback]:
            fallback = self._fallback[fallback]
        target = self._children[fallback].get(letter, 0) if parent else 0
        child = children[letter] = len(self._children)
        self._children.append({})
        self._depth.append(depth)
        self._spelling.append(stop)
        self._fallback.append(target)
        self._found.append(self._found[target])
        return child
