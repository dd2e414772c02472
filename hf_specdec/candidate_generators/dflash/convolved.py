"""DFlash2's decoder layers: a convolution over the slots of a block before and after the attention and the MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

BEFORE, AFTER = 0, 1  # the sides of a sublayer


class SlotConvolution(nn.Module):
    """Mixes a slot's values with those of the slots before it in its block.

    Both kernels depend on the sublayer's input x: kernel[side, tap] = base[side, tap] + delta(x)[side, tap], where one delta serves a
    group of channels. Formula: z-lab/dflash (dflash/model.py).

    Args:
        size: H channels.
        num_taps: how many slots are mixed, the slot itself included.
        group_size: channels that share a delta.
    """

    def __init__(self, size: int, num_taps: int, group_size: int):
        super().__init__()
        self.shape, self.group_size = (2, num_taps, size // group_size), group_size
        self.base_kernel = nn.Parameter(torch.empty(2, num_taps, size))
        self.kernel_projection = nn.Linear(size, 2 * num_taps * (size // group_size), bias=False)

    def kernels(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T, 2, taps, H] from a sublayer's input [1, T, H]."""
        delta = self.kernel_projection(x).unflatten(-1, self.shape)
        return self.base_kernel + delta.repeat_interleave(self.group_size, dim=-1)

    def forward(self, values: torch.Tensor, kernels: torch.Tensor, side: int, slots: torch.Tensor) -> torch.Tensor:
        """The mixed values [1, T, H].

        Args:
            values: [1, T, H].
            slots: [T], the slot of each packed token in its block: there is nothing before slot 0.
        """
        out = kernels[:, :, side, 0] * values
        for tap in range(1, min(self.shape[1], values.shape[1])):
            earlier = nn.functional.pad(values[:, :-tap], (0, 0, tap, 0)) * (slots >= tap)[None, :, None]
            out = out + kernels[:, :, side, tap] * earlier
        return out


class ConvolvedLayer(Qwen3DecoderLayer):
    """Qwen3's layer with convolutions around its attention and its MLP."""

    def __init__(self, config: Qwen3Config, index: int, num_taps: int, group_size: int):
        super().__init__(config, index)
        self.attention_conv = SlotConvolution(config.hidden_size, num_taps, group_size)
        self.mlp_conv = SlotConvolution(config.hidden_size, num_taps, group_size)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: torch.Tensor, slots: torch.Tensor, attention_mask: torch.Tensor | None = None, **given: Any
    ) -> torch.Tensor:
        """Hidden states [B, T, H]; `given` is for the attention."""
        x = self.input_layernorm(hidden)
        kernels = self.attention_conv.kernels(x)
        convolved = self.attention_conv(x, kernels, BEFORE, slots)
        attended, _ = self.self_attn(convolved, attention_mask=attention_mask, **given)
        hidden = hidden + self.attention_conv(attended, kernels, AFTER, slots)
        x = self.post_attention_layernorm(hidden)
        kernels = self.mlp_conv.kernels(x)
        return hidden + self.mlp_conv(self.mlp(self.mlp_conv(x, kernels, BEFORE, slots)), kernels, AFTER, slots)
