"""τ of heads for the bundled target by loss and method, with about as many parameters and as many steps each.

    python benchmarks/training.py --work FOLDER [--data /work/shared/data] [--json benchmarks/results/training-cpu.json]

The target answers the prompts of its training chats greedily (recipes/tiny/heads.py); every head learns from these answers, from scratch,
on one thread, computing in bfloat16. τ is measured by greedy decoding of the held-out prompts that come with the models. A run that is
stopped goes on; finished heads are not trained again. scripts/result_tables.py shows the results in docs/training.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from acceptance import BUNDLED_PROMPTS, measure, read_prompts

from hf_specdec.cli.measure import environment
from hf_specdec.training.options import LOSSES, options_by_method
from hf_specdec.training.pipeline import train_head
from recipes.tiny.heads import load_target, write_answers, write_prompts

NUM_ANSWERS, STEPS, LENGTH = 4096, 400, 5
COMMON: dict[str, Any] = {
    "max_steps": STEPS, "tokens_per_batch": 512, "bf16": True, "max_held_out": 40, "eval_every": 10**6, "save_every": 100,
}  # fmt: skip
EAGLE3 = {"learning_rate": 4e-3, "feature_layers": "2,4,7", "fc_norm": True, "num_steps": LENGTH}
DFLASH = {"learning_rate": 2e-3, "num_layers": 3, "num_anchors": 32}
# name: method, options. Sizes are such that about 2.1 million parameters are trained; all heads draft five tokens.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "EAGLE-3": ("eagle3", {**EAGLE3, "intermediate_size": 768}),
    "P-EAGLE": ("eagle3", {**EAGLE3, "parallel": True, "num_layers": 2, "intermediate_size": 272}),
    "DFlash": ("dflash", {**DFLASH, "intermediate_size": 608}),
    "DSpark": (
        "dflash",
        {**DFLASH, "variant": "dspark", "head_rank": 64, "block_size": LENGTH, "intermediate_size": 384},
    ),
    "Domino": (
        "dflash",
        {**DFLASH, "variant": "domino", "head_rank": 64, "block_size": LENGTH, "intermediate_size": 312},
    ),
    "DFlash2": ("dflash", {**DFLASH, "variant": "dflash2", "head_rank": 64, "intermediate_size": 336}),
}


def answers(data: Path, work: Path) -> Path:
    """The target's answers to some prompts of its training chats."""
    prompts, path = work / "prompts.jsonl", work / "answers.jsonl"
    if not prompts.exists():
        write_prompts(data, work / "more_stories.jsonl", prompts)
    write_answers(prompts, path, NUM_ANSWERS)
    return path


def trained(name: str, loss: str, data: Path, folder: Path) -> tuple[float, int]:
    """Train a head, or go on. Returns the estimate of τ and the number of trained parameters."""
    method, options = METHODS[name]
    kind: Any = options_by_method()[method]
    made = kind(**COMMON, **options, loss=loss)
    model, tokenizer = load_target(torch.float32)
    said: list[str] = []
    out = train_head(method, model, tokenizer, data, folder, made, target_name="tiny", quiet=True, say=said.append)
    (parameters,) = (line for line in said if "M parameters" in line)
    assert out.estimate is not None
    return out.estimate.tau, round(float(parameters.split(": ")[1].split(" M")[0]) * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of prompts, answers and heads")
    parser.add_argument("--data", type=Path, default=Path("/work/shared/data"), help="the texts of recipes/tiny")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/training-cpu.json"), help="the figures")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), help="train these")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES), help="with these losses")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    data = answers(args.data, args.work)
    model, tokenizer = load_target(torch.float32)
    tasks: dict[str, list[str]] = {}
    for row in read_prompts(str(BUNDLED_PROMPTS)):
        tasks.setdefault(row["task"], []).append(row["prompt"])
    report: dict[str, Any] = {"environment": environment(model), "steps": STEPS, "answers": NUM_ANSWERS, "results": []}
    if args.json.is_file():
        report["results"] = json.loads(args.json.read_text(encoding="utf-8"))["results"]
    plain: dict[str, Any] = {}
    for loss in args.losses:
        for name in args.only:
            if any((each["method"], each["loss"]) == (name, loss) for each in report["results"]):
                continue
            folder, began = args.work / f"{name.replace(' ', '-').lower()}-{loss}", time.process_time()
            estimate, parameters = trained(name, loss, data, folder)
            seconds = time.process_time() - began
            found = measure(model, tokenizer, tasks, {"model": str(folder), "num_speculative_tokens": LENGTH}, plain)
            row = {"method": name, "loss": loss, "parameters": parameters, "cpu_seconds": round(seconds, 1)}
            row |= {"estimate": estimate, "tau": found["tasks"]["all"]["tau"], "tasks": found["tasks"]}
            report["results"].append({**row, "equal": found["equal"], "prompts": found["prompts"]})
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(
                f"{name:16} {loss:6} {parameters} τ {row['tau']:.3f} (estimate {estimate:.3f}) {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
