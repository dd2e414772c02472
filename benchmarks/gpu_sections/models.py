"""The models of the end-to-end sections: the bundled ones, inflated to the sizes of real ones, so that text and acceptance
are real and so is the cost."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from inflate import DIMENSIONS, PRESETS, inflate  # pyright: ignore[reportMissingImports]
from inflate_head import inflate_eagle3  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_specdec

from .context import Context

LLAMA_VOCABULARY = 128256
TOY = (288, 7, 800, 8, 2, 32)  # hardly larger than the bundled target
TOY_VOCABULARY = 4128


@dataclass
class Models:
    """What decodes.

    Attributes:
        target: bfloat16, with the shape of Llama-3.1-8B (tied embeddings); it never ends a text by itself.
        drafter: with the shape of Llama-3.2-1B.
        eagle3: folder of an EAGLE-3 head of the target's sizes; its draft vocabulary is the bundled model's.
    """

    target: Any
    drafter: Any
    eagle3: str
    tokenizer: Any


def grown(
    name: str, preset: tuple[int, ...], context: Context, vocab_size: int | None, dtype: torch.dtype
) -> PreTrainedModel:
    """A bundled model on the device, inflated there."""
    source: Any = AutoModelForCausalLM.from_pretrained(hf_specdec.bundled(name), dtype=dtype)
    model = inflate(
        source.to(context.device), **dict(zip(DIMENSIONS, preset, strict=True)), vocab_size=vocab_size, dtype=dtype
    )
    model.generation_config.eos_token_id = None  # lengths are given: no processor that forbids the end
    return model.eval()


@contextmanager
def decoding_models(context: Context) -> Iterator[Models]:
    """Target, drafter and head; the head's folder is removed at the end."""
    vocab_size = TOY_VOCABULARY if context.toy else LLAMA_VOCABULARY
    dtype = torch.float32 if context.toy else torch.bfloat16
    target = grown("tiny", TOY if context.toy else PRESETS["8b"], context, vocab_size, dtype)
    small = (144, 2, 400, 4, 2, 32)
    drafter = grown("tiny-draft", small if context.toy else PRESETS["1b"], context, vocab_size, dtype)
    tokenizer = AutoTokenizer.from_pretrained(hf_specdec.bundled("tiny"), padding_side="left")
    source = AutoModelForCausalLM.from_pretrained(hf_specdec.bundled("tiny")).config
    with tempfile.TemporaryDirectory(prefix="hf-specdec-gpu-") as folder:
        head = Path(folder) / "eagle3"
        inflate_eagle3(hf_specdec.bundled("tiny-eagle3"), source, target.config, head, dtype, context.device)
        try:
            yield Models(target, drafter, str(head), tokenizer)
        finally:
            hf_specdec.release(target)
