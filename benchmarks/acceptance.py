"""τ of every method with the bundled heads, chain and tree, on the held-out prompts that come with them.

    python benchmarks/acceptance.py [--json benchmarks/results/acceptance.json] [--only eagle3 ..]
    python benchmarks/acceptance.py --target tiny-hybrid [..]    # the target with recurrent layers, and the time too

Greedy, float32, batch 1. τ is tokens per forward of the target; every output must equal plain generate()'s. For the hybrid, tokens per
second of CPU time beside those of the loop without drafts and of plain generate(): each prompt in every way in turn, one thread.
scripts/result_tables.py shows the results in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.cli.eval import summary
from hf_specdec.cli.measure import Measurement, Variant, environment, timed_generate, warm_up
from hf_specdec.cli.options import BUNDLED_PROMPTS, encode_prompts, read_prompts

K = 5
TARGETS = ("tiny", "tiny-hybrid")
CHAIN = {"num_speculative_tokens": K}
DYNAMIC = {"depth": K, "top_k": 4, "total_tokens": 24}
STATIC = {"branching_factors": [3, 2, 1, 1, 1]}
DRAFT = {"method": "draft_model", "model": "tiny-draft"}
# method: {shape: configuration}
CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "ngram": {"chain": {"method": "ngram", **CHAIN}},
    "suffix": {"chain": {"method": "suffix"}},
    "token_recycling": {"tree": {"method": "token_recycling"}},
    "lookahead": {"chain": {"method": "lookahead"}},
    "draft_model": {"chain": {**DRAFT, **CHAIN}, "tree": {**DRAFT, **DYNAMIC}},
    "eagle": {"chain": {"model": "tiny-eagle", **CHAIN}, "tree": {"model": "tiny-eagle", **DYNAMIC}},
    "eagle3": {"chain": {"model": "tiny-eagle3", **CHAIN}, "tree": {"model": "tiny-eagle3", **DYNAMIC}},
    "mtp": {"chain": {"model": "tiny-mtp", **CHAIN}, "tree": {"model": "tiny-mtp", **DYNAMIC}},
    "mlp_speculator": {
        "chain": {"model": "tiny-mlp_speculator", "branching_factors": [1, 1, 1, 1]},
        "tree": {"model": "tiny-mlp_speculator", "branching_factors": [3, 2, 1, 1]},
    },
    "medusa": {
        "chain": {"model": "tiny-medusa", "branching_factors": [1, 1, 1, 1]},
        "tree": {"model": "tiny-medusa", "branching_factors": [4, 2, 2, 1]},
    },
    "hydra": {
        "chain": {"model": "tiny-hydra", "branching_factors": [1, 1, 1]},
        "tree": {"model": "tiny-hydra", "branching_factors": [4, 2, 2]},
    },
    "dflash": {"chain": {"model": "tiny-dflash"}},
    "hybrid": {
        "chain": {
            "method": "hybrid",
            "first": {"method": "suffix"},
            "second": {"model": "tiny-eagle3", **CHAIN},
        }
    },
}
HYBRID_CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "none": {"–": {"method": "none"}},
    "mtp": {
        "chain": {"method": "mtp", "num_speculative_tokens": 3},
        "tree": {"method": "mtp", "branching_factors": [3, 2, 1]},
    },
    "ngram": {"chain": {"method": "ngram", "num_speculative_tokens": 3}},
    "suffix": {"chain": {"method": "suffix"}},
}


def begun() -> Measurement:
    """A measurement of one repeat."""
    result = Measurement(Variant(""))
    result.repeat()
    return result


def measure(model: Any, tokenizer: Any, tasks: dict[str, list[str]], config: dict[str, Any], plain: dict) -> dict:
    """Figures of one configuration by task, "all" last; and how many outputs equal the plain ones."""
    variant, arguments = Variant("", config), {"max_new_tokens": 128, "do_sample": False}
    out, whole, equal = {}, begun(), 0
    hf_specdec.release(model)
    warm_up(model, encode_prompts(tokenizer, tasks["math"][:1], None, model.device), variant, arguments)
    for task, prompts in tasks.items():
        figures = begun()
        for prompt in prompts:
            inputs = encode_prompts(tokenizer, [prompt], None, model.device)
            rows, seconds, speculation = timed_generate(model, inputs, variant, arguments, 0)
            for each in (figures, whole):
                each.add(rows, seconds, speculation)
            if prompt not in plain:
                plain[prompt] = timed_generate(model, inputs, Variant(""), arguments, 0)[0]
            equal += rows == plain[prompt]
        out[task] = {"tau": figures.accepted_length}
    found = summary([whole])
    out["all"] = {key: found[key] for key in ("tau", "acceptance_rate", "acceptance_per_position")}
    return {"speculative_config": config, "tasks": out, "equal": equal, "prompts": sum(map(len, tasks.values()))}


def measure_in_turns(model: Any, tokenizer: Any, tasks: dict[str, list[str]], configs: dict) -> list[dict[str, Any]]:
    """`measure` for several configurations, prompt by prompt, with tokens per second of CPU time beside plain generate()'s."""
    arguments = {"max_new_tokens": 128, "do_sample": False}
    runs = [(method, shape, config) for method, shapes in configs.items() for shape, config in shapes.items()]
    figures = {(method, shape): {task: begun() for task in [*tasks, "all"]} for method, shape, _ in runs}
    plains = {key: begun() for key in figures}
    equal = dict.fromkeys(figures, 0)

    def timed(inputs: Any, config: dict[str, Any] | None) -> tuple[Any, float, Any]:
        began = time.process_time()
        rows, _, speculation = timed_generate(model, inputs, Variant("", config), arguments, 0)
        return rows, time.process_time() - began, speculation

    for *_, config in runs:
        warm_up(model, encode_prompts(tokenizer, tasks["math"][:1], None, model.device), Variant("", config), arguments)
    for task, prompt in track([(t, prompt) for t, own in tasks.items() for prompt in own], "measuring", transient=True):
        inputs = encode_prompts(tokenizer, [prompt], None, model.device)
        plain, plain_seconds, _ = timed(inputs, None)
        for method, shape, config in runs:
            rows, seconds, speculation = timed(inputs, config)
            for name in (task, "all"):
                figures[method, shape][name].add(rows, seconds, speculation)
            plains[method, shape].add(plain, plain_seconds, None)
            equal[method, shape] += rows == plain
    results = []
    for method, shape, config in runs:
        own, plain = figures[method, shape], plains[method, shape]
        kept: dict[str, Any] = {task: {"tau": each.accepted_length} for task, each in own.items()}
        of_all = summary([own["all"], plain, plain])
        names = (
            "tau",
            "acceptance_rate",
            "acceptance_per_position",
            "tokens_per_second",
            "plain_tokens_per_second",
            "speed_up",
        )
        kept["all"] = {name: of_all[name] for name in names}
        result = {"method": method, "shape": shape, "speculative_config": config, "tasks": kept}
        results.append({**result, "equal": equal[method, shape], "prompts": sum(map(len, tasks.values()))})
        print(
            f"{method:16} {shape:6} τ {of_all['tau']:.3f}  × {of_all['speed_up']:.2f}  equal {equal[method, shape]}",
            flush=True,
        )
    return results


def with_others(results: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New results among earlier ones, in the order of CONFIGS."""
    found = {(each["method"], each["shape"]): each for each in [*earlier, *results]}
    return [found[method, shape] for method in CONFIGS for shape in CONFIGS[method] if (method, shape) in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, default="tiny", help="the bundled target")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--only", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="measure these; the file keeps the others"
    )
    parser.add_argument("--limit", type=int, help="at most so many prompts of each task")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = hf_specdec.bundled(args.target)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tasks: dict[str, list[str]] = {}
    for row in read_prompts(str(BUNDLED_PROMPTS)):
        tasks.setdefault(row["task"], []).append(row["prompt"])
    tasks = {task: prompts[: args.limit] for task, prompts in tasks.items()}
    results, plain = [], {}
    runs = [(method, shape) for method in args.only for shape in CONFIGS[method]] if args.target == "tiny" else []
    if args.target == "tiny-hybrid":
        results = measure_in_turns(model, tokenizer, tasks, HYBRID_CONFIGS)
    for method, shape in track(runs, "measuring", transient=True):
        found = measure(model, tokenizer, tasks, CONFIGS[method][shape], plain)
        results.append({"method": method, "shape": shape, **found})
        print(
            f"{method:16} {shape:6} τ {found['tasks']['all']['tau']:.3f}  equal {found['equal']}/{found['prompts']}",
            flush=True,
        )
    if args.json and args.json.is_file() and set(args.only) != set(CONFIGS):
        results = with_others(results, json.loads(args.json.read_text(encoding="utf-8"))["results"])
    report = {"environment": environment(model), "max_new_tokens": 128, "results": results}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
