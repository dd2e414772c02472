"""Random drafts with their logits, and what the definitions make of them in float64."""

from __future__ import annotations

import torch

from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.kernels import random_bits
from hf_specdec.kernels.rejection.reference import rejection_walk
from hf_specdec.kernels.verification import reference

from .context import Context


class Drafts:
    """B rows of N nodes, ragged, that the target often follows; logits [R, V] in scattered order.

    Attributes:
        logits, index, tokens, valid, parents, temperature, seeds, positions, steps: as the verification kernels take them.
    """

    def __init__(self, context: Context, batch: int, width: int, vocab: int, chain: bool, dtype: torch.dtype):
        self.context, self.batch, self.width, self.vocab, self.chain = context, batch, width, vocab, chain
        device = context.device
        lengths = context.randint(0, width + 1, batch)
        lengths[0] = width
        self.valid = torch.arange(width, device=device) < lengths[:, None]
        line = torch.arange(-1, width - 1, device=device).expand(batch, -1).contiguous()
        below = context.randint(0, 2**20, batch, width) % (torch.arange(width, device=device) + 1) - 1
        self.parents = line if chain else below
        rows = batch * (width + 1)
        order = torch.randperm(rows + 3, generator=context.generator, device=device)
        self.index = order[:rows].view(batch, width + 1).contiguous()
        self.logits = (context.randn(rows + 3, vocab) * 2).to(dtype)
        self.temperature = torch.tensor([1.0, 0.7, 1.3, 2.5], device=device)[context.randint(0, 4, batch)]
        self.seeds = context.randint(-(2**62), 2**62, batch)
        self.positions, self.steps = context.randint(0, 2**20, batch), context.randint(0, 5000, batch)
        self.tokens = context.randint(0, vocab, batch, width)
        self.everywhere = torch.arange(batch, device=device)

    @property
    def tree(self) -> torch.Tensor | None:
        """What kernels take as parents."""
        return None if self.chain else self.parents

    def scores(self) -> torch.Tensor:
        """Float32 [B, N + 1, V] after temperature: what the definition adds noise to."""
        return self.logits.float()[self.index] / self.temperature[:, None, None]

    def depths(self) -> torch.Tensor:
        """Of root and nodes, int64 [B, N + 1]."""
        depth = torch.zeros(self.batch, self.width + 1, dtype=torch.long, device=self.tokens.device)
        for node in range(self.width):
            depth[:, node + 1] = depth.gather(1, self.parents[:, node : node + 1] + 1).squeeze(1) + 1
        return depth

    def choices(self, sampled: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's own tokens int64 [B, N + 1], and how far the second best score is behind [B, N + 1]."""
        scores, depth = self.scores(), self.depths()
        if sampled:
            for row in range(self.batch):
                seeds, positions = self.seeds[row].expand_as(depth[row]), self.positions[row] + depth[row]
                noise = random_bits.gumbel(
                    seeds, positions, torch.zeros_like(seeds), random_bits.TOKEN_STREAM, self.vocab
                )
                scores[row] += noise
        best = scores.topk(2, dim=2).values
        first = (scores == best[:, :, :1]).to(torch.uint8).argmax(2)  # of equals the lowest id
        return first, best[:, :, 0] - best[:, :, 1]

    def follow(self, choices: torch.Tensor) -> None:
        """Draft what the target chooses, most of the time."""
        follows = self.context.randint(0, 10, self.batch, self.width) < 7
        self.tokens = torch.where(follows, choices.gather(1, self.parents + 1), self.tokens).contiguous()

    def drawn(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft distributions near the target's [B, N + 1, V]; tokens drawn from them, siblings without replacement."""
        scores = self.scores()
        noisy = scores + 0.7 * self.context.randn(*scores.shape)
        noisy = noisy.masked_fill(self.context.randint(0, 10, *scores.shape) == 0, float("-inf"))
        probs = torch.softmax(noisy, -1)
        tokens = self.tokens.clone()
        parents = self.parents.tolist()
        for row in range(self.batch):
            for slot in range(self.width + 1):
                children = [node for node in range(self.width) if parents[row][node] + 1 == slot]
                if children:
                    drawn = torch.multinomial(probs[row, slot], len(children), generator=self.context.generator)
                    tokens[row, children] = drawn
        self.tokens = tokens
        return probs.contiguous(), (self.parents + 1).contiguous()

    def accepted(self, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The definition's walk along `choices`: path bool [B, N] and the token after it [B]."""
        trees = DraftTrees(self.tokens, [self.width] * self.batch, self.parents.cpu().numpy())
        ancestors = torch.from_numpy(trees.ancestors).to(self.tokens.device)
        path = reference.accepted_nodes(self.tokens, self.valid, self.parents, ancestors, choices)
        last = (path * torch.arange(1, self.width + 1, device=path.device)).amax(1)
        return path, choices.gather(1, last[:, None]).squeeze(1)

    def rejected(self, probs: torch.Tensor | None, prob_index: torch.Tensor | None, slack: float):
        """The definition's walk by rejection in float64: path, token, and rows [B] that hang on rounding: where numbers
        `slack` off decide otherwise."""
        wide = self.scores().double()

        def noise(depth: torch.Tensor) -> torch.Tensor:
            stream = random_bits.RESIDUAL_STREAM
            return random_bits.gumbel(self.seeds, self.positions + depth, self.steps, stream, self.vocab).double()

        uniform = random_bits.uniform(self.seeds, self.positions, self.steps, random_bits.ACCEPT_STREAM, self.width)
        found = []
        for factor in (1.0, 1 - slack, 1 + slack):
            found.append(
                rejection_walk(
                    self.tokens, self.valid, self.parents, probs, prob_index,
                    lambda node: torch.softmax(wide[self.everywhere, node], -1), uniform.double() * factor, noise,
                )
            )  # fmt: skip
        path, token = found[0]
        near = torch.zeros_like(token, dtype=torch.bool)
        for other, drawn in found[1:]:
            near |= (other != path).any(1) | (drawn != token)
        return path, token, near

    def poisoned(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs for the kernels: every node accepted, impossible lengths and tokens."""
        device = self.tokens.device
        return (
            torch.ones(self.batch, self.width, dtype=torch.bool, device=device),
            torch.full((self.batch,), -77, dtype=torch.int32, device=device),
            torch.full((self.batch,), -77, dtype=torch.long, device=device),
        )
