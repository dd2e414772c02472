"""What our loop costs beside transformers' own: plain decoding through it ("none") over `generate()`, on a CPU; and what n-gram
drafts of automatic length ("auto") cost over "none", on random prompts, where next to nothing is accepted.

    python benchmarks/loop_cost.py                              # the bundled model, batches 1 and 8
    python benchmarks/loop_cost.py --size 100m --new-tokens 32  # the same model at the cost of a larger one
    python benchmarks/loop_cost.py --dtype bfloat16 --operators # and the same without the native library, over plain
    python benchmarks/loop_cost.py --package /path/to/another/checkout

One thread, greedy. CPU time of whole calls, in turns: plain, none, plain; each ratio is none over the mean of its
neighbours, and the median and quartiles of the ratios are printed; likewise none, auto, none. Aims with the native library: none at most
0.33 on the bundled model, 0.62 at batch 1 and 0.67 at batch 8 of any model; without it 1.05 and 1; auto at most 1.03.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from loads import SIZES

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="bundled")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--operators", action="store_true", help="measure none without the native library, too")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--package", type=Path, default=ROOT, help="the checkout whose package is measured")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parse()
    sys.path[:0] = [str(options.package), str(ROOT / "benchmarks"), str(options.package / "recipes" / "tiny")]
    import torch
    from decode import machine
    from transformers import AutoModelForCausalLM

    import hf_specdec

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(hf_specdec.bundled("tiny"), dtype=torch.float32).eval()
    if SIZES[options.size] is not None:
        from inflate import inflate  # pyright: ignore[reportMissingImports]  (of the package that is measured)

        model = inflate(model, **SIZES[options.size]).eval()
    model = model.to(getattr(torch, options.dtype))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())

    def seconds(batch_size: int, config: dict | None) -> float:
        generator = torch.Generator().manual_seed(batch_size)
        ids = torch.randint(5, 2000, (batch_size, 24), generator=generator)
        more = {} if config is None else {"speculative_config": config}
        began = time.process_time()
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.new_tokens, do_sample=False,
            eos_token_id=-1, pad_token_id=0, **more,
        )  # fmt: skip
        return time.process_time() - began

    none, auto = {"method": "none"}, {"method": "ngram", "num_speculative_tokens": "auto"}
    results = []
    for batch_size in options.batch_sizes:
        ways = [("none", none, None), ("auto", auto, none)]
        if options.operators:
            ways.insert(1, ("operators", none | {"native": False}, None))
        for config in (None, *(config for _, config, _ in ways)):
            seconds(batch_size, config)
        result = {"batch_size": batch_size}
        for name, config, base in ways:
            ratios, plain = [], []
            for _ in range(options.turns):
                before, ours, after = seconds(batch_size, base), seconds(batch_size, config), seconds(batch_size, base)
                plain.append((before + after) / 2)
                ratios.append(ours / plain[-1])
            quartiles = statistics.quantiles(ratios, n=4)
            step = 1e3 * statistics.median(plain) / options.new_tokens
            result[name] = {"base_ms": round(step, 2), "ratio": [round(ratio, 3) for ratio in quartiles]}
            print(
                f"{num_parameters / 1e6:.0f} M, batch {batch_size}: {'plain' if base is None else 'none'} {step:.2f} ms a step, "
                f"{name} {quartiles[1]:.3f} × (quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f})",
                flush=True,
            )
        results.append(result)
    if options.json:
        report = {
            "parameters": num_parameters,
            "dtype": options.dtype,
            "new_tokens": options.new_tokens,
            "machine": machine(),
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
