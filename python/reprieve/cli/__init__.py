"""The command `reprieve`: what it ends with, and how it says what went wrong."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, Final

from rich.console import Console

from reprieve.cli.arguments import parse
from reprieve.cli.runner import run
from reprieve.errors import ReprieveError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

BAD_INPUT: Final = 2
INTERRUPTED: Final = 130
OUTPUT_CLOSED: Final = 141


class _Console(Console):
    """A console that leaves it to `main` what happens when nobody reads any more."""

    def on_broken_pipe(self) -> None:
        """Raise `BrokenPipeError`."""
        raise BrokenPipeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments`, or the program's own; return its exit status.

    0: all went well. 1: a request failed, or differs from what it gives alone. 2: the input is bad (or there is not
    enough memory for what it asks), which one line on stderr says. 130: interrupted. 141: nobody reads the output any
    more. Raises `SystemExit` as argparse does, with 2 for a bad argument and 0 after help.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no Unicode shows "?", and does not fail
    try:
        plan = parse(sys.argv[1:] if arguments is None else arguments)
        return run(plan, _Console(stderr=plan.json_path == "-"))
    except ReprieveError as error:
        return _refuse(str(error))
    except BrokenPipeError:
        # Whoever read the output has gone; nor can what is still buffered be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED
    except OSError as error:
        return _refuse(f"cannot write the output: {error}")
    except MemoryError as error:
        return _refuse(f"not enough memory: {error}")
    except KeyboardInterrupt:
        sys.stderr.write("reprieve: interrupted\n")
        return INTERRUPTED


def _refuse(problem: str) -> int:
    sys.stderr.write(f"reprieve: error: {' '.join(problem.split())}\n")
    return BAD_INPUT
