"""Verification kernels against their definitions: rows that end otherwise, but for those that hang on float rounding."""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Iterator

import torch

from .context import Context
from .drafts import Drafts
from .report import Row, at_most

MODULES = ("verification", "rejection", "random_bits")
TIE = 1e-5  # scores that near are no different


def follow_errors(drafts: Drafts, sampled: bool) -> int:
    """Rows of greedy or coupled verification that are wrong."""
    from hf_specdec.kernels.verification.triton import target_choices, verify_choices

    choices, gap = drafts.choices(sampled)
    drafts.follow(choices)
    noise = {}
    if sampled:
        flags = torch.ones(drafts.batch, dtype=torch.bool, device=drafts.tokens.device)
        noise = dict(seeds=drafts.seeds, positions=drafts.positions, do_sample=flags)
    arguments = dict(parents=drafts.tree, temperature=drafts.temperature, **noise)
    ours = target_choices(drafts.logits, drafts.index, drafts.valid, **arguments)
    exists = torch.nn.functional.pad(drafts.valid, (1, 0), value=True)
    wrong = (exists & (ours != choices) & ((gap >= TIE) | (not sampled))).any(1)
    path, lengths, token = verify_choices(
        drafts.logits, drafts.index, drafts.tokens, drafts.valid, out=drafts.poisoned(), **arguments
    )
    wanted, following = drafts.accepted(torch.where(exists, ours, choices))
    wrong |= (path != wanted).any(1) | (lengths != wanted.sum(1)) | (token != following)
    return int(wrong.sum())


def rejection_errors(drafts: Drafts, points: bool) -> int:
    """Rows of rejection verification that are wrong."""
    from hf_specdec.kernels.rejection.triton import verify_rejection

    probs = prob_index = None
    if points:
        drafts.follow(drafts.choices(False)[0])
    else:
        probs, prob_index = drafts.drawn()
    path, token, near = drafts.rejected(probs, prob_index, slack=1e-5)
    ours = verify_rejection(
        drafts.logits, drafts.index, drafts.tokens, drafts.valid, drafts.seeds, drafts.positions, drafts.steps,
        parents=drafts.tree, probs=probs, prob_index=prob_index, temperature=drafts.temperature, out=drafts.poisoned(),
    )  # fmt: skip
    same = (ours[0] == path).all(1) & (ours[1] == path.sum(1)) & (ours[2] == token)
    return int((~same & ~near).sum())


def rows(context: Context, name: str, dtype: torch.dtype) -> Iterator[Row]:
    """A line per rule and shape."""
    times = 1 if context.toy else 3
    for chain in (True, False):
        shape = "chains" if chain else "trees"
        sizes = (2, 4, 150) if context.toy else (16, 7 if chain else 24, 128256)
        draw = lambda chain=chain, sizes=sizes: Drafts(context, *sizes, chain, dtype)  # noqa: E731
        for what, run in (
            ("greedy", lambda d: follow_errors(d, False)),
            ("coupled", lambda d: follow_errors(d, True)),
            ("rejection, points", lambda d: rejection_errors(d, True)),
            ("rejection, distributions", lambda d: rejection_errors(d, False)),
        ):
            wrong = sum(run(draw()) for _ in range(times))
            yield at_most(
                "correctness", f"verification {name}: {what}, {shape}", wrong, 0, f"of {times * sizes[0]} rows wrong"
            )
