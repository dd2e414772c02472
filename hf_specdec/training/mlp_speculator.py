"""MLP speculators (Wertheimer et al. 2024): a recurrence over the text's own tokens, cross-entropy summed over its steps.

Their stage 1 (ground truth) is a run on the data as it is, stage 2 (the target's own text) one with `--regenerate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..candidate_generators.mlp_speculator.parts import ScaledNorm, SumSpeculator
from .base import Exported, Guesses, HeadTrainer, StepLoss, every_anchor
from .batch import Batch
from .options import TrainingOptions, option
from .registry import register

_CHILDREN = (4, 3, 2)  # of the tree that config.json proposes; from there on 2


@dataclass
class MLPSpeculatorOptions(TrainingOptions):
    """The speculator's own options; the others' defaults are those of its authors."""

    weight_decay: float = option(0.1, "of AdamW, on matrices", minimum=0)
    final_learning_rate: float = option(0.1, "where it ends, as a share of the peak", minimum=0, maximum=1)
    num_heads: int = option(3, "steps of the recurrence: tokens drafted", minimum=1)
    inner_dim: int = option(0, "width of its state; 0: the target's hidden size", minimum=0)
    tie_weights: bool = option(False, "all steps share their weights (but the first projection): a third of the size")
    scale_input: bool = option(True, "normalise the target's hidden state first")


@register(MLPSpeculatorOptions)
class MLPSpeculatorTrainer(HeadTrainer):
    """Step k reads x_{t+1+k} and is trained for x_{t+2+k}; the state begins as h_t. IBM's accelerator format."""

    method = "mlp_speculator"
    options: MLPSpeculatorOptions
    head: SumSpeculator

    def build(self, token_counts: torch.Tensor) -> nn.Module:
        """Matrices from N(0, 1 / inner), norms at 1 and 0."""
        options, target = self.options, self.target
        count, inner, vocab_size = options.num_heads, options.inner_dim or target.hidden_size, target.vocab_size
        num_own, num_projections = (1, min(count, 2)) if options.tie_weights else (count, count)
        speculator = SumSpeculator(
            count,
            inner,
            options.scale_input,
            emb=[nn.Embedding(vocab_size, inner) for _ in range(num_own)],
            proj=[nn.Linear(inner if i else target.hidden_size, inner, bias=False) for i in range(num_projections)],
            ln=[ScaledNorm(inner) for _ in range(num_own)],
            head=[nn.Linear(inner, vocab_size, bias=False) for _ in range(num_own)],
        )
        for parameter in (p for p in speculator.parameters() if p.dim() > 1):
            nn.init.normal_(parameter, std=1 / math.sqrt(inner))
        for name, parameter in speculator.ln.named_parameters():
            nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)
        self.num_guesses = count
        return speculator

    def loss(self, batch: Batch) -> StepLoss:
        """The sum of the steps' cross-entropies."""
        labels = [batch.labels(k) for k in range(self.num_guesses)]
        used = torch.stack([counts for _, counts in labels]).any(0)
        state = batch.hidden()[used]
        total, metrics = state.new_zeros(()), {}
        for k, (ids, counts) in enumerate(labels):
            logits, state = self.head.step(k, state, batch.ahead(batch.input_ids, 1 + k)[used])
            counted = counts[used]
            wanted = ids[used][counted]
            logits = logits[counted].float()
            total = total + F.cross_entropy(logits, wanted, reduction="sum")
            metrics[f"accuracy_{k + 1}"] = ((logits.argmax(-1) == wanted).sum(), counted.sum())
        return StepLoss(total, labels[0][1].sum(), metrics)

    def guesses(self, batch: Batch) -> Guesses:
        """Every step at every hidden state."""
        state, tokens = batch.hidden().flatten(0, 1), []
        for k in range(self.num_guesses):
            logits, state = self.head.step(k, state, batch.ahead(batch.input_ids, 1 + k).flatten())
            tokens.append(logits.argmax(-1).view(batch.input_ids.shape))
        return every_anchor(torch.stack(tokens, dim=-1))

    def exported(self, form: str) -> Exported:
        """`speculator.{emb,proj,ln,head}.{step}`; tied tensors once, under the first step that has them."""
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
