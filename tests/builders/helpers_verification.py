"""Random chains put through `verify`, with every number that a verification rule used, for walks written in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hf_specdec.config import SpeculativeConfig
from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.sequence import Sequence
from hf_specdec.kernels import random_bits as rb
from hf_specdec.verification.verify import Verdict, begin_verification


def verdict_of(trees: DraftTrees, scores: torch.Tensor, rows: list[Sequence], config: SpeculativeConfig) -> Verdict:
    """`begin_verification`, then wait for the verdict."""
    return begin_verification(trees, scores, rows, config).wait()


def verify(trees: DraftTrees, scores: torch.Tensor, rows: list[Sequence], rule: str):
    """The verdict under a rule by name."""
    return verdict_of(trees, scores, rows, SpeculativeConfig(rejection_sample_method=rule))


def emitted_by(verdict, i: int) -> list[int]:
    """What a verdict appends to row i."""
    return [*verdict.tokens[i, verdict.accepted[i]].tolist(), int(verdict.next_tokens[i])]


@dataclass
class VerifiedChain:
    """A row that was verified.

    Attributes:
        tokens: the n drafted ones.
        q: the [width, V] distributions they were drawn from; None: they were deterministic.
        p: the target's [n + 1, V].
        uniforms: one number per draft.
        noise: the Gumbel noise [V] of the token emitted at a depth.
        emitted: the verdict.
    """

    tokens: list[int]
    q: list[list[float]] | None
    p: list[list[float]]
    uniforms: list[float]
    noise: Callable[[int], list[float]]
    emitted: list[int]


def verified_chains(
    rule: str, seed: int, vocab: int, stochastic: bool, batch: int = 400, width: int = 4
) -> Iterator[VerifiedChain]:
    """Sampled rows with 0 to `width` drafts from a random drafter, each row with random numbers of its own, in one batch."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, width + 1, (batch,), generator=g).tolist()
    q = torch.rand(batch, width, vocab, generator=g).mul(3).softmax(-1)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=g).view(batch, width)
    scores = torch.randn(sum(lengths) + batch, vocab, generator=g)
    rows = [Sequence([0] * (1 + i % 7), 99, do_sample=True, seed=i, num_steps=i % 3) for i in range(batch)]
    behind = torch.arange(width) >= torch.tensor(lengths)[:, None]  # no draft's: these may be anything
    given = q.masked_fill(behind[:, :, None], float("nan")) if stochastic else None
    verdict = verify(DraftTrees(tokens, lengths, None, given), scores, rows, rule)
    for i, (seq, own) in enumerate(zip(rows, scores.split([n + 1 for n in lengths]), strict=True)):

        def keys(depth: int, seq=seq) -> list[torch.Tensor]:
            return [torch.tensor([k]) for k in (seq.seed, len(seq.tokens) + depth, seq.num_steps)]

        yield VerifiedChain(
            tokens=tokens[i, : lengths[i]].tolist(),
            q=q[i].double().tolist() if stochastic else None,
            p=own.double().softmax(-1).tolist(),
            uniforms=rb.uniform(*keys(0), rb.ACCEPT_STREAM, width)[0].double().tolist(),
            noise=lambda depth, keys=keys: rb.gumbel(*keys(depth), rb.RESIDUAL_STREAM, vocab)[0].tolist(),
            emitted=emitted_by(verdict, i),
        )
