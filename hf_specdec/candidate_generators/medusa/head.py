"""The network of Medusa heads: one head per depth over the target's last hidden state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ...core.output import Taps


class ResidualBlocks(nn.Module):
    """A stack of residual blocks u + SiLU(W u + b)."""

    def __init__(self, hidden_size: int, num_blocks: int, bias: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(num_blocks))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., H] to the same."""
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class MedusaHeads(nn.Module):
    """All heads of a checkpoint, with the names of vLLM's layout.

    Args:
        vocab_sizes: those of the language-model heads: one per head, one for all, or none (then all use the target's).
        target_head: the target's language-model head, for heads that have none.

    Attributes:
        target_ids: int64 [Vd], the target's id of each token in the heads' vocabulary; None: the same ids.
        taps: the target's state that the heads read.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, num_blocks: int, vocab_sizes: list[int], bias: bool, target_head: nn.Module,
        scale: float = 1.0,
    ):  # fmt: skip
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlocks(hidden_size, num_blocks, bias) for _ in range(num_heads))
        self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, size, bias=False) for size in vocab_sizes)
        self.scale = scale
        self.target_ids: torch.Tensor | None = None
        self.taps = Taps(last_hidden=True, newest_only=True)
        self._target_head = [target_head]  # in a list, so that it is not a submodule

    def scoring(self) -> Sequence[nn.Module]:
        """The language-model heads: one per head, or one for all."""
        return list(self.lm_heads) or self._target_head

    def forward(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [.., Vd] of head `index` from hidden states [.., H]."""
        lm_heads = self.scoring()
        logits = lm_heads[min(index, len(lm_heads) - 1)](self.blocks[index](hidden))
        return logits if self.scale == 1.0 else logits * self.scale
