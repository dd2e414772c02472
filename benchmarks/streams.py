"""Clients that stream completions, in a process of their own: when each asked, when its first and last text came.

Reads one JSON object: {"port", "path", "bodies": [..], "arrivals": [seconds, ..] or "clients": n}; with arrivals every request is
sent at its time, with clients n of them ask one request after the other. Writes a list of answers, one per body.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any


async def ask(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """One streamed request. Times are seconds since the epoch."""
    data = json.dumps({**body, "stream": True}).encode()
    began, first, last, text, usage, more = time.time(), None, None, "", None, {}
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    # HTTP/1.0, so that the answer ends with the connection and is not cut into chunks
    head = f"POST {path} HTTP/1.0\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    status = (await reader.readline()).decode()
    if " 200 " not in status:
        raise RuntimeError(f"{status}{(await reader.read()).decode()[:2000]}")
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        frame = json.loads(line[6:])
        if "error" in frame:
            raise RuntimeError(str(frame["error"]))
        usage, more = frame.get("usage") or usage, frame.get("metrics") or more
        piece = "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in frame["choices"]
        )
        if piece:
            last = time.time()
            first = first or last
            text += piece
    writer.close()
    tokens = None if usage is None else usage["completion_tokens"]
    return {"began": began, "first": first, "last": last, "text": text, "tokens": tokens, "metrics": more}


async def run(
    port: int, path: str, bodies: list[dict[str, Any]], arrivals: list[float] | None = None, clients: int | None = None
) -> list[dict[str, Any]]:
    """All requests; answers in their order."""
    if arrivals is not None:

        async def later(seconds: float, body: dict[str, Any]) -> dict[str, Any]:
            await asyncio.sleep(seconds)
            return await ask(port, path, body)

        return await asyncio.gather(*map(later, arrivals, bodies))
    answers: list[Any] = [None] * len(bodies)
    left = iter(enumerate(bodies))

    async def client() -> None:
        for i, body in left:
            answers[i] = await ask(port, path, body)

    await asyncio.gather(*(client() for _ in range(clients or 1)))
    return answers


if __name__ == "__main__":
    json.dump(asyncio.run(run(**json.load(sys.stdin))), sys.stdout)
