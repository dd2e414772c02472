"""Output tokens per second of many prompts at once: `hf_specdec.LLM` against transformers' own continuous batching.

    python benchmarks/offline.py                       # the bundled model at the cost of 100 M parameters, 32 prompts
    python benchmarks/offline.py --prompts 8 --size 50m --turns 3

One model in float32, one thread, greedy, real prompts. The ways take turns in one process; CPU time, and each way's ratio to
transformers' `generate_batch` in the same turn, as median and quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

CONFIGS = {
    "plain": None,
    "n-gram": {"method": "ngram", "num_speculative_tokens": 4},
    "n-gram, auto": {"method": "ngram", "num_speculative_tokens": "auto"},
    "draft model": {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 4},
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="100m", help="see loads.py (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import torch
    from decode import machine
    from loads import larger, prompts

    import hf_specdec

    torch.set_num_threads(1)
    model, tokenizer = larger(options.size)
    ids = [tokenizer(prompt)["input_ids"][:200] for prompt in prompts()[: options.prompts]]
    params = hf_specdec.SamplingParams(temperature=0, max_tokens=options.new_tokens, ignore_eos=True)
    engines = {name: hf_specdec.LLM(model, tokenizer, config, max_model_len=512) for name, config in CONFIGS.items()}

    def transformers_way() -> list[list[int]]:
        config = model.generation_config.__class__(
            max_new_tokens=options.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
        )
        found = model.generate_batch(inputs=ids, generation_config=config, progress_bar=False)
        return [found[name].generated_tokens for name in sorted(found, key=lambda name: int(name.rpartition("_")[2]))]

    def ours(name: str) -> list[list[int]]:
        engines[name].engine.decoder.forget_prefixes()
        return [output.outputs[0].token_ids for output in engines[name].generate(ids, params, use_tqdm=False)]

    ways = {"transformers": transformers_way, **{name: (lambda name=name: ours(name)) for name in engines}}
    texts = {name: way() for name, way in ways.items()}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.turns):
        for name, way in ways.items():
            began = time.process_time()
            way()
            spent[name].append(time.process_time() - began)
    report = {
        "machine": machine(),
        "size": options.size,
        "prompts": len(ids),
        "new_tokens": options.new_tokens,
        "ways": {},
    }
    for name, seconds in spent.items():
        ratios = [other / own for other, own in zip(spent["transformers"], seconds, strict=True)]
        equal = sum(a == b for a, b in zip(texts[name], texts["plain"], strict=True))
        rate = len(ids) * options.new_tokens / statistics.median(seconds)
        report["ways"][name] = {
            "tokens_per_cpu_second": round(rate, 1),
            "ratios": [round(r, 2) for r in ratios],
            "equal": equal,
        }
        print(
            f"{name:14} {rate:7.1f} tokens/s  {statistics.median(ratios):.2f} ×  {equal} of {len(ids)} texts equal plain's",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
