"""A real socket whose other end plays a script, and the loops against it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from loadgen.drive import Run, closed_loop, open_loop
from loadgen.http_client import HttpClient
from loadgen.workload import Request

Script = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(value: Any) -> bytes:
    data = b"data: %s\n\n" % (value if isinstance(value, bytes) else json.dumps(value).encode())
    return b"%x\r\n%s\r\n" % (len(data), data)


def delta(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]}


def usage(prompt: int, output: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 2}}}


@asynccontextmanager
async def server(script: Script) -> AsyncIterator[str]:
    """Reads each request and lets the script answer it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length) or b"{}")
        try:
            await script({"line": head.split(b"\r\n")[0].decode(), **body}, writer)
            await writer.drain()
        except ConnectionError:
            pass  # the client left first, as some tests want
        finally:
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


def run_loop(script: Script, count: int, **options: Any) -> Run:
    """Runs `count` requests with a closed loop of one client, unless told otherwise."""
    requests = options.pop("requests", [Request([21, 22, 23], 4, 0.0)] * count)
    clients, timeout = options.pop("clients", 1), options.pop("timeout", 20.0)

    async def main() -> Run:
        run = Run(requests)
        async with server(script) as url:
            client = HttpClient(
                url,
                options.pop("api", "completions"),
                options.pop("model", "m"),
                temperature=0.0,
                extra=options.pop("extra", {}),
            )
            if clients is None:
                await open_loop(client, run, timeout)
            else:
                await closed_loop(client, run, clients, timeout)
        return run

    return asyncio.run(main())
