"""Hydra and Hydra++ (Ankner et al. 2024): heads that also read the tokens after h_t, trained on the target's distribution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from ..candidate_generators.checkpoints.files import renaming
from ..candidate_generators.checkpoints.layers import Embeddings
from ..candidate_generators.hydra import LLAMA_LIKE, HydraHeads, prefix_config
from .base import Exported, register
from .batch import Batch, Places
from .draft_layer import rotary_for
from .losses import LogitsOf, StepTrainer, follow_text
from .options import HydraOptions, TrainingError


@register(HydraOptions)
class HydraTrainer(StepTrainer):
    """Head k reads h_t and x_{t+1} .. x_{t+1+k}, and learns the target's distribution of x_{t+2+k}. Hydra++ with --prefix-layer."""

    options: HydraOptions
    head: Any  # a HydraHeads

    def build(self, token_counts: torch.Tensor) -> nn.Module:
        """Heads begin by predicting the target's next token: blocks pass h_t on, and linear layers are the target's lm_head."""
        options, target = self.options, self.target
        layers = self._prefix_config() if options.prefix_layer else None
        hydra: Any = HydraHeads(
            target.hidden_size, options.num_heads, options.num_layers, target.vocab_size, grounded=True,
            embeddings=Embeddings(target.embed_tokens), prefix_config=layers,
        )  # fmt: skip
        with torch.no_grad():
            for head in hydra.heads:
                for parameter in head.blocks.parameters():
                    parameter.zero_()
                head.blocks[0].res_connection.weight[:, : target.hidden_size].fill_diagonal_(1.0)
                head.lm_head.weight.copy_(target.lm_head.weight)
                head.lm_head.bias.zero_()
            if hydra.prefix is not None and layers is not None:
                for module in hydra.prefix.modules():
                    if isinstance(module, nn.Linear):
                        nn.init.normal_(module.weight, std=layers.initializer_range)
                hydra.prefix.rotary = rotary_for(layers, target)
        self.num_guesses, self.weights = options.num_heads, [options.head_decay**k for k in range(options.num_heads)]
        return hydra

    def rate_share(self, name: str) -> float:
        return self.options.lm_head_rate if ".lm_head." in name else 1.0

    def _prefix_config(self) -> LlamaConfig:
        """The prefix layer's configuration: one Llama layer with the target's settings, as loading assumes."""
        theirs = self.target.config
        if theirs.model_type not in LLAMA_LIKE:
            kinds = ", ".join(LLAMA_LIKE)
            raise TrainingError(f"--prefix-layer needs a target of type {kinds}; this one is {theirs.model_type!r}.")
        config = prefix_config(theirs, getattr(theirs, "head_dim", None), theirs.intermediate_size)
        config._attn_implementation = "sdpa"
        return config

    def _states(self, batch: Batch) -> torch.Tensor:
        """The states [B, S, H] that heads read besides tokens: h_t, or the prefix layer's output."""
        hidden = batch.hidden()
        return hidden if self.head.prefix is None else self.head.prefix(hidden, batch.position_ids, attention_mask=None)

    def steps(self, batch: Batch, places: Places) -> Iterator[tuple[LogitsOf, torch.Tensor]]:
        """Head k, on the states with the tokens up to its own."""

        def step(k, states, tokens):
            states = self.head.with_tokens(states, tokens)
            return states, states

        return zip(self.head.heads, follow_text(batch, places, self._states(batch), step), strict=False)

    def exported(self, form: str) -> Exported:
        """`hydra_mlp.{head}.{place}`, `hydra_lm_head.{head}`. In Hydra++ files, dropout modules count as places too."""
        options, has_prefix = self.options, self.head.prefix is not None
        places = [2 * j + 1 if has_prefix else j for j in range(options.num_layers)]
        rename = renaming(
            *((rf"heads\.(\d+)\.blocks\.{j}\.", rf"hydra_mlp.\1.{place}.") for j, place in enumerate(places)),
            (r"heads\.(\d+)\.lm_head\.", r"hydra_lm_head.\1." + ("1." if has_prefix else "")),
            (r"prefix\.", "prefix_embeding_layer."),
        )
        tensors = {rename(name): tensor for name, tensor in self.head.state_dict().items()}
        config = {
            "base_model_name_or_path": self.target.name,
            "hydra_num_heads": options.num_heads,
            "hydra_num_layers": options.num_layers,
            "hydra_head_arch": "prefix-mlp" if has_prefix else "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
        }
        return Exported(tensors, config, "hydra_lm_head.safetensors")
