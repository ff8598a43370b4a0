"""Chat templates: rendered as models expect, and refused without harm."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

import tiny_vocab
from reprieve.errors import InvalidArgument
from reprieve.text import ChatTemplate, Text, load_text

if TYPE_CHECKING:
    from pathlib import Path

HELLO = [{"role": "user", "content": "hello"}]


def test_blocks_leave_no_blank_lines() -> None:
    source = (
        "{% for message in messages %}\n"
        "    {% if true %}\n"
        "{{ message.role }}: {{ message.content }}\n"
        "    {% endif %}\n"
        "{% endfor %}\n"
    )
    assert ChatTemplate(source).render(HELLO) == "user: hello\n"


def test_the_generation_prompt_can_be_left_out() -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}{% if add_generation_prompt %}>{% endif %}")
    assert template.render(HELLO) == "hello>"
    assert template.render(HELLO, add_generation_prompt=False) == "hello"


def test_special_tokens_have_their_names_and_missing_ones_are_empty() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", {"bos_token": "<s>"})
    assert template.render(HELLO) == "<s>hello"


def test_loop_controls_are_there() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert template.render(HELLO * 3) == "hello"


def test_json_is_written_without_html_escapes() -> None:
    template = ChatTemplate("{{ messages[0] | tojson }}")
    assert template.render([{"role": "é", "content": "<a href='x'>"}]) == '{"role": "é", "content": "<a href=\'x\'>"}'


def test_the_date_comes_from_the_clock_that_is_handed_in() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", now=lambda: datetime(2024, 2, 29, tzinfo=UTC))
    assert template.render(HELLO) == "2024-02-29"
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(HELLO).isdigit()


def test_generation_blocks_stand_for_their_content() -> None:
    template = ChatTemplate("{% generation %}{{ messages[0].content }}{% endgeneration %}!")
    assert template.render(HELLO) == "hello!"


def test_tools_and_documents_are_none() -> None:
    assert ChatTemplate("{{ tools is none and documents is none }}").render(HELLO) == "True"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "refuses the messages"),
        ("{{ messages[0].missing.deeper }}", "has no attribute"),
        ("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", "unsafe|refuses"),
        ("{% for %}", "does not compile"),
        ("{{ 1 | no_such_filter }}", "does not compile"),
        ("{{" + "(" * 2000, "does not compile"),
        ("{{" + "9" * 5000 + "}}", "does not compile"),
        ("{% for a in messages %}" * 30 + "{% endfor %}" * 30, "does not compile"),
    ],
)
def test_a_faulty_template_is_refused_when_it_is_used(source: str, words: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(InvalidArgument, match=words) as caught:
        template.render(HELLO)
    assert caught.value.field == "chat"


def test_a_template_cannot_change_the_messages() -> None:
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(InvalidArgument, match="chat"):
        ChatTemplate("{{ messages.append(messages[0]) }}").render(messages)
    assert messages == HELLO


def test_a_chat_prompt_gets_the_control_tokens_of_the_template_and_no_bos() -> None:
    template = ChatTemplate("<|user|>{{ messages[0].content }}<|end|>")
    text = Text(tiny_vocab.byte_level(add_bos_token=True), template)
    hello = text.tokenizer.encode("hello", special=False)
    assert text.encode_prompt("hello", chat=True) == [tiny_vocab.USER, *hello, tiny_vocab.END]


def test_a_chat_prompt_without_a_template_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="the model has no chat template") as caught:
        Text(tiny_vocab.byte_level()).encode_prompt("hello", chat=True)
    assert caught.value.field == "chat"


def test_a_prompt_that_gives_no_tokens_is_refused() -> None:
    text = Text(tiny_vocab.byte_level(), ChatTemplate(""))
    with pytest.raises(InvalidArgument, match="gives no tokens"):
        text.encode_prompt("", chat=False)
    with pytest.raises(InvalidArgument, match="gives no tokens"):
        text.encode_prompt("hello", chat=True)


@pytest.mark.parametrize(
    "entry", [5, {}, [5], [{"name": [1]}], [{"name": {}, "template": "x"}], [{"name": "default", "template": 5}]]
)
def test_a_template_entry_of_another_kind_is_no_template(entry: object, tmp_path: Path) -> None:
    backend = tiny_vocab.byte_level()._backend
    (tmp_path / "tokenizer.json").write_text(backend.to_str(), "utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}), "utf-8")
    text = load_text(tmp_path)
    assert text is not None
    with pytest.raises(InvalidArgument, match="the model has no chat template"):
        text.encode_prompt("hello", chat=True)
    assert text.encode_prompt("hello") == text.tokenizer.encode("hello", special=False)
