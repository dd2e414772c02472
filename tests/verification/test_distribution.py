"""Sampled output has the target's own distribution: chi-square tests with the power to see a 2 % error.

The joint distribution of the first three tokens of 120,000 independent rows (125 cells, 124 degrees of freedom) is
compared with the product of the target's probabilities. The three tokens come from one, two or three rounds, so the test
sees what depends on what: the second and third given the first, within a draft and across rounds.

Power. A verifier that accepts with probability min(1, 1.02 p/q) shifts the first token's probability by 0.01 at p = 0.5
(deterministic draft): a noncentrality of n * (0.01**2 / 0.5 + 0.01**2 / 0.5) = 48 from the first token alone, and as much
again from each later one that was tested. The statistic's own deviation is sqrt(2 * 124) = 16, so even the 48 is three
of them; `test_wrong_verifiers_are_caught` runs such verifiers through the very same test, at the same n.
"""

import pytest
import torch
from helpers_markov import DRAFTER, TARGET, VOCAB, Drafts, cells, draw, joint
from scipy import stats

from hf_specdec.config import SpeculativeConfig
from hf_specdec.kernels.random_bits import reference as random_bits
from hf_specdec.kernels.rejection import reference
from hf_specdec.verification import verify as verification
from hf_specdec.verification.rules import follow_target

N = 120_000

SHAPES = {
    "no draft": Drafts((1,), ragged=False),  # replaced by empty trees below
    "chain": Drafts((1, 1, 1)),
    "tree": Drafts((3, 1, 1)),
    "bushy tree": Drafts((2, 2)),
    "duplicate siblings": Drafts((3, 2), duplicates=True),
    "q chain": Drafts((1, 1, 1), stochastic=True),
    "q tree": Drafts((3, 1, 1), stochastic=True),
    "q bushy tree": Drafts((2, 2), stochastic=True),
    "q all siblings": Drafts((VOCAB,), stochastic=True),
}


def fresh(shape):
    """Drafts with their own random state at its start, so that a test does not depend on those before it."""
    kept = SHAPES[shape]
    return Drafts(kept.widths, kept.stochastic, kept.duplicates, kept.ragged)


def p_value(drafts, rule, n=N):
    """Of the joint chi-square test; and the mean number of tokens per round."""
    tokens, tau = draw(drafts, rule, n)
    return stats.chisquare(cells(tokens), joint() * n).pvalue, tau


def without_drafts(last):
    return verification.DraftTrees.empty(len(last))


# Trees contain what chains and rows without drafts show.
SLOW = ("no draft", "chain", "bushy tree", "q bushy tree", "q all siblings")
# Coupled rows emit the same tokens for every shape (tested below), so two of them stand for all.
CASES = [
    *(pytest.param(shape, "rejection", marks=pytest.mark.slow if shape in SLOW else ()) for shape in SHAPES),
    pytest.param("chain", "block", marks=pytest.mark.slow),
    ("q chain", "block"),  # without a draft it is the same draw as "rejection"
    ("chain", "coupled"),
    pytest.param("q tree", "coupled", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "rule"), CASES)
def test_joint_distribution(shape, rule):
    drafts = without_drafts if shape == "no draft" else fresh(shape)
    p, tau = p_value(drafts, rule)
    print(f"{rule:9} {shape:18} p = {p:.4f}  tau = {tau:.3f}")
    assert p > 1e-3
    assert tau == 1 if shape == "no draft" else tau > 1.2


def test_speculative_sampling_accepts_what_it_should():
    """The rate of Leviathan et al. for one draft token: the sum of min(p, q)."""
    config = SpeculativeConfig(rejection_sample_method="rejection")
    for start in range(VOCAB):
        rows = [verification.Sequence([start], 99, do_sample=True, seed=i) for i in range(20_000)]
        trees = Drafts((1,), stochastic=True, ragged=False)(torch.full((len(rows),), start))
        nodes = torch.stack([torch.full((len(rows),), start), trees.tokens[:, 0]], dim=1).flatten()
        accepted = verification.begin_verification(trees, TARGET.log()[nodes], rows, config).wait().accepted.mean()
        expected = float(torch.minimum(TARGET[start], DRAFTER[start]).sum())
        assert abs(accepted - expected) < 4 * (expected * (1 - expected) / len(rows)) ** 0.5


def test_coupled_does_not_depend_on_the_draft():
    """Row for row the same tokens, whatever was drafted."""
    plain, _ = draw(without_drafts, "coupled", 5000)
    for shape in SHAPES:
        tokens, _ = draw(fresh(shape), "coupled", 5000)
        assert torch.equal(tokens, plain), shape


# ---- deliberately wrong verifiers -----------------------------------------------------------------------------------


def accepts_too_often(*args, walk=reference.rejection_walk):
    """u * q < 1.02 * p."""
    *rest, uniform, gumbel = args
    return walk(*rest, uniform / 1.02, gumbel)


def forgets_to_remove(*args, walk=reference.rejection_walk):
    """After a rejection, draws from p instead of what is left of it."""
    *_, target_probs, _uniform, gumbel = args
    accepted, _ = walk(*args)
    depth = accepted.sum(1)
    current = (accepted * torch.arange(1, accepted.shape[1] + 1)).amax(1)
    return accepted, (target_probs(current).log() + gumbel(depth)).argmax(1)


def mistakes_q(tokens, valid, parents, probs, prob_index, *rest, walk=reference.rejection_walk):
    """Tests against a q that is a little flatter than the one the drafts were drawn from (say, another temperature)."""
    return walk(tokens, valid, parents, 0.9 * probs + 0.1 / probs.shape[-1], prob_index, *rest)


def block_accepts_too_often(*args, walk=reference.block_walk):
    """u / 1.06 < h. (Where p >= q a block's h is 1 and its weight is 0, so less of this error shows than token by token.)"""
    *rest, uniform, gumbel = args
    return walk(*rest, uniform / 1.06, gumbel)


def block_forgets_to_remove(*args, walk=reference.block_walk):
    """After an accepted block, draws from p instead of what is left of it."""
    return forgets_to_remove(*args, walk=walk)


def block_forgets_its_weight(
    tokens, valid, probs, prob_index, target_probs, uniform, gumbel, walk=reference.block_walk
):
    """Draws from max(p - q, 0), as token-wise rejection does, instead of max(w p - q, 0)."""
    accepted, _ = walk(tokens, valid, probs, prob_index, target_probs, uniform, gumbel)
    length = accepted.sum(1)
    p, row = target_probs(length), torch.arange(len(tokens))
    q = probs[row, length.clamp(max=tokens.shape[1] - 1)] * (length < valid.sum(1))[:, None]
    return accepted, ((p - q).clamp(min=0).log() + gumbel(length)).argmax(1)


def block_shares_its_luck(*args, walk=reference.block_walk):
    """Every test of a block uses the largest uniform number so far, not one of its own."""
    *rest, uniform, gumbel = args
    return walk(*rest, uniform.cummax(1).values, gumbel)


def same_noise_everywhere(seeds, positions, steps, stream, count, gumbel=random_bits.gumbel):
    """Noise that forgets the position."""
    return gumbel(seeds, positions * 0, steps, stream, count)


def same_noise_for_two_positions(seeds, positions, steps, stream, count, gumbel=random_bits.gumbel):
    """The first token is right, the second right in itself, but they share their noise."""
    return gumbel(seeds, positions.clamp(min=2), steps, stream, count)


def walks_too_far(trees, scores, index, sequences, config, sampling, walk=follow_target):
    """Coupled: a rejected first draft token passes with probability 0.03. (Once a round: chains have the power to show it.)"""
    path, following = walk(trees, scores, index, sequences, config)
    tokens = trees.tokens
    if tokens.shape[1] == 0:
        return path, following
    luck = torch.rand(len(sequences), generator=torch.Generator().manual_seed(len(sequences))) < 0.03
    wrong = luck & ~path[:, 0] & torch.from_numpy(trees.valid[:, 0])
    path[wrong] = False
    path[wrong, 0] = True
    redrawn = torch.multinomial(TARGET[tokens[:, 0]], 1, generator=torch.Generator().manual_seed(1)).squeeze(1)
    return path, torch.where(wrong, redrawn, following)


WRONG = [
    ("chain", "rejection", reference, "rejection_walk", accepts_too_often),
    pytest.param("tree", "rejection", reference, "rejection_walk", accepts_too_often, marks=pytest.mark.slow),
    pytest.param("q chain", "rejection", reference, "rejection_walk", accepts_too_often, marks=pytest.mark.slow),
    ("q tree", "rejection", reference, "rejection_walk", accepts_too_often),
    pytest.param("chain", "rejection", reference, "rejection_walk", forgets_to_remove, marks=pytest.mark.slow),
    ("tree", "rejection", reference, "rejection_walk", forgets_to_remove),
    pytest.param("q chain", "rejection", reference, "rejection_walk", forgets_to_remove, marks=pytest.mark.slow),
    pytest.param("q tree", "rejection", reference, "rejection_walk", forgets_to_remove, marks=pytest.mark.slow),
    ("q tree", "rejection", reference, "rejection_walk", mistakes_q),
    pytest.param("chain", "block", reference, "block_walk", block_accepts_too_often, marks=pytest.mark.slow),
    ("q chain", "block", reference, "block_walk", block_accepts_too_often),
    ("q chain", "block", reference, "block_walk", block_forgets_to_remove),
    ("q chain", "block", reference, "block_walk", block_forgets_its_weight),
    ("q chain", "block", reference, "block_walk", block_shares_its_luck),
    ("chain", "coupled", verification.RULES, "coupled", walks_too_far),
    pytest.param("chain", "coupled", random_bits, "gumbel", same_noise_everywhere, marks=pytest.mark.slow),
    ("tree", "coupled", random_bits, "gumbel", same_noise_for_two_positions),
]

# A tenth of the rounds shows them.
OBVIOUS = (
    forgets_to_remove, mistakes_q, block_forgets_to_remove, block_shares_its_luck,
    same_noise_everywhere, same_noise_for_two_positions,
)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "rule", "module", "name", "wrong"),
    WRONG,
    ids=lambda v: v if isinstance(v, str) else getattr(v, "__name__", "rules"),
)
def test_wrong_verifiers_are_caught(shape, rule, module, name, wrong, monkeypatch):
    if module is random_bits:
        monkeypatch.setenv("HF_SPECDEC_KERNELS", "reference")  # the library has its own noise
    (monkeypatch.setitem if isinstance(module, dict) else monkeypatch.setattr)(module, name, wrong)
    p, _ = p_value(fresh(shape), rule, N // 10 if wrong in OBVIOUS else N)
    print(f"{wrong.__name__:28} {shape:8} p = {p:.2e}")
    assert p < 1e-4
