"""Draft-side kernels against their definitions, exactly."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .context import Context
from .report import Row, at_most

MODULES = ("drafting",)


def frontier_errors(context: Context, rows: int, frontier: int, width: int) -> int:
    """Results of `next_frontier` that differ from sums and a stable sort of all children."""
    from hf_specdec.kernels.drafting.triton import next_frontier

    values, log_probs = -context.randn(rows, frontier).abs(), -context.randn(rows, frontier, width).abs()
    tokens = context.randint(0, 1000, rows, frontier, width)
    limits = context.randint(1, 4, rows).int()
    children = (values[:, :, None] + log_probs).flatten(1)
    children[limits < 2] = float("-inf")
    best = children.sort(dim=1, descending=True, stable=True)
    chosen = best.indices[:, :width]
    wanted = (children, best.values[:, :width], chosen, tokens.flatten(1).gather(1, chosen), chosen // width)
    found = next_frontier(values, tokens, log_probs, width, limits, 2)
    return sum(not torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


def prune_errors(context: Context, rows: int, size: int, count: int) -> int:
    """Rows of `prune_tree` whose nodes, parents or lengths are not those of the likeliest nodes."""
    from hf_specdec.kernels.drafting.triton import prune_tree

    parents = context.randint(0, 2**20, rows, size) % (torch.arange(size, device=context.device) + 1) - 1
    steps, values = context.randn(rows, size).abs(), torch.zeros(rows, size, device=context.device)
    for node in range(size):
        above = values.gather(1, parents[:, node : node + 1].clamp(min=0)).squeeze(1)
        values[:, node] = torch.where(parents[:, node] < 0, 0.0, above) - steps[:, node]
    tokens, expanded = context.randint(1, 1000, rows, size), context.randint(-1, 9, rows, size)
    ours = [each.cpu() for each in prune_tree(tokens, values, parents, expanded, count)]
    wrong = 0
    for row in range(rows):
        keep = values[row].sort(descending=True, stable=True).indices[:count].sort().values.cpu()
        place = {int(node): i for i, node in enumerate(keep)} | {-1: -1}
        length = len(keep)
        wanted = (
            tokens[row].cpu()[keep],
            torch.tensor([place[int(p)] for p in parents[row].cpu()[keep]]),
            expanded[row].cpu()[keep],
            keep,
        )
        same = all(torch.equal(out[row, :length], each) for out, each in zip(ours[:4], wanted, strict=True))
        wrong += not (same and int(ours[4][row]) == length)
    return wrong


def vocabulary_errors(context: Context, dtype: torch.dtype, vocab: int) -> int:
    """Wrong elements of widened logits."""
    from hf_specdec.kernels.drafting import triton as ops

    target_ids = torch.randperm(vocab, generator=context.generator, device=context.device)[: vocab // 4].sort().values
    logits = context.randn(5, len(target_ids), dtype=dtype)
    out = ops.to_target_vocabulary(logits, ops.draft_places(target_ids, vocab))
    wanted = torch.full((5, vocab), float("-inf"), device=context.device)
    wanted[:, target_ids] = logits.float()
    return wanted.numel() if out is None else int((out != wanted).sum())


def feature_errors(context: Context, dtype: torch.dtype, layers: int, tokens: int, hidden: int) -> int:
    """Wrong elements of gathered hidden states."""
    from hf_specdec.kernels.drafting import triton as ops

    taken = [context.randn(tokens, hidden, dtype=dtype) for _ in range(layers)]
    index = context.randint(0, tokens, tokens + 3)
    wanted = torch.cat([layer[index] for layer in taken], dim=1)
    return int((ops.gather_features(taken, index, dtype) != wanted).sum())


def rows(context: Context, name: str, dtype: torch.dtype) -> Iterator[Row]:
    """A line per operation."""
    toy, section = context.toy, "correctness"
    wrong = vocabulary_errors(context, dtype, 200 if toy else 128256)
    yield at_most(section, f"drafting {name}: draft vocabulary", wrong, 0, "wrong elements")
    wrong = feature_errors(context, dtype, *((5, 4, 40) if toy else (5, 256, 4096)))
    yield at_most(section, f"drafting {name}: features", wrong, 0, "wrong elements")
    wrong = frontier_errors(context, *((2, 3, 4) if toy else (64, 10, 10)))
    yield at_most(section, f"drafting {name}: next frontier", wrong, 0, "wrong results")
    wrong = prune_errors(context, *((2, 20, 6) if toy else (16, 510, 59)))
    yield at_most(section, f"drafting {name}: prune tree", wrong, 0, "wrong rows")
