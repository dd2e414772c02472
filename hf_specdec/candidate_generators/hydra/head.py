"""The network of Hydra heads, and the prefix layer of Hydra++."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from ..checkpoints.layers import Embeddings, RotaryPositions

LLAMA_LIKE = ("llama", "mistral", "qwen2")  # types of targets whose settings a prefix layer can have
_LAYER_KEYS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "rope_parameters",
)  # fmt: skip


def prefix_config(target: PretrainedConfig, head_dim: int | None, intermediate_size: int) -> LlamaConfig:
    """The prefix layer's configuration: a Llama layer with the target's settings, since checkpoints have none of their own."""
    values = {key: getattr(target, key) for key in _LAYER_KEYS}
    return LlamaConfig(**values, head_dim=head_dim, intermediate_size=intermediate_size, num_hidden_layers=1)


class HydraBlock(nn.Module):
    """res(x) + SiLU(W x + b) of `num_inputs` parts [H]; with more than one (a head's first block) the residual is a linear map."""

    def __init__(self, hidden_size: int, num_inputs: int):
        super().__init__()
        self.linear = nn.Linear(num_inputs * hidden_size, hidden_size)
        self.res_connection = nn.Linear(num_inputs * hidden_size, hidden_size) if num_inputs > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., num_inputs * H] to [.., H]."""
        return self.res_connection(x) + F.silu(self.linear(x))


class HydraHead(nn.Module):
    """Blocks and a language-model head with bias."""

    def __init__(self, hidden_size: int, num_inputs: int, num_blocks: int, vocab_size: int):
        super().__init__()
        widths = [num_inputs] + [1] * (num_blocks - 1)
        self.blocks = nn.Sequential(*(HydraBlock(hidden_size, width) for width in widths))
        self.lm_head = nn.Linear(hidden_size, vocab_size)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """Logits [.., V] from [hidden; embeddings of the tokens since] [.., num_inputs * H]."""
        return self.lm_head(self.blocks(state))


class PrefixLayer(nn.Module):
    """Hydra++'s decoder layer and norm over the target's hidden states."""

    rotary: RotaryPositions  # set after loading

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, features: torch.Tensor, position_ids: torch.Tensor, **attention) -> torch.Tensor:
        """The prefix embeddings [1, T, H] of hidden states [1, T, H]."""
        position_embeddings = self.rotary(position_ids, features.dtype)
        (layer,) = self.layers
        out = layer(features, position_ids=position_ids, position_embeddings=position_embeddings, **attention)
        return self.norm(out)


class HydraHeads(nn.Module):
    """All heads of a checkpoint, and the prefix layer of Hydra++.

    Ungrounded heads read the prefix layer too, as in training; the original inference code skips it for them.

    Args:
        grounded: whether heads read the tokens drafted before; if not, they are like Medusa's.
        prefix_config: of the prefix layer; None: no prefix layer.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, num_blocks: int, vocab_size: int, grounded: bool, embeddings: Embeddings,
        prefix_config: LlamaConfig | None,
    ):  # fmt: skip
        super().__init__()
        self.heads = nn.ModuleList(
            HydraHead(hidden_size, i + 2 if grounded else 1, num_blocks, vocab_size) for i in range(num_heads)
        )
        self.prefix = None if prefix_config is None else PrefixLayer(prefix_config)
        self.grounded, self.embeddings, self.prefix_config = grounded, embeddings, prefix_config

    def forward(self, input_ids, features, position_ids, **attention) -> torch.Tensor:
        """The prefix layer's output for the target's hidden states [1, T, H] (see `PackedHead`). `input_ids` are not used."""
        assert self.prefix is not None
        return self.prefix(features, position_ids, **attention)

    def with_tokens(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The states [.., S + H] after tokens [..], from states [.., S]."""
        return torch.cat([state, self.embeddings(tokens, state)], dim=-1) if self.grounded else state
