"""EAGLE-1/2 (Li et al. 2024): a decoder layer learns to continue the target's final hidden states, over several steps as in HASS."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..candidate_generators.eagle import EagleHead
from ..core.output import Taps
from .base import Exported, Guesses, HeadTrainer, StepLoss, register
from .batch import Batch
from .draft_layer import Shapes, embedding_table, layer_config_for, layer_json, prepare
from .losses import Lesson, argmax_of
from .options import EagleOptions
from .unrolled import greedy_guesses, unroll


@register(EagleOptions)
class EagleTrainer(HeadTrainer):
    """From h_t and x_{t+1} the head predicts h_{t+1}, which the target's own lm_head reads."""

    method = "eagle"
    taps = Taps(last_hidden=True)
    options: EagleOptions
    head: EagleHead

    def build(self, token_counts: torch.Tensor) -> nn.Module:
        """One layer without a norm before attention; embeddings and lm_head are the target's, not trained."""
        self.config = layer_config_for(self.target, self.options.intermediate_size, self.options.num_layers)
        self.num_guesses = self.options.draft_length
        head = EagleHead(self.config, Shapes({}))
        prepare(head, self.config, self.target)
        return head

    def noisy(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, S, H] with uniform noise, which is narrower on texts longer than 512."""
        width = self.options.feature_noise * (512 / lengths).clamp(max=1.0)
        return hidden + (torch.rand_like(hidden) - 0.5) * width[:, None, None]

    def loss(self, batch: Batch) -> StepLoss:
        """sum over steps of step_decay^s (feature_weight SmoothL1 + token_weight times the tokens' loss)."""
        options, target = self.options, self.target
        lesson = Lesson.of(self, batch, options.num_steps)
        wanted = lesson.places.at(batch.hidden())  # h_u, from which x_{u+1} is chosen
        features = self.noisy(batch.hidden(), batch.lengths) if options.feature_noise else batch.hidden()

        def steps():
            for step, output in enumerate(unroll(self.head, batch, features, options.num_steps)):
                hidden = lesson.places.guessed(output, step)
                away = F.smooth_l1_loss(hidden.float(), wanted[: len(hidden)], reduction="none").mean(-1)
                yield target.logits, hidden, options.feature_weight * away

        weights = [options.step_decay**step for step in range(options.num_steps)]
        return lesson.graded(weights, target.vocab_size, steps(), options.token_weight)

    def guesses(self, batch: Batch) -> Guesses:
        """Greedy guesses under teacher forcing: as in drafting, but reading the text's tokens."""
        target = self.target
        outputs = unroll(self.head, batch, batch.hidden(), self.num_guesses)
        return greedy_guesses(outputs, lambda hidden: argmax_of(target.logits, hidden, target.vocab_size), batch)

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
