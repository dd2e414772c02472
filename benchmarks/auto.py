"""Method "auto" against plain decoding and every fixed method, on real text at the cost of a larger model.

    python benchmarks/auto.py --json benchmarks/results/auto-cpu.json
    python benchmarks/auto.py --tasks math edit --batch-sizes 1 --temperatures 0    # a quick look

The target is the bundled model inflated (same text, same acceptance); the EAGLE-3 head is inflated in the same way, the draft model
is used as it is. `auto` has the very drafters of the fixed columns. In each cell (task, temperature, batch size) every method gets
the same batches of different prompts, in an order that rotates, so that all meet the same disturbances. It begins the cell with
nothing learnt; its first batches are the cold part, the others the warm part. `auto, kept` has a memory file, which the cells
before have filled, as a program has that ran yesterday. Figures are CPU seconds of whole calls, prompts included.

Printed per cell and part: tokens per second over `none` of each method, and each auto over the best fixed method. Aims: 0.95 of the
best and 0.97 of `none`.
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
TASKS = ("math", "code", "edit", "summary", "story", "mixed")
AUTOS = ("auto", "auto, kept")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="100m", help="of the target, in loads.py (default: %(default)s)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cold", type=int, default=2, help="batches of the cold part")
    parser.add_argument("--warm", type=int, default=6, help="batches of the warm part (fewer of several rows)")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def methods(eagle3: str, memory: str) -> dict[str, dict[str, Any]]:
    """The fixed methods, and auto with the same drafters."""
    chain = {"method": "token_recycling", "use_tree": False}
    drafters = [
        "suffix", "ngram", {**chain, "matrix_per_sequence": False}, {"method": "draft_model", "model": "tiny-draft"},
        {"method": "eagle3", "model": eagle3},
    ]  # fmt: skip
    return {
        "none": {"method": "none"},
        "ngram": {"method": "ngram", "num_speculative_tokens": 5},
        "suffix": {"method": "suffix"},
        "token_recycling": {**chain, "num_speculative_tokens": 3},
        "draft_model": {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 4},
        "eagle3": {"method": "eagle3", "model": eagle3, "num_speculative_tokens": 4},
        "auto": {"method": "auto", "methods": drafters, "memory": False},
        "auto, kept": {"method": "auto", "methods": drafters, "memory": memory},
    }


def batches(task: str, size: int, cold: int, warm: int, tokenizer: Any) -> list[Any]:
    """Batches of encoded prompts, all different: the cold part's, then the warm part's."""
    from requests_of import requests

    count = cold + (warm if size == 1 else max(1, warm * 2 // size))
    chats = [[{"role": "user", "content": text}] for text in requests(task, count * size)]
    return [
        tokenizer.apply_chat_template(
            chats[i : i + size], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        for i in range(0, len(chats), size)
    ]


def cell(
    model: Any, tokenizer: Any, configs: dict[str, Any], task: str, heat: float, size: int, options
) -> dict[str, Any]:
    """One cell of the table."""
    import hf_specdec

    hf_specdec.release(model)
    sampling = {"do_sample": True, "temperature": heat, "top_k": 0} if heat else {"do_sample": False}
    parts = ("cold", "warm")
    seconds, tokens = ({part: dict.fromkeys(configs, 0.0) for part in parts} for _ in range(2))
    chosen: dict[str, dict[str, int]] = {name: {} for name in AUTOS}
    cold = options.cold if size == 1 else 1
    for number, inputs in enumerate(batches(task, size, cold, options.warm, tokenizer)):
        part = parts[number >= cold]
        turn = number % len(configs)
        for name in [*configs][turn:] + [*configs][:turn]:
            began = time.process_time()
            out = model.generate(
                **inputs, **sampling, max_new_tokens=options.new_tokens, return_dict_in_generate=True,
                pad_token_id=tokenizer.pad_token_id, speculative_config={**configs[name], "seed": 11},
            )  # fmt: skip
            seconds[part][name] += time.process_time() - began
            tokens[part][name] += out.speculation["num_new_tokens"]
            for drafter, figures in out.speculation.get("drafters", {}).items():
                chosen[name][drafter] = chosen[name].get(drafter, 0) + figures["num_steps"]
    found: dict[str, Any] = {"task": task, "temperature": heat, "batch_size": size, "chosen": chosen}
    for part in parts:
        rates = {name: tokens[part][name] / seconds[part][name] for name in configs}
        best = max((name for name in rates if name not in AUTOS), key=rates.__getitem__)
        found[part] = {
            "tokens": int(tokens[part]["none"]), "none_tokens_per_second": round(rates["none"], 1),
            "speed_up": {name: round(rate / rates["none"], 3) for name, rate in rates.items() if name != "none"},
            "best": best, "over_best": {name: round(rates[name] / rates[best], 3) for name in AUTOS},
        }  # fmt: skip
    return found


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
        inflate_eagle3(hf_specdec.bundled("tiny-eagle3"), source, model.config, f"{folder}/eagle3", model.dtype)
        configs = methods(f"{folder}/eagle3", f"{folder}/memory")
        for inputs in batches("mixed", 2, 1, 0, tokenizer):  # first calls load and compile
            for config in configs.values():
                model.generate(**inputs, max_new_tokens=16, do_sample=False, speculative_config=config)
        for size, heat, task in itertools.product(options.batch_sizes, options.temperatures, options.tasks):
            found = cell(model, tokenizer, configs, task, heat, size, options)
            cells.append(found)
            for part in ("cold", "warm"):
                own = found[part]
                others = "  ".join(f"{name} {ratio:.2f}" for name, ratio in own["speed_up"].items())
                over = ", ".join(f"{ratio:.2f}" for ratio in own["over_best"].values())
                print(f"{task:7} T={heat:g} batch {size:2} {part}: {others}  | over {own['best']}: {over}", flush=True)
            print(f"    {found['chosen']}", flush=True)
            if options.json:
                report = {"options": {**vars(options), "json": None}, "machine": machine(), "cells": cells}
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for part, name in itertools.product(("cold", "warm"), AUTOS):
        over = [each[part]["over_best"][name] for each in cells]
        least = min(each[part]["speed_up"][name] for each in cells)
        print(
            f"{name}, {part}: over the best: median {statistics.median(over):.2f}, least {min(over):.2f}; over none: least {least:.2f}"
        )


if __name__ == "__main__":
    main()
