"""Tokenizer: text to token ids and back, byte by byte."""

from __future__ import annotations

import operator
from functools import partial
from typing import TYPE_CHECKING

import tokenizers

from reprieve.errors import InvalidArgument, ModelFileError, UnsupportedTokenizer
from reprieve.text.gguf_vocab import gguf_vocabulary
from reprieve.text.guard import library_guard
from reprieve.text.json_vocab import json_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from reprieve.text.vocabulary import Vocabulary


class Tokenizer:
    """The vocabulary of a model.

    Immutable, so that all requests share one. Adds no BOS or EOS by itself: `Text.encode_prompt` does.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        # Whether control tokens count is a setting of the whole backend, not of a call: hence two of them.
        self._plain = tokenizers.Tokenizer.from_str(vocabulary.backend.to_str())
        self._plain.encode_special_tokens = True

    @classmethod
    def from_file(cls, path: Path, config: Mapping[str, object] | None = None) -> Tokenizer:
        """Read tokenizer.json at `path`; `config` holds what tokenizer_config.json says.

        Raises `ModelFileError` where the file is damaged, `UnsupportedTokenizer` where its kind is not known.
        """
        vocabulary = json_vocabulary(path, config or {})
        with library_guard(partial(ModelFileError, path), "is not a tokenizer that can be copied"):
            return cls(vocabulary)

    @classmethod
    def from_gguf(cls, path: Path, metadata: Mapping[str, object]) -> Tokenizer:
        """Build the vocabulary in the header `metadata` (key to plain Python value) of the GGUF file at `path`.

        Raises `UnsupportedTokenizer`, with advice, where the header leaves open how text is split.
        """
        vocabulary = gguf_vocabulary(path, metadata)
        with library_guard(partial(UnsupportedTokenizer, path), "its vocabulary cannot be copied"):
            return cls(vocabulary)

    @property
    def vocab_size(self) -> int:
        """How many ids name a token."""
        return self._vocabulary.vocab_size

    @property
    def num_ids(self) -> int:
        """One more than the highest id; every id is below it, and some may name no token."""
        return len(self._vocabulary.pieces)

    @property
    def special_ids(self) -> frozenset[int]:
        """The control tokens: they give no text."""
        return self._vocabulary.special_ids

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, or None."""
        return self._vocabulary.bos_id

    @property
    def add_bos(self) -> bool:
        """Whether a raw prompt begins with `bos_id`."""
        return self._vocabulary.add_bos

    @property
    def prefix_space(self) -> bool:
        """Whether `encode` puts a space before a text, as SentencePiece does."""
        return self._vocabulary.prefix_space

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of `text`; nothing is added before or after it.

        With `special`, what is spelled like a control token becomes that token, as the output of a chat template needs.
        Without, it is text like any other, so that a user's text cannot pose as the template's. A character that a
        byte-level vocabulary has no tokens for is left out, as in the tokenizers library.

        Raises `InvalidArgument` where `text` is not valid Unicode, or where the model's own rules fail on it.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as failure:
            raise InvalidArgument("prompt", f"holds half a surrogate pair at character {failure.start}") from failure
        backend = self._backend if special else self._plain
        with library_guard(partial(InvalidArgument, "prompt"), "the model's tokenizer fails on it"):
            return list(backend.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what the token adds to a text: b"" for control tokens and for ids that name no token.

        Raises `InvalidArgument` where there is no such id.
        """
        token_id = operator.index(token_id)
        if not 0 <= token_id < self.num_ids:
            raise InvalidArgument("token_id", f"{token_id} is not one of the tokenizer's ids, 0 to {self.num_ids - 1}")
        return self._vocabulary.pieces[token_id]

    def decode(self, token_ids: Iterable[int], *, start: bool = False) -> str:
        """Return the text of `token_ids`; bytes that are not UTF-8 become U+FFFD.

        `start` says that they begin a text: the space that `encode` put before it is then taken away. An answer goes
        on from its prompt, and keeps it.

        Raises `InvalidArgument` where there is no such id.
        """
        data = b"".join(map(self.token_bytes, token_ids))
        if start and self.prefix_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")
