"""`generate()` on the device equals `generate()` on the CPU in float32, for every method that the bundled target has."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from acceptance import CONFIGS
from decode import batches
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.core.sequence import stream_seeds
from hf_specdec.kernels import random_bits

from .context import Context, kernels
from .report import Row, at_most

SECTION = "equality"
TIE = 1e-3  # scores that near may change places: float32 sums of other shapes
SEED, TEMPERATURE = 3, 0.8
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "coupled": {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0},
}
TREES = ("token_recycling", "eagle3", "medusa")  # what the interpreter drafts in trees
DRAWN = ("ngram", "eagle3")  # and what it draws with noise
COMPILED = ("ngram", "eagle3")  # every call traces the target's layers again


@dataclass
class Pair:
    """One model in two places, and prompts.

    Attributes:
        batch: on the CPU, padded on the left.
        num_tokens: new ones per row.
    """

    cpu: Any
    other: Any
    batch: Any
    num_tokens: int

    @classmethod
    def make(cls, context: Context, num_tokens: int) -> Pair:
        """The bundled target in float32; without a GPU the other one runs interpreted kernels."""
        folder = hf_specdec.bundled("tiny")
        models: list[Any] = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2)]
        for model in models:
            model.generation_config.eos_token_id = None
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        batch = batches(tokenizer, "math", 1 if context.toy else 3, 1)[0]
        if context.toy:
            batch = {name: each[:, -5:] for name, each in batch.items()}
        return cls(models[0], models[1].to(context.device), batch, num_tokens)

    def generate(self, model: Any, config: dict[str, Any], rule: str) -> tuple[torch.Tensor, int]:
        """Output ids [B, S + n] on the CPU, and how many tokens were drafted."""
        inputs = {name: each.to(model.device) for name, each in self.batch.items()}
        config = {**config, "seed": SEED, "rejection_sample_method": "coupled"}
        out = model.generate(
            **inputs,
            **RULES[rule],
            max_new_tokens=self.num_tokens,
            speculative_config=config,
            return_dict_in_generate=True,
        )
        hf_specdec.release(model)
        return out.sequences.cpu(), out.speculation["num_draft_tokens"]

    def differences(self, ours: torch.Tensor, wanted: torch.Tensor, rule: str) -> tuple[int, int]:
        """Rows that differ: for no reason, and where the model could not tell two tokens apart."""
        wrong = ties = 0
        for row in (ours != wanted).any(1).nonzero().flatten().tolist():
            tie = self.is_tie(row, ours[row], wanted[row], rule)
            wrong, ties = wrong + (not tie), ties + tie
        return wrong, ties

    @torch.no_grad()
    def is_tie(self, row: int, ours: torch.Tensor, wanted: torch.Tensor, rule: str) -> bool:
        """Whether the scores of the first two tokens that differ are within TIE."""
        padding = int((self.batch["attention_mask"][row] == 0).sum())
        at = int((ours != wanted).nonzero()[0])
        text = wanted[padding:at]
        scores = self.cpu(input_ids=text[None], use_cache=False).logits[0, -1].double()
        if rule == "coupled":
            mask = self.batch["attention_mask"].bool()
            rows = [ids[keep].tolist() for ids, keep in zip(self.batch["input_ids"], mask, strict=True)]
            seed = torch.tensor([stream_seeds(SEED, rows)[row]])
            where = torch.tensor([len(text)]), torch.zeros(1, dtype=torch.long), random_bits.TOKEN_STREAM
            noise = random_bits.gumbel(seed, *where, len(scores))[0]
            scores = scores / TEMPERATURE + noise
        return bool((scores[ours[at]] - scores[wanted[at]]).abs() <= TIE)


def left_out(method: str, shape: str, rule: str) -> bool:
    """Whether the interpreter, which takes seconds for a step, leaves this to a GPU."""
    if rule == "coupled":
        return shape == "tree" or method not in DRAWN
    return shape == "tree" and method not in TREES


def rows(context: Context) -> Iterator[Row]:
    """Greedy first, then coupled; each with kernels launched one by one and, on a GPU, as graphs, some compiled."""
    torch.backends.cuda.matmul.allow_tf32 = False
    pair = Pair.make(context, 4 if context.toy else 32)
    graphs = {"cuda_graphs": True}
    hows: dict[str, dict[str, Any]] = {"eager": {"cuda_graphs": False}}
    if context.on_gpu:
        hows |= {"graphs": graphs, "graphs, compiled": {**graphs, "compile": True}}
    for rule in RULES:
        expected: dict[tuple[str, str], torch.Tensor] = {}
        for how, keys in hows.items():
            for method, shapes in CONFIGS.items():
                if "compile" in keys and method not in COMPILED:
                    continue
                if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
                    yield Row(SECTION, f"{rule}, {how}: {method}", note="left out: arctic-inference is not installed")
                    continue
                for shape, config in shapes.items():
                    if context.toy and left_out(method, shape, rule):
                        continue
                    try:
                        if (method, shape) not in expected:
                            with kernels("reference"):
                                expected[method, shape], _ = pair.generate(pair.cpu, config, rule)
                    except ImportError as error:  # of a hybrid's part
                        yield Row(SECTION, f"{rule}, {how}: {method}, {shape}", note=f"left out: {error}")
                        continue
                    with kernels("triton"):
                        ours, drafted = pair.generate(pair.other, {**config, **keys}, rule)
                    wrong, ties = pair.differences(ours, expected[method, shape], rule)
                    note = f"{drafted} tokens drafted" + (f", {ties} rows differ at a near tie" if ties else "")
                    name = f"{rule}, {how}: {method}, {shape}"
                    yield at_most(SECTION, name, wrong, 0, f"of {len(ours)} rows differ", note=note)
