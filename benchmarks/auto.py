"""Method "auto" against plain decoding and every fixed method, on real text at the cost of a larger model.

    python benchmarks/auto.py --json benchmarks/results/auto-cpu.json
    python benchmarks/auto.py --size 50m --batch-sizes 1 --tasks math edit --repeats 1    # a quick look

The target is the bundled model inflated (same text, same acceptance); the EAGLE-3 head is inflated in the same way, the draft model
is used as it is. In each cell (task, temperature, batch size) the methods take turns, prompt batch by prompt batch, so that they meet
the same disturbances. Figures are CPU seconds of whole calls, prompts included. Printed per cell: tokens per second over plain
`none` of each fixed method and of auto; auto over the best of them; auto over none. Aims: 0.95 and 0.97.

Every method keeps its decoder for the whole run, as a program would, so auto remembers what steps cost. Look-ups begin empty.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
TASKS = ("math", "code", "edit", "story", "mixed")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="100m", help="of the target, in loads.py (default: %(default)s)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, default=8, help="of each task, at least one batch")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def methods(folder: str) -> dict[str, Any]:
    """The fixed methods, and auto with the same head."""
    return {
        "none": {"method": "none"},
        "ngram": {"method": "ngram", "num_speculative_tokens": 5},
        "suffix": {"method": "suffix"},
        "token_recycling": {"method": "token_recycling", "use_tree": False, "num_speculative_tokens": 3},
        "draft_model": {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 4},
        "eagle3": {"method": "eagle3", "model": folder, "num_speculative_tokens": 4},
        "auto": {"method": "auto", "model": folder},
    }


def batches(task: str, size: int, count: int, tokenizer: Any) -> list[Any]:
    """Batches of encoded prompts of a task; "mixed": of all tasks, in turn."""
    from loads import prompts

    if task == "mixed":
        by_task = [prompts(each) for each in TASKS[:-1]]
        texts = [text for group in itertools.zip_longest(*by_task) for text in group if text is not None]
    else:
        texts = prompts(task)
    texts = list(itertools.islice(itertools.cycle(texts), max(count, size)))
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [
        tokenizer.apply_chat_template(
            chats[i : i + size], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        for i in range(0, len(chats) - size + 1, size)
    ]


def cell(
    model: Any, tokenizer: Any, configs: dict[str, Any], task: str, heat: float, size: int, options
) -> dict[str, Any]:
    """One cell of the table."""
    sampling = {"do_sample": True, "temperature": heat, "top_k": 0} if heat else {"do_sample": False}
    seconds, tokens, chosen = dict.fromkeys(configs, 0.0), dict.fromkeys(configs, 0), {}
    for turn in range(options.repeats):
        for inputs in batches(task, size, options.prompts, tokenizer):
            for name, config in configs.items():
                began = time.process_time()
                out = model.generate(
                    **inputs, **sampling, max_new_tokens=options.new_tokens, return_dict_in_generate=True,
                    pad_token_id=tokenizer.pad_token_id, speculative_config={**config, "seed": 11 + turn},
                )  # fmt: skip
                seconds[name] += time.process_time() - began
                tokens[name] += out.speculation["num_new_tokens"]
                for drafter, figures in out.speculation.get("drafters", {}).items():
                    chosen[drafter] = chosen.get(drafter, 0) + figures["num_steps"]
    rates = {name: tokens[name] / seconds[name] for name in configs}
    speed_up = {name: round(rate / rates["none"], 3) for name, rate in rates.items() if name != "none"}
    best = max((name for name in rates if name != "auto"), key=rates.__getitem__)
    return {
        "task": task, "temperature": heat, "batch_size": size, "none_tokens_per_second": round(rates["none"], 1),
        "speed_up": speed_up, "best": best, "auto_over_best": round(rates["auto"] / rates[best], 3), "chosen": chosen,
    }  # fmt: skip


def main() -> None:
    """Measure, print, keep."""
    options = parse()
    import torch
    from decode import machine
    from loads import larger
    from transformers import AutoConfig

    import hf_specdec
    from hf_specdec.inflation import inflate_eagle3

    torch.set_num_threads(1)
    model, tokenizer = larger(options.size, options.dtype)
    tokenizer.padding_side = "left"
    source = AutoConfig.from_pretrained(hf_specdec.bundled("tiny"))
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        inflate_eagle3(hf_specdec.bundled("tiny-eagle3"), source, model.config, folder, model.dtype)
        configs = methods(folder)
        for inputs in batches("mixed", 2, 2, tokenizer):  # first calls load and compile
            for config in configs.values():
                model.generate(**inputs, max_new_tokens=16, do_sample=False, speculative_config=config)
        for task, heat, size in itertools.product(options.tasks, options.temperatures, options.batch_sizes):
            found = cell(model, tokenizer, configs, task, heat, size, options)
            cells.append(found)
            others = "  ".join(f"{name} {ratio:.2f}" for name, ratio in found["speed_up"].items())
            line = f"{task:6} T={heat:g} batch {size:2}: {others}"
            print(f"{line}  | auto/best {found['auto_over_best']:.2f} ({found['best']})  {found['chosen']}", flush=True)
            if options.json:
                report = {"options": {**vars(options), "json": None}, "machine": machine(), "cells": cells}
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    worst = min(each["auto_over_best"] for each in cells)
    least = min(each["speed_up"]["auto"] for each in cells)
    middle = statistics.median(each["auto_over_best"] for each in cells)
    print(f"auto over the best: median {middle:.2f}, least {worst:.2f}; auto over none: least {least:.2f}")


if __name__ == "__main__":
    main()
