"""What it costs a target's forward to hand hidden states to a drafter: taps against none, and against all hidden states.

    python benchmarks/taps.py MODEL [--dtype bfloat16] [--threads 1] [--json FILE]

Interleaved in one run; times are medians in milliseconds, ratios to the forward without taps.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

import hf_specdec
from hf_specdec.core.output import Taps
from hf_specdec.core.rows import RowInput
from hf_specdec.model.prepare import prepare

SHAPES = {"1 row x 6": (1, 6), "8 rows x 6": (8, 6), "1 row x 512": (1, 512)}
CONTEXT = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="bundled name, folder or Hub id")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="write the figures here too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    name = hf_specdec.resolve_model(args.model)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, args.dtype)).eval()
    count = model.config.num_hidden_layers
    variants = {
        "no taps": (Taps(), False),
        "last hidden": (Taps(last_hidden=True), False),
        "3 layers (EAGLE-3)": (Taps(layers=(min(2, count), count // 2, max(count - 3, 1))), False),
        "all hidden states": (Taps(), True),
    }
    packed = prepare(model)
    rows = []
    for shape, (batch, tokens) in SHAPES.items():
        times: dict[str, list[float]] = {variant: [] for variant in variants}
        cache = packed.new_cache(batch * (-(-(CONTEXT + tokens) // 16)), 16)
        for i in range(batch):
            cache.add(i)
            cache.reserve(i, CONTEXT + tokens)
        ids = np.random.default_rng(0).integers(5, model.config.vocab_size, CONTEXT + tokens)
        with packed.active(), torch.no_grad():
            packed.forward([RowInput(i, ids[:CONTEXT], 0) for i in range(batch)], cache)
            for repeat in range(args.repeats + 1):
                for variant, (taps, everything) in variants.items():
                    packed.taps = taps
                    start = time.perf_counter()
                    packed.forward([RowInput(i, ids[CONTEXT:], CONTEXT) for i in range(batch)], cache, everything)
                    if repeat:  # the first round warms up
                        times[variant].append(time.perf_counter() - start)
        plain = statistics.median(times["no taps"])
        for variant, own in times.items():
            # Pairs of one round are compared, so that a slow moment of the machine counts for both.
            ratio = statistics.median(a / b for a, b in zip(own, times["no taps"], strict=True))
            rows.append({"shape": shape, "variant": variant, "ms": 1e3 * statistics.median(own), "ratio": ratio})
            print(f"{shape:12} {variant:20} {rows[-1]['ms']:9.2f} ms  {ratio:6.3f}  (plain {1e3 * plain:.2f})")
    if args.json:
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        with open(args.json, "w", encoding="utf-8") as f:
            setting = {"model": args.model, "dtype": args.dtype, "threads": args.threads, "context": CONTEXT}
            json.dump({"setting": setting, "versions": versions, "rows": rows}, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()
