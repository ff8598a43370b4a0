"""The vocabulary in the header of a GGUF file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from reprieve.errors import UnsupportedTokenizer
from reprieve.text.guard import library_guard
from reprieve.text.vocabulary import SPACE_MARK, Vocabulary, byte_letters, byte_level_bytes, sentencepiece_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ADVICE: Final = "put the model's tokenizer.json next to the GGUF file, or load the model's safetensors folder"
"""What to do about a vocabulary that is refused."""


class TokenType(IntEnum):
    """What `tokenizer.ggml.token_type` says of each token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_MERGEABLE: Final = frozenset({TokenType.NORMAL, TokenType.USER_DEFINED})
_SILENT: Final = frozenset({TokenType.UNKNOWN, TokenType.CONTROL, TokenType.UNUSED})


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How a byte-level vocabulary splits text into words before it merges inside them.

    `pattern` None is the rule of GPT-2. `digits` splits every digit off first. `nfc` composes characters first.
    `ignore_merges` takes a word that is itself a token whole. `add_bos` holds where the header says nothing.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


# The two patterns differ only in how many digits make a word.
_HEAD: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = SplitRule(pattern=_HEAD + r"\p{N}{1,3}" + _TAIL, ignore_merges=True, add_bos=True)
_QWEN2: Final = SplitRule(pattern=_HEAD + r"\p{N}" + _TAIL, nfc=True)
_GPT2: Final = SplitRule()
_SINGLE_DIGITS: Final = SplitRule(digits=True)

SPLIT_RULES: Final[Mapping[str, SplitRule]] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}
"""The pre-tokenizers that are known for certain, by `tokenizer.ggml.pre`; what is not here is refused."""


def gguf_vocabulary(path: Path, metadata: Mapping[str, object]) -> Vocabulary:
    """Build the vocabulary that the header `metadata` of the file at `path` describes.

    Raises `UnsupportedTokenizer`, with advice, where the header is incomplete or leaves open how text is split.
    """
    header = _Header(path, metadata)
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return _byte_level(header)
    if model == "llama":
        return _sentencepiece(header)
    raise header.refuse(f"its vocabulary is of the kind {model!r}, and only 'gpt2' and 'llama' are known here")


class _Header:
    """The tokenizer's part of a GGUF header, checked."""

    def __init__(self, path: Path, metadata: Mapping[str, object]) -> None:
        self._path = path
        self._metadata = metadata
        self.tokens: list[str] = self.values("tokens", str)
        if not self.tokens:
            raise self.refuse("its vocabulary is empty")
        types = self.values("token_type", int)
        if len(types) != len(self.tokens):
            raise self.refuse(f"it has {len(self.tokens)} tokens and {len(types)} token types")
        known = {int(kind) for kind in TokenType}
        self.types = [TokenType(kind) if kind in known else TokenType.UNUSED for kind in types]
        # A token without text can never be written; any unique name keeps its id.
        self.tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(self.tokens)]
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for token_id, token in enumerate(self.tokens) if self.ids[token] != token_id)
            raise self.refuse(f"its vocabulary lists the token {twice!r} more than once")

    def refuse(self, problem: str) -> UnsupportedTokenizer:
        """Return the error for `problem`, with advice."""
        return UnsupportedTokenizer(self._path, f"{problem}; {ADVICE}")

    def values(self, name: str, kind: type) -> list[Any]:
        """Return the list `tokenizer.ggml.<name>`, whose items must be of `kind`."""
        found = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(found, (list, tuple)) or not all(isinstance(value, kind) for value in found):
            raise self.refuse(f"its header has no list tokenizer.ggml.{name} of {kind.__name__}")
        return list(found)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return the flag `tokenizer.ggml.<name>`."""
        return bool(self._metadata.get(f"tokenizer.ggml.{name}", default))

    def split_rule(self) -> SplitRule:
        """Return the rule that `tokenizer.ggml.pre` names."""
        name = self._metadata.get("tokenizer.ggml.pre")
        rule = SPLIT_RULES.get(name) if isinstance(name, str) else None
        if rule is None:
            raise self.refuse(f"how it splits text (tokenizer.ggml.pre = {name!r}) is not known here")
        return rule

    def vocabulary(
        self, backend: tokenizers.Tokenizer, pieces: tuple[bytes, ...], *, add_bos: bool, prefix_space: bool
    ) -> Vocabulary:
        """Add the special tokens to `backend` and put the parts together; `add_bos` is the default."""
        silent = {token_id for token_id, kind in enumerate(self.types) if kind in _SILENT}
        spoken = {token_id for token_id, kind in enumerate(self.types) if kind is TokenType.USER_DEFINED}
        special = {token_id for token_id in silent if self.types[token_id] is not TokenType.UNUSED}
        with library_guard(self.refuse, "its special tokens cannot be added"):
            backend.add_special_tokens([self._added(token_id) for token_id in sorted(special)])
            backend.add_tokens([self._added(token_id) for token_id in sorted(spoken)])
        bos_id = self._metadata.get("tokenizer.ggml.bos_token_id")
        if bos_id is not None and (not isinstance(bos_id, int) or not 0 <= bos_id < len(self.tokens)):
            raise self.refuse(f"its bos_token_id {bos_id!r} is not one of its {len(self.tokens)} tokens")
        add_bos = self.flag("add_bos_token", default=add_bos)
        if add_bos and bos_id is None:
            raise self.refuse("a prompt should begin with a BOS token, and its header names none")
        return Vocabulary(
            backend=backend,
            pieces=tuple(b"" if token_id in silent else piece for token_id, piece in enumerate(pieces)),
            special_ids=frozenset(special),
            vocab_size=len(self.tokens),
            bos_id=bos_id,
            add_bos=add_bos,
            prefix_space=prefix_space,
        )

    def _added(self, token_id: int) -> tokenizers.AddedToken:
        special = self.types[token_id] is not TokenType.USER_DEFINED
        return tokenizers.AddedToken(self.tokens[token_id], normalized=False, special=special)


def _byte_level(header: _Header) -> Vocabulary:
    rule = header.split_rule()
    merges = [_pair(header, merge) for merge in header.values("merges", str)]
    backend = _bpe(header, merges, ignore_merges=rule.ignore_merges)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(rule.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    letters = byte_letters()
    pieces = tuple(
        token.encode("utf-8") if kind is TokenType.USER_DEFINED else byte_level_bytes(token, letters)
        for token, kind in zip(header.tokens, header.types, strict=True)
    )
    return header.vocabulary(backend, pieces, add_bos=rule.add_bos, prefix_space=False)


def _sentencepiece(header: _Header) -> Vocabulary:
    prefix_space = header.flag("add_space_prefix", default=True)
    unknown = next((t for t, kind in zip(header.tokens, header.types, strict=True) if kind is TokenType.UNKNOWN), None)
    backend = _bpe(header, _score_merges(header), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    spaces = normalizers.Replace(" ", SPACE_MARK)
    # Every stretch of text between special tokens gets the prefix: this is the meaning the format gives to it.
    steps = [normalizers.Prepend(SPACE_MARK), spaces] if prefix_space else [spaces]
    backend.normalizer = normalizers.Sequence(steps)
    pieces = tuple(sentencepiece_bytes(token) for token in header.tokens)
    return header.vocabulary(backend, pieces, add_bos=True, prefix_space=prefix_space)


def _bpe(header: _Header, merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    with library_guard(header.refuse, "its merges do not fit its tokens"):
        return tokenizers.Tokenizer(models.BPE(header.ids, merges, **options))


def _pair(header: _Header, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise header.refuse(f"the merge {merge!r} is not two pieces with a space between them")
    return left, right


def _score_merges(header: _Header) -> list[tuple[str, str]]:
    """Return every way to join two pieces to a third, best score first, then the longest left piece.

    Raises `UnsupportedTokenizer` where two pieces share a score: which of them is joined first is then not known.
    """
    scores = header.values("scores", float)
    if len(scores) != len(header.tokens):
        raise header.refuse(f"it has {len(header.tokens)} tokens and {len(scores)} scores")
    mergeable = {t for t, kind in zip(header.tokens, header.types, strict=True) if kind in _MERGEABLE}
    lengths = set(map(len, mergeable))
    merges: list[tuple[float, int, str, str]] = []
    owner: dict[float, str] = {}
    for token, kind, score in zip(header.tokens, header.types, scores, strict=True):
        if kind is not TokenType.NORMAL:
            continue
        # Lengths first: to cut one piece of n letters at every place copies n * n of them.
        cuts = [at for at in range(1, len(token)) if at in lengths and len(token) - at in lengths]
        splits = [(token[:at], token[at:]) for at in cuts]
        joins = [(-score, -len(left), left, right) for left, right in splits if {left, right} <= mergeable]
        if joins and math.isnan(score):
            raise header.refuse(f"the score of its piece {token!r} is not a number")
        if joins and owner.setdefault(score, token) != token:
            raise header.refuse(f"its pieces {owner[score]!r} and {token!r} share the score {score}")
        merges.extend(joins)
    return [(left, right) for _, _, left, right in sorted(merges)]
