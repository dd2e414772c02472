"""What latent attention (MLA) costs a step on a CPU: over pages, and with gathered keys.

    python benchmarks/latent.py                                     # the table of docs/performance.md
    python benchmarks/latent.py --lengths 512 --rows 1 --dtypes float32 --turns 5

One thread. A random model of the type deepseek_v3, four dense layers of width 1,024 with 16 heads, a rank of 512 and heads of DeepSeek's
widths. Its cache holds random latents. CPU time of forwards of one token and of five (a chain of four drafts) per row, in turns; medians
(of one turn after a first one, where rows hold more than 65,536 tokens together).
Then forwards of more tokens after 2,048 cached ones, with absorbed products and with expanded keys: the library takes the way with
fewer multiplications.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
SIZES: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "first_k_dense_replace": 4,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 32768,
}  # fmt: skip
PROMPT, TOKENS = 2048, (8, 32, 64, 128, 256, 512)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 16384])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class Target:
    """A prepared target with rows of one length in its cache."""

    def __init__(self, model: Any, length: int, rows: int, gather: bool = False):
        import numpy as np
        import torch

        from hf_specdec.core.rows import RowInput
        from hf_specdec.model.prepare import prepare

        self.packed, self.length = prepare(model), length
        self.packed.gather = gather
        most = length + max(TOKENS)
        self.cache = self.packed.new_cache(rows * (most // 16 + 1), 16)
        draw = torch.Generator().manual_seed(0)
        pair = [
            torch.randn(length, 1, SIZES[width], generator=draw, dtype=torch.float32).to(model.dtype)
            for width in ("kv_lora_rank", "qk_rope_head_dim")
        ]
        for row in range(rows):
            self.cache.add(row, most)
        for row in range(rows):
            self.cache.reserve(row, most)
            self.cache.load_all(row, [(pair[0], pair[1])] * SIZES["num_hidden_layers"])
        self.row = lambda row, count: RowInput(row, np.arange(count) + 7, length)

    def seconds(self, count: int) -> float:
        """CPU time of a forward of `count` tokens per row."""
        rows = [self.row(row, count) for row in self.cache.tables]
        with self.packed.active():
            began = time.process_time()
            self.packed.forward(rows, self.cache)
            return time.process_time() - began


def in_turns(ways: dict[str, Callable[[], float]], turns: int) -> dict[str, float]:
    """Median milliseconds of each way."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(turns):
        for name, way in ways.items():
            found[name].append(1000 * way())
    return {name: round(statistics.median(each), 2) for name, each in found.items()}


def steps(model: Any, length: int, rows: int, turns: int) -> list[dict[str, Any]]:
    """Steps of one and of five tokens per row, gathered and over pages."""
    targets = {"gathered": Target(model, length, rows, gather=True), "pages": Target(model, length, rows)}
    found = []
    for count in (1, 5):
        ways = {name: (lambda each=each: each.seconds(count)) for name, each in targets.items()}  # noqa: B023
        times = in_turns(ways, turns if rows * length < 65536 else 1)
        found.append({"context": length, "rows": rows, "tokens": count, **times})
    return found


def forced(target: Target, count: int, absorbed: bool) -> float:
    """CPU time of a forward of `count` tokens, one way or the other."""
    from hf_specdec.model import latent

    chosen = latent._is_absorbed
    latent._is_absorbed = lambda module, row: absorbed
    try:
        return target.seconds(count)
    finally:
        latent._is_absorbed = chosen


def prompts(model: Any, turns: int) -> list[dict[str, Any]]:
    """Forwards of more tokens, both ways, and which of them is taken."""
    from hf_specdec.model import latent

    target, found = Target(model, PROMPT, 1), []
    for count in TOKENS:
        ways = {
            "absorbed": lambda n=count: forced(target, n, True),
            "expanded": lambda n=count: forced(target, n, False),
        }
        taken = latent._is_absorbed(model.model.layers[0].self_attn, target.row(0, count))
        found.append({"tokens": count, **in_turns(ways, turns), "taken": "absorbed" if taken else "expanded"})
    return found


def main() -> None:
    """Measure, print, write."""
    import torch
    from decode import machine
    from transformers import AutoConfig, AutoModelForCausalLM

    arguments = parse()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"turns": arguments.turns, "machine": machine(), "sizes": SIZES}
    for dtype in arguments.dtypes:
        torch.manual_seed(0)
        config = AutoConfig.for_model("deepseek_v3", **SIZES)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        of_dtype: dict[str, Any] = {"steps": [], "prompts": []}
        with torch.no_grad():
            for length in arguments.lengths:
                for rows in arguments.rows:
                    of_dtype["steps"] += steps(model, length, rows, arguments.turns)
                    for line in of_dtype["steps"][-2:]:
                        ratio = line["gathered"] / line["pages"]
                        print(dtype, line, f"gathered / pages {ratio:.1f}", flush=True)
            of_dtype["prompts"] = prompts(model, arguments.turns)
        for line in of_dtype["prompts"]:
            print(dtype, line, flush=True)
        results[dtype] = of_dtype
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
