"""How long streams of a running server stand still while large requests arrive: the longest time between two frames of 32 streams.

hf-specdec serve tiny --dtype float32 --max-model-len 512 &
python benchmarks/stalls.py --port 8000
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def requests() -> dict[str, tuple[str, bytes]]:
    """By name: the path and the body. Most are refused by a server whose model has a short context."""
    words = (Path(__file__).resolve().parents[1] / "README.md").read_text().split()
    text, message = (
        " ".join(random.Random(0).choices(words, k=2_000_000))[: 14 << 20],
        {"role": "user", "content": "hello"},
    )
    found: dict[str, tuple[str, Any]] = {
        "text, 1 MiB": (COMPLETIONS, {"prompt": text[: 1 << 20]}),
        "text, 14 MiB": (COMPLETIONS, {"prompt": text}),
        "chat, 14 MiB": (CHAT, {"messages": [{**message, "content": text}]}),
        "responses, 14 MiB": ("/v1/responses", {"input": text}),
        "20,000 messages": (CHAT, {"messages": [message] * 20_000}),
        "200,000 parts": (CHAT, {"messages": [{**message, "content": [{"type": "text", "text": "x"}] * 200_000}]}),
        "2 M ids": (COMPLETIONS, {"prompt": [5] * 2_000_000}),
        "2 M prompts": (COMPLETIONS, {"prompt": [[5]] * 2_000_000}),
        "2 M wrong ids": (COMPLETIONS, {"prompt": "x", "stop_token_ids": ["x"] * 2_000_000}),
        "4 M empty lists": (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "unknown": [[]] * 4_000_000}),
        "tokenize, 1 MiB": ("/tokenize", {"prompt": text[: 1 << 20]}),
        "detokenize, 5 M": ("/detokenize", {"tokens": [5] * 5_000_000}),
    }
    return {name: (path, json.dumps(body).encode()) for name, (path, body) in found.items()}


async def stream(port: int, gaps: list[float], is_over: threading.Event) -> None:
    """Stream one answer after the other; note the seconds between frames."""
    fields = {"prompt": "Once upon a time", "max_tokens": 200, "stream": True, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = f"POST {COMPLETIONS} HTTP/1.0\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    while not is_over.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        last = time.perf_counter()
        while await reader.read(1 << 16):
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()
        writer.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=32)
    options = parser.parse_args()
    gaps: list[float] = []
    is_over = threading.Event()

    async def streams() -> None:
        await asyncio.gather(*(stream(options.port, gaps, is_over) for _ in range(options.streams)))

    thread = threading.Thread(target=lambda: asyncio.run(streams()), daemon=True)
    thread.start()
    tried: dict[str, tuple[str, bytes] | None] = {"nothing": None, **requests()}
    for name, request in tried.items():
        time.sleep(2)
        gaps.clear()
        began, status = time.perf_counter(), "-"
        if request is not None:
            connection = http.client.HTTPConnection("127.0.0.1", options.port, timeout=300)
            path, body = request
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            status = str(answer.status)
        seconds = time.perf_counter() - began
        time.sleep(1)
        print(f"{name:20s} {status:>4s} after {seconds:6.2f} s, longest gap {max(gaps):.3f} s", flush=True)
    is_over.set()
    thread.join()


if __name__ == "__main__":
    main()
