"""MLP speculators (Wertheimer et al. 2024): a recurrence over the text's own tokens, cross-entropy summed over its steps.

The paper's stage 1 (ground truth) is a run on the data as it is; stage 2 (the target's own text) is one with `--regenerate`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import torch
from torch import nn

from ..candidate_generators.mlp_speculator import SumSpeculator
from .base import Exported, register
from .batch import Batch, Places
from .draft_layer import embedding_table, main_directions
from .losses import LogitsOf, StepTrainer, follow_text
from .options import MLPSpeculatorOptions

logger = logging.getLogger(__name__)

_CHILDREN = (4, 3, 2)  # children per depth of the tree proposed in config.json; 2 at further depths


@register(MLPSpeculatorOptions)
class MLPSpeculatorTrainer(StepTrainer):
    """Trains step k to predict x_{t+2+k} from x_{t+1+k} and a state that starts as h_t. Exports IBM's accelerator format."""

    options: MLPSpeculatorOptions
    head: SumSpeculator

    def build(self, token_counts: torch.Tensor) -> nn.Module:
        """Matrices from N(0, 1 / inner), norms at 1 and 0; with `from_target`, tables from the target's, unless the head is wider."""
        options, target = self.options, self.target
        count, inner = options.num_heads, options.inner_dim or target.hidden_size
        sizes = count, target.hidden_size, [inner], target.vocab_size
        speculator = SumSpeculator(*sizes, options.scale_input, options.tie_weights)
        for parameter in (p for p in speculator.parameters() if p.dim() > 1):
            nn.init.normal_(parameter, std=1 / math.sqrt(inner))
        for name, parameter in speculator.ln.named_parameters():
            nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)
        if options.from_target and inner <= target.hidden_size:
            self._begin_as_target(speculator, inner)
        elif options.from_target and options.init_from is None:
            logger.warning(
                "--from-target has no effect: with --inner-dim %d the head is wider than the target (%d), so that it begins at random.",
                inner, target.hidden_size,
            )  # fmt: skip
        self.num_guesses, self.weights = count, [1.0] * count
        return speculator

    @torch.no_grad()
    def _begin_as_target(self, speculator: SumSpeculator, inner: int) -> None:
        """Initialise from the target: embeddings scaled like random ones, heads unchanged, the first projection onto main directions."""
        target = self.target
        words = embedding_table(target).float()
        embedded = words @ main_directions(words, inner).T
        head = target.lm_head.weight.float()
        directions = main_directions(head, inner)
        for name, parameter in speculator.named_parameters():
            if name.startswith("emb."):
                parameter.copy_(embedded / (embedded.square().mean() * inner).sqrt())
            elif name.startswith("head."):
                parameter.copy_(head @ directions.T)
            elif name == "proj.0.weight":
                parameter.copy_(directions)

    def steps(self, batch: Batch, places: Places) -> Iterator[tuple[LogitsOf, torch.Tensor]]:
        """The logits of step k, from h_t and the tokens after it."""
        return ((nn.Identity(), logits) for logits in follow_text(batch, places, batch.hidden(), self.head.step))

    def exported(self, form: str) -> Exported:
        """`speculator.{emb,proj,ln,head}.{step}`; tied tensors are written once, under their first step."""
        options, target = self.options, self.target
        children = [*_CHILDREN, *[2] * self.num_guesses][: self.num_guesses]
        config = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": target.vocab_size,
            "emb_dim": target.hidden_size,
            "inner_dim": options.inner_dim or target.hidden_size,
            "n_predict": self.num_guesses,
            "top_k_tokens_per_head": children,
            "n_candidates": max(children) + 1,
            "tie_weights": options.tie_weights,
            "scale_input": options.scale_input,
            "base_model_name_or_path": target.name,
        }
        return Exported({f"speculator.{name}": tensor for name, tensor in self.head.state_dict().items()}, config)
