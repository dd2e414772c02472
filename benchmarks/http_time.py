"""What the HTTP side costs beside the engine's steps: CPU time of the two threads of a server while all streams decode.

    python benchmarks/http_time.py                                  # 64 and 256 streams, the bundled model at the cost of 50 M parameters
    python benchmarks/http_time.py --streams 64 --method ngram
    python benchmarks/http_time.py --profile                        # what the HTTP thread does

One thread for the model, float32, greedy; clients in a process of their own. Aim: the HTTP side takes under 5 % of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="50m", help="see loads.py (default: %(default)s)")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--method", choices=["none", "ngram"], default="none")
    parser.add_argument("--path", choices=["/v1/completions", "/v1/chat/completions"], default="/v1/completions")
    parser.add_argument("--profile", action="store_true", help="print what the HTTP thread spends its time in")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def cpu_clock(thread: threading.Thread):
    """A function that tells the CPU seconds of a thread."""
    number = time.pthread_getcpuclockid(thread.ident)  # type: ignore[arg-type]
    return lambda: time.clock_gettime(number)


def measure(server, app, streams: int, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of CPU time per step of both threads, over the steps in which all streams decode."""
    import uvicorn

    marks: list[tuple[float, float]] = []  # (HTTP, engine) seconds of CPU time at the end of such a step
    engine = server.worker.engine
    clocks = cpu_clock(threading.main_thread()), cpu_clock(server.worker)
    step = engine.step

    def marked():
        found = step()
        if len(engine.scheduler.running) == streams and len(found) == streams:
            marks.append((clocks[0](), clocks[1]()))
        return found

    engine.step = marked
    own = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))

    async def main() -> None:
        serving = asyncio.create_task(own.serve())
        while not own.started:
            await asyncio.sleep(0.01)
        port = own.servers[0].sockets[0].getsockname()[1]
        body = {"max_tokens": options.new_tokens, "temperature": 0, "ignore_eos": True}
        bodies = []
        for i in range(streams):
            text = f"Tom {i} went to the park. Tom {i}"
            chat = options.path.endswith("chat/completions")
            bodies.append({**body, **({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text})})
        clients = await asyncio.create_subprocess_exec(
            sys.executable, str(ROOT / "benchmarks" / "streams.py"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        wanted = {"port": port, "path": options.path, "bodies": bodies, "clients": streams}
        answers = json.loads((await clients.communicate(json.dumps(wanted).encode()))[0])
        assert all(answer["text"] for answer in answers)
        own.should_exit = True
        await serving

    server.loop = asyncio.new_event_loop()
    asyncio.set_event_loop(server.loop)
    try:
        server.loop.run_until_complete(main())
    finally:
        engine.step = step
    http, steps = zip(*marks, strict=True)
    spent = [1e3 * statistics.mean(b - a for a, b in pairwise(own)) for own in (http, steps)]
    return {"streams": streams, "steps": len(marks), "http_ms": spent[0], "step_ms": spent[1]}


def main() -> None:
    """Measure and print."""
    options = parse()
    import cProfile
    import pstats

    import torch
    from decode import machine
    from loads import larger

    from hf_specdec import LLM
    from hf_specdec.serve.api import make_app
    from hf_specdec.serve.server import Limits, Server

    torch.set_num_threads(1)
    model, tokenizer = larger(options.size)
    config = None if options.method == "none" else {"method": "ngram", "num_speculative_tokens": 4}
    llm = LLM(model, tokenizer, config, max_model_len=256, max_num_batched_tokens=8192)
    server = Server(tokenizer, ["tiny"], Limits())
    app = make_app(server)
    server.start(llm, asyncio.new_event_loop())
    results = []
    profile = cProfile.Profile(time.thread_time)
    for streams in options.streams:
        if options.profile:
            profile.enable()
        found = measure(server, app, streams, options)
        profile.disable()
        results.append(found)
        share = found["http_ms"] / found["step_ms"]
        print(
            f"{streams} streams, {options.method}, {options.path}: HTTP {found['http_ms']:.2f} ms of CPU time a step of "
            f"{found['step_ms']:.1f} ms ({100 * share:.2f} %), {1e3 * found['http_ms'] / streams:.0f} µs a frame",
            flush=True,
        )
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    server.stop()
    if options.json:
        report = {
            "machine": machine(),
            "size": options.size,
            "method": options.method,
            "path": options.path,
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
