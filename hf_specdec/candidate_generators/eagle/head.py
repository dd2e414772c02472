"""The network of EAGLE-1, EAGLE-2 and HASS heads."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..checkpoints.files import Plan
from ..checkpoints.layers import LayeredHead, add_tables, decoder_layer


class EagleHead(LayeredHead):
    """Decoder layers over fc([embedding; feature]), with the norms and biases that the checkpoint has.

    enorm, hnorm: on the embedding and on the feature (HASS's `add_para_norm`, speculators' `layernorms`).
    layers.0.input_layernorm: EAGLE's first layer has none.
    norm: after the last layer; its output goes to the language-model head and is fed back (absent in EAGLE's own heads).

    Args:
        plan: the checkpoint's tensors by these names.
    """

    def __init__(self, config: PretrainedConfig, plan: Plan):
        super().__init__()
        width = config.hidden_size

        def norm(name: str) -> nn.Module:
            return LlamaRMSNorm(width, config.rms_norm_eps) if f"{name}.weight" in plan else nn.Identity()

        self.enorm, self.hnorm, self.norm = norm("enorm"), norm("hnorm"), norm("norm")
        self.fc = nn.Linear(2 * width, width)
        self.layers = nn.ModuleList(decoder_layer(config, i) for i in range(config.num_hidden_layers))
        if "layers.0.input_layernorm.weight" not in plan:
            self.layers[0].input_layernorm = nn.Identity()
        add_tables(self, plan, width)

    def forward(self, input_ids, features, position_ids, **attention) -> torch.Tensor:
        """The feature after each token, [1, T, H]: a prediction of the target's final hidden state."""
        embedded = self.enorm(self.embeddings(input_ids, features))
        hidden = self.fc(torch.cat([embedded, self.hnorm(features)], dim=-1))
        position_embeddings = self.rotary(position_ids, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=position_ids, position_embeddings=position_embeddings, **attention)
        return self.norm(hidden)
