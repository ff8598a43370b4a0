"""ChatTemplate: messages to the text that a chat model was trained on."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reprieve.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2.parser import Parser


class ChatTemplate:
    """A Jinja template as models carry it, run in a sandbox.

    `tokens` holds the texts of special tokens by the names that templates use, such as "bos_token". `now` tells the
    time to templates that write the date. A template that does not compile is refused when it is used, for the model
    still serves raw prompts.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str] | None = None, *, now: Callable[[], datetime] | None = None
    ) -> None:
        self._tokens = dict(tokens or {})
        self._template: jinja2.Template | Exception
        try:
            self._template = _environment(now or _local_time).from_string(source)
        except Exception as failure:  # noqa: BLE001  # also RecursionError, SyntaxError, ValueError: see `render`
            self._template = failure

    def render(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> str:
        """Return the text of `messages`, each with "role" and "content", and where the answer begins after it.

        Raises `InvalidArgument` where the template is faulty or refuses the messages.
        """
        if isinstance(self._template, Exception):
            problem = f"the model's chat template does not compile: {self._template}"
            raise InvalidArgument("chat", problem) from self._template
        values = {"messages": messages, "tools": None, "documents": None, **self._tokens}
        try:
            return self._template.render(values, add_generation_prompt=add_generation_prompt)
        except Exception as failure:  # whatever an expression of the template can raise
            raise InvalidArgument("chat", f"the model's chat template refuses the messages: {failure}") from failure


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


class _Generation(Extension):
    """`{% generation %}`: marks the model's own words for training; here its content stands for itself."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _local_time() -> datetime:
    return datetime.now().astimezone()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
