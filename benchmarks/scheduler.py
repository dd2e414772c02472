"""How much of a step the engine takes beside the decoder: scheduling, taking tokens, text. With 256 running requests by default.

    python benchmarks/scheduler.py                              # 256 requests, the bundled model at the cost of 50 M parameters
    python benchmarks/scheduler.py --requests 64 --method ngram

One thread, float32, greedy; CPU time of the steps in which all requests decode. Aim: scheduling under 2 % of the step.
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

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="50m", help="see loads.py (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--method", choices=["none", "ngram"], default="none")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import torch
    from decode import machine
    from loads import larger

    import hf_specdec

    torch.set_num_threads(1)
    model, tokenizer = larger(options.size)
    config = None if options.method == "none" else {"method": "ngram", "num_speculative_tokens": 4}
    llm = hf_specdec.LLM(model, tokenizer, config, max_model_len=256, max_num_batched_tokens=8192)
    engine = llm.engine

    parts: dict[str, list[float]] = {"whole": [], "decoder": [], "schedule": []}
    decoding = []  # per step, whether all requests decoded in it

    def timed(name, call):
        def run(*args):
            began = time.process_time()
            found = call(*args)
            parts[name].append(time.process_time() - began)
            return found

        return run

    def scheduled(*args):
        rows, counts = schedule(*args)
        decoding.append(len(rows) == options.requests and max(counts) == 1)
        return rows, counts

    loop: Any = engine
    schedule, loop.scheduler.schedule = engine.scheduler.schedule, timed("schedule", scheduled)
    loop.decoder.step = timed("decoder", engine.decoder.step)
    loop.step = timed("whole", engine.step)
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 2000, (16,), generator=random).tolist() for _ in range(options.requests)]
    params = hf_specdec.SamplingParams(temperature=0, max_tokens=options.new_tokens, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)

    ms = {
        name: 1e3 * statistics.median(t for t, all_rows in zip(own, decoding, strict=True) if all_rows)
        for name, own in parts.items()
    }
    beside = ms["whole"] - ms["decoder"]
    print(
        f"{options.requests} requests, {options.method}: a step {ms['whole']:.1f} ms of CPU time; scheduling {ms['schedule']:.2f} ms "
        f"({100 * ms['schedule'] / ms['whole']:.2f} %), all beside the decoder {beside:.2f} ms ({100 * beside / ms['whole']:.2f} %)"
    )
    if options.json:
        report = {"machine": machine(), "requests": options.requests, "method": options.method, "ms": ms}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    llm.close()


if __name__ == "__main__":
    main()
