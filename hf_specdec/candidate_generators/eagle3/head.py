"""The network of EAGLE-3 and P-EAGLE heads, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ...core.output import Taps
from ..checkpoints.files import Plan
from ..checkpoints.layers import Embeddings, RotaryPositions, add_tables, decoder_layer


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
    """

    taps: Taps
    norm_before_residual: bool
    norm_output: bool
    logit_scale: float
    mask_token: int | None
    window_stays: bool
    norm_before_head: bool = True


class FirstLayer(nn.Module):
    """EAGLE-3's first layer: attention over [norm(embedding); norm(hidden)], residual from the hidden half."""

    def __init__(self, config: PretrainedConfig, norm_before_residual: bool):
        super().__init__()
        layer: Any = decoder_layer(config, 0)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            out_features = getattr(layer.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, out_features))
        self.norm_before_residual = norm_before_residual

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, **attention) -> torch.Tensor:
        """Hidden states [1, T, H] from embeddings and hidden states [1, T, H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        hidden = residual + self.self_attn(hidden_states=both, **attention)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """Decoder layers over embeddings and features; `fuse` makes features from the target's hidden states.

    Args:
        plan: the checkpoint's tensors, which decide on norms, biases and tables.
        num_states, state_width: number and width of the target's hidden states that are concatenated.
    """

    embeddings: Embeddings
    rotary: RotaryPositions
    lm_head: nn.Linear  # if the file has one

    def __init__(self, config: PretrainedConfig, plan: Plan, options: Eagle3Options, num_states: int, state_width: int):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm_output = options.norm_output
        self.layers = nn.ModuleList([FirstLayer(config, options.norm_before_residual)])
        self.layers.extend(decoder_layer(config, i) for i in range(1, config.num_hidden_layers))
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

    def borrowed(self) -> list[nn.Module]:
        return [self.embeddings.table]

    def forward(self, input_ids, features, position_ids, **attention) -> torch.Tensor:
        """The output that is fed back, [1, T, H]: before the last norm, or after it with `norm_output`."""
        attention["position_embeddings"] = self.rotary(position_ids, features.dtype)
        hidden = self.layers[0](self.embeddings(input_ids, features), features, **attention)
        for layer in self.layers[1:]:
            hidden = layer(hidden, position_ids=position_ids, **attention)
        return self.norm(hidden) if self.norm_output else hidden
