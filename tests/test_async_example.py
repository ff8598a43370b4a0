"""The example of a server stays short, streams, refuses, and cancels whom hangs up."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_kit import ENDLESS, check_all_gone, endless_engine, run
from engine_kit import alone, ask

if TYPE_CHECKING:
    from types import ModuleType

    from reprieve import Request

EXAMPLE = Path(__file__).parent.parent / "examples" / "async_server.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("async_server", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_line(request: Request) -> bytes:
    fields = {"prompt": request.prompt, "max_new_tokens": request.max_new_tokens, "ignore_eos": True}
    return json.dumps(fields).encode() + b"\n"


def test_the_example_streams_refuses_and_cancels_who_hangs_up() -> None:
    serve = example().serve

    async def main() -> None:
        async with endless_engine() as engine, await serve(engine, 0) as server:
            host, port = server.sockets[0].getsockname()[:2]
            reader, writer = await asyncio.open_connection(host, port)

            async def events(line: bytes) -> list[dict[str, Any]]:
                writer.write(line)
                got = [json.loads(await reader.readline())]
                while got[-1]["event"] not in {"Done", "Failed", "Refused"}:
                    got.append(json.loads(await reader.readline()))
                return got

            got = await events(as_line(ask(5, 9)))
            assert [event["id"] for event in got[:-1]] == alone(ask(5, 9)).tokens
            assert got[-1]["finish_reason"] == "length"
            for line in (b"{}\n", b"no\n", b"[]\n", b'{"prompt": [1], "magic": 1}\n', b'{"prompt": [1000000]}\n'):
                (refused,) = await events(line)
                assert refused["event"] == "Refused"
            writer.write(as_line(ask(5, ENDLESS)))
            await reader.readline()
            writer.close()
            await writer.wait_closed()
            await engine.drain()
            assert engine.stats().tokens_generated < ENDLESS
            check_all_gone(engine)

    run(main())


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text("utf-8").splitlines()) < 65
