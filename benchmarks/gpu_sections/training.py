"""EAGLE-3 training for a target with the shape of Llama-3.2-1B: steps per second and memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from decode import PROMPTS
from inflate import PRESETS  # pyright: ignore[reportMissingImports]
from transformers import AutoTokenizer

import hf_specdec
from hf_specdec.training import trainer_class
from hf_specdec.training.pipeline import train_head

from .context import Context
from .models import TOY, grown
from .report import Row

SECTION = "training"


def write_texts(path: Path, count: int, prompts_each: int) -> None:
    """Texts of several prompts each, other ones in each text."""
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            parts = [prompts[(7 * i + 3 * j) % len(prompts)] for j in range(prompts_each)]
            file.write(json.dumps({"text": f"{i}\n" + "\n".join(parts)}) + "\n")


def train(
    context: Context, model: Any, folder: Path, num_steps: int, more: dict[str, Any]
) -> tuple[float, float, float]:
    """Steps and tokens per second (the first steps left out), and the most memory in GiB (NaN on a CPU)."""
    data = folder / "texts.jsonl"
    write_texts(data, *((6, 1) if context.toy else (400, 8)))
    kind = trainer_class("eagle3")
    never = 10**6
    options = kind.options_class(
        max_steps=num_steps, tokens_per_batch=64 if context.toy else 8192, max_length=32 if context.toy else 512,
        epochs=100, bf16=context.on_gpu, held_out=0.0, eval_every=never, save_every=never, log_every=1, **more,
    )  # fmt: skip
    if context.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    tokenizer = AutoTokenizer.from_pretrained(hf_specdec.bundled("tiny"))
    train_head("eagle3", model, tokenizer, data, folder / "head", options, target_name="inflated", quiet=True)
    log = (folder / "head" / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [entry for entry in map(json.loads, log) if "loss" in entry]
    settled = entries[len(entries) // 3 :]
    seconds = max(settled[-1]["seconds"] - settled[0]["seconds"], 1e-3)  # logged to hundredths
    tokens = settled[-1]["tokens"] - settled[0]["tokens"]
    memory = torch.cuda.max_memory_allocated() / 2**30 if context.on_gpu else float("nan")
    return (len(settled) - 1) / seconds, tokens / seconds, memory


def rows(context: Context) -> Iterator[Row]:
    """Without torch.compile, then with it where the trainer has the option."""
    dtype = torch.bfloat16 if context.on_gpu else torch.float32
    model = grown("tiny", TOY if context.toy else PRESETS["1b"], context, None, dtype)
    names = {field.name for field in fields(trainer_class("eagle3").options_class)}
    for compiled in (False, True):
        name = f"EAGLE-3, {'torch.compile' if compiled else 'eager'}"
        if compiled and ("compile" not in names or not context.on_gpu):
            why = "the trainer has no such option" if "compile" not in names else "only on a GPU"
            yield Row(SECTION, name, note=f"left out: {why}")
            continue
        with tempfile.TemporaryDirectory(prefix="hf-specdec-gpu-") as folder:
            more = {"compile": True} if compiled else {}
            steps, tokens, memory = train(context, model, Path(folder), 4 if context.toy else 30, more)
        yield Row(SECTION, f"{name}: steps", steps, "steps/s")
        yield Row(SECTION, f"{name}: text", tokens, "tokens/s")
        if context.on_gpu:
            yield Row(SECTION, f"{name}: peak memory", memory, "GiB")
