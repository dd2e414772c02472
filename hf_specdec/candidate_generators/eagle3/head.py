"""The network of EAGLE-3 and P-EAGLE heads, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Gemma4TextConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ...core.output import Taps
from ..checkpoints.files import Plan
from ..checkpoints.layers import LayeredHead, add_tables, capped, decoder_layer


@dataclass(frozen=True)
class Eagle3Options:
    """How an EAGLE-3 head computes, from its config.json and tensors.

    Attributes:
        taps: the target's hidden states it reads, in order of concatenation: some layers', or the last.
        norm_before_residual: the first layer's residual is the normed hidden state.
        norm_output: the normed output is fed back, not the one before the norm.
        logit_scale: factor of the logits.
        mask_token: P-EAGLE's token in mask rows; None: the head drafts step by step.
        window_stays: sliding windows end at the text's last token while drafting, as speculators' EAGLE-3 heads are
            trained; drafted tokens are visible besides. Otherwise windows move on with the drafts.
        norm_before_head: the language-model head reads the normed output (SpecForge: unless `norm_output` is false).
        softcap: of the logits; None: they are not capped.
    """

    taps: Taps
    norm_before_residual: bool
    norm_output: bool
    logit_scale: float
    mask_token: int | None
    window_stays: bool
    norm_before_head: bool = True
    softcap: float | None = None


_INPUTS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")  # of attention


def is_joining(plan: Plan, index: int, width: int) -> bool:
    """Whether the attention of a layer reads embeddings beside hidden states: of the first one, or in DeepSpec's files, of all."""
    name = f"layers.{index}.self_attn.q_proj.weight"
    return index == 0 or (name in plan and plan.matrix(name)[1] == 2 * width)


class JoiningLayer(nn.Module):
    """EAGLE-3's layer: attention over [norm(embedding); norm(hidden)], residual from the hidden half."""

    def __init__(self, config: PretrainedConfig, index: int, norm_before_residual: bool):
        super().__init__()
        layer: Any = decoder_layer(config, index)
        for name, part in [*layer.named_children(), *layer.named_buffers(recurse=False)]:
            setattr(self, name, part)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        for name in _INPUTS:
            if (linear := getattr(self.self_attn, name, None)) is not None:
                setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, linear.out_features))
        self.norm_before_residual, self.is_gemma4 = norm_before_residual, isinstance(config, Gemma4TextConfig)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, **attention) -> torch.Tensor:
        """Hidden states [1, T, H] from embeddings and hidden states [1, T, H]."""
        part: Any = self  # pyright does not know the parts of transformers' layer
        normed = part.hidden_norm(hidden)
        residual = normed if part.norm_before_residual else hidden
        both = torch.cat([part.input_layernorm(embedded), normed], dim=-1)
        if not part.is_gemma4:
            hidden = residual + part.self_attn(hidden_states=both, **attention)[0]
            return hidden + part.mlp(part.post_attention_layernorm(hidden))
        attended = part.self_attn(hidden_states=both, shared_kv_states=None, **attention)[0]
        hidden = residual + part.post_attention_layernorm(attended)
        made = part.mlp(part.pre_feedforward_layernorm(hidden))
        return (hidden + part.post_feedforward_layernorm(made)) * part.layer_scalar


class Eagle3Head(LayeredHead):
    """Decoder layers over embeddings and features; `fuse` makes features from the target's hidden states.

    Args:
        plan: the checkpoint's tensors, which decide on norms, biases and tables.
        num_states, state_width: number and width of the target's hidden states that are concatenated.
    """

    mask_features: torch.Tensor  # [H], in place of features in P-EAGLE's mask rows

    def __init__(self, config: PretrainedConfig, plan: Plan, options: Eagle3Options, num_states: int, state_width: int):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.options = options
        self.layers = nn.ModuleList(
            JoiningLayer(config, i, options.norm_before_residual)
            if is_joining(plan, i, width)
            else decoder_layer(config, i)
            for i in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(width, eps)
        self.fc = nn.Linear(num_states * state_width, width) if options.taps.layers else None
        self.input_norm = LlamaRMSNorm(num_states * state_width, eps) if "input_norm.weight" in plan else None
        self.fc_norm = None
        if "fc_norm.0.weight" in plan:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(state_width, eps) for _ in range(num_states))
        if "mask_hidden" in plan:
            self.mask_hidden = nn.Parameter(torch.empty(plan.shape("mask_hidden")))
        add_tables(self, plan, width)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The head's features [.., H] from the target's concatenated hidden states [.., L * Ht]."""
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.input_norm is not None:
            states = self.input_norm(states)
        return states if self.fc is None else self.fc(states)

    def logits(self, hidden: torch.Tensor, lm_head: nn.Module) -> torch.Tensor:
        """Logits [n, Vd] from outputs [n, H], by the head's `lm_head` or rows of it."""
        is_ready = self.options.norm_output or not self.options.norm_before_head
        logits = lm_head(hidden if is_ready else self.norm(hidden))
        return capped(logits, self.options.logit_scale, self.options.softcap)

    def forward(self, input_ids, features, position_ids, **attention) -> torch.Tensor:
        """The output that is fed back, [1, T, H]: before the last norm, or after it with `options.norm_output`."""
        attention["position_embeddings"] = self.rotary(position_ids, features.dtype)
        embedded, hidden = self.embeddings(input_ids, features), features
        for layer in self.layers:
            inputs = (embedded, hidden) if isinstance(layer, JoiningLayer) else (hidden,)
            hidden = layer(*inputs, position_ids=position_ids, **attention)
        return self.norm(hidden) if self.options.norm_output else hidden
