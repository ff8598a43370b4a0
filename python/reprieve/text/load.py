"""Text: what a model needs to read and write text, and where its files keep it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from reprieve.errors import InvalidArgument, ModelFileError, UnsupportedTokenizer
from reprieve.text.chat import ChatTemplate
from reprieve.text.guard import parse_json_object
from reprieve.text.json_vocab import token_text
from reprieve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TOKENIZER_FILE: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"

# Names of GGUF headers, by the names that chat templates use.
_GGUF_TOKENS: Final = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


@dataclass(frozen=True, slots=True)
class Text:
    """A model's tokenizer, and its chat template where it has one."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None

    def encode_prompt(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Return the ids of `prompt`: as it is, or with `chat` as a user's message put through the template.

        A raw prompt begins with BOS where the tokenizer's own settings say so, and what is spelled like a control
        token in it is text. A template writes its control tokens, BOS included, itself.

        Raises `InvalidArgument` that names `chat` or `prompt`.
        """
        if chat:
            if self.chat_template is None:
                raise InvalidArgument("chat", "the model has no chat template")
            rendered = self.chat_template.render([{"role": "user", "content": prompt}])
            ids = self.tokenizer.encode(rendered, special=True)
        else:
            ids = self.tokenizer.encode(prompt, special=False)
            if self.tokenizer.add_bos and self.tokenizer.bos_id is not None:
                ids.insert(0, self.tokenizer.bos_id)
        if not ids:
            raise InvalidArgument("prompt", f"gives no tokens: {prompt!r}")
        return ids


def load_text(path: Path, metadata: Mapping[str, object] | None = None) -> Text | None:
    """Return the text side of the model at `path`, or None where it takes and gives token ids only.

    `path` is a folder with tokenizer.json, tokenizer_config.json and chat_template.jinja, of which the last two may be
    missing; or a GGUF file, whose header is `metadata` (key to plain Python value). A tokenizer.json next to a GGUF
    file is used in place of the file's own vocabulary.

    Raises `ModelFileError` where a file is damaged, `UnsupportedTokenizer` where a vocabulary is of an unknown kind.
    """
    folder = path if path.is_dir() else path.parent
    own = None if path.is_dir() else _gguf_template(metadata or {})
    if (folder / TOKENIZER_FILE).is_file():
        text = _from_folder(folder, own)
        _check_fit(folder / TOKENIZER_FILE, text.tokenizer, metadata or {})
        return text
    if path.is_dir() or metadata is None or metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return None
    return Text(Tokenizer.from_gguf(path, metadata), own)


def _from_folder(folder: Path, fallback: ChatTemplate | None) -> Text:
    config = _read_config(folder / CONFIG_FILE)
    tokenizer = Tokenizer.from_file(folder / TOKENIZER_FILE, config)
    source = _read(folder / TEMPLATE_FILE)
    if source is None:
        source = _default_template(config.get("chat_template"))
    if source is None:
        return Text(tokenizer, fallback)
    texts = {name: token_text(entry) for name, entry in config.items() if name.endswith("_token")}
    return Text(tokenizer, ChatTemplate(source, {name: text for name, text in texts.items() if text is not None}))


def _check_fit(path: Path, tokenizer: Tokenizer, metadata: Mapping[str, object]) -> None:
    """Refuse a tokenizer.json that knows more tokens than the GGUF file beside it: it belongs to another model."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, (list, tuple)) and tokenizer.num_ids > len(tokens):
        problem = f"has token ids up to {tokenizer.num_ids - 1}, the GGUF file next to it has {len(tokens)} tokens"
        raise UnsupportedTokenizer(path, problem)


def _gguf_template(metadata: Mapping[str, object]) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None
    tokens = metadata.get("tokenizer.ggml.tokens")
    texts = {}
    for name, key in _GGUF_TOKENS.items():
        token_id = metadata.get(key)
        if isinstance(tokens, (list, tuple)) and isinstance(token_id, int) and 0 <= token_id < len(tokens):
            texts[name] = str(tokens[token_id])
    return ChatTemplate(source, texts)


def _default_template(entry: object) -> str | None:
    """Return the template in tokenizer_config.json: a text, or the one named "default" of a list."""
    if isinstance(entry, list):
        default = [item for item in entry if isinstance(item, dict) and item.get("name") == "default"]
        entry = default[-1].get("template") if default else None
    return entry if isinstance(entry, str) else None


def _read(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise ModelFileError(path, f"cannot be read: {failure}") from failure


def _read_config(path: Path) -> dict[str, Any]:
    source = _read(path)
    return {} if source is None else parse_json_object(path, source)
