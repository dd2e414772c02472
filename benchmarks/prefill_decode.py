"""Prefill and decode in two processes, with NIXL between them: equal texts and steps, bytes per second, a producer that is killed.

python benchmarks/prefill_decode.py --json benchmarks/results/prefill-decode-cpu.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

from hf_specdec import LLM, SamplingParams

METHODS = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "draft_model": {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "model": "tiny-eagle3"},
    "mtp": {"method": "mtp", "model": "tiny-mtp"},
}
SENTENCE = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friends. "
)
TRANSFER = {
    "kv_connector": "NixlConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"pull_seconds": 10, "hold_seconds": 30},
}  # fmt: skip


def engine(config, transfer: Any = TRANSFER) -> Any:
    return LLM("tiny", dtype="float32", speculative_config=config, max_model_len=1024, max_num_seqs=4,
               kv_cache_memory_bytes=256 << 20, kv_transfer_config=transfer)  # fmt: skip


def run(llm, prompt, tokens, transfer=None):
    params = SamplingParams(temperature=0, max_tokens=tokens, kv_transfer_params=transfer)
    return llm.generate([prompt], params, use_tqdm=False)[0]


def produce(config, pipe):
    """The producer's process: prompts come in, `kv_transfer_params` go out."""
    llm = engine(config)
    pipe.send(os.getpid())
    while True:
        if not pipe.poll(0.01):
            with llm.engine.decoder.active():
                llm.engine.transfers.poll()
            continue
        prompt = pipe.recv()
        if prompt is None:
            break
        if isinstance(prompt, tuple):
            read_in_chunks(llm, pipe, *prompt)
            continue
        if prompt == "held":
            pipe.send(len(llm.engine.transfers.producer.prompts))
            continue
        began = time.perf_counter()
        params = run(llm, prompt, 1, {"do_remote_decode": True}).kv_transfer_params
        pipe.send((params, time.perf_counter() - began))
    llm.close()
    pipe.close()
    os._exit(0)  # UCX's threads may abort a normal end


def read_in_chunks(llm, pipe, prompt, in_chunks):
    """Read a prompt in chunks of 64 tokens; send its `kv_transfer_params` as soon as they are there, then the time of the end."""
    engine = llm.engine
    engine.decoder.forget_prefixes()
    engine.scheduler.max_num_batched_tokens = 64
    asked = {"do_remote_decode": True, "in_chunks": in_chunks}
    params = SamplingParams(temperature=0, max_tokens=1, kv_transfer_params=asked)
    with engine.decoder.active():
        request = engine.add("p", prompt, llm.tokenizer(prompt)["input_ids"], params)
        sent = False
        while not request.finished:
            engine.step()
            if request.announcement is not None and not sent:
                pipe.send(request.announcement)
                sent = True
        read = time.monotonic()
        if not sent:
            pipe.send(request.kv_transfer_params)
        until = read + 10
        while engine.transfers.is_busy and time.monotonic() < until:
            engine.transfers.poll()
            time.sleep(0.002)
    pipe.send(read)


def overlap(config, repeats=6):
    """Time from the end of reading to the first token here, and bytes that had not come then; with and without overlap in turns."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=produce, args=(config, theirs))
    process.start()
    consumer, one = engine(config), engine(config, None)
    pipe.recv()
    transfers, rows = consumer.engine.transfers, []
    for number in range(2 * repeats):
        prompt, in_chunks = f"Story {number}. " + SENTENCE * 30, number % 2 == 0
        consumer.engine.decoder.forget_prefixes()
        before = transfers.statistics.bytes, transfers.statistics.pulled, time.monotonic()
        pipe.send((prompt, in_chunks))
        ids = consumer.tokenizer(prompt)["input_ids"]
        params = SamplingParams(temperature=0, max_tokens=16, kv_transfer_params=json.loads(json.dumps(pipe.recv())))
        with consumer.engine.decoder.active():
            history, first = [], 0.0
            request = consumer.engine.add("c", prompt, ids, params)
            while not request.finished:
                consumer.engine.step()
                history.append((time.monotonic(), transfers.statistics.bytes))
                first = first or (time.monotonic() if request.choices[0].output.token_ids else 0.0)
        read, expected = pipe.recv(), run(one, prompt, 16)
        early = max((amount for when, amount in history if when <= read), default=before[0]) - before[0]
        rows.append({
            "in_chunks": in_chunks, "tokens": len(ids), "equal": request.result().outputs[0].token_ids == expected.outputs[0].token_ids,
            "pulled": transfers.statistics.pulled - before[1], "bytes": transfers.statistics.bytes - before[0],
            "bytes_left_at_the_end_of_reading": transfers.statistics.bytes - before[0] - early,
            "first_token_after_reading_ms": 1e3 * (first - read), "first_token_ms": 1e3 * (first - before[2]),
        })  # fmt: skip
    pipe.send(None)
    process.join()
    consumer.close()
    one.close()
    return rows


def measure(config, count, tokens, killed=False):
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=produce, args=(config, theirs))
    process.start()
    consumer, one = engine(config), engine(config, None)
    pid, rows = pipe.recv(), []
    statistics = consumer.engine.transfers.statistics
    for number in range(count):
        prompt = f"Story {number}. " + SENTENCE * (4 + 4 * number)
        pipe.send(prompt)
        params, prefill = pipe.recv()
        params = json.loads(json.dumps(params))
        if killed:
            os.kill(pid, signal.SIGKILL)
            process.join()
        bytes_before, seconds_before = statistics.bytes, statistics.seconds
        began = time.perf_counter()
        found = run(consumer, prompt, tokens, params)
        decode = time.perf_counter() - began
        expected = run(one, prompt, tokens)
        rows.append({
            "prompt": len(found.prompt_token_ids), "equal": found.outputs[0].token_ids == expected.outputs[0].token_ids,
            "steps": found.speculation["num_steps"], "steps_of_one": expected.speculation["num_steps"],
            "bytes": statistics.bytes - bytes_before, "seconds": statistics.seconds - seconds_before,
            "prefill_seconds": prefill, "decode_seconds": decode,
        })  # fmt: skip
    held = 0
    if not killed:
        time.sleep(0.3)
        pipe.send("held")
        held = pipe.recv()
        pipe.send(None)
    process.join()
    consumer.close()
    one.close()
    moved, seconds = sum(row["bytes"] for row in rows), sum(row["seconds"] for row in rows)
    return {
        "equal": all(row["equal"] for row in rows), "steps": sum(row["steps"] for row in rows),
        "steps_of_one": sum(row["steps_of_one"] for row in rows), "pulled": statistics.pulled,
        "recomputed": statistics.recomputed, "held_at_the_end": held, "bytes": moved,
        "gib_per_second": moved / 2**30 / seconds if seconds else None,
        "best_gib_per_second": max((row["bytes"] / 2**30 / row["seconds"] for row in rows if row["seconds"]), default=None),
        "rows": rows,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two prompts a method instead of six")
    parser.add_argument("--json", metavar="FILE", help="write the figures; - prints them")
    parser.add_argument(
        "--overlap", action="store_true", help="only long prompts, pulled while they are read and after"
    )
    args = parser.parse_args()
    if args.overlap:
        rows = {name: overlap(METHODS[name]) for name in ("none", "eagle3")}
        print(json.dumps(rows, indent=1))
        if args.json and args.json != "-":
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(rows, file, indent=1)
                file.write("\n")
        return
    count = 2 if args.quick else 6
    report = {"methods": {name: measure(config, count, 48) for name, config in METHODS.items()}}
    report["killed"] = measure(METHODS["eagle3"], 1, 48, killed=True)
    for name, each in [*report["methods"].items(), ("killed", report["killed"])]:
        speed = each["gib_per_second"]
        print(
            f"{name:12} equal {each['equal']}, steps {each['steps']} ({each['steps_of_one']} in one server), pulled {each['pulled']}, "
            f"read again {each['recomputed']}, {each['bytes'] / 2**20:.1f} MiB"
            + (f" at {speed:.2f} GiB/s" if speed else "")
        )
    if args.json == "-":
        print(json.dumps(report))
    elif args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # UCX's threads may abort a normal end
