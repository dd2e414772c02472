"""Growing drafts against a plain implementation that follows one path at a time, for any shape, limits and batch."""

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.candidate_generators.growing.tree_growth import DraftLevel, growth_of
from hf_specdec.candidate_generators.growing.tree_shapes import DynamicTree, TreeDraftingConfig, TreeTemplate
from hf_specdec.config import SpeculativeConfigError
from hf_specdec.core.sequence import Sequence

VOCAB = 11


def logits_after(row: int, path: tuple[int, ...]) -> np.ndarray:
    """What a deterministic drafter says after a path: float32 [V], different for every row and path."""
    key = hashlib.blake2b(repr((row, path)).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(key, "little")).normal(size=VOCAB).astype(np.float32) * 2


class Identity:
    in_target_vocabulary = True

    def scores(self, logits):
        return logits


class PathDrafter:
    """Follows every expanded node's path, from what `DraftLevel` says of it, and checks that it is consistent."""

    vocabulary, survival = Identity(), None

    def __init__(self, rows):
        self.paths = [[()] for _ in rows]  # of the last level, per kept row
        self.rows = list(rows)
        self.expanded = {row: [] for row in rows}

    def root_logits(self):
        return torch.from_numpy(np.stack([logits_after(row, ()) for row in self.rows]))

    def at_once(self, rows, logits, made):
        return None

    def expand(self, level: DraftLevel) -> torch.Tensor:
        assert [self.rows[i] for i in level.kept] == level.rows
        out, paths = [], []
        for i, row in enumerate(level.rows):
            before = self.paths[level.kept[i]]
            own = [
                before[parent] + (token,)
                for parent, token in zip(level.parents[i].tolist(), level.tokens[i].tolist(), strict=True)
            ]
            assert all(len(path) == level.depth for path in own)
            assert level.first == len(self.expanded[row])
            self.expanded[row] += own
            for f, path in enumerate(own):
                seen = {self.expanded[row][e] for e in np.flatnonzero(level.ancestors[i, f])}
                assert seen == {path[: d + 1] for d in range(len(path))}
            assert level.depths.tolist() == [len(path) for path in self.expanded[row]]
            paths.append(own)
            out.append(np.stack([logits_after(row, path) for path in own]))
        self.rows, self.paths = level.rows, paths
        return torch.from_numpy(np.stack(out))


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64) - x.max()
    return x - math.log(np.exp(x).sum())


def paths_of(draft, i):
    """{path: (position in the tree, expanded index)} of row i."""
    trees, out = draft.trees, {}
    for node in range(trees.lengths[i]):
        path, at = [], node
        while at >= 0:
            path.append(int(trees.tokens[i, at]))
            at = int(trees.parent_index[i, at])
        out[tuple(path[::-1])] = int(draft.expanded[i, node])
    assert len(out) == trees.lengths[i], "no node twice"
    return out


def static_paths(template: TreeTemplate, row: int, limit: int) -> set[tuple[int, ...]]:
    built: dict[int, tuple[int, ...]] = {-1: ()}
    for node, (parent, rank) in enumerate(zip(template.parents, template.ranks, strict=True)):
        if template.depths[node] <= limit:
            path = built[int(parent)]
            built[node] = path + (int(np.argsort(-logits_after(row, path), kind="stable")[rank]),)
    return set(built.values()) - {()}


def dynamic_paths(shape: DynamicTree, row: int, limit: int) -> set[tuple[int, ...]]:
    values, frontier = {}, {(): 0.0}
    for _ in range(min(limit, shape.depth)):
        children = {}
        for path, value in frontier.items():
            log_probs = log_softmax(logits_after(row, path))
            for token in np.argsort(-log_probs, kind="stable")[: shape.top_k]:
                children[path + (int(token),)] = value + log_probs[token]
        values |= children
        frontier = dict(sorted(children.items(), key=lambda item: -item[1])[: shape.top_k])
    return set(sorted(values, key=lambda path: -values[path])[: shape.total_tokens - 1])


def grow(drafter, config, shape, sequences, limits, logits):
    drafter.config, drafter.shape = config, shape
    growth = growth_of(drafter, sequences, limits)
    return growth.draft(*growth.levels(logits))


def run(shape, limits, **config):
    rows = [i for i, limit in enumerate(limits) if limit]
    drafter = PathDrafter(rows)
    sequences = [Sequence([1, 2], max_length=50) for _ in limits]
    draft = grow(drafter, TreeDraftingConfig(method="", **config), shape, sequences, limits, drafter.root_logits())
    draft.trees.check()
    for i in range(len(limits)):
        for path, at in paths_of(draft, i).items():
            assert at == -1 or drafter.expanded[i][at] == path
    return draft


LIMITS = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any)
PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(PATHS, LIMITS)
def test_static_trees(paths, limits):
    template = TreeTemplate.from_paths(paths)
    draft = run(template, limits)
    for i, limit in enumerate(limits):
        assert set(paths_of(draft, i)) == static_paths(template, i, limit)
    assert draft.trees.tokens.shape[1] <= template.num_nodes(max(limits))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 40), LIMITS)
def test_dynamic_trees(depth, top_k, total_tokens, limits):
    shape = DynamicTree(depth, top_k, total_tokens)
    draft = run(shape, limits)
    for i, limit in enumerate(limits):
        assert set(paths_of(draft, i)) == dynamic_paths(shape, i, limit)
        assert draft.trees.lengths[i] <= shape.num_nodes(min(limit, depth))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 6), LIMITS)
def test_best_paths_of_a_full_tree(widths, keep, limits):
    """The MLP speculator's candidates: of all paths, the likeliest `keep`."""
    template = TreeTemplate.from_widths(widths, keep_paths=keep)
    draft = run(template, limits)
    for i, limit in enumerate(limits):
        depth = min(limit, len(widths))
        leaves = {path for path in static_paths(TreeTemplate.from_widths(widths), i, limit) if len(path) == depth}
        value = {p: sum(log_softmax(logits_after(i, p[:d]))[p[d]] for d in range(depth)) for p in leaves}
        best = sorted(leaves, key=lambda path: -value[path])[:keep]
        assert set(paths_of(draft, i)) == {path[: d + 1] for path in best for d in range(depth)}


@settings(max_examples=40, deadline=None)
@given(st.floats(0.01, 0.9), LIMITS, st.booleans())
def test_drafts_end_where_confidence_falls(threshold, limits, dynamic):
    shape = DynamicTree(5, 2, 20) if dynamic else TreeTemplate.from_widths([1] * 5)
    draft = run(shape, limits, draft_confidence_threshold=threshold)
    for i, limit in enumerate(limits):
        longest, value, path = 0, 0.0, ()
        if dynamic:  # the best path of each depth is the one that counts
            frontier = {(): 0.0}
            for depth in range(1, limit + 1):
                children = {}
                for prefix, so_far in frontier.items():
                    log_probs = log_softmax(logits_after(i, prefix))
                    for token in np.argsort(-log_probs, kind="stable")[:2]:
                        children[prefix + (int(token),)] = so_far + log_probs[token]
                if max(children.values()) < math.log(threshold):
                    break
                longest = depth
                frontier = dict(sorted(children.items(), key=lambda item: -item[1])[:2])
        else:
            while longest < limit:
                log_probs = log_softmax(logits_after(i, path))
                value += log_probs.max()
                if value < math.log(threshold):
                    break
                path, longest = path + (int(log_probs.argmax()),), longest + 1
        assert max(map(len, paths_of(draft, i)), default=0) == longest


def test_equal_probabilities_never_orphan_a_child():
    certain = torch.full((VOCAB,), -200.0)
    certain[3] = 200.0  # probability 1: a child is exactly as likely as its parent

    class Certain(PathDrafter):
        def expand(self, level):
            return certain.expand(*super().expand(level).shape)

    shape = DynamicTree(4, 3, 4)
    draft = grow(Certain([0]), TreeDraftingConfig(method=""), shape, [Sequence([1], 9)], [4], certain[None])
    draft.trees.check()
    assert set(paths_of(draft, 0)) == {(3,), (3, 3), (3, 3, 3)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_k": 0}, "at least 1"),
        ({"total_tokens": 1}, "at least 2"),
        ({"top_k": 2, "branching_factors": [2]}, "cannot be combined"),
        ({"total_tokens": 5, "branching_factors": [2]}, "cannot be combined"),
        ({"branching_factors": [2, 0]}, "at least 1"),
        ({"branching_factors": [2], "num_speculative_tokens": 3}, "has 1 depths"),
        ({"depth": 3, "num_speculative_tokens": 4}, "is 3, but"),
        ({"speculative_token_tree": [[0], []]}, "child-rank paths"),
        ({"speculative_token_tree": "eagle_mc_sim"}, "did you mean 'eagle_mc_sim_7b_63'"),
        ({"speculative_token_tree": "[(0,), (0,"}, "cannot be read"),
        ({"draft_confidence_threshold": 1.5}, "at most 1"),
    ],
)
def test_bad_shapes(values, message):
    with pytest.raises(SpeculativeConfigError, match=message.replace("(", r"\(")):
        TreeDraftingConfig(method="", **values)


def test_shapes_from_keys():
    chain = TreeDraftingConfig(method="", num_speculative_tokens=3).shape()
    assert chain.is_chain and chain.num_nodes(9) == 3 and chain.num_expanded(3) == 2
    text = TreeDraftingConfig(method="", speculative_token_tree="[(0,), (0, 0), (1,)]").shape()
    assert text.parents.tolist() == [-1, -1, 0] and text.ranks.tolist() == [0, 1, 0]
    published = TreeDraftingConfig(method="", speculative_token_tree="eagle_mc_sim_7b_63").shape()
    assert len(published.parents) == 25 and published.depth == 5
    dynamic = TreeDraftingConfig(method="", depth=6, total_tokens=50).shape()
    assert dynamic == DynamicTree(6, 8, 50)
