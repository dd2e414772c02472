"""DraftTrees over random trees, against plain recursion."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from hf_specdec.core.draft_trees import DraftTrees


@st.composite
def forests(draw, max_rows=4, max_nodes=9, vocab=5):
    """Ragged lists of ids and parents, some rows empty."""
    tokens, parents = [], []
    for _ in range(draw(st.integers(1, max_rows))):
        count = draw(st.integers(0, max_nodes))
        tokens.append(draw(st.lists(st.integers(0, vocab - 1), min_size=count, max_size=count)))
        parents.append([draw(st.integers(-1, i - 1)) for i in range(count)])
    return tokens, parents


def path_to(parents, node):
    """Nodes from the root's child down to `node`."""
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


@settings(max_examples=150, deadline=None)
@given(forests())
def test_shape_of_random_trees(forest):
    tokens, parents = forest
    trees = DraftTrees.from_lists(tokens, parents)
    width = trees.tokens.shape[1]
    assert trees.lengths == [len(row) for row in tokens] and trees.num_nodes == sum(trees.lengths)
    assert not trees.is_chain
    for i, row in enumerate(parents):
        count = len(row)
        assert trees.tokens[i, :count].tolist() == tokens[i]
        assert trees.valid[i].tolist() == [True] * count + [False] * (width - count)
        assert trees.parent_index[i, :count].tolist() == row
        assert trees.ancestors[i, 0].tolist() == [True] + [False] * width  # the root has only itself
        for node in range(count):
            path = path_to(row, node)
            assert trees.depths[i, node] == len(path)
            expected = np.zeros(width + 1, dtype=bool)
            expected[[0, *(n + 1 for n in path)]] = True
            assert np.array_equal(trees.ancestors[i, node + 1], expected)
            mask = np.zeros((len(tokens), width), dtype=bool)
            mask[i, path] = True
            assert trees.paths(mask)[i] == path  # root to leaf


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=4))
def test_a_chain_is_a_tree_of_only_children(rows):
    chain = DraftTrees.from_lists(rows)
    tree = DraftTrees.from_lists(rows, [list(range(-1, len(row) - 1)) for row in rows])
    assert chain.is_chain and not tree.is_chain
    for name in ("valid", "parent_index", "ancestors", "depths"):
        assert np.array_equal(getattr(chain, name), getattr(tree, name)), name


@settings(max_examples=60, deadline=None)
@given(forests(), st.data())
def test_select(forest, data):
    tokens, parents = forest
    rows = data.draw(st.permutations(range(len(tokens))))[: data.draw(st.integers(1, len(tokens)))]
    trees = DraftTrees.from_lists(tokens, parents)
    width = trees.tokens.shape[1]
    trees.probs = torch.rand(len(tokens), width + 1, 7)
    trees.prob_index = trees.parent_index + 1
    some = trees.select(list(rows))
    assert some.lengths == [len(tokens[i]) for i in rows]
    for name in ("tokens", "parents", "probs", "prob_index", "ancestors", "depths", "valid"):
        assert np.array_equal(np.asarray(getattr(some, name)), np.asarray(getattr(trees, name))[list(rows)]), name
    chain = DraftTrees.from_lists(tokens)
    assert chain.select(list(rows)).is_chain and chain.select(list(rows)).probs is None


def test_empty():
    trees = DraftTrees.empty(3)
    assert trees.lengths == [0, 0, 0] and trees.num_nodes == 0 and tuple(trees.tokens.shape) == (3, 0)
    assert trees.ancestors.tolist() == [[[True]]] * 3
    assert trees.paths(np.zeros((3, 0), dtype=bool)) == [[], [], []]


def test_ancestors_of_a_long_chain():
    for count in (1, 2, 3, 65):
        found = DraftTrees.from_lists([[0] * count]).ancestors[0]
        assert np.array_equal(found, np.tri(count + 1, dtype=bool)), count


@pytest.mark.parametrize(
    "parents",
    [[[0]], [[-2]], [[-1, 1]], [[-1, 2, 1]]],
    ids=["itself", "below the root", "itself, second", "a later node"],
)
def test_parents_stand_before_children(parents):
    with pytest.raises(ValueError, match="before their children"):
        DraftTrees.from_lists([list(range(len(parents[0])))], parents)


@pytest.mark.parametrize("lengths", [[3], [-1], [1, 1], []])
def test_lengths_fit(lengths):
    with pytest.raises(ValueError, match="do not fit"):
        DraftTrees(torch.zeros(1, 2, dtype=torch.long), lengths).check()
    with pytest.raises(ValueError, match="do not fit"):
        DraftTrees(torch.zeros(len(lengths) + 1, 2, dtype=torch.long), [1, *lengths[:-1], -1]).check()


@given(st.integers(0, 4), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_chosen_trees_draw_every_node_from_a_distribution(deterministic, distributions, nodes, first):
    """A deterministic draft beside a sampled tree whose siblings share distributions: padding names one that exists, too."""
    plain = DraftTrees.from_lists([[1] * deterministic, [2] * deterministic])
    index = np.minimum(np.tile(np.arange(nodes), (2, 1)), distributions - 1)
    probs = torch.full((2, distributions, 8), 1 / 8)
    sampled = DraftTrees(
        torch.full((2, nodes), 3), [nodes, nodes], np.tile(np.arange(-1, nodes - 1), (2, 1)), probs, index
    )
    chosen = (
        DraftTrees.choose(plain, sampled, [True, False]) if first else DraftTrees.choose(sampled, plain, [False, True])
    )
    assert chosen.prob_index.shape == chosen.tokens.shape
    assert (chosen.prob_index >= 0).all() and (chosen.prob_index < chosen.probs.shape[1]).all()
    assert torch.equal(chosen.probs[0, chosen.prob_index[0, :nodes]], probs[0, index[0]])
    assert chosen.probs[1, chosen.prob_index[1, :deterministic], 2].tolist() == [1.0] * deterministic


@settings(max_examples=60, deadline=None)
@given(forests(), st.data())
def test_kept_and_extended_trees_have_the_paths_that_they_should(forest, data):
    """Cutting a subtree and appending a path change no other path; a draft with distributions keeps them, and the rest are one-hot."""
    tokens, parents = forest
    trees = DraftTrees.from_lists(tokens, parents)
    kept, after, more = [], [], []
    for row in parents:
        alive = {-1}
        alive |= {
            i for i, parent in enumerate(row) if parent in alive and data.draw(st.booleans()) and not alive.add(i)
        }
        kept.append(sorted(alive - {-1}))
        after.append(data.draw(st.integers(-1, len(kept[-1]) - 1)))
        more.append(data.draw(st.lists(st.integers(0, 4), max_size=3)))

    def paths(trees, row):
        own, ids = trees.parent_index[row].tolist(), trees.tokens[row].tolist()
        return [[ids[at] for at in path_to(own, node)] for node in range(trees.lengths[row])]

    keep = np.zeros(trees.tokens.shape, dtype=bool)
    for i, nodes in enumerate(kept):
        keep[i, nodes] = True
    cut = trees.kept(keep)
    distributions = torch.rand(len(tokens), 2, 5)
    drawn = DraftTrees(cut.tokens, cut.lengths, cut.parents, distributions, np.zeros(cut.tokens.shape, dtype=np.int64))
    for each in (cut, drawn):
        out = each.extended(more, after)
        out.check()
        for i, row in enumerate(parents):
            before = [[tokens[i][at] for at in path_to(row, node)] for node in kept[i]]
            start = before[after[i]] if after[i] >= 0 else []
            assert paths(cut, i) == before
            assert paths(out, i) == before + [[*start, *more[i][: k + 1]] for k in range(len(more[i]))]
            for node in range(out.lengths[i]) if each is drawn else ():
                q = out.probs[i, out.prob_index[i, node]]
                own = node < cut.lengths[i]
                assert torch.equal(q, distributions[i, 0]) if own else q[out.tokens[i, node]] == 1 == q.sum()


def test_the_first_path_of_a_tree():
    trees = DraftTrees.from_lists([[5, 6, 7, 8, 9], [1, 2], []], [[-1, -1, 0, 0, 2], [-1, -1], []])
    assert [trees.first_path(row) for row in range(3)] == [[0, 2, 4], [0], []]
    assert DraftTrees.from_lists([[1, 2]]).first_path(0) == [0, 1]
