"""The shapes of drafts: a chain, a static tree given node by node, or a dynamic tree; and the keys that give them."""

from __future__ import annotations

import ast
import dataclasses
import heapq
import itertools
import json
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ...config import MOST_DRAFT_NODES, MOST_DRAFT_TOKENS, SpeculativeConfig, config_key, nearest_hint
from ...core.draft_trees import DraftTrees
from ...kernels.attention.inputs import Window


@dataclass(frozen=True, eq=False)
class TemplateLevel:
    """One depth of a template, indexed for growing.

    Attributes:
        nodes: indices of its M nodes in the template.
        ranks: int64 [M], which child of its parent each is; `width` is the largest plus one.
        parents: int64 [M], each one's parent (node of the template; unused at depth 1).
        slots: int64 [M], the parent's index among the nodes expanded in the previous level (the root: 0).
        inner: int64 [F], the M nodes that have children, which are expanded next.
        inner_slots: int64 [F], `slots` of these.
        inner_ancestors: bool numpy [F, E + F], which of the E nodes expanded before, and of these F, are on each one's path.
    """

    nodes: slice
    ranks: torch.Tensor
    width: int
    parents: torch.Tensor
    slots: torch.Tensor
    inner: torch.Tensor
    inner_slots: torch.Tensor
    inner_ancestors: np.ndarray

    def nodes_of(self, children: torch.Tensor) -> torch.Tensor:
        """Select the M nodes' values [R, M] from their parents' children [R, P or 1, width]."""
        if len(self.ranks) == 1 and self.width == 1:  # the likeliest child
            return children[:, 0]
        if children.shape[1] == 1:
            return children[:, 0, self.ranks]
        return children[:, self.slots, self.ranks]

    def on(self, device: torch.device) -> TemplateLevel:
        """The same with tensors on a device."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return dataclasses.replace(self, **tensors)


@dataclass(frozen=True, eq=False)
class TreeTemplate:
    """A static tree: each node is given by its parent and its rank among the children.

    Attributes:
        parents: int64 numpy [N], index of each node's parent (-1: the root); nodes are in breadth-first order.
        ranks: int64 numpy [N], 0 for the parent's likeliest child, 1 for the next, ..
        keep_paths: of the grown tree, keep only the paths to this many best leaves (None: everything).
    """

    parents: np.ndarray
    ranks: np.ndarray
    keep_paths: int | None = None

    @classmethod
    def from_widths(cls, widths: list[int], keep_paths: int | None = None) -> TreeTemplate:
        """Every node at depth d has `widths[d]` children. Raises ValueError: there are more than MOST_DRAFT_NODES nodes."""
        if has_too_many_nodes(widths):
            raise ValueError(f"A tree of {widths} children per depth has more than {MOST_DRAFT_NODES} nodes.")
        tree = cls.from_paths(itertools.product(*map(range, widths)))
        return dataclasses.replace(tree, keep_paths=keep_paths)

    @classmethod
    def from_paths(cls, paths: Iterable[SequenceOf[int]]) -> TreeTemplate:
        """From child-rank paths; missing prefixes are added, order does not matter.

        Example: [[0], [1], [0, 0]] is a root with two children, the first of which has one.
        """
        closed = {tuple(path[: end + 1]) for path in paths for end in range(len(path))}
        ordered = sorted(closed, key=lambda path: (len(path), path))
        index = {path: i for i, path in enumerate(ordered)}
        parents = [index.get(path[:-1], -1) for path in ordered]
        return cls(np.asarray(parents, dtype=np.int64), np.asarray([path[-1] for path in ordered], dtype=np.int64))

    @classmethod
    def from_accuracies(cls, accuracies: np.ndarray, num_nodes: int) -> TreeTemplate:
        """The tree with the greatest expected accepted length (Cai et al. 2024, "Medusa", section 2.3.3).

        Children are never likelier than their parents, so taking the likeliest available node `num_nodes` times is optimal.
        Nodes that were never right are left out, so there may be fewer.

        Args:
            accuracies: float [depths, ranks], how often the drafter's token of each rank is the right one at each depth.

        Raises:
            ValueError: no rank was ever right at the first depth, or there is no node to choose.
        """
        order = np.argsort(-accuracies, axis=1, kind="stable")  # measured rates may not fall with the rank
        rates = np.take_along_axis(accuracies, order, axis=1)
        if num_nodes < 1 or not rates.size or rates[0, 0] <= 0:
            raise ValueError("A calibrated tree needs at least one node, and a drafter that is sometimes right.")
        # Of each node: minus its probability, its path as columns of `rates`, its parent's probability.
        nodes: list[tuple[float, tuple[int, ...], float]] = [(-rates[0, 0], (0,), 1.0)]
        chosen: list[list[int]] = []
        while nodes and len(chosen) < num_nodes:
            value, path, parent = heapq.heappop(nodes)
            chosen.append([int(order[depth, column]) for depth, column in enumerate(path)])
            depth, column = len(path), path[-1]
            if column + 1 < rates.shape[1] and rates[depth - 1, column + 1] > 0:
                heapq.heappush(nodes, (-parent * rates[depth - 1, column + 1], (*path[:-1], column + 1), parent))
            if depth < len(rates) and rates[depth, 0] > 0:
                heapq.heappush(nodes, (value * rates[depth, 0], (*path, 0), -value))
        return cls.from_paths(chosen)

    @cached_property
    def _draft(self) -> DraftTrees:
        """A whole draft of one row, whose tokens mean nothing."""
        count = len(self.parents)
        return DraftTrees(torch.zeros(1, count, dtype=torch.long), [count], self.parents[None])

    @cached_property
    def depths(self) -> np.ndarray:
        """int64 [N]: 1 for the root's children."""
        return self.ancestors.sum(axis=1)

    @cached_property
    def ancestors(self) -> np.ndarray:
        """bool [N, N]: `ancestors[i, j]` if node j is i or on the path to it."""
        return self._draft.ancestors[0, 1:, 1:]

    @property
    def depth(self) -> int:
        """Nodes on the longest path."""
        return int(self.depths[-1])

    @cached_property
    def level_ends(self) -> list[int]:
        """Number of nodes in the first 1, 2, .. levels."""
        return np.searchsorted(self.depths, np.arange(1, self.depth + 1), side="right").tolist()

    @cached_property
    def is_chain(self) -> bool:
        """True if no node has two children."""
        return len(self.parents) == self.depth

    @cached_property
    def on_first_path(self) -> np.ndarray:
        """bool [N]: the first child of the root, its first child, and so on to a leaf."""
        path = np.zeros(len(self.parents), dtype=bool)
        path[self._draft.first_path(0)] = True
        return path

    @property
    def prunes(self) -> bool:
        """True if only the best paths of a drafted tree are verified."""
        return self.keep_paths is not None

    def num_nodes(self, depth: int) -> int:
        """The most nodes of a draft of that depth."""
        nodes = self.level_ends[min(depth, self.depth) - 1] if depth else 0
        return min(nodes, self.keep_paths * depth) if self.keep_paths is not None else nodes

    def num_expanded(self, depth: int) -> int:
        """Nodes that the drafter expands in a draft of that depth."""
        return int(np.searchsorted(self.depths[self.expanded], depth))

    @cached_property
    def widest(self) -> int:
        """The most nodes of one depth that the drafter expands."""
        return int(np.bincount(self.depths[self.expanded]).max(initial=0))

    @cached_property
    def expanded(self) -> np.ndarray:
        """int64 [E], the nodes with children, which the drafter expands, in its order."""
        return np.unique(self.parents[self.parents >= 0])

    def expanded_nodes(self, depth: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The E nodes that are expanded in drafts of that depth, in order.

        Returns: their depths, int64 [E]; the nodes on each one's path, itself included, bool [E, E] (None if paths are known only while
            drafting).
        """
        nodes = self.expanded[self.depths[self.expanded] < depth]
        return self.depths[nodes], self.ancestors[np.ix_(nodes, nodes)]

    @cached_property
    def levels(self) -> list[TemplateLevel]:
        """The levels, from the first depth on."""
        has_children = np.isin(np.arange(len(self.parents)), self.expanded)
        levels, frontier, start = [], np.array([-1]), 0
        for end in self.level_ends:
            parents, ranks = self.parents[start:end], self.ranks[start:end]
            slots, inner = np.searchsorted(frontier, parents), np.flatnonzero(has_children[start:end])
            frontier = start + inner
            seen = self.expanded[self.expanded < end]
            levels.append(
                TemplateLevel(
                    nodes=slice(start, end),
                    ranks=torch.from_numpy(ranks),
                    width=int(ranks.max()) + 1,
                    parents=torch.from_numpy(parents),
                    slots=torch.from_numpy(slots),
                    inner=torch.from_numpy(inner),
                    inner_slots=torch.from_numpy(slots[inner]),
                    inner_ancestors=self.ancestors[np.ix_(frontier, seen)],
                )
            )
            start = end
        return levels

    @cached_property
    def nodes(self) -> np.ndarray:
        """int64 [N, 4]: see `DraftRound`."""
        slots = np.concatenate([level.slots.numpy() for level in self.levels])
        return np.stack([self.depths, slots, self.ranks, np.isin(np.arange(len(slots)), self.expanded)], axis=1)

    def levels_on(self, device: torch.device) -> list[TemplateLevel]:
        """`levels` with tensors on a device, cached."""
        cached = vars(self).setdefault("_levels_on", {})
        if device not in cached:
            cached[device] = [level.on(device) for level in self.levels]
        return cached[device]


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree (Li et al. 2024): at each depth the `top_k` likeliest nodes get `top_k` children each, and the
    `total_tokens - 1` nodes with the most probable paths are verified together with the last token.

    Attributes:
        depth: nodes on the longest path.
        top_k: width of the frontier, and children per node.
        total_tokens: tokens verified per step, the last accepted one included.
    """

    depth: int
    top_k: int
    total_tokens: int

    is_chain = False
    prunes = True

    @property
    def widest(self) -> int:
        """The most nodes of one depth that the drafter expands."""
        return self.top_k

    def num_nodes(self, depth: int) -> int:
        """See TreeTemplate."""
        if depth == 0:
            return 0
        return min(self.total_tokens - 1, self.top_k + (depth - 1) * self.top_k**2)

    def num_expanded(self, depth: int) -> int:
        """See TreeTemplate."""
        return self.top_k * max(depth - 1, 0)

    @cached_property
    def nodes(self) -> np.ndarray:
        """All that may be grown, int64 [N, 4]: see `DraftRound`."""
        first = [(1, 0, rank, 0) for rank in range(self.top_k)]
        ranks = list(itertools.product(range(2, self.depth + 1), range(self.top_k), range(self.top_k), [0]))
        return np.array(first + ranks)

    def expanded_nodes(self, depth: int) -> tuple[np.ndarray, None]:
        """See TreeTemplate."""
        return np.repeat(np.arange(1, depth), self.top_k), None


TreeShape = TreeTemplate | DynamicTree
_MOST_CANDIDATES = 2**20  # most nodes that a dynamic tree is chosen from


def has_too_many_nodes(widths: list[int]) -> bool:
    """Whether a tree in which every node at depth d has `widths[d]` children has more than MOST_DRAFT_NODES."""
    total, level = 0, 1
    for width in widths:
        level *= width
        total += level
        if total > MOST_DRAFT_NODES:
            return True
    return False


@dataclass
class TreeDraftingConfig(SpeculativeConfig):
    """Keys of methods that can draft chains, static trees and dynamic trees."""

    has_weights = True
    # at most one is given
    tree_keys: ClassVar[tuple[str, ...]] = ("branching_factors", "speculative_token_tree", "top_k")

    depth: int | None = config_key(
        None, "longest path of a tree: another name for num_speculative_tokens (EAGLE's)", minimum=1
    )
    branching_factors: list[int] | None = config_key(
        None, "children per node at each depth, e.g. [3, 2, 1]: draft a static tree instead of a chain"
    )
    speculative_token_tree: list[list[int]] | str | None = config_key(
        None,
        "a static tree as child-rank paths, e.g. [[0], [1], [0, 1]] (or that as text), or the name of a published one; "
        "[0, 1] is the second-likeliest child of the likeliest first token",
    )
    top_k: int | None = config_key(
        None,
        "draft a dynamic tree (EAGLE-2): continue this many nodes per depth; a node gets as many children",
        minimum=1,
    )
    total_tokens: int | None = config_key(
        None, "dynamic tree: tokens verified per step, the last accepted one included (default 60)", minimum=2
    )
    draft_window: int | None = config_key(
        None,
        "a drafter with keys of its own attends to so many last tokens only, or fewer if its file says so",
        minimum=1,
    )
    draft_sinks: int | None = config_key(
        None,
        "with draft_window: so many first tokens stay visible, too, unless the file has a window",
        minimum=1,
    )
    draft_vocabulary: int | str | None = config_key(
        None,
        "the drafter scores only these tokens: a file of ids (JSON list, .npy, .pt, or one a line; from `hf-specdec calibrate`), or a "
        "number: so many, the most frequent in the bundled prompts. Not for hydra, gemma4_assistant, self_window, and heads with such a "
        "vocabulary",
    )
    draft_confidence_threshold: float | None = config_key(
        None,
        "stop a row's draft where the drafter gives its best path less than this probability (0 to 1)",
        minimum=0.0,
        maximum=1.0,
    )

    def __post_init__(self) -> None:
        self.check_keys()
        self.read_auto()
        if self.depth is not None:
            self._fix_depth("depth", self.depth, "is {}")
        given = [key for key in self.tree_keys if getattr(self, key) not in (None, False)]
        if len(given) > 1:
            raise self.fail(given[1], f"cannot be combined with {given[0]!r}: both give the tree's shape.")
        self._check_factors("branching_factors")
        if self.speculative_token_tree is not None:
            paths = read_token_tree(self, self.speculative_token_tree)
            self._fix_depth("speculative_token_tree", max(map(len, paths)))
        super().__post_init__()
        if self.total_tokens is not None and self.top_k is None:
            if given:
                raise self.fail("total_tokens", f"is for dynamic trees and cannot be combined with {given[0]!r}.")
            self.top_k = 8
        if self.top_k is not None:
            self.total_tokens = 60 if self.total_tokens is None else self.total_tokens
            self._check_dynamic_tree(self.top_k, self.total_tokens)
        if self.draft_sinks is not None and self.draft_window is None:
            raise self.fail("draft_sinks", "is for drafters with a window: give 'draft_window' too.")

    @property
    def window(self) -> int | Window | None:
        """What a drafter with keys of its own sees of the text; None: all that its layers see."""
        if self.draft_window is None or self.draft_sinks is None:
            return self.draft_window
        return Window(self.draft_window, self.draft_sinks)

    @property
    def tree_key(self) -> str | None:
        """The key that gives the shape of a tree; None for chains."""
        return next((key for key in self.tree_keys if getattr(self, key) not in (None, False)), None)

    def _check_factors(self, key: str) -> None:
        """Check children per node at each depth, which fix the draft's depth."""
        factors = getattr(self, key)
        if factors is None:
            return
        if not isinstance(factors, list) or not factors or not all(type(f) is int and f >= 1 for f in factors):
            raise self.fail(key, f"must be a list of integers of at least 1, not {factors!r}.")
        if has_too_many_nodes(factors):
            given = repr(factors) if len(factors) <= 8 else f"a list of {len(factors)}"
            raise self.fail(
                key, f"is {given}, which is a tree of more than {MOST_DRAFT_NODES} nodes: use fewer or smaller factors."
            )
        self._fix_depth(key, len(factors))

    def _check_dynamic_tree(self, top_k: int, total_tokens: int) -> None:
        if total_tokens > MOST_DRAFT_NODES:
            raise self.fail("total_tokens", f"is {total_tokens}; at most {MOST_DRAFT_NODES} are verified a step.")
        if top_k**2 * self.longest_draft > _MOST_CANDIDATES:
            raise self.fail(
                "top_k",
                f"is {top_k}, so trees {self.longest_draft} deep would be chosen from {top_k**2 * self.longest_draft} nodes; "
                f"at most {_MOST_CANDIDATES} are grown: lower it, or num_speculative_tokens.",
            )

    def _fix_depth(self, key: str, depth: int, says: str = "has {} depths") -> None:
        if self.num_speculative_tokens not in (None, depth):
            raise self.fail(key, f"{says.format(depth)}, but num_speculative_tokens is {self.num_speculative_tokens}.")
        self.num_speculative_tokens = depth

    def shape(self) -> TreeShape:
        """The shape that the keys give."""
        depth = self.longest_draft
        if self.top_k is not None and self.total_tokens is not None:
            return DynamicTree(depth, self.top_k, self.total_tokens)
        if self.speculative_token_tree is not None:
            return TreeTemplate.from_paths(read_token_tree(self, self.speculative_token_tree))
        return TreeTemplate.from_widths(self.branching_factors or [1] * depth)


# ---- `speculative_token_tree`: child-rank paths, such a list as text, or the name of a published tree -------------------

# Static trees published with EAGLE, Medusa and Token Recycling (whose code calls its tree "2.2.2"). The file has one path per node, a
# digit for each child rank.
_PUBLISHED = json.loads(Path(__file__).with_name("published_trees.json").read_text(encoding="utf-8"))
PUBLISHED_TREES: dict[str, list[list[int]]] = {
    name: [[int(rank) for rank in path] for path in text.split()] for name, text in _PUBLISHED.items()
}

_TREE_KEY = "speculative_token_tree"


def read_token_tree(config: SpeculativeConfig, value: Any) -> list[list[int]]:
    """The tree's child-rank paths: [[0], [1], [0, 0]] is a root with two children, the first of which has one. Raises
    SpeculativeConfigError: an unknown name, not a list of paths, an empty list, or too many or too long paths."""
    paths = value
    if isinstance(value, str):
        if not value.lstrip().startswith(("[", "(")):
            if value in PUBLISHED_TREES:
                return PUBLISHED_TREES[value]
            hint, names = nearest_hint(value, PUBLISHED_TREES), ", ".join(PUBLISHED_TREES)
            raise config.fail(_TREE_KEY, f"names no published tree: {value!r}{hint}; there are {names}.")
        try:  # vLLM writes the tree as the text of a Python list of tuples
            paths = ast.literal_eval(value)
        except (ValueError, SyntaxError) as error:
            raise config.fail(_TREE_KEY, f"cannot be read: {error}.") from None
    is_list = isinstance(paths, (list, tuple)) and all(isinstance(path, (list, tuple)) and path for path in paths)
    if not paths or not is_list or not all(type(rank) is int and rank >= 0 for path in paths for rank in path):
        raise config.fail(_TREE_KEY, f"must be a list of child-rank paths like [[0], [1], [0, 0]], not {value!r}.")
    if max(map(len, paths)) > MOST_DRAFT_TOKENS or _has_too_many_prefixes(paths):
        raise config.fail(
            _TREE_KEY,
            f"has {len(paths)} paths of up to {max(map(len, paths))} tokens; a tree has at most {MOST_DRAFT_NODES} nodes, a path "
            f"{MOST_DRAFT_TOKENS}.",
        )
    return [list(path) for path in paths]


def _has_too_many_prefixes(paths: Iterable[SequenceOf[int]]) -> bool:
    nodes: set[tuple[int, ...]] = set()
    for path in paths:
        for end in range(len(path), 0, -1):
            prefix = tuple(path[:end])
            if prefix in nodes:  # then its own prefixes are in, too
                break
            nodes.add(prefix)
        if len(nodes) > MOST_DRAFT_NODES:
            return True
    return False
