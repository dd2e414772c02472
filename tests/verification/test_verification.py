"""Verification against walks written in plain Python."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers_verification import emitted_by, verified_chains, verify
from hypothesis import given, settings

from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.sequence import Sequence
from hf_specdec.kernels import random_bits as rb
from hf_specdec.kernels.rejection import reference as ops

VOCAB = 4


@st.composite
def problems(draw):
    """Trees with repeated siblings, and how each row is decoded."""
    tokens, parents, sampled, extra = [], [], [], []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, 8))
        tokens.append(draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count)))
        parents.append([draw(st.integers(-1, i - 1)) for i in range(count)])
        sampled.append(draw(st.booleans()))
        extra.append(draw(st.integers(1, 5)))
    return tokens, parents, sampled, extra, draw(st.integers(0, 2**20))


def sequences_of(sampled, extra, seed):
    return [
        Sequence([1] * n, 100, do_sample=s, seed=seed + 17 * i, num_steps=i)
        for i, (s, n) in enumerate(zip(sampled, extra, strict=True))
    ]


def split_scores(scores, tokens):
    """Each row's own [count + 1, V]."""
    return scores.split([len(row) + 1 for row in tokens])


def walk_from(node, tokens, parents, scores, seq, done):
    """Ids emitted below `node`: the target's choice, and on along a child that equals it (of equal ones, the longest way)."""
    choice = scores[node + 1]
    if seq.do_sample:
        key = (torch.tensor([k]) for k in (seq.seed, len(seq.tokens) + done, 0))
        choice = choice + rb.gumbel(*key, rb.TOKEN_STREAM, VOCAB)[0]
    token = int(choice.argmax())
    options = [
        walk_from(i, tokens, parents, scores, seq, done + 1)
        for i, p in enumerate(parents)
        if p == node and tokens[i] == token
    ]
    return [token, *max(options, key=len, default=[])]


def with_consistent_siblings(scores, tokens, parents):
    """Equal siblings have equal prefixes, so the target says the same after them: copy the scores of the first."""
    seen = {}
    out = scores.clone()
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        prefix = (*(seen[parent] if parent >= 0 else ()), token)
        first = next((j for j, p in seen.items() if p == prefix), i)
        seen[i] = prefix
        out[i + 1] = out[first + 1]
    return out


@settings(max_examples=200, deadline=None)
@given(problems())
def test_greedy_and_coupled_walks(problem):
    tokens, parents, sampled, extra, seed = problem
    rows = sequences_of(sampled, extra, seed)
    count = sum(map(len, tokens)) + len(tokens)
    scores = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))
    parts = split_scores(scores, tokens)
    parts = [with_consistent_siblings(*row) for row in zip(parts, tokens, parents, strict=True)]
    verdict = verify(DraftTrees.from_lists(tokens, parents), torch.cat(parts), rows, "coupled")
    for i, seq in enumerate(rows):
        assert emitted_by(verdict, i) == walk_from(-1, tokens[i], parents[i], parts[i], seq, 0)
        path = np.flatnonzero(verdict.accepted[i]).tolist()
        assert [parents[i][n] for n in path] == [-1, *path][: len(path)]  # a path from the root, inside the row
        assert all(n < len(tokens[i]) for n in path)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_chains_equal_trees_of_only_children(problem):
    tokens, _, sampled, extra, seed = problem
    rows = sequences_of(sampled, extra, seed)
    scores = torch.randn(sum(map(len, tokens)) + len(tokens), VOCAB, generator=torch.Generator().manual_seed(seed))
    chain = DraftTrees.from_lists(tokens)
    tree = DraftTrees.from_lists(tokens, [list(range(-1, len(row) - 1)) for row in tokens])
    for rule in ("greedy", "coupled", "rejection", "typical"):
        a, b = verify(chain, scores, rows, rule), verify(tree, scores, rows, rule)
        assert [emitted_by(a, i) for i in range(len(rows))] == [emitted_by(b, i) for i in range(len(rows))], rule


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from(["coupled", "rejection", "typical"]), st.booleans())
def test_a_row_is_verified_alone_as_in_a_batch(problem, rule, stochastic):
    """Mixed batches: greedy and sampled rows, with and without drafts, padded to the largest tree."""
    tokens, parents, sampled, extra, seed = problem
    rows = sequences_of(sampled, extra, seed)
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(sum(map(len, tokens)) + len(tokens), VOCAB, generator=g)
    trees = DraftTrees.from_lists(tokens, parents)
    if stochastic:
        trees.probs = torch.rand(len(tokens), trees.tokens.shape[1] + 1, VOCAB, generator=g).softmax(-1)
        trees.prob_index = trees.parent_index + 1
    verdict = verify(trees, scores, rows, rule)
    for i, part in enumerate(split_scores(scores, tokens)):
        n = len(tokens[i])
        alone = DraftTrees.from_lists([tokens[i]], [parents[i]])
        if stochastic:
            alone.probs, alone.prob_index = trees.probs[i : i + 1, : n + 1], trees.prob_index[i : i + 1, :n]
        single = verify(alone, part, [rows[i]], rule)
        assert emitted_by(single, 0) == emitted_by(verdict, i)
        assert not verdict.accepted[i, n:].any()
        if not sampled[i]:
            consistent = with_consistent_siblings(part, tokens[i], parents[i])
            if torch.equal(consistent, part):
                assert emitted_by(verdict, i) == walk_from(-1, tokens[i], parents[i], part, rows[i], 0)


def test_padding_is_never_accepted():
    """Padded entries hold token 0 with a parent in the row; the target choosing 0 must not accept them."""
    scores = torch.zeros(3, VOCAB)
    scores[:, 0] = 5.0
    trees = DraftTrees(torch.zeros(2, 3, dtype=torch.long), [1, 0])
    rows = [Sequence([1], 9), Sequence([1, 2], 9, do_sample=True, seed=3)]
    for rule in ("coupled", "rejection", "block", "typical"):
        verdict = verify(trees, scores, rows, rule)
        assert verdict.accepted.tolist()[0] == [True, False, False] and not verdict.accepted[1].any(), rule
    shaped = DraftTrees(trees.tokens, [1, 0], np.array([[-1, -1, 0], [-1, -1, 0]]))
    assert verify(shaped, scores, rows, "coupled").accepted.tolist() == [[True, False, False], [False] * 3]


# ---- speculative sampling -------------------------------------------------------------------------------------------


def leviathan(tokens, q, p, uniforms, noise):
    """Algorithm 1 of Leviathan et al. 2023 for one chain, in float64 and plain Python; `q`: rows of numbers, or None (points).

    Returns what is emitted and how near any comparison was to a tie (such cases are not compared).
    """
    near, emitted = 1.0, []
    for k, token in enumerate(tokens):
        q_k = q[k] if q is not None else [float(v == token) for v in range(VOCAB)]
        near = min(near, abs(uniforms[k] * q_k[token] - p[k][token]))
        if uniforms[k] * q_k[token] < p[k][token]:  # u < p / q
            emitted.append(token)
            continue
        left = [max(a - b, 0.0) for a, b in zip(p[k], q_k, strict=True)]
        return [*emitted, *_draw([x / sum(left) for x in left], noise(k))], near
    return [*emitted, *_draw(p[len(tokens)], noise(len(tokens)))], near


def _draw(p, noise):
    return [max((v for v in range(VOCAB) if p[v] > 0), key=lambda v: np.log(p[v]) + noise[v])]


@pytest.mark.parametrize("stochastic", [False, True])
def test_rejection_on_chains_is_leviathans(stochastic):
    compared = rejected = 0
    for row in verified_chains("rejection", 5, VOCAB, stochastic):
        expected, near = leviathan(row.tokens, row.q, row.p, row.uniforms, row.noise)
        if near > 1e-6:
            compared += 1
            assert row.emitted == expected
            rejected += len(expected) <= len(row.tokens)
    assert compared > 0.98 * 400 and rejected > 400 / 5


def multi_candidate(tokens, parents, q, p, uniforms, gumbel):
    """Sibling by sibling: q loses the tokens tried, p loses q (EAGLE-1, SpecInfer), in float64; `q`: {node: list}."""
    near, node, emitted, left = 1.0, -1, [], None
    while True:
        left, over = np.array(p[node + 1]), np.array(q[node + 1]) if q is not None else None
        accepted = None
        for child in [i for i, parent in enumerate(parents) if parent == node]:
            token = tokens[child]
            mass = over[token] if over is not None else 1.0
            near = min(near, abs(uniforms[child] * mass - left[token]))
            if mass > 0 and uniforms[child] * mass < left[token]:
                accepted = child
                break
            left = np.maximum(left - (over if over is not None else np.eye(VOCAB)[token]), 0)
            left = left / left.sum()
            if over is not None:
                over = np.where(np.arange(VOCAB) == token, 0, over)
                over = over / over.sum()
        if accepted is None:
            return [*emitted, *_draw(left.tolist(), gumbel(len(emitted)))], near
        emitted.append(tokens[accepted])
        node = accepted


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_rejection_on_trees_is_multi_candidate_sampling(stochastic, seed):
    """Breadth-first and depth-first trees, siblings drawn without replacement from q (or distinct points)."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"breadth": [-1, -1, -1, 0, 0, 1, 2, 3], "depth": [-1, 0, 1, 1, -1, 4, 4, -1]}
    for parents in shapes.values():
        batch, width = 200, len(parents)
        q = torch.rand(batch, width + 1, VOCAB, generator=g).mul(2).softmax(-1)
        tokens = torch.zeros(batch, width, dtype=torch.long)
        for node in range(-1, width):
            children = [i for i, parent in enumerate(parents) if parent == node]
            if children:
                tokens[:, children] = torch.multinomial(q[:, node + 1], len(children), generator=g)
        uniforms = torch.rand(batch, width, generator=g)
        noise = -torch.empty(batch, 9, VOCAB).exponential_(generator=g).log()
        p = torch.randn(batch, width + 1, VOCAB, generator=g).softmax(-1)
        table = torch.tensor(parents).expand(batch, -1)
        rows = torch.arange(batch)
        accepted, following = ops.rejection_walk(
            tokens, torch.ones(batch, width, dtype=torch.bool), table, q if stochastic else None, table + 1,
            lambda node, p=p, rows=rows: p[rows, node], uniforms, lambda depth, noise=noise, rows=rows: noise[rows, depth],
        )  # fmt: skip
        compared = 0
        for i in range(batch):
            expected, near = multi_candidate(
                tokens[i].tolist(), parents, q[i].double().numpy() if stochastic else None, p[i].double().numpy(),
                uniforms[i].tolist(), noise[i].tolist().__getitem__,
            )  # fmt: skip
            if near > 1e-6:
                compared += 1
                assert [*tokens[i, accepted[i]].tolist(), int(following[i])] == expected
        assert compared > 0.95 * batch


def test_certain_targets():
    """A target that is certain accepts its token and nothing else, under every rule, also at p = 0 and p = 1."""
    scores = torch.full((3, VOCAB), float("-inf"))
    scores[[0, 1, 2], [2, 3, 1]] = 0.0
    for tokens, expected in (([2, 3], [2, 3, 1]), ([2, 0], [2, 3]), ([1, 3], [2])):
        for probs in (None, torch.full((1, 2, VOCAB), 1 / VOCAB)):
            for rule in ("coupled", "rejection", "block", "typical"):
                row = Sequence([0], 9, do_sample=True, seed=4)
                verdict = verify(DraftTrees(torch.tensor([tokens]), [2], None, probs), scores, [row], rule)
                assert emitted_by(verdict, 0) == expected


BROKEN = {
    "nan": [0.0, float("nan"), 1.0, 0.5],
    "all removed": [float("-inf")] * 4,
    "inf": [0.0, float("inf"), 1.0, 2.0],
}
SAMPLING_RULES = ["coupled", "rejection", "block", "typical"]


@pytest.mark.parametrize("rule", SAMPLING_RULES)
@pytest.mark.parametrize("name", BROKEN)
def test_rows_that_sample_from_nothing_are_an_error(rule, name):
    """As transformers raises, but only for scores that choose a token: not after a rejected draft, not in a greedy row."""
    trees = DraftTrees(torch.tensor([[2, 1]]), [2], None)
    certain = torch.full((3, VOCAB), -50.0)
    certain[[0, 1, 2], [2, 1, 3]] = 50.0  # accepts both drafts
    for node in range(3):
        scores = certain.clone()
        scores[node] = torch.tensor(BROKEN[name])
        with pytest.raises(RuntimeError, match="No token can be sampled in row 0"):
            verify(trees, scores, [Sequence([0], 9, do_sample=True, seed=4)], rule)
        verify(trees, scores, [Sequence([0], 9)], rule)
    scores = certain.clone()
    scores[0, 2], scores[0, 3] = -50.0, 50.0  # rejects the first draft
    scores[1:] = torch.tensor(BROKEN[name])
    verdict = verify(trees, scores, [Sequence([0], 9, do_sample=True, seed=4)], rule)
    assert emitted_by(verdict, 0) == [3]
