"""What the HTTP side costs beside the engine's steps: CPU time of both while all streams decode, and how long a step takes.

    python benchmarks/http_time.py                                  # 64 and 256 streams, the bundled model at the cost of 50 M parameters
    python benchmarks/http_time.py --streams 64 --method ngram --rounds 1
    python benchmarks/http_time.py --forms process --profile        # what the HTTP side does

The engine runs in a process of its own, as in `hf-specdec serve`, and in a thread of the HTTP side's process, in turns. One thread for the
model, greedy; clients in a process of their own. Give it two cores at least.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="50m", help="see loads.py (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=64,
        help="many enough for all streams to decode at once (default: %(default)s)",
    )
    parser.add_argument("--method", choices=["none", "ngram"], default="none")
    parser.add_argument("--path", choices=["/v1/completions", "/v1/chat/completions"], default="/v1/completions")
    parser.add_argument("--forms", choices=["thread", "process"], nargs="+", default=["thread", "process"])
    parser.add_argument("--rounds", type=int, default=5, help="every form once in each (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="print what the event loop's thread spends its time in")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def clock_of(thread: threading.Thread | int) -> Callable[[], float]:
    """A function that tells the CPU seconds of a thread, or of the process with this id."""
    if isinstance(thread, int):
        number = (~thread << 3) | 2  # as in clock_getcpuclockid(3) of Linux
    else:
        number = time.pthread_getcpuclockid(thread.ident)  # type: ignore[arg-type]
    return lambda: time.clock_gettime(number)


def queue_clock(process: int, thread: int | None = None) -> Callable[[], float]:
    """A function that tells how many seconds a thread was ready to run and had to wait for a core; None: the busiest but the first."""

    def read(task: Path) -> list[int]:  # nanoseconds: of running, of waiting; number of turns
        try:
            return list(map(int, (task / "schedstat").read_text().split()))
        except OSError:  # it has just ended
            return [0]

    tasks = Path(f"/proc/{process}/task")
    if thread is not None:
        return lambda: read(tasks / str(thread))[1] / 1e9
    return lambda: max(read(task) for task in tasks.iterdir() if task.name != str(process))[1] / 1e9


def start(form: str, folder: str, tokenizer: Any, options: argparse.Namespace) -> tuple[Any, tuple]:
    """(a server whose engine runs in a thread or in a process, clocks: CPU of the HTTP side and of the engine, wait for a core)."""
    from hf_specdec import LLM
    from hf_specdec.serve.http.server import Limits, Server
    from hf_specdec.serve.ipc.engine_process import EngineProcess

    config = None if options.method == "none" else {"method": "ngram", "num_speculative_tokens": 4}
    arguments = dict(
        model=folder, speculative_config=config, dtype=options.dtype, device="cpu", max_model_len=256, max_num_batched_tokens=8192
    )  # fmt: skip
    server, loop = Server(tokenizer, ["tiny"], Limits()), asyncio.new_event_loop()
    if form == "thread":
        server.start(LLM(**arguments), loop)
        assert isinstance(server.worker, threading.Thread)
        queued = queue_clock(os.getpid(), server.worker.native_id)
        return server, (clock_of(threading.main_thread()), clock_of(server.worker), queued)
    engine = EngineProcess(server.deliver, arguments)
    server.connect(engine, engine.loaded.result(), loop)
    return server, (time.process_time, clock_of(engine.process.pid), queue_clock(engine.process.pid))


def measure(server: Any, clocks: tuple, streams: int, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a step in which all streams decode.

    CPU time of the HTTP side and of the engine, wall time, how long the engine's thread was ready and had no core, and the rest of the
    wall time: a step on a machine that is not shared with others.
    """
    import uvicorn

    from hf_specdec.serve.http.api import make_app

    marks: list[list[float]] = []  # at the end of each such step
    deliver, clocks = server.worker.deliver, (*clocks, time.perf_counter)

    def marked(updates: list) -> None:
        deliver(updates)
        if len(updates) == streams:
            marks.append([clock() for clock in clocks])

    server.worker.deliver = marked
    own = uvicorn.Server(uvicorn.Config(make_app(server), port=0, log_level="warning", lifespan="off"))

    async def run() -> None:
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
        server.loop.run_until_complete(run())
    finally:
        server.worker.deliver = deliver
    if len(marks) < 2:
        raise RuntimeError(
            "No two steps had all streams: the first had ended when the last began. Use more --new-tokens."
        )
    spent = [1e3 * (last - first) / (len(marks) - 1) for first, last in zip(marks[0], marks[-1], strict=True)]
    found = dict(zip(("http_ms", "engine_ms", "queued_ms", "wall_ms"), spent, strict=True))
    return {"steps": len(marks), **found, "step_ms": found["wall_ms"] - found["queued_ms"]}


def main() -> None:
    """Measure and print."""
    options = parse()
    import torch
    from decode import machine
    from loads import larger

    torch.set_num_threads(1)
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    profile = cProfile.Profile(time.thread_time)
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = larger(options.size, options.dtype)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del model
        servers = {form: start(form, folder, tokenizer, options) for form in options.forms}
        for streams in options.streams:
            for i in range(-1, options.rounds):  # the first one warms up
                for form in options.forms[:: 1 if i % 2 else -1]:
                    if options.profile and i >= 0:
                        profile.enable()
                    one = measure(*servers[form], streams, options)
                    profile.disable()
                    if i >= 0:
                        found.setdefault((streams, form), []).append(one)
        for server, _ in servers.values():
            server.stop()
    results = []
    for (streams, form), rounds in found.items():
        median = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        results.append({"streams": streams, "form": form, **median})
        print(
            f"{streams} streams, {options.method}, {options.path}, engine in a {form}: HTTP {median['http_ms']:.2f} ms of CPU time a step, "
            f"{1e3 * median['http_ms'] / streams:.0f} µs a frame; engine {median['engine_ms']:.1f} ms; a step every "
            f"{median['wall_ms']:.1f} ms, of which {median['step_ms']:.1f} without waiting for a core",
            flush=True,
        )
        if form == "process" and (streams, "thread") in found:
            pairs = list(zip(found[streams, "thread"], rounds, strict=True))
            ratios = {key: sorted(one[key] / other[key] for one, other in pairs) for key in ("wall_ms", "step_ms")}
            for key, each in ratios.items():
                print(
                    f"  speed over that with a thread, {key}: {statistics.median(each):.3f} ({each[0]:.3f} to {each[-1]:.3f})"
                )
            results[-1]["speed_over_thread"] = ratios
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    if options.json:
        report = {
            "machine": machine(), "size": options.size, "dtype": options.dtype, "method": options.method, "path": options.path,
            "rounds": options.rounds, "results": results,
        }  # fmt: skip
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
