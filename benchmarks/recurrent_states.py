"""What drafts cost a target with a recurrent state, on a CPU: the time of a step of K + 1 tokens over a step of one token, with the
state after each draft kept or replayed (`recurrent_states`), and the memory of a row.

    python benchmarks/recurrent_states.py                              # an inflated and two random targets, chains and a tree
    python benchmarks/recurrent_states.py --targets qwen3_5_text --dtypes bfloat16 --rows 1 --turns 3

One thread, forwards of the target alone. `tiny-hybrid` is the bundled hybrid made bigger without changing its function
(`hf_specdec.inflation`): in float32 its greedy text is first compared with the small one's. The others have random weights.
CPU time of some steps, in turns: one token, kept, replayed, one token; each ratio is over the mean of its neighbours of one token,
and the median and quartiles of the ratios are printed. Of the drafts of successive steps none, half and all are accepted in turn: only
accepted drafts are replayed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
INFLATED = "tiny-hybrid"
INFLATED_SIZES = {  # a layer's state as for qwen3_5_text
    "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 128, "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
COMMON = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
FAMILIES = {  # a layer's state has the size of Qwen3.5-4B's, halved, and of Granite-4.0-H-Small's, quartered
    "qwen3_5_text": {
        "head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "granitemoehybrid": {
        "layer_types": (["mamba"] * 3 + ["attention"]) * 2, "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_expand": 2, "num_local_experts": 0, "shared_intermediate_size": 3072,
    },
}  # fmt: skip
# name → the parent of each draft (-1: the text), and the path that is accepted when all are
DRAFTS = {
    "chain of 4": ([-1, 0, 1, 2], [0, 1, 2, 3]),
    "chain of 8": (list(range(-1, 7)), list(range(8))),
    "tree of 9": ([-1, -1, -1, 0, 0, 1, 3, 3, 6], [0, 3, 6, 8]),
}
ONE_TOKEN = ([], [])
PROMPT = 32


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    targets = [INFLATED, *FAMILIES]
    parser.add_argument("--targets", nargs="+", choices=targets, default=targets)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--drafts", nargs="+", choices=list(DRAFTS), default=list(DRAFTS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="steps timed at once")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class Target:
    """A prepared target with rows in its cache."""

    def __init__(self, model, states: str, rows: int):
        import numpy as np

        from hf_specdec.core.rows import RowInput
        from hf_specdec.model.prepare import ModelOptions, prepare

        self.packed, self.row_input = prepare(model, ModelOptions(recurrent_states=states)), RowInput
        self.cache = self.packed.new_cache(rows * 512, 16)
        self.random, self.number = np.random.default_rng(0), 0
        prompts = []
        for row in range(rows):
            self.cache.add(row)
            self.cache.reserve(row, PROMPT)
            prompts.append(RowInput(row, self._tokens(PROMPT), 0, prompt=PROMPT))
        with self.packed.active():
            self.packed.forward(prompts, self.cache)
        self.cache.commit([(row, PROMPT, []) for row in range(rows)])

    def _tokens(self, count: int):
        return self.random.integers(5, self.packed.config.vocab_size, count)

    def seconds(self, draft: tuple[list[int], list[int]], steps: int) -> float:
        """CPU time of some steps, each with this draft in every row."""
        with self.packed.active():
            began = time.process_time()
            for _ in range(steps):
                self._step(*draft)
            return time.process_time() - began

    def _step(self, parents: list[int], path: list[int]) -> None:
        accepted = path[: (0, len(path) // 2, len(path))[self.number % 3]]
        inputs, kept = [], []
        for row, table in self.cache.tables.items():
            start = table.length
            self.cache.reserve(row, start + 1 + len(parents))
            inputs.append(self._row(row, start, parents))
            kept.append((row, start + 1, accepted))
        self.packed.forward(inputs, self.cache)
        self.cache.commit(kept)
        self.number += bool(parents)

    def _row(self, row: int, start: int, parents: list[int]):
        import numpy as np
        import torch

        count = 1 + len(parents)
        drafts = torch.from_numpy(self._tokens(len(parents))) if parents else None
        given = self.row_input(row, self._tokens(1), start, logits=count, drafts=drafts)
        if parents != list(range(-1, len(parents) - 1)):
            seen = np.eye(count, dtype=bool)
            for node, parent in enumerate(parents):
                seen[node + 1] |= seen[parent + 1]
            given.visibility, positions = seen, start + seen.sum(1) - 1
            given.positions = given.region_positions = positions
        return given


def inflated(dtype):
    """The bundled hybrid made bigger. In float32, raises unless it writes the small one's text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_specdec
    from hf_specdec.inflation import inflate

    sys.path.insert(0, str(ROOT))
    from recipes.tiny.inflate_states import HybridInflation

    folder = hf_specdec.bundled(INFLATED)
    small: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model: Any = inflate(small, **INFLATED_SIZES, dtype=dtype, kind=HybridInflation)
    if dtype == torch.float32:
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        chats = [[{"role": "user", "content": each}] for each in ("Tell me a story about a dog.", "What is 5 - 2?")]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True,
            tokenizer_kwargs={"return_token_type_ids": False},
        )  # fmt: skip
        texts = [each.generate(**inputs, do_sample=False, max_new_tokens=64) for each in (small, model)]
        if not torch.equal(*texts):
            raise SystemExit(f"{INFLATED} and its inflation write different texts.")
    return model


def made(name: str, dtype):
    """A target by name."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if name == INFLATED:
        return inflated(dtype)
    config = AutoConfig.for_model(name, **COMMON, **FAMILIES[name])
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def main() -> None:
    """Measure and print."""
    options = parse()
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    import torch
    from decode import machine

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    results = []
    for name, dtype in itertools.product(options.targets, options.dtypes):
        model = made(name, getattr(torch, dtype))
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        for rows in options.rows:
            targets = {states: Target(model, states, rows) for states in ("kept", "replayed")}
            for drafts in options.drafts:
                result = measure(targets, DRAFTS[drafts], options)
                key = {"target": name, "dtype": dtype, "parameters": round(millions), "rows": rows, "drafts": drafts}
                results.append({**key, **result})
                kept, replayed, memory = (result[key] for key in ("kept", "replayed", "mib_per_row"))
                print(
                    f"{name} ({millions:.0f} M, {dtype}), {rows} rows, {drafts}: kept {kept[1]:.2f} × ({kept[0]:.2f} to {kept[2]:.2f}), "
                    f"replayed {replayed[1]:.2f} × ({replayed[0]:.2f} to {replayed[2]:.2f}) a step of one token "
                    f"({result['one_token_ms']:.0f} ms); a row: {memory['kept']:.1f}, {memory['replayed']:.1f} MiB",
                    flush=True,
                )
    if options.json:
        report = {"turns": options.turns, "steps": options.steps, "machine": machine(), "results": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure(targets: dict[str, Target], draft: tuple[list[int], list[int]], options: argparse.Namespace) -> dict:
    """Quartiles of the time of a step over one of one token, for each target, and the memory of its rows."""
    one = targets["kept"]
    for target in targets.values():
        target.seconds(draft, 3)
    ratios, plain = {states: [] for states in targets}, []
    for _ in range(options.turns):
        before = one.seconds(ONE_TOKEN, options.steps)
        times = {states: target.seconds(draft, options.steps) for states, target in targets.items()}
        plain.append((before + one.seconds(ONE_TOKEN, options.steps)) / 2)
        for states, seconds in times.items():
            ratios[states].append(seconds / plain[-1])
    return {
        "one_token_ms": round(1e3 * statistics.median(plain) / options.steps, 1),
        **{states: [round(each, 3) for each in statistics.quantiles(own, n=4)] for states, own in ratios.items()},
        "mib_per_row": {
            states: round(target.packed.bytes_of_states(len(draft[0])) / 2**20, 2) for states, target in targets.items()
        },
    }


if __name__ == "__main__":
    main()
