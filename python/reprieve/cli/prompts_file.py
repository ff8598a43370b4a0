"""The file of prompts: one JSON object a line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from reprieve.cli.plan import Prompt
from reprieve.errors import InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path

_KEYS: Final = ("id", "prompt", "chat", "max_new_tokens")


def read_prompts(path: Path, max_new_tokens: int) -> tuple[Prompt, ...]:
    """Return the prompts in `path`, a JSON Lines file; `max_new_tokens` is the budget of a line that names none.

    A line is `{"id", "prompt": text or [token ids], "chat": true|false, "max_new_tokens"}`; only the prompt is
    required. Empty lines are skipped. Raises `InvalidArgument` that names the file, the line and the field.
    """
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise InvalidArgument("--prompts", f"cannot read {path}: {error.strerror or error}") from None
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        origin = f"{path}:{number}"
        prompt = _prompt(origin, _fields(origin, line), f"line-{number}", max_new_tokens)
        if prompt.id in prompts:
            raise prompt.refused("id", f"{prompt.id!r} is already the id of {prompts[prompt.id].origin}")
        prompts[prompt.id] = prompt
    if not prompts:
        raise InvalidArgument("--prompts", f"{path} holds no prompt")
    return tuple(prompts.values())


def _fields(origin: str, line: bytes) -> dict[str, Any]:
    """Return the object in a line, which has no other keys than there may be."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, an integer of thousands of digits
        raise InvalidArgument(origin, f"is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgument(origin, f"must be a JSON object, not {type(fields).__name__}")
    for key in fields:
        if key not in _KEYS:
            raise InvalidArgument(f"{origin}: {key}", f"is no field; there are {', '.join(_KEYS)}")
    return fields


def _prompt(origin: str, fields: dict[str, Any], default_id: str, max_new_tokens: int) -> Prompt:
    """Check the types of a line's fields, which JSON leaves open; `Prompt` checks their values."""

    def refused(name: str, problem: str) -> InvalidArgument:
        return InvalidArgument(f"{origin}: {name}", problem)

    if "prompt" not in fields:
        raise refused("prompt", "is missing")
    content = fields["prompt"]
    if isinstance(content, list):
        for index, token in enumerate(content):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
                raise refused("prompt", f"must hold token ids from 0 to {2**31 - 1}; item {index} is {token!r:.40}")
    elif not isinstance(content, str):
        raise refused("prompt", f"must be text or a list of token ids, not {content!r:.40}")
    request_id = fields.get("id", default_id)
    if not isinstance(request_id, str) or not request_id:
        raise refused("id", f"must be text that is not empty, not {request_id!r:.40}")
    chat = fields.get("chat", False)
    if not isinstance(chat, bool):
        raise refused("chat", f"must be true or false, not {chat!r:.40}")
    return Prompt(origin, request_id, content, chat, fields.get("max_new_tokens", max_new_tokens))
