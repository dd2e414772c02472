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


def engine(config, transfer=TRANSFER):
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
        if prompt == "held":
            pipe.send(len(llm.engine.transfers.held))
            continue
        began = time.perf_counter()
        params = run(llm, prompt, 1, {"do_remote_decode": True}).kv_transfer_params
        pipe.send((params, time.perf_counter() - began))
    llm.close()
    pipe.close()
    os._exit(0)  # UCX's threads may abort a normal end


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
    args = parser.parse_args()
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
