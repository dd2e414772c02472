"""Medusa-1 (Cai et al. 2024): heads on the frozen target's last hidden state, cross-entropy with weights 0.8^k."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..candidate_generators.checkpoints.files import renaming
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
        options, tensors = self.options, self.head.state_dict()
        if form == "original":
            lm_head = (r"lm_heads\.(\d+)\.", rf"\1.{options.num_layers}.")
            rename = renaming((r"blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear."), lm_head)
            config = {
                "medusa_num_heads": options.num_heads,
                "medusa_num_layers": options.num_layers,
                "base_model_name_or_path": self.target.name,
                "version": "2",
            }
            named = {rename(name): tensor for name, tensor in tensors.items()}
            return Exported(named, config, "medusa_lm_head.safetensors")
        if not options.own_lm_head:  # vLLM always reads one from the file
            tensors["lm_heads.0.weight"] = self.target.lm_head.weight
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
