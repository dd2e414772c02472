"""Inflation of models with recurrent layers, Qwen3.5's: `inflate(model, kind=HybridInflation, linear_num_value_heads=32)`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_specdec.inflation.tensors import DIMENSIONS, Inflation, head_places

STATE_DIMENSIONS = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
STATE_KEY_HEADS, STATE_VALUE_HEADS = STATE_DIMENSIONS[:2]


class HybridInflation(Inflation):
    """Recurrent layers grow in the number of heads and in the widths of keys and values, so their states grow too.

    Wider heads have smaller queries, so a rule's output shrinks by sqrt(dk/dk'); its mean square over a wider value head shrinks by a
    further dv/dv'. All norms share one epsilon, which is scaled by dk/dk' * dv/dv'; the residual stream is scaled to match it.
    """

    architectures = ("Qwen3_5ForCausalLM",)
    dimensions = (*DIMENSIONS, *STATE_DIMENSIONS)
    groups = (
        *Inflation.groups,
        (STATE_VALUE_HEADS, STATE_KEY_HEADS, "recurrent key heads", "recurrent value heads"),
    )
    norm_offset = 1.0  # weights of these norms are stored minus 1

    def __init__(self, model, old: dict[str, int], new: dict[str, int], dtype: torch.dtype, seed: int):
        super().__init__(model, old, new, dtype, seed)
        share = {name: old[name] / new[name] for name in old}
        self.eps_scale = share["linear_key_head_dim"] * share["linear_value_head_dim"]
        self.residual_scale = math.sqrt(self.eps_scale / share["hidden_size"])
        self.value_heads, self.key_sources = head_places(old, new, STATE_VALUE_HEADS, STATE_KEY_HEADS)

    @property
    def rotary_share(self) -> float:
        return self.model.config.rope_parameters.get("partial_rotary_factor", 1.0)

    def fill_mixer(self, layer: Any, source: Any) -> None:
        if hasattr(layer, "linear_attn"):
            self.fill_delta_rule(layer.linear_attn, source and source.linear_attn)
        else:
            super().fill_mixer(layer, source)

    def fill_query(self, linear: Any, source: Any, scale: float) -> None:
        """Set `q_proj`: a head's rows are its query, times `scale`, and then its gate."""
        d, d_new = self.old["head_dim"], self.new["head_dim"]
        scales = torch.ones(self.old["num_attention_heads"], 2, d)
        scales[:, 0] = scale
        rows = torch.cat([(2 * head + half) * d_new + self.inside for head in self.q_heads for half in (0, 1)])
        cleared = torch.cat([torch.arange(2 * d_new) + 2 * head * d_new for head in self.q_heads])
        self.fill_rows(linear, source, rows, slice(None), cleared, scales.flatten().unsqueeze(1))

    def fill_delta_rule(self, rule: Any, source: Any) -> None:
        """Set the tensors of a gated delta rule. New channels of old heads are zero, and nothing reads the new heads."""
        old, new = self.old, self.new
        keys, values = ("linear_key_head_dim", STATE_KEY_HEADS), ("linear_value_head_dim", STATE_VALUE_HEADS)
        key_heads = list(range(len(self.key_sources)))
        key_rows, key_cleared = _channels(key_heads, old[keys[0]], new[keys[0]])
        key_from, _ = _channels(self.key_sources, old[keys[0]], old[keys[0]])
        value_rows, value_cleared = _channels(self.value_heads, old[values[0]], new[values[0]])
        key_dim, key_dim_new = (math.prod(sizes[name] for name in keys) for sizes in (old, new))
        value_dim = math.prod(old[name] for name in values)
        rows, cleared = (
            torch.cat([of_keys, of_keys + key_dim_new, of_values + 2 * key_dim_new])
            for of_keys, of_values in ((key_rows, value_rows), (key_cleared, value_cleared))
        )
        sources = torch.cat([key_from, key_from + key_dim, torch.arange(value_dim) + 2 * key_dim])
        self.fill_rows(rule.in_proj_qkv, source and source.in_proj_qkv, rows, sources, cleared, 1.0)
        self.fill_rows(rule.in_proj_z, source and source.in_proj_z, value_rows, slice(None), value_cleared, 1.0)
        heads = torch.tensor(self.value_heads)
        for name in ("in_proj_a", "in_proj_b"):
            self.fill_rows(getattr(rule, name), source and getattr(source, name), heads, slice(None), heads, 1.0)
        self.fill_output(rule.out_proj, source and source.out_proj, value_rows)
        self.fill_vectors(rule, source, heads, rows, sources)

    def fill_vectors(self, rule: Any, source: Any, heads: Tensor, rows: Tensor, sources: Tensor) -> None:
        """Set the convolution, the decays and the norm of a gated delta rule."""
        convolution = self.random(*rule.conv1d.weight.shape)
        decay, bias = torch.zeros(self.new[STATE_VALUE_HEADS]), torch.ones(self.new[STATE_VALUE_HEADS])
        norm = torch.ones(self.new["linear_value_head_dim"])
        if source is not None:
            convolution[rows] = source.conv1d.weight.detach()[sources].to(self.dtype)
            decay[heads], bias[heads] = source.A_log.detach().float(), source.dt_bias.detach().float()
            norm[: self.old["linear_value_head_dim"]] = source.norm.weight.detach().float()
        rule.conv1d.weight, rule.A_log, rule.dt_bias = map(self.parameter, (convolution, decay, bias))
        rule.norm.weight = self.parameter(
            norm * math.sqrt(self.old["linear_value_head_dim"] / self.new["linear_value_head_dim"])
        )


def _channels(heads: list[int], width: int, new_width: int) -> tuple[Tensor, Tensor]:
    """Of these heads of `new_width` channels each: the first `width` channels of each, and all channels."""
    first = torch.cat([torch.arange(width) + head * new_width for head in heads])
    return first, torch.cat([torch.arange(new_width) + head * new_width for head in heads])
