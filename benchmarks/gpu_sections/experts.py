"""Steps of a mixture of experts: the shape of Qwen3-30B-A3B, with random weights and fewer layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

import hf_specdec

from . import floors
from .context import Context
from .generating import Way, measure
from .kernel_times import bandwidth
from .models import LLAMA_VOCABULARY, TOY_VOCABULARY, Models
from .repeating import METHOD
from .report import Row

SECTION = "decoding"
_SHAPE: dict[str, Any] = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
          "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_hidden_layers": 12}  # fmt: skip
_TOY: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 2}  # fmt: skip


def mixture(context: Context) -> PreTrainedModel:
    """The model, on the device. Texts are noise, and end nowhere."""
    shape, vocab_size = (_TOY, TOY_VOCABULARY) if context.toy else (_SHAPE, LLAMA_VOCABULARY)
    config = Qwen3MoeConfig(**shape, vocab_size=vocab_size, tie_word_embeddings=True, max_position_embeddings=4096)
    with context.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if context.toy else torch.bfloat16)
    model.generation_config.eos_token_id = None
    return model.eval()


def active_bytes(model: PreTrainedModel) -> int:
    """Weights that a step of one token reads: of the experts those it is sent to."""
    config: Any = model.config
    whole = floors.step_weight_bytes(model)
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    return whole - experts + experts * config.num_experts_per_tok // config.num_experts


def expert_rows(context: Context, models: Models, lengths: tuple[int, int]) -> Iterator[Row]:
    """Steps of 1 and 8 tokens at batch 1, by default and without graphs."""
    model = mixture(context)
    ids = torch.arange(5, 5 + (6 if context.toy else 64), device=context.device)[None]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    floor = floors.milliseconds_of(active_bytes(model), bandwidth(context))
    for how, keys in (("by default", {}), ("no graphs", {"cuda_graphs": False})):
        for count in (1, 8):
            config = {"method": METHOD, "num_speculative_tokens": count - 1} if count > 1 else {"method": "none"}
            way = Way("", {"speculative_config": {**config, **keys}})
            timing = measure(context, replace(models, target=model), batch, way, lengths)
            shape = f"{model.config.num_experts} experts, {model.config.num_hidden_layers} layers"
            name = f"step, {shape}, {how}, batch 1, {count} token{'s' * (count > 1)}"
            yield Row(SECTION, name, timing.step_ms, "ms", floor=floor if count == 1 else None, note=timing.note)
    hf_specdec.release(model)
