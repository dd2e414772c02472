"""DSpark's and Domino's heads on a DFlash block, which correct logits for the tokens chosen earlier on a path."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import nn

Embed = Callable[[torch.Tensor], torch.Tensor]
MARKOV_TYPES = ("vanilla", "gated", "rnn")


class SequentialHead(nn.Module):
    """Corrects the block's logits along a path, left to right, without another forward of the drafter.

    A path's state [n, S] is carried from one token to the next.
    """

    state_size = 0

    @abstractmethod
    def forward(
        self, state: torch.Tensor, previous: torch.Tensor, hidden: torch.Tensor, embed: Embed, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One more token on n paths.

        Args:
            state: [n, S].
            previous: int64 [n], the token before the predicted one.
            hidden: [n, H], the block's final hidden state in the slot that predicts.
            embed: the drafter's embedding of tokens, [n, H] from [n].
            depth: 1 for the first drafted token.

        Returns: the new state [n, S]; the correction of the logits [n, Vd] (None: no correction at this depth).
        """

    def summary(self, previous: torch.Tensor) -> torch.Tensor:
        """The features [n, r] of the previous token for a confidence head."""
        raise TypeError(f"{type(self).__name__} has nothing for a confidence head to read.")


class MarkovHead(SequentialHead):
    """DSpark's low-rank bias B[previous] = W2 W1[previous].

    `gated`: W1[previous] is multiplied by a gate that depends on the hidden state. `rnn`: a recurrent state over the path
    replaces it. Formulas: speculators 0.9 (models/dspark) and SpecForge (modeling/draft/dspark.py).

    Args:
        vocab_size: V of the target (rows of W1).
        draft_vocab_size: Vd (rows of W2).
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int, kind: str):
        super().__init__()
        self.kind = kind
        self.state_size = rank if kind == "rnn" else 0
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def summary(self, previous: torch.Tensor) -> torch.Tensor:
        """W1[previous]: [n, r]."""
        # The target's embeddings may have more padding rows than the head's.
        return self.markov_w1(previous.clamp(max=self.markov_w1.num_embeddings - 1))

    def forward(self, state, previous, hidden, embed, depth):
        """See `SequentialHead`."""
        latent = self.summary(previous)
        if self.kind == "gated":
            latent = latent * torch.sigmoid(self.gate_proj(torch.cat([hidden, latent], dim=-1)))
        elif self.kind == "rnn":
            gate, candidate, out = self.joint_proj(torch.cat([state, latent, hidden], dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            latent = torch.tanh(out)
        return state, self.markov_w2(latent)


class DominoHead(SequentialHead):
    """Domino's correction: a GRU reads the path's embeddings; its state and the hidden state give logits through a
    bottleneck. The first `num_pure` tokens are not corrected. Formula: SpecForge (modeling/draft/domino.py)."""

    def __init__(self, draft_vocab_size: int, bottleneck: int, hidden_size: int, gru_size: int, num_pure: int):
        super().__init__()
        self.state_size, self.num_pure = gru_size, num_pure
        self.prefix_gru = nn.GRU(hidden_size, gru_size, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + gru_size, bottleneck, bias=False),
            nn.SiLU(),
            nn.Linear(bottleneck, draft_vocab_size, bias=False),
        )

    def forward(self, state, previous, hidden, embed, depth):
        """See `SequentialHead`."""
        _, state = self.prefix_gru(embed(previous)[:, None], state[None].contiguous())
        state = state[0]
        return state, self.embed_proj(torch.cat([hidden, state], dim=-1)) if depth > self.num_pure else None


class ConfidenceHead(nn.Module):
    """DSpark's estimate of the probability that the token predicted next is accepted, given that all tokens before it were.

    Args:
        input_size: H, or H + r if it also reads the Markov head's summary of the previous token.
    """

    def __init__(self, input_size: int):
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Log-probability [...] in float32, from features [..., input_size]."""
        return nn.functional.logsigmoid(self.proj(features).squeeze(-1).to(torch.float32))
