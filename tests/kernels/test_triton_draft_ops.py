"""Drafting-side kernels against the loop's own definitions, in the interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import DEVICE, RUNS_HERE, needs_triton

from hf_specdec.kernels.drafting import reference
from hf_specdec.sampling import DraftVocabularyLogitsWarper

if RUNS_HERE:
    from hf_specdec.kernels.drafting import triton as ops


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
@pytest.mark.parametrize("where", [..., (0, 1), (slice(None), 0, 2)], ids=["all", "a parent's", "some"])
def test_next_frontier_of_a_drafter_gone_wrong(where):
    """NaNs are the least likely, and whatever is chosen is a child."""
    g = torch.Generator().manual_seed(0)
    values, log_probs = -torch.rand(2, 3, generator=g), -torch.rand(2, 3, 4, generator=g)
    tokens = torch.randint(0, 1000, log_probs.shape, generator=g)
    log_probs[where] = float("nan")
    expected = reference.next_frontier(values, tokens, log_probs, 12)
    ours = ops.next_frontier(*on(values, tokens, log_probs), 12)
    assert all(torch.equal(own.cpu(), other) for own, other in zip(ours, expected, strict=True))
    assert ours[2].cpu().sort(1)[0].tolist() == [list(range(12))] * 2


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
    out = ops.to_target_vocabulary(logits.to(DEVICE), places)
    assert torch.equal(out.cpu(), DraftVocabularyLogitsWarper(target_ids, vocab)(None, logits).float())


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_with_a_vocabulary_of_their_own_use_it(dtype, monkeypatch):
    from hf_specdec.candidate_generators.checkpoints.target_parts import DraftVocabulary

    called = []
    original = ops.to_target_vocabulary
    monkeypatch.setattr(ops, "to_target_vocabulary", lambda *a: (called.append(1), original(*a))[1])
    ids = torch.tensor([7, 2, 30])
    logits = torch.randn(4, 3).to(dtype)
    found = {}
    for kernels in ("reference", "triton"):
        monkeypatch.setenv("HF_SPECDEC_KERNELS", kernels)
        found[kernels] = DraftVocabulary(40, ids.to(DEVICE)).scores(logits.to(DEVICE)).cpu()
    assert len(called) == 1 and torch.equal(found["triton"], found["reference"])
    assert found["triton"].isfinite().sum() == 12


@needs_triton
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    layers=st.integers(1, 9), tokens=st.integers(1, 7), hidden=st.sampled_from([1, 40, 2048, 2100]), count=st.integers(0, 9),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16, torch.float16])] * 2), seed=st.integers(0, 99),
)  # fmt: skip
def test_features_of_read_tokens(layers, tokens, hidden, count, dtypes, seed):
    g = torch.Generator().manual_seed(seed)
    taken = [torch.randn(tokens, hidden, generator=g).to(dtypes[0]) for _ in range(layers)]
    index = torch.randint(0, tokens, (count,), generator=g)
    out = ops.gather_features(on(*taken), *on(index), dtypes[1])
    expected = reference.gather_features(taken, index, dtypes[1])
    # The interpreter cuts off where a GPU rounds to bfloat16.
    rounded = 2**-7 if dtypes[1] == torch.bfloat16 != dtypes[0] and DEVICE == "cpu" else 0.0
    torch.testing.assert_close(out.cpu(), expected, rtol=rounded, atol=0.0)


@needs_triton
def test_features_that_do_not_fit_are_refused():
    index = torch.zeros(2, dtype=torch.long, device=DEVICE)
    for layers in ([torch.ones(3, 4), torch.ones(3, 5)], [torch.ones(3, 4), torch.ones(2, 4)]):
        with pytest.raises(ValueError, match="needs layers"):
            ops.gather_features(on(*layers), index, torch.float32)


@needs_triton
def test_heads_gather_by_it(monkeypatch):
    from hf_specdec.candidate_generators.checkpoints.target_parts import gather_features

    called = []
    original = ops.gather_features
    monkeypatch.setattr(ops, "gather_features", lambda *a: (called.append(len(a[0])), original(*a))[1])
    layers, index = on(*torch.randn(3, 5, 6)), on(torch.tensor([4, 0]))[0]
    found = {}
    for kernels in ("reference", "triton"):
        monkeypatch.setenv("HF_SPECDEC_KERNELS", kernels)
        found[kernels] = gather_features(layers, index.cpu(), index.device, torch.float32).cpu()
    views = [layer.T.contiguous().T for layer in layers]
    assert torch.equal(gather_features(views, index, index.device, torch.float32).cpu(), found["reference"])
    mixed = [layers[0].to(torch.float16), *layers[1:]]
    assert gather_features(mixed, index, index.device, torch.float32).shape == (2, 18)
    assert called == [3, 3, 1, 1, 1] and torch.equal(found["triton"], found["reference"])
