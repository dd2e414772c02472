"""Drafting-side kernels against the loop's own definitions, in the interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import DEVICE, RUNS_HERE, needs_triton, run_interpreted

from hf_specdec.decoding.warpers import DraftVocabularyLogitsWarper
from hf_specdec.kernels import reference

if RUNS_HERE:
    from hf_specdec.kernels import draft_ops as ops


def test_in_a_process_of_its_own():
    run_interpreted(__file__)


def on(*tensors):
    return tuple(t.to(DEVICE) for t in tensors)


@needs_triton
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 4), st.integers(1, 6), st.integers(1, 10), st.booleans())
def test_next_frontier(seed, rows, frontier, width, ties):
    """Sums, and the best of all children; of equals the first."""
    g = torch.Generator().manual_seed(seed)
    values, log_probs = -torch.rand(rows, frontier, generator=g), -torch.rand(rows, frontier, width, generator=g)
    if ties:
        values, log_probs = (values * 4).round(), (log_probs * 4).round()
    tokens = torch.randint(0, 1000, log_probs.shape, generator=g)
    limits = torch.randint(1, 4, (rows,), generator=g, dtype=torch.int32)
    keep = min(width, frontier * width)
    expected = reference.next_frontier(values, tokens, log_probs, keep, limits, 2)
    ours = ops.next_frontier(*on(values, tokens, log_probs), keep, limits.to(DEVICE), 2)
    assert all(torch.equal(own.cpu(), other) for own, other in zip(ours, expected, strict=True))


@needs_triton
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 40), st.integers(1, 50), st.booleans())
def test_prune_tree(seed, rows, size, count, ties):
    """Nodes kept, parents renumbered, padding a chain."""
    g = torch.Generator().manual_seed(seed)
    parents = torch.minimum(
        (torch.rand(rows, size, generator=g) * (torch.arange(size) + 1)).long() - 1, torch.arange(-1, size - 1)
    )
    steps = torch.rand(rows, size, generator=g)
    steps = (steps * 2).round() if ties else steps
    values = torch.zeros(rows, size)
    for node in range(size):
        above = torch.where(parents[:, node] < 0, 0.0, values.gather(1, parents[:, node].clamp(min=0)[:, None])[:, 0])
        values[:, node] = above - steps[:, node]
    empty = torch.rand(rows, generator=g) < 0.2
    values[empty] = float("-inf")
    tokens = torch.randint(1, 1000, values.shape, generator=g)
    expanded = torch.randint(-1, 9, values.shape, generator=g)
    expected = reference.prune_tree(tokens, values, parents, expanded, count)
    ours = ops.prune_tree(*on(tokens, values, parents, expanded), count)
    assert all(torch.equal(own.cpu(), other) for own, other in zip(ours, expected, strict=True))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [50, 2048, 3001])
def test_draft_vocabulary(dtype, vocab):
    g = torch.Generator().manual_seed(vocab)
    target_ids = torch.randperm(vocab, generator=g)[: vocab // 3].sort().values
    logits = torch.randn(3, len(target_ids), generator=g).to(dtype)
    places = ops.draft_places(target_ids.to(DEVICE), vocab)
    out = torch.full((3, vocab), float("nan"), device=DEVICE)
    ops.to_target_vocabulary(logits.to(DEVICE), places, out=out)
    assert torch.equal(out.cpu(), DraftVocabularyLogitsWarper(target_ids, vocab)(None, logits).float())
    probs = torch.softmax(logits.float(), -1)
    wide = ops.to_target_vocabulary(probs.to(DEVICE), places, fill=0.0).cpu()
    assert torch.equal(wide, torch.zeros(3, vocab).index_copy(1, target_ids, probs))
    ids = torch.randint(0, len(target_ids), (5, 7, 9), generator=g)
    assert torch.equal(ops.to_target_ids(*on(ids, target_ids)).cpu(), target_ids[ids])


@needs_triton
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(0, 9), st.booleans())
def test_features_of_accepted_tokens(seed, batch, width, include_root):
    g = torch.Generator().manual_seed(seed)
    path = torch.rand(batch, width, generator=g) < 0.5
    total = batch * (width + 1) + 5
    index = torch.randperm(total, generator=g)[: batch * (width + 1)].view(batch, width + 1).contiguous()
    features = torch.randn(total, 70, generator=g).to(torch.bfloat16)
    chosen = torch.cat([torch.full((batch, 1), include_root), path], 1)
    expected = index[chosen]  # row by row
    counts = chosen.sum(1)
    sources, starts = ops.accepted_rows(*on(index, path, path.sum(1).int()), include_root)
    assert starts.tolist() == [0, *counts.cumsum(0).tolist()]
    assert sources[: len(expected)].tolist() == expected.tolist() and (sources[len(expected) :] == -1).all()
    out = torch.full((batch * (width + 1), 70), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    ops.gather_features(features.to(DEVICE)[:, :], sources, out)
    assert torch.equal(out.cpu()[: len(expected)], features[expected])
    assert (out.cpu()[len(expected) :] == 0).all()
