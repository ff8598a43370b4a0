"""A server on top of `AsyncEngine`: one JSON request a line in, one JSON event a line out.

Who hangs up is cancelled when the next event cannot be written.

python examples/async_server.py demo
echo '{"prompt": "Why is the sky blue?", "chat": true}' | nc -N localhost 8000
"""

import asyncio
import contextlib
import json
import sys
from dataclasses import asdict

from reprieve.async_engine import AsyncEngine
from reprieve.errors import ReprieveError
from reprieve.request import Event, Failed


def as_line(event: Event) -> bytes:
    fields = {"code": event.code, "text": event.text} if isinstance(event, Failed) else asdict(event)
    return json.dumps({"event": type(event).__name__, **fields}).encode() + b"\n"


async def answer(engine: AsyncEngine, line: bytes, writer: asyncio.StreamWriter) -> None:
    try:
        fields = json.loads(line)
        # A reader that is too slow waits in `drain`; the engine does not.
        async with contextlib.aclosing(engine.stream(fields.pop("prompt"), **fields)) as stream:
            async for event in stream:
                writer.write(as_line(event))
                await writer.drain()
    except (ReprieveError, ValueError, KeyError, AttributeError, TypeError) as error:
        writer.write(json.dumps({"event": "Refused", "problem": str(error)}).encode() + b"\n")


async def serve(engine: AsyncEngine, port: int) -> asyncio.Server:
    """Return a server that answers the lines of a connection one after the other."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while line := await reader.readline():
                await answer(engine, line, writer)

    return await asyncio.start_server(client, "localhost", port)


async def main(model: str, port: int = 8000) -> None:
    async with AsyncEngine(model, kv_blocks=40) as engine, await serve(engine, port) as server:
        print(f"{engine.model.name} listens on port {port}")
        await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1]))
