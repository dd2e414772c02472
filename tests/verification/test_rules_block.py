"""Block verification: exact by enumeration, never shorter than token-wise rejection, and equal to a plain walk."""

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers_markov import Drafts, draw
from helpers_verification import verdict_of as verify
from helpers_verification import verified_chains
from hypothesis import given, settings

from hf_specdec.config import SpeculativeConfig, SpeculativeConfigError
from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.sequence import Sequence
from hf_specdec.kernels.rejection import reference as ops

VOCAB, DEPTH = 3, 3
BLOCK = SpeculativeConfig(rejection_sample_method="block")
NEVER, ALWAYS = 1 - 1e-12, 1e-300  # uniform numbers that accept only what is certain, or all that is possible


class Tables:
    """Target p and drafter q after every prefix of at most DEPTH tokens: float64 [V] each."""

    def __init__(self, p, q):
        self.p, self.q = p, q

    @classmethod
    def random(cls, seed, sharpness, points=False):
        g = np.random.default_rng(seed)
        prefixes = [x for n in range(DEPTH + 1) for x in itertools.product(range(VOCAB), repeat=n)]
        made = []
        for _ in range(2):
            table = {x: g.dirichlet(np.full(VOCAB, sharpness)) for x in prefixes}
            for row in table.values():  # zeros, too
                if g.random() < 0.2:
                    row[g.integers(VOCAB)] = 0
                    row /= row.sum()
            made.append(table)
        p, q = made
        if points:
            q = {x: np.eye(VOCAB)[row.argmax()] for x, row in q.items()}
        return cls(p, q)

    def chance(self, table, tokens):
        return math.prod(table[tokens[:i]][tokens[i]] for i in range(len(tokens)))


def accept(tables, drafts, n, uniform, points=False):
    """`reference.block_acceptance` on rows `drafts` of DEPTH columns of which n are valid."""
    tokens = torch.tensor(drafts)
    q = torch.tensor(np.array([[tables.q[x[:i]] for i in range(DEPTH)] for x in drafts]))
    p = torch.tensor(np.array([[tables.p[x[: min(i, n)]] for i in range(DEPTH + 1)] for x in drafts]))
    rows = torch.arange(len(drafts))
    valid = (torch.arange(DEPTH) < n).expand(len(drafts), -1)
    index = torch.arange(DEPTH).expand(len(drafts), -1)
    return ops.block_acceptance(
        tokens, valid, None if points else q, index, lambda node: p[rows, node], torch.as_tensor(uniform).expand(len(drafts), -1)
    )  # fmt: skip


def length_chances(tables, drafts, n, points=False):
    """P(length = i | draft) [rows, n + 1] of the implementation, each test's threshold found by bisection."""
    h = np.ones((len(drafts), n + 1))
    for i in range(1, n + 1):
        low, high = np.zeros(len(drafts)), np.ones(len(drafts))
        for _ in range(45):
            uniform = np.full((len(drafts), DEPTH), NEVER)
            uniform[:, i - 1] = np.clip((low + high) / 2, ALWAYS, NEVER)
            taken = (accept(tables, drafts, n, uniform, points)[0] >= i).numpy()
            low, high = np.where(taken, (low + high) / 2, low), np.where(taken, high, (low + high) / 2)
        h[:, i] = low
    return np.stack([h[:, i] * np.prod(1 - h[:, i + 1 :], axis=1) for i in range(n + 1)], axis=1)


def output_chances(tables, n, points=False):
    """The distribution of the first n + 1 tokens when one round with n drafts is followed by plain sampling; E[accepted]."""
    drafts = [x for x in itertools.product(range(VOCAB), repeat=DEPTH) if tables.chance(tables.q, x[:n]) > 0]
    drafts = list({x[:n]: x for x in drafts}.values())
    chances = length_chances(tables, drafts, n, points)
    out, expected = np.zeros((VOCAB,) * (n + 1)), 0.0
    for i in range(n + 1):
        uniform = np.full((1, DEPTH), NEVER)
        uniform[0, :i] = ALWAYS
        length, left_over = accept(tables, drafts, n, uniform, points)
        for row, draft in enumerate(drafts):
            mass = tables.chance(tables.q, draft[:n]) * chances[row, i]
            if mass < 1e-11:
                continue
            assert length[row] == i
            expected += mass * i
            for y, share in enumerate((left_over[row] / left_over[row].sum()).tolist()):
                done = (*draft[:i], y)
                for rest in itertools.product(range(VOCAB), repeat=n - i):
                    text = (*done, *rest)
                    follow = math.prod(tables.p[text[:k]][text[k]] for k in range(i + 1, n + 1))
                    out[text] += mass * share * follow
    return out, expected


def token_wise_length(tables, n):
    """E[accepted] of token-wise rejection: the sum of the products of min(p, q)."""
    return sum(
        math.prod(min(tables.p[x[:i]][x[i]], tables.q[x[:i]][x[i]]) for i in range(len(x)))
        for m in range(1, n + 1)
        for x in itertools.product(range(VOCAB), repeat=m)
    )


@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("n", range(DEPTH + 1))
@pytest.mark.parametrize("seed", range(4))
def test_exact_by_enumeration(seed, n, points):
    """Every draft times every outcome of the tests: what comes out has the target's distribution."""
    tables = Tables.random(seed, sharpness=(0.3, 1.0)[seed % 2], points=points)
    out, expected = output_chances(tables, n, points)
    for text in itertools.product(range(VOCAB), repeat=n + 1):
        assert abs(out[text] - tables.chance(tables.p, text)) < 1e-8, text
    token_wise = token_wise_length(tables, n)
    if points or n < 2:
        assert abs(expected - token_wise) < 1e-8
    else:
        assert expected > token_wise - 1e-8


def test_the_papers_example():
    """Sun et al., section 2: p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 token by token, 11/9 as a block."""
    prefixes = [x for m in range(DEPTH + 1) for x in itertools.product(range(VOCAB), repeat=m)]
    p, q = np.array([1 / 3, 2 / 3, 0]), np.array([2 / 3, 1 / 3, 0])
    tables = Tables(dict.fromkeys(prefixes, p), dict.fromkeys(prefixes, q))
    assert abs(token_wise_length(tables, 2) - 10 / 9) < 1e-12
    assert abs(output_chances(tables, 2)[1] - 11 / 9) < 1e-8


def plain_weights(tables, x):
    """w after the drafted tokens x, in plain Python."""
    w = 1.0
    for i in range(len(x)):
        w = min(1.0, w * tables.p[x[:i]][x[i]] / tables.q[x[:i]][x[i]]) if tables.q[x[:i]][x[i]] > 0 else 0.0
    return w


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.2, 1.0, 5.0]))
def test_never_shorter_than_token_wise(seed, sharpness):
    """E[accepted] is the sum over prefixes of q(x) w(x), at least that of token-wise rejection at every length."""
    tables = Tables.random(seed, sharpness)
    total = 0.0
    for m in range(1, DEPTH + 1):
        total += sum(
            tables.chance(tables.q, x) * plain_weights(tables, x) for x in itertools.product(range(VOCAB), repeat=m)
        )
        assert total >= token_wise_length(tables, m) - 1e-12


def test_the_implementation_has_these_weights():
    tables = Tables.random(11, 1.0)
    for n in range(1, DEPTH + 1):
        drafts = list(itertools.product(range(VOCAB), repeat=DEPTH))
        reach = length_chances(tables, drafts, n)[:, ::-1].cumsum(1)[:, ::-1]  # P(length >= i | whole draft)
        for i in range(1, n + 1):
            for x in itertools.product(range(VOCAB), repeat=i):
                if tables.chance(tables.q, x) > 0:
                    after = {d: tables.chance(tables.q, d[:n]) for d in drafts if d[:i] == x}
                    mean = sum(after[d] * reach[drafts.index(d), i] for d in after) / sum(after.values())
                    assert abs(mean - plain_weights(tables, x)) < 1e-8


# ---- through verify() -----------------------------------------------------------------------------------------------


def plain_block(tokens, q, p, uniforms, noise):
    """Algorithm 2 of Sun et al. for one chain, float64 and plain Python; also how near a comparison was to a tie."""
    n, w, near, length, left = len(tokens), 1.0, 1.0, 0, None
    for i in range(n + 1):
        if i:
            mass = q[i - 1][tokens[i - 1]]
            w = min(1.0, w * p[i - 1][tokens[i - 1]] / mass)
        over = [max(w * a - b, 0.0) for a, b in zip(p[i], q[i] if i < n else [0.0] * len(p[i]), strict=True)]
        rest = sum(over)
        h = 1.0 if i == 0 or rest + 1 - w == 0 else rest / (rest + 1 - w)
        if i:
            near = min(near, abs(uniforms[i - 1] - h))
        if i == 0 or uniforms[i - 1] < h:
            length, left = i, over
    best = max((v for v in range(len(left)) if left[v] > 0), key=lambda v: math.log(left[v]) + noise(length)[v])
    return [*tokens[:length], best], near


@pytest.mark.parametrize("stochastic", [False, True])
def test_verify_is_algorithm_2(stochastic):
    """Ragged rows, each with numbers of its own."""
    vocab, compared, seen = 5, 0, set()
    for row in verified_chains("block", 8, vocab, stochastic):
        drawn = row.q if row.q is not None else torch.eye(vocab)[row.tokens].tolist()
        expected, near = plain_block(row.tokens, drawn, row.p, row.uniforms, row.noise)
        if near > 1e-5:
            compared += 1
            seen.add((len(row.tokens), len(expected) - 1))
            assert row.emitted == expected
    assert compared > 0.95 * 400 and len(seen) > 12  # nearly every (drafted, accepted)


def test_the_loop_accepts_more_than_token_by_token():
    """20,000 rows, three drafts a round from a drafter that is too sure: 0.13 tokens a round more, at an error of 0.01."""
    mean = {}
    for rule in ("rejection", "block"):
        _, mean[rule] = draw(Drafts((1, 1, 1), stochastic=True, ragged=False), rule, 20_000)
    print(mean)
    assert mean["block"] > mean["rejection"] + 0.08


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=5), st.integers(0, 2**20), st.booleans()
)
def test_a_row_alone_is_as_in_a_batch(shape, seed, stochastic):
    """Greedy and sampled rows of any length beside each other; greedy ones walk along the argmax."""
    g = torch.Generator().manual_seed(seed)
    lengths, width, vocab = [n for n, _ in shape], 4, 5
    tokens = torch.randint(0, vocab, (len(shape), width), generator=g)
    q = torch.rand(len(shape), width, vocab, generator=g).softmax(-1) if stochastic else None
    scores = torch.randn(sum(lengths) + len(shape), vocab, generator=g)
    rows = [Sequence([1] * (i + 1), 99, do_sample=s, seed=seed + i, num_steps=i) for i, (_, s) in enumerate(shape)]
    verdict = verify(DraftTrees(tokens, lengths, None, q), scores, rows, BLOCK)
    for i, part in enumerate(scores.split([n + 1 for n in lengths])):
        n = lengths[i]
        alone = DraftTrees(tokens[i : i + 1, :n], [n], None, None if q is None else q[i : i + 1, :n])
        single = verify(alone, part, [rows[i]], BLOCK)
        assert single.accepted[0].tolist() == verdict.accepted[i, :n].tolist() and not verdict.accepted[i, n:].any()
        assert single.next_tokens[0] == verdict.next_tokens[i]
        if not rows[i].do_sample:
            agree = (part.argmax(1)[:-1] == tokens[i, :n]).long().cumprod(0).bool()
            assert verdict.accepted[i, :n].tolist() == agree.tolist()
            assert verdict.next_tokens[i] == part.argmax(1)[int(agree.sum())]


def test_a_drafter_equal_to_the_target_is_always_believed():
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(500, 5, 7, generator=g)
    q = scores[:, :4].softmax(-1)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=g).view(500, 4)
    rows = [Sequence([1], 99, do_sample=True, seed=i) for i in range(500)]
    assert verify(DraftTrees(tokens, [4] * 500, None, q), scores.flatten(0, 1), rows, BLOCK).accepted.all()


@pytest.mark.parametrize("sampled", [False, True])
def test_trees_are_refused_where_rows_sample(sampled):
    trees = DraftTrees.from_lists([[1, 2]], [[-1, -1]])
    scores = torch.eye(4)[[2, 0, 3]]
    row = Sequence([0], 9, do_sample=sampled, seed=1)
    if not sampled:
        assert verify(trees, scores, [row], BLOCK).accepted.tolist() == [[False, True]]
        return
    with pytest.raises(SpeculativeConfigError, match=r"'rejection_sample_method'.*'block', which verifies chains"):
        verify(trees, scores, [row], BLOCK)
