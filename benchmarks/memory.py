"""Memory of `generate()`, plain and ours: peak resident bytes of a process that makes one call, above what it had before it.

    python benchmarks/memory.py --json benchmarks/results/memory-cpu.json
    python benchmarks/memory.py --package /path/to/another/checkout     # the same of another version

Each figure is a process of its own: the model is made, a short call of the same kind is run (code, packed weights), the peak
that the system keeps is set back (`/proc/self/clear_refs`), and the call is run. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What is asked for, and after how many new tokens a criterion stops it.
CALLS = [
    (10, 10, 1), (1000, 10, 1), (30_000, 10, 1), (30_000, 1000, 1), (30_000, 10, 4), (131_072, 10, 4), (30_000, 600, 4),
]  # fmt: skip
METHODS = {
    "plain": None,
    "none": {"method": "none"},
    "ngram": {"method": "ngram"},
    "token_recycling": {"method": "token_recycling"},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
}
PROMPT = 64
LAYERS, KV_HEADS, HEAD_WIDTH = 8, 4, 64


def make(num_layers: int):
    """A random Llama in float32: 2 KiB of keys and values per layer and token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_WIDTH, max_position_embeddings=2**20, initializer_range=0.1,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def high_water() -> int:
    """Most bytes that this process had in memory since the last `forget_high_water`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def forget_high_water() -> None:
    """Let the system count anew."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(method: str, asked: int, written: int, batch: int) -> dict:
    """One call in this process: peak bytes above what there was, seconds, and what the text's keys and values take."""
    import torch
    from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

    import hf_specdec  # noqa: F401

    class After(StoppingCriteria):
        def __init__(self, count: int):
            self.left = count

        def __call__(self, input_ids, scores, **kwargs):  # pyright: ignore[reportIncompatibleMethodOverride]
            self.left -= 1
            return torch.full((len(input_ids),), self.left <= 0)

    torch.set_num_threads(1)
    model: Any = make(LAYERS)
    ids = torch.arange(PROMPT).repeat(batch, 1) + 5 * torch.arange(batch)[:, None] + 1
    extra = {} if METHODS[method] is None else {"speculative_config": METHODS[method]}
    drafter_bytes = 0
    if method == "draft_model":
        extra["assistant_model"] = make(2)
        drafter_bytes = 2 * 2 * KV_HEADS * HEAD_WIDTH * 4

    def call(max_new_tokens: int, count: int):
        criteria = StoppingCriteriaList([After(count)])
        mask = torch.ones_like(ids)
        return model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            stopping_criteria=criteria,
            **extra,
        )

    call(16, 16)
    forget_high_water()
    before = high_water()
    start = time.process_time()
    length = call(asked, written).shape[1]
    seconds = time.process_time() - start
    per_token = LAYERS * 2 * KV_HEADS * HEAD_WIDTH * 4 + drafter_bytes
    return {
        "method": method, "max_new_tokens": asked, "written": written, "batch": batch,
        "peak_bytes": high_water() - before, "process_bytes": high_water(), "kv_bytes": batch * length * per_token,
        "cpu_seconds": seconds,
    }  # fmt: skip


def in_a_process(package: Path, *arguments) -> dict:
    """`measure` in a process of its own that imports the package from a checkout; what went wrong, if it did."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=package, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"killed by signal {-done.returncode}"])[-1]
        names = ("method", "max_new_tokens", "written", "batch")
        return {**dict(zip(names, arguments, strict=True)), "error": reason[:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=ROOT, help="checkout to measure")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--label", default="after", help="name of the figures in that file; others there are kept")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        method, *numbers = options.one
        print(json.dumps(measure(method, *map(int, numbers))))
        return
    results = []
    print("| max_new_tokens | written | batch | " + " | ".join(options.methods) + " |")
    print("|---|---|---|" + "---|" * len(options.methods))
    for asked, written, batch in CALLS:
        row = [in_a_process(options.package, method, asked, written, batch) for method in options.methods]
        results += row
        cells = [each.get("error") or f"{each['peak_bytes'] / 2**20:.1f}" for each in row]
        print(f"| {asked} | {written} | {batch} | " + " | ".join(cells) + " |", flush=True)
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        known["machine"] = {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
        }
        known[options.label] = results
        options.json.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
