"""A load of requests on Ray Serve's replicas, one of which is killed in the middle: how many are answered, and how fast.

python benchmarks/replicas.py --json benchmarks/results/replicas-cpu.json
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]

from hf_specdec.serve.ray import Arguments, application


def ask(port, number, tokens):
    body = {"model": "tiny", "prompt": f"Story {number}. Once upon a time", "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            text = json.loads(answer.read())["choices"][0]["text"]
            return number, answer.status, text, time.perf_counter() - began
    except urllib.error.HTTPError as error:
        return number, error.code, error.read().decode()[:200], time.perf_counter() - began


def processes_of_replicas():
    """Process ids of the replicas, as Ray names their processes."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if line.startswith(b"ray::ServeReplica:hf-specdec:Replica"):
                found.append(int(folder.name))
    return sorted(found)


def load(port, count, clients, tokens, kill_at=None):
    """(answers by number, seconds, seconds of the kill)."""
    answers, began, killed = {}, time.perf_counter(), None
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        waiting = [pool.submit(ask, port, number, tokens) for number in range(count)]
        for done in concurrent.futures.as_completed(waiting):
            number, *rest = done.result()
            answers[number] = rest
            if kill_at is not None and killed is None and len(answers) >= kill_at:
                os.kill(processes_of_replicas()[0], signal.SIGKILL)
                killed = time.perf_counter() - began
    return answers, time.perf_counter() - began, killed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--port", type=int, default=8431)
    parser.add_argument("--json", metavar="FILE", help="write the figures; - prints them")
    args = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    began = time.perf_counter()
    llm = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 32 << 20,
           "speculative_config": {"method": "eagle3", "model": "tiny-eagle3"}}  # fmt: skip
    serve.run(application(Arguments("tiny", num_replicas=2, llm=llm)), name="hf-specdec")
    started = time.perf_counter() - began
    expected, seconds, _ = load(args.port, args.requests, args.clients, args.tokens)
    answers, seconds_killed, killed = load(args.port, args.requests, args.clients, args.tokens, args.requests // 3)
    report = {
        "requests": args.requests, "clients": args.clients, "tokens": args.tokens, "seconds_to_start": started,
        "seconds": seconds, "requests_per_second": args.requests / seconds, "seconds_with_a_kill": seconds_killed, "killed_at": killed,
        "answered": sum(each[0] == 200 for each in answers.values()), "lost": sum(each[0] != 200 for each in answers.values()),
        "equal": sum(answers[number][1] == expected[number][1] for number in answers),
        "longest": max(each[2] for each in answers.values()), "longest_without": max(each[2] for each in expected.values()),
        "replicas_at_the_end": len(processes_of_replicas()),
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    if args.json and args.json != "-":
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
