"""A target and drafters small enough to know every probability: the next token depends on the last one alone.

Rows are independent (own seed), so the joint distribution of their first tokens is a product of table entries, whatever
rounds they came from. Everything is driven through `verify`, many rows at once.
"""

import numpy as np
import torch
from helpers_verification import verdict_of as verify

from hf_specdec.config import SpeculativeConfig
from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.sequence import Sequence

VOCAB = 5
NUM_TOKENS = 3  # the joint distribution tested is that of the first three: 125 cells
START = 0
ROWS = torch.arange(VOCAB)

# Target: every row holds 0.5, 0.2, 0.15, 0.1, 0.05 in another order. Half the mass on the likeliest token makes tests of
# "accept with probability p" as sharp as they get.
_SHAPE = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
TARGET = torch.stack([_SHAPE[(ROWS * (1 + last % 4) + last) % VOCAB] for last in range(VOCAB)])
# Drafter: too sure of the target's best token (0.71 where the target has 0.5, so that it is tested), and wrong after token 4.
_SURE = TARGET**2 / (TARGET**2).sum(1, keepdim=True)
DRAFTER = 0.9 * torch.cat([_SURE[:4], _SURE[4:].roll(1, 1)]) + 0.1 / VOCAB


def joint(table=TARGET):
    """Probability of each triple of first tokens, [V**3]."""
    table = table.double() / table.double().sum(1, keepdim=True)
    return torch.einsum("a,ab,bc->abc", table[START], table, table).flatten().numpy()


def chosen_children(width):
    """Deterministic drafts: the target's best, then third, then its second-best token after each token: [V, width]."""
    return TARGET.argsort(1, descending=True)[:, [0, 2, 1]][:, :width]


class Drafts:
    """Draws trees with `widths[d]` children per node at depth d, in breadth-first order, for rows whose last token is known.

    Args:
        widths: e.g. (1, 1, 1) is a chain of three.
        stochastic: children are drawn from DRAFTER (siblings without replacement) and carry its probabilities.
        duplicates: deterministic siblings repeat: all children of a node are its first one, but for the last.
        ragged: a third of the rows get a prefix of the nodes, of random length (0 included).
    """

    def __init__(self, widths, stochastic=False, duplicates=False, ragged=True):
        self.widths, self.stochastic, self.duplicates, self.ragged = widths, stochastic, duplicates, ragged
        self.generator = torch.Generator().manual_seed(1234)
        self.parents, level = [], [-1]
        for width in widths:
            first = len(self.parents)
            self.parents += [node for node in level for _ in range(width)]
            level = range(first, len(self.parents))
        self.num_internal = 1 + (len(self.parents) - len(level))

    def __call__(self, last):
        count = len(last)
        tokens = torch.empty(count, 0, dtype=torch.long)
        probs = torch.zeros(count, self.num_internal, VOCAB)
        level, first = [-1], 0
        for width in self.widths:
            columns = []
            for node in level:
                parent = last if node < 0 else tokens[:, node]
                columns.append(self.children(parent, width))
                probs[:, node + 1] = DRAFTER[parent]
            tokens = torch.cat([tokens, *columns], dim=1)
            level, first = list(range(first, tokens.shape[1])), tokens.shape[1]
        lengths = torch.full((count,), tokens.shape[1])
        if self.ragged:
            cut = torch.randint(0, tokens.shape[1] + 1, (count,), generator=self.generator)
            lengths = torch.where(torch.rand(count, generator=self.generator) < 1 / 3, cut, lengths)
        parents = None if max(self.widths) == 1 else np.tile(np.asarray(self.parents), (count, 1))
        trees = DraftTrees(tokens, lengths.tolist(), parents)
        if self.stochastic:
            trees.probs = probs
            trees.prob_index = None if parents is None else parents + 1
        return trees

    def children(self, parent, width):
        if not self.stochastic:
            chosen = chosen_children(width)
            if self.duplicates:
                chosen = torch.cat([chosen[:, :1].expand(-1, width - 1), chosen[:, -1:]], dim=1)
            return chosen[parent]
        # The order of perturbed log-probabilities is that of draws without replacement.
        noise = -torch.empty(len(parent), VOCAB).exponential_(generator=self.generator).log()
        return (DRAFTER[parent].log() + noise).topk(width).indices


def draw(drafts, rule, num_rows, first_seed=0):
    """The first tokens of `num_rows` rows, int64 [num_rows, NUM_TOKENS], and the mean number emitted per round."""
    config = SpeculativeConfig(rejection_sample_method=rule)
    rows = [Sequence([START], 10**6, do_sample=True, seed=first_seed + i) for i in range(num_rows)]
    active, emitted, rounds = rows, 0, 0
    while active:
        last = torch.tensor([seq.tokens[-1] for seq in active])
        trees = drafts(last)
        nodes = torch.cat([last[:, None], trees.tokens], dim=1)
        valid = np.concatenate([np.ones((len(active), 1), dtype=bool), trees.valid], axis=1)
        verdict = verify(trees, TARGET.log()[nodes[torch.from_numpy(valid)]], active, config)
        counts = verdict.accepted.sum(1)
        for i, seq in enumerate(active):
            if counts[i]:
                seq.tokens += verdict.tokens[i, verdict.accepted[i]].tolist()
            seq.tokens.append(int(verdict.next_tokens[i]))
            seq.num_steps += 1
        emitted, rounds = emitted + int(counts.sum()) + len(active), rounds + len(active)
        active = [seq for seq in active if len(seq.tokens) <= NUM_TOKENS]
    return torch.tensor([seq.tokens[1 : NUM_TOKENS + 1] for seq in rows]), emitted / rounds


def cells(tokens):
    """Counts of each triple, [V**3]."""
    index = sum(tokens[:, i] * VOCAB ** (NUM_TOKENS - 1 - i) for i in range(NUM_TOKENS))
    return torch.bincount(index, minlength=VOCAB**NUM_TOKENS).numpy()
