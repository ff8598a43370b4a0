"""The arguments of the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from reprieve import __version__
from reprieve.cli.demo import demo_plan
from reprieve.cli.plan import Plan, Prompt
from reprieve.cli.prompts_file import read_prompts
from reprieve.errors import InvalidArgument
from reprieve.loading import DEVICES, KV_TYPES, MOST_THREADS, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_MOST: Final = 2**31 - 1
_SETTINGS: Final[dict[str, tuple[str, int, int, str]]] = {
    "--kv-blocks": ("kv_blocks", 1, _MOST, "blocks in the KV pool (room for all the prompts)"),
    "--block-size": ("block_size", 1, _MOST, "positions in a block (16)"),
    "--max-slots": ("max_slots", 1, 2**20, "most sequences resident at once (16)"),
    "--step-tokens": ("step_tokens", 1, 2**24, "tokens a step aims at (128)"),
    "--host-kv-bytes": ("host_kv_bytes", 0, 2**63 - 1, "bytes of spilled KV kept on the host; 0 keeps none (256 MiB)"),
    "--head-room": ("head_room", 0, 2**20, "blocks that stay free per resident sequence when one comes in (1)"),
    "--depth": ("depth", 1, 3, "steps in flight (the device's own)"),
    "--immunity": ("immunity_tokens", 0, _MOST, "tokens that a resumed sequence is left alone for (64)"),
}
"""Options that are settings of the engine: the setting's name, its bounds, what it is (its default)."""


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse(arguments: Sequence[str]) -> Plan:
    """Return what `arguments` ask for.

    Raises `InvalidArgument` for a bad file of prompts; ends the program, as argparse does, for a bad argument.
    """
    parser = _Parser(
        prog="reprieve",
        description="Decode large language models through KV-cache exhaustion, with not one bit of anybody's output "
        "changed.",
    )
    parser.add_argument("--version", action="version", version=f"reprieve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="watch eight prompts share a KV pool that is far too small for them",
        description="Let SmolLM2-135M answer eight prompts in a KV pool that holds about a third of what they need, "
        "and compare each answer with the one it gives alone. The model (98 MB) is fetched the first time.",
    )
    generate = commands.add_parser(
        "generate",
        allow_abbrev=False,
        help="answer prompts with a model",
        description="Answer prompts with a model. Exit status: 0; 1 if a request failed or differs from what it gives "
        "alone; 2 for bad input.",
    )
    for command in (demo, generate):
        command.add_argument("--json", metavar="FILE", help='write everything as JSON to FILE, or to stdout with "-"')
        command.add_argument("--trace", metavar="FILE", help="write what happened when to FILE, for ui.perfetto.dev")
    _add_settings(demo, ["--depth"])
    _add_generate(generate)
    values = parser.parse_args(arguments)
    for option, name in (("--json", values.json), ("--trace", values.trace)):
        if name is not None and (option, name) != ("--json", "-"):
            _check_file(option, name)
    if values.command == "demo":
        return demo_plan(values.json, values.trace, _settings(values))
    if values.park_by is not None and not values.force_park_every:
        generate.error("argument --park-by: goes with --force-park-every")
    return _generate_plan(values)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help='a folder, a GGUF file, a name on the hub, or "demo"')
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--prompt",
        action="append",
        nargs="+",
        metavar="TEXT",
        help="prompts, each a user's message if the model has a chat template",
    )
    prompts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='lines of {"id", "prompt": text or [token ids], "chat": true|false (false), "max_new_tokens"}',
    )
    parser.add_argument(
        "--max-new", type=_integer(1, _MOST), default=128, metavar="N", help="most tokens of an answer (128)"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the model's end-of-sequence tokens")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="what computes (auto: cpu)")
    parser.add_argument(
        "--threads", type=_integer(1, MOST_THREADS), metavar="N", help="threads of the cpu device (one per core)"
    )
    parser.add_argument("--weights", choices=WEIGHTS, default="file", help="what weights are rounded to (file)")
    parser.add_argument(
        "--kv", choices=KV_TYPES, default="auto", help="element type of the KV pool (auto: f16 on the cpu device)"
    )
    _add_settings(parser, _SETTINGS)
    parser.add_argument(
        "--force-park-every",
        type=_integer(0, _MOST),
        default=0,
        metavar="K",
        help="park each sequence after every K tokens, to try it out; 0 never does (0)",
    )
    parser.add_argument("--park-by", choices=("spill", "replay"), help="how --force-park-every parks")
    parser.add_argument("--check-alone", action="store_true", help="run each request alone too, and compare")


def _add_settings(parser: argparse.ArgumentParser, options: Iterable[str]) -> None:
    for option in options:
        setting, lowest, highest, what = _SETTINGS[option]
        # Absent ones are left out of the namespace: the engine has the defaults.
        absent = argparse.SUPPRESS
        parser.add_argument(
            option, dest=setting, type=_integer(lowest, highest), default=absent, metavar="N", help=what
        )


def _settings(values: argparse.Namespace) -> dict[str, int]:
    """Return the settings of the engine that were given."""
    return {name: getattr(values, name) for name, *_ in _SETTINGS.values() if hasattr(values, name)}


def _integer(lowest: int, highest: int) -> Callable[[str], int]:
    """Return the type of an argument that is an integer within these bounds."""

    def integer(text: str) -> int:
        problem = f"must be an integer from {lowest} to {highest}, not {text!r:.40}"
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(problem) from None
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(problem)
        return value

    return integer


def _generate_plan(values: argparse.Namespace) -> Plan:
    if values.prompts is not None:
        prompts = read_prompts(values.prompts, values.max_new)
    else:
        texts = [text for group in values.prompt for text in group]
        prompts = tuple(
            Prompt(f"--prompt {number}", f"prompt-{number}", text, None, values.max_new)
            for number, text in enumerate(texts, start=1)
        )
    forced = {"force_park_every": values.force_park_every, "force_park_by": values.park_by}
    return Plan(
        model=values.model,
        prompts=prompts,
        device=values.device,
        threads=values.threads,
        weights=values.weights,
        kv=values.kv,
        settings=_settings(values) | forced,
        ignore_eos=values.ignore_eos,
        check_alone=values.check_alone,
        json_path=values.json,
        trace_path=values.trace,
    )


def _check_file(option: str, name: str) -> None:
    """Refuse a file that could not be written, before anything has been computed for it."""
    path = Path(name)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidArgument(option, f"cannot write {name}: it is a folder, or in a folder that is not there")
