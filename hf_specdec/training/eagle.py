"""EAGLE-1/2 (Li et al. 2024): a decoder layer learns to continue the target's final hidden states, over several steps as in HASS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..candidate_generators.eagle import EagleHead
from ..core.output import Taps
from .base import Exported, register
from .batch import Batch, Places
from .draft_layer import Shapes, embedding_table, layer_config_for, layer_json, prepare
from .losses import LogitsOf, StepTrainer
from .options import EagleOptions
from .unrolled import unroll


@register(EagleOptions)
class EagleTrainer(StepTrainer):
    """From h_t and x_{t+1} the head predicts h_{t+1}, which the target's own lm_head reads."""

    taps = Taps(last_hidden=True)
    options: EagleOptions
    head: EagleHead

    def build(self, token_counts: torch.Tensor) -> nn.Module:
        """One layer without a norm before attention; embeddings and lm_head are the target's, not trained."""
        self.config = layer_config_for(self.target, self.options.intermediate_size, self.options.num_layers)
        self.num_guesses = self.options.draft_length
        self.weights = [self.options.step_decay**step for step in range(self.options.num_steps)]
        head = EagleHead(self.config, Shapes({}))
        prepare(head, self.config, self.target)
        return head

    def noisy(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, S, H] with uniform noise, which is narrower on texts longer than 512."""
        width = self.options.feature_noise * (512 / lengths).clamp(max=1.0)
        return hidden + (torch.rand_like(hidden) - 0.5) * width[:, None, None]

    def whole_loss(self, losses: torch.Tensor, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """feature_weight SmoothL1 + token_weight times the tokens' loss."""
        away = F.smooth_l1_loss(hidden.float(), wanted, reduction="none").mean(-1)
        return self.options.feature_weight * away + self.options.token_weight * losses

    def steps(self, batch: Batch, places: Places) -> Iterator[tuple[LogitsOf, torch.Tensor]]:
        """The head's outputs, which the target's lm_head reads; in training from noisy states."""
        is_noisy = self.head.training and self.options.feature_noise
        features = self.noisy(batch.hidden(), batch.lengths) if is_noisy else batch.hidden()
        for step, output in enumerate(unroll(self.head, batch, features, places.num_steps)):
            yield self.target.logits, places.guessed(output, step)

    def exported(self, form: str) -> Exported:
        """yuhuili's files: fc, layers.*, and a copy of the embeddings."""
        tensors = dict(self.head.state_dict())
        if self.options.own_embeddings:
            tensors["embed_tokens.weight"] = embedding_table(self.target)
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            **layer_json(self.config),
            "bias": False,
            "tie_word_embeddings": False,
            "use_cache": True,
        }
        return Exported(tensors, config)
