"""Medusa-1 (Cai et al. 2024): heads on the frozen target's last hidden state, cross-entropy with weights 0.8^k."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..candidate_generators.medusa import MedusaHeads
from .base import Exported, register
from .batch import Batch, Places
from .losses import LogitsOf, StepTrainer
from .options import MedusaOptions


@register(MedusaOptions)
class MedusaTrainer(StepTrainer):
    """Trains head k to predict x_{t+2+k} from h_t. Blocks are initialised to the identity, linear layers to the target's lm_head."""

    formats = ("original", "vllm")
    options: MedusaOptions
    head: Any  # a MedusaHeads

    def build(self, token_counts: torch.Tensor) -> nn.Module:
        """Blocks are zero, so every head starts by predicting the target's next token."""
        options, target = self.options, self.target
        medusa = MedusaHeads(
            target.hidden_size,
            options.num_heads,
            options.num_layers,
            vocab_sizes=[target.vocab_size] * options.num_heads if options.own_lm_head else [],
            bias=True,
            target_head=target.lm_head_float32(),
        )
        with torch.no_grad():
            for parameter in medusa.blocks.parameters():
                parameter.zero_()
            for weight in medusa.lm_heads.parameters():
                weight.copy_(target.lm_head.weight)
        self.num_guesses, self.weights = options.num_heads, [options.head_decay**k for k in range(options.num_heads)]
        return medusa

    def steps(self, batch: Batch, places: Places) -> Iterator[tuple[LogitsOf, torch.Tensor]]:
        """Head k at every column, on the target's last hidden state."""
        for k in range(places.num_steps):
            yield functools.partial(self.head, k), places.guessed(batch.hidden(), k)

    def exported(self, form: str) -> Exported:
        """FasterDecoding's files (`{head}.{block}.linear`), or those vLLM reads (`blocks.{head}.layers.{block}`)."""
        options, tensors = self.options, {}
        lm_heads = [lm_head.weight for lm_head in self.head.lm_heads]
        for i, blocks in enumerate(self.head.blocks):
            for j, block in enumerate(blocks.layers):
                name = f"{i}.{j}.linear" if form == "original" else f"blocks.{i}.layers.{j}"
                tensors[f"{name}.weight"], tensors[f"{name}.bias"] = block.weight, block.bias
        if form == "original":
            tensors |= {f"{i}.{options.num_layers}.weight": weight for i, weight in enumerate(lm_heads)}
            config = {
                "medusa_num_heads": options.num_heads,
                "medusa_num_layers": options.num_layers,
                "base_model_name_or_path": self.target.name,
                "version": "2",
            }
            return Exported(tensors, config, "medusa_lm_head.safetensors")
        # vLLM always reads a language-model head from the file.
        tensors |= {f"lm_heads.{i}.weight": w for i, w in enumerate(lm_heads or [self.target.lm_head.weight])}
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
            "truncated_vocab_size": self.target.vocab_size,
            "num_heads": options.num_heads,
            "num_hidden_layers": options.num_layers,
            "medusa_fc_bias": True,
            "original_lm_head": not options.own_lm_head,
        }
        return Exported(tensors, config)
