"""What a run of the command is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from reprieve.errors import InvalidArgument
from reprieve.request import Request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reprieve.device.kv_pool import KvKind
    from reprieve.model.weights import Rounding


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and where it came from, which errors name.

    `chat` None means: through the model's chat template if it has one.
    """

    origin: str
    id: str
    content: str | Sequence[int]
    chat: bool | None = False
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` that names the origin and the field, of all that can be told without a model."""
        if isinstance(self.content, str) and not self.content.isascii():
            try:
                self.content.encode()
            except UnicodeEncodeError as error:
                raise self.refused("prompt", f"is not valid text: {error.reason} at {error.start}") from None
        self.request()

    def request(self, prompt: Sequence[int] | None = None, *, ignore_eos: bool = False) -> Request:
        """Return the request, whose prompt is given as token ids once they are known."""
        chat = bool(self.chat) and prompt is None
        content = self.content if prompt is None else prompt
        try:
            return Request(content, max_new_tokens=self.max_new_tokens, id=self.id, chat=chat, ignore_eos=ignore_eos)
        except InvalidArgument as error:
            raise self.refused(error.field, error.problem) from None

    def refused(self, name: str, problem: str) -> InvalidArgument:
        """Return the error for a field of this prompt."""
        return InvalidArgument(f"{self.origin}: {name}", problem)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the command line asks for.

    `settings` are those of `EngineConfig` that were given; without "kv_blocks" the pool has room for all. `device`,
    `threads`, `weights` and `kv` are what `Engine` takes. `json_path` and `trace_path` are files; "-" for the former
    is stdout.
    """

    model: str
    prompts: tuple[Prompt, ...]
    device: str = "auto"
    threads: int | None = None
    weights: Rounding = "file"
    kv: KvKind | Literal["auto"] = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = False
    check_alone: bool = False
    json_path: str | None = None
    trace_path: str | None = None
