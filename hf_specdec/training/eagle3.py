"""EAGLE-3 (Li et al. 2025) and P-EAGLE: a head on three of the target's hidden states, trained as it drafts (training-time test)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..candidate_generators.eagle3 import Eagle3Head, Eagle3Options
from ..core.output import Taps
from . import draft_layer
from .base import Exported, register
from .batch import Batch, Places
from .losses import LogitsOf, StepTrainer
from .options import Eagle3TrainingOptions, TrainingError
from .unrolled import unroll

_WHOLE_VOCABULARY = 8192  # up to this vocabulary of the target the head drafts all tokens
_DRAFT_VOCABULARY = 32000  # default size of the draft vocabulary for larger targets


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The hidden states an EAGLE-3 head reads: the published 2, n/2 and n - 3; for targets below 12 layers, where these are
    close together and far from the end, n/3, the middle of the rest, and the last layer's input."""
    if num_layers >= 12:
        return 2, num_layers // 2, num_layers - 3
    last = max(2, num_layers - 1)
    low = (num_layers - 1) // 3
    return tuple(i for i in (low, (low + last + 1) // 2, last) if i <= num_layers)


def most_frequent(token_counts: torch.Tensor, size: int) -> torch.Tensor:
    """The ids [size] of the most frequent tokens, ascending; ties go to lower ids."""
    return token_counts.argsort(descending=True, stable=True)[:size].sort().values


@torch.no_grad()
def attend_to_own_token(attention: Any, width: int, head_dim: int) -> None:
    """Initial weights with which each row attends mostly to itself.

    The newest token reaches the output of EAGLE-3's first layer through attention alone, so the head would have to learn this
    first. Keys and queries start as the same random projection of the embedding, which match best for equal tokens.
    """
    keys = torch.randn_like(attention.k_proj.weight[:, :width]) / width**0.5
    group = attention.q_proj.out_features // attention.k_proj.out_features
    attention.k_proj.weight[:, :width] = keys
    attention.q_proj.weight[:, :width] = keys.unflatten(0, (-1, head_dim)).repeat_interleave(group, dim=0).flatten(0, 1)
    attention.v_proj.weight[:, :width] = torch.randn_like(attention.v_proj.weight[:, :width]) / width**0.5


@register(Eagle3TrainingOptions)
class Eagle3Trainer(StepTrainer):
    """Trains the head to draft `num_steps` tokens from every position, reading the text's tokens and its own hidden states, or with
    `parallel` (P-EAGLE) the mask token and `mask_hidden`."""

    formats = ("original", "speculators")
    options: Eagle3TrainingOptions
    head: Eagle3Head

    def __init__(self, options: Eagle3TrainingOptions, target: Any):
        super().__init__(options, target)
        if options.mask_token_id is not None and not options.parallel:
            raise TrainingError("--mask-token-id is for --parallel.")
        self.down_sample_ratio = options.down_sample_ratio
        if options.down_sample_ratio < 1 and not options.parallel:
            raise TrainingError("--down-sample-ratio is for --parallel.")
        usual = default_layers(target.num_layers)
        layers = draft_layer.layer_numbers("--feature-layers", options.feature_layers, target.num_layers, usual)
        self.taps = Taps(last_hidden=True, layers=tuple(sorted(layers)))
        self.mask_token: int | None = None  # of P-EAGLE; set by `build`

    def build(self, token_counts: torch.Tensor) -> nn.Module:
        """The language-model head is initialised with the target's rows of the draft vocabulary, its input with the deepest state
        read, and attention to each row's own token."""
        options, target = self.options, self.target
        self._choose_vocabulary(token_counts)
        self.config = draft_layer.layer_config_for(
            target, options.intermediate_size, options.num_layers, options.num_key_value_heads
        )
        self.num_guesses = options.draft_length
        self.weights = [options.step_decay**step for step in range(options.num_steps)]
        size = target.vocab_size if self.draft_ids is None else len(self.draft_ids)
        shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (size, target.hidden_size)}
        if options.fc_norm:
            shapes["fc_norm.0.weight"] = (target.hidden_size,)
        reads = Taps(layers=self.taps.layers)
        if options.parallel:
            shapes["mask_hidden"] = (1, 1, len(reads.layers) * target.hidden_size)
            self.mask_token = draft_layer.mask_token(options.mask_token_id, target, token_counts)
        what = Eagle3Options(
            reads, norm_before_residual=False, norm_output=options.norm_output, logit_scale=1.0, mask_token=self.mask_token,
            window_stays=False,
        )  # fmt: skip
        head: Any = Eagle3Head(self.config, draft_layer.Shapes(shapes), what, len(self.taps.layers), target.hidden_size)
        draft_layer.prepare(head, self.config, target)
        rows = target.lm_head.weight if self.draft_ids is None else target.lm_head.weight[self.draft_ids]
        with torch.no_grad():
            head.lm_head.weight.copy_(rows)
            head.norm.weight.copy_(draft_layer.last_norm_scale(target))
            if options.parallel:  # as large as the states in whose place it stands
                sizes = draft_layer.state_sizes(target, reads.layers, token_counts)
                head.mask_hidden.copy_(torch.randn_like(sizes) * sizes)
            # Pass on the last of the states, with a little of the others: one deep in the target suits the language-model head.
            head.fc.weight[:, -target.hidden_size :] += torch.eye(target.hidden_size, device=target.device)
        attention: Any = head.layers[0].self_attn
        attend_to_own_token(attention, target.hidden_size, attention.head_dim)
        return head

    def _choose_vocabulary(self, token_counts: torch.Tensor) -> None:
        vocab_size, size = self.target.vocab_size, self.options.draft_vocab_size
        if size is None:
            size = vocab_size if vocab_size <= _WHOLE_VOCABULARY else _DRAFT_VOCABULARY
        if size < vocab_size:
            self.draft_ids = most_frequent(token_counts, size).to(self.target.device)
            self.draft_places = torch.full((vocab_size,), -1, device=self.target.device)
            self.draft_places[self.draft_ids] = torch.arange(size, device=self.target.device)

    def rate_share(self, name: str) -> float:
        return self.options.lm_head_rate if name.startswith("lm_head.") else 1.0

    def unrolled(self, batch: Batch, num_steps: int, places: Places | None = None) -> Iterator[torch.Tensor]:
        """The head's output [B, S, H] of every step, under teacher forcing."""
        features = self.head.fuse(torch.cat([batch.layers[i] for i in self.taps.layers], dim=-1))
        mask = None if self.mask_token is None else (self.mask_token, self.head.fuse(self.head.mask_hidden.flatten()))
        return unroll(self.head, batch, features, num_steps, mask, places)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The input of the language-model head [n, H], from the head's output [n, H]."""
        return hidden if self.head.options.norm_output else self.head.norm(hidden)

    def whole_loss(self, losses: torch.Tensor, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The tokens' loss + feature_weight SmoothL1."""
        if not self.options.feature_weight:
            return losses
        away = F.smooth_l1_loss(self.normed(hidden).float(), wanted, reduction="none").mean(-1)
        return losses + self.options.feature_weight * away

    def steps(self, batch: Batch, places: Places) -> Iterator[tuple[LogitsOf, torch.Tensor]]:
        """The head's outputs, which its own lm_head reads."""
        logits = functools.partial(self.head.logits, lm_head=self.head.lm_head)
        for step, output in enumerate(self.unrolled(batch, places.num_steps, places)):
            yield logits, places.guessed(output, step)

    def exported(self, form: str) -> Exported:
        """yuhuili's and SpecForge's files (midlayer.*, d2t, t2d; embeddings are the target's), or speculators'."""
        state = dict(self.head.state_dict())
        if self.draft_ids is not None and self.draft_places is not None:
            state["d2t"] = self.draft_ids - torch.arange(len(self.draft_ids), device=self.draft_ids.device)
            state["t2d"] = self.draft_places >= 0
        is_parallel = self.mask_token is not None
        flags = {
            **({"mask_token_id": self.mask_token, "parallel_drafting": True} if is_parallel else {}),
            "draft_vocab_size": self.head.lm_head.out_features,
            "eagle_aux_hidden_state_layer_ids": list(self.taps.layers),  # inputs of these layers
            "fc_norm": self.options.fc_norm,
            "norm_before_fc": False,
            "norm_before_residual": False,
            "norm_output": self.options.norm_output,
            "tie_word_embeddings": False,
        }
        if form == "speculators":
            config = {
                **self.speculators_config(
                    "PEagleSpeculator" if is_parallel else "Eagle3Speculator",
                    draft_layer.layer_json(self.config),
                    "peagle" if is_parallel else "eagle3",
                ),
                "speculators_version": "0.9.0",
                **flags,
                "target_hidden_size": None,
                "embed_requires_grad": False,
            }
            return Exported({**state, "embed_tokens.weight": draft_layer.embedding_table(self.target)}, config)
        # For SGLang, SpecForge and ModelOpt, which name layers by their outputs.
        outputs = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in self.taps.layers], "use_aux_hidden_state": True}
        config = {
            "architectures": ["PEagleDraftModel" if is_parallel else "LlamaForCausalLMEagle3"],
            **draft_layer.layer_json(self.config),
            **flags,
            "recycle_normed": self.options.norm_output,  # SpecForge's norm_output would mean something else
            "num_aux_hidden_states": len(self.taps.layers),
            "target_hidden_size": self.target.hidden_size,
            "eagle_config": outputs,
            "use_cache": True,
        }
        first = "layers.0." if is_parallel else "midlayer."  # SpecForge's names
        return Exported({name.replace("layers.0.", first, 1): tensor for name, tensor in state.items()}, config)
