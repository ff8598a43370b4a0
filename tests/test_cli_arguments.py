"""What the command line accepts and refuses before a model is looked for."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cli_kit import prompts_file, refusal
from reprieve import __version__
from reprieve.cli import main
from reprieve.cli.arguments import parse
from reprieve.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


# What is asked for.


def test_the_version_is_that_of_the_package() -> None:
    done = subprocess.run([sys.executable, "-m", "reprieve", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"reprieve {__version__}\n"


def test_every_option_reaches_the_plan() -> None:
    settings = "--kv-blocks 9 --block-size 4 --max-slots 3 --step-tokens 8 --host-kv-bytes 0 --head-room 2 --immunity 5"
    settings += " --depth 3 --trace t.json"
    rest = "--max-new 7 --ignore-eos --device cpu --threads 3 --weights bf16 --kv f16 --check-alone --json -"
    forced = "--force-park-every 6 --park-by spill"
    plan = parse(f"generate M --prompt a b --prompt c {settings} {rest} {forced}".split())
    assert (plan.model, plan.device, plan.threads, plan.weights, plan.kv) == ("M", "cpu", 3, "bf16", "f16")
    assert [(prompt.content, prompt.chat, prompt.max_new_tokens) for prompt in plan.prompts] == [
        (text, None, 7) for text in "abc"
    ]
    assert plan.ignore_eos
    assert plan.check_alone
    assert (plan.json_path, plan.trace_path) == ("-", "t.json")
    assert EngineConfig(**plan.settings) == EngineConfig(
        kv_blocks=9,
        block_size=4,
        max_slots=3,
        step_tokens=8,
        host_kv_bytes=0,
        head_room=2,
        immunity_tokens=5,
        depth=3,
        force_park_every=6,
        force_park_by="spill",
    )


def test_absent_options_leave_the_engine_its_defaults() -> None:
    plan = parse(["generate", "M", "--prompt", "a"])
    assert EngineConfig(**plan.settings) == EngineConfig()
    assert "kv_blocks" not in plan.settings
    assert (plan.device, plan.threads, plan.kv) == ("auto", None, "auto")
    assert plan.prompts[0].max_new_tokens == 128


NUMBERS = ["--kv-blocks", "--block-size", "--max-slots", "--step-tokens", "--host-kv-bytes", "--head-room"]
NUMBERS += ["--threads", "--immunity", "--max-new", "--force-park-every", "--depth"]
BAD: dict[str, tuple[str, ...]] = dict.fromkeys(NUMBERS, ("-1", "x", "1.5", "", "9223372036854775808", "1" * 5000))
BAD |= {"--device": ("gpu",), "--weights": ("q4",), "--kv": ("f8",), "--park-by": ("force",)}


@pytest.mark.parametrize(("option", "value"), [(option, value) for option, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_with_the_option_and_the_value(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "M", "--prompt", "a", f"{option}={value}")
    assert f"argument {option}: " in said
    assert repr(value)[:20] in said


@pytest.mark.parametrize(
    "option", ["--kv-blocks", "--block-size", "--max-slots", "--step-tokens", "--max-new", "--threads", "--depth"]
)
def test_zero_is_refused_where_nothing_could_run(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"argument {option}: must be an integer from 1" in refusal(capsys, "M", "--prompt", "a", option, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "MODEL"),
        (["M"], "one of the arguments --prompt --prompts is required"),
        (["M", "--prompt", "a", "--prompts", "f"], "not allowed with"),
        (["M", "--prompt"], "--prompt: expected at least one argument"),
        (["M", "--prompt", ""], "--prompt 1: prompt: is empty"),
        (["M", "--prompt", "a", "\ud800"], "--prompt 2: prompt: is not valid text"),
        (["M", "--prompt", "a", "--park-by", "spill"], "--park-by: goes with --force-park-every"),
        (["M", "--prompt", "a", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["M", "--prompt", "a", "--check"], "unrecognized arguments: --check"),
        (["M", "--prompt", "a", "--json", "/absent/folder/out.json"], "--json: cannot write /absent/folder/out.json"),
        (["M", "--prompt", "a", "--trace", "/absent/folder/t"], "--trace: cannot write /absent/folder/t"),
        (["M", "--prompt", "a", "--trace", "/"], "--trace: cannot write /: it is a folder"),
        (["M", "--prompt", "a", "--depth", "4"], "argument --depth: must be an integer from 1 to 3"),
        (["./absent", "--prompt", "a"], "model: there is no file or folder './absent'"),
        (["absent", "--prompt", "a"], 'no hub name such as "owner/name"'),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    arguments: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, *arguments)


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["nonsense"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 2


# The file of prompts.

LINES: list[tuple[object, str]] = [
    ("{", "is not JSON"),
    ("[1]", "must be a JSON object, not list"),
    ("[" * 100_000, "is not JSON"),
    ({}, "prompt: is missing"),
    ({"prompt": ""}, "prompt: is empty"),
    ({"prompt": []}, "prompt: is empty"),
    ({"prompt": 5}, "prompt: must be text or a list of token ids, not 5"),
    ({"prompt": None}, "prompt: must be text"),
    ({"prompt": ["a"]}, "prompt: must hold token ids from 0 to 2147483647; item 0 is 'a'"),
    ({"prompt": [1, True]}, "prompt: must hold token ids from 0 to 2147483647; item 1 is True"),
    ({"prompt": [1, -1]}, "prompt: must hold token ids from 0 to 2147483647; item 1 is -1"),
    ({"prompt": [2**31]}, "prompt: must hold token ids from 0 to 2147483647; item 0 is 2147483648"),
    ({"prompt": [1.0]}, "prompt: must hold token ids from 0 to 2147483647; item 0 is 1.0"),
    ('{"prompt": "\\ud800"}', "prompt: is not valid text"),
    ({"prompt": "a", "chat": "yes"}, "chat: must be true or false, not 'yes'"),
    ({"prompt": "a", "chat": 1}, "chat: must be true or false, not 1"),
    ({"prompt": [1], "chat": True}, "chat: a chat template applies to a text prompt"),
    ({"prompt": "a", "id": 7}, "id: must be text that is not empty, not 7"),
    ({"prompt": "a", "id": ""}, "id: must be text that is not empty, not ''"),
    ({"prompt": "a", "id": "first"}, "id: 'first' is already the id of"),
    ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens: must be"),
    ({"prompt": "a", "max_new_tokens": "9"}, "max_new_tokens: must be"),
    ({"prompt": "a", "max_new_tokens": 1.5}, "max_new_tokens: must be"),
    ({"prompt": "a", "max_new": 9}, "max_new: is no field; there are id, prompt, chat, max_new_tokens"),
]


@pytest.mark.parametrize(("line", "said"), LINES, ids=[said[:24] + str(n) for n, (_, said) in enumerate(LINES)])
def test_a_bad_line_is_refused_with_file_line_and_field_before_the_model_is_looked_for(
    line: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prompts_file(tmp_path, {"id": "first", "prompt": "a"}, "", line)
    said_so = refusal(capsys, "./absent", "--prompts", path)
    assert said_so.startswith(f"reprieve: error: {path}:3: ")
    assert said in said_so


def test_a_file_without_prompts_or_no_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = prompts_file(tmp_path, "", "  ")
    assert f"--prompts: {empty} holds no prompt" in refusal(capsys, "M", "--prompts", empty)
    assert f"--prompts: cannot read {tmp_path}" in refusal(capsys, "M", "--prompts", tmp_path)
    (tmp_path / "bytes").write_bytes(b'\n{"prompt": "\xff"}\n')
    assert f"{tmp_path}/bytes:2: is not JSON" in refusal(capsys, "M", "--prompts", tmp_path / "bytes")


def test_a_line_may_leave_out_all_but_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": [1, 2], "max_new_tokens": null}')
    first, second = parse(["generate", "M", "--prompts", str(path), "--max-new", "9"]).prompts
    assert (first.id, first.content, first.chat, first.max_new_tokens) == ("line-1", "a", False, 9)
    assert (second.id, second.content, second.chat, second.max_new_tokens) == ("line-3", [1, 2], False, None)
