"""DraftTrees: the drafts of one round, one tree per row. A chain is a tree whose nodes have at most one child."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


@dataclass
class DraftTrees:
    """Trees of B rows, padded to the N nodes of the largest one.

    Attributes:
        tokens: int64 [B, N] drafted ids, on the target's device.
        parents: int64 numpy [B, N], index of each node's parent in its row (-1: the root, the last accepted token). Parents
            come before their children. None: every row is a chain.
        lengths: number of nodes of each row, 0..N; later entries are padding.
        probs: [B, M, V] distributions that the drafts were drawn from, or None when drafts are deterministic. A distribution
            that no node was drawn from may hold anything, even NaN.
        prob_index: numpy [B, N], which of the M distributions each node was drawn from; None: node i from distribution i.
    """

    tokens: torch.Tensor
    lengths: list[int]
    parents: np.ndarray | None = None
    probs: torch.Tensor | None = None
    prob_index: np.ndarray | None = None

    @classmethod
    def empty(cls, batch_size: int, device: torch.device | str = "cpu") -> DraftTrees:
        """Trees without nodes: plain decoding."""
        return cls(torch.empty(batch_size, 0, dtype=torch.long, device=device), [0] * batch_size)

    @classmethod
    def from_lists(
        cls,
        tokens: SequenceOf[SequenceOf[int]],
        parents: SequenceOf[SequenceOf[int]] | None = None,
        device: torch.device | str = "cpu",
    ) -> DraftTrees:
        """Trees from ragged lists of ids and parents (None: chains).

        Raises:
            ValueError: see `check`.
        """
        lengths = [len(row) for row in tokens]
        width = max(lengths, default=0)
        ids = np.zeros((len(lengths), width), dtype=np.int64)
        tree = None if parents is None else np.tile(np.arange(-1, width - 1), (len(lengths), 1))
        for i, row in enumerate(tokens):
            ids[i, : len(row)] = row
            if tree is not None and parents is not None:
                tree[i, : len(row)] = parents[i]
        trees = cls(torch.from_numpy(ids).to(device), lengths, tree)
        trees.check()
        return trees

    @classmethod
    def choose(cls, first: DraftTrees, second: DraftTrees, use_second: SequenceOf[bool]) -> DraftTrees:
        """Take each row's tree from one of two proposals for the same batch: from `second` where `use_second` is True."""
        if not any(use_second):
            return first
        width = max(first.tokens.shape[1], second.tokens.shape[1])
        rows = np.asarray(use_second, dtype=bool)
        pick = torch.from_numpy(rows).to(first.tokens.device)
        a, b = (torch.nn.functional.pad(trees.tokens, (0, width - trees.tokens.shape[1])) for trees in (first, second))
        out = cls(
            torch.where(pick[:, None], b, a),
            [m if use else n for n, m, use in zip(first.lengths, second.lengths, use_second, strict=True)],
        )
        if not (first.is_chain and second.is_chain):
            chain = np.tile(np.arange(-1, width - 1), (len(rows), 1))
            padded = [chain.copy(), chain.copy()]
            for trees, parents in zip((first, second), padded, strict=True):
                parents[:, : trees.tokens.shape[1]] = trees.parent_index
            out.parents = np.where(rows[:, None], padded[1], padded[0])
        if first.probs is not None or second.probs is not None:
            size = next(trees.probs.shape[2] for trees in (second, first) if trees.probs is not None)
            (p, index), (q, other) = (trees._distributions(width, size) for trees in (first, second))
            count = max(p.shape[1], q.shape[1])
            p, q = (torch.nn.functional.pad(table, (0, 0, 0, count - table.shape[1])) for table in (p, q))
            out.probs = torch.where(pick[:, None, None], q, p)
            out.prob_index = np.where(rows[:, None], other, index)
        return out

    def _distributions(self, width: int, vocab_size: int) -> tuple[torch.Tensor, np.ndarray]:
        """`probs` and `prob_index` [B, width]. Deterministic drafts get one-hot distributions."""
        index = np.tile(np.arange(width), (len(self.lengths), 1))
        probs = self.probs
        if probs is None:
            probs = torch.nn.functional.one_hot(self.tokens, vocab_size).to(torch.float32)
        elif self.prob_index is not None:
            index[:, : self.prob_index.shape[1]] = self.prob_index
        return probs, np.clip(index, 0, max(probs.shape[1] - 1, 0))  # padding must name a distribution, too

    def check(self) -> None:
        """Raise ValueError if a parent does not come before its child, or if a length is out of range."""
        width = self.tokens.shape[1]
        least, most = min(self.lengths, default=0), max(self.lengths, default=0)
        if least < 0 or most > width or len(self.lengths) != self.tokens.shape[0]:
            raise ValueError(f"Draft lengths {self.lengths} do not fit tokens of shape {tuple(self.tokens.shape)}.")
        if self.parents is not None and ((self.parents < -1) | (self.parents >= np.arange(width))).any():
            raise ValueError("A draft tree's parents must come before their children (-1 is the root).")

    @property
    def is_chain(self) -> bool:
        """True if every row is known to be a chain: `parents` is None."""
        return self.parents is None

    @property
    def row_depths(self) -> list[int]:
        """Depth of each row's tree; 0 without nodes."""
        if self.is_chain:
            return self.lengths
        return np.where(self.valid, self.depths, 0).max(axis=1, initial=0).tolist()

    @property
    def num_nodes(self) -> int:
        """Number of nodes of all rows together."""
        return sum(self.lengths)

    @cached_property
    def nodes_by_depth(self) -> np.ndarray:
        """int [B, D]: number of nodes of each row's tree at depth 1, 2, .. D."""
        if not any(self.lengths):
            return np.zeros((len(self.lengths), 0), dtype=np.int64)
        lengths = np.asarray(self.lengths, dtype=np.int64)
        if self.is_chain:
            return (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        depths = np.where(self.valid, self.depths, 0)
        counts = np.zeros((len(lengths), int(depths.max()) + 1), dtype=np.int64)
        np.add.at(counts, (np.arange(len(lengths))[:, None], depths), 1)
        return counts[:, 1:]

    def matching_path(self, row: int, tokens: list[int]) -> list[int]:
        """The nodes on the longest path from the root of a row's tree whose ids `tokens` begin with."""
        count = self.lengths[row]
        ids = self.tokens[row, :count].tolist()
        if self.is_chain:
            pairs = zip(ids, tokens, strict=False)
            return list(
                range(next((i for i, (node, token) in enumerate(pairs) if node != token), min(count, len(tokens))))
            )
        parents, path, at = self.parent_index[row, :count].tolist(), [], -1
        for token in tokens:
            at = next((node for node in range(at + 1, count) if parents[node] == at and ids[node] == token), -1)
            if at < 0:
                break
            path.append(at)
        return path

    @cached_property
    def valid(self) -> np.ndarray:
        """bool [B, N]: which entries are nodes and not padding."""
        return np.arange(self.tokens.shape[1])[None, :] < np.asarray(self.lengths, dtype=np.int64)[:, None]

    @cached_property
    def parent_index(self) -> np.ndarray:
        """`parents`, filled in for chains: int64 [B, N]."""
        if self.parents is not None:
            return self.parents
        return np.tile(np.arange(-1, self.tokens.shape[1] - 1), (len(self.lengths), 1))

    @cached_property
    def ancestors(self) -> np.ndarray:
        """bool [B, N + 1, N + 1] over (root, node 0, .. node N - 1): `[b, i, j]` is True if j is i or an ancestor of i."""
        parents = np.pad(self.parent_index + 1, ((0, 0), (1, 0)))  # the root is its own parent
        rows, nodes = np.arange(parents.shape[0])[:, None], np.arange(parents.shape[1])[None, :]
        out = np.zeros((*parents.shape, parents.shape[1]), dtype=bool)
        ancestor = np.broadcast_to(nodes, parents.shape)  # of every node, itself first
        out[rows, nodes, ancestor] = True
        for _ in range(self.tokens.shape[1]):
            ancestor = parents[rows, ancestor]
            if not ancestor.any():
                break
            out[rows, nodes, ancestor] = True
        out[:, :, 0] = True
        return out

    @cached_property
    def depths(self) -> np.ndarray:
        """int64 [B, N], depth of each node; the root's children have depth 1."""
        if self.is_chain:
            return np.tile(np.arange(1, self.tokens.shape[1] + 1), (len(self.lengths), 1))
        return self.ancestors[:, 1:, :].sum(2) - 1

    def paths(self, accepted: np.ndarray) -> list[list[int]]:
        """Node indices on each row's accepted path, root to leaf, from a mask bool [B, N] of accepted nodes."""
        paths: list[list[int]] = [[] for _ in accepted]
        if not accepted.shape[1]:
            return paths
        for row, node in np.argwhere(accepted).tolist():
            paths[row].append(node)
        return paths

    def chains(self) -> list[list[int]]:
        """The ids of each row's nodes; only for chains."""
        return [row[:count] for row, count in zip(self.tokens.tolist(), self.lengths, strict=True)]

    def extended(self, more: SequenceOf[SequenceOf[int]], after: SequenceOf[int] | None = None) -> DraftTrees:
        """These trees, each with further ids, one after another. The further ids are deterministic: where drafts have distributions,
        theirs are one-hot.

        Args:
            after: per row, the node that they follow (-1: the root); None: its last one.
        """
        drafted = [row[:count] for row, count in zip(self.tokens.tolist(), self.lengths, strict=True)]
        joined, parents = [[*ids, *further] for ids, further in zip(drafted, more, strict=True)], None
        if not self.is_chain:
            parents = []
            for i, (n, ids) in enumerate(zip(self.lengths, joined, strict=True)):
                parents.append([*self.parent_index[i, :n].tolist(), *range(n - 1, len(ids) - 1)])
                if after is not None and len(ids) > n:
                    parents[i][n] = after[i]
        out = DraftTrees.from_lists(joined, parents, device=self.tokens.device)
        if self.probs is not None:
            lengths, nodes = np.array(self.lengths)[:, None], np.arange(out.tokens.shape[1])
            probs, index = self._distributions(max(out.tokens.shape[1], self.tokens.shape[1]), self.probs.shape[2])
            further = DraftTrees.from_lists(more, device=self.tokens.device).tokens
            points = torch.nn.functional.one_hot(further, self.probs.shape[2]).to(probs.dtype)
            out.probs = torch.cat([probs, points], dim=1)
            out.prob_index = np.where(nodes < lengths, index[:, : len(nodes)], probs.shape[1] + nodes - lengths)
            out.prob_index = np.minimum(out.prob_index, out.probs.shape[1] - 1)  # padding must name one, too
        return out

    def kept(self, keep: np.ndarray) -> DraftTrees:
        """Only the nodes that `keep`, bool [B, N], marks: the parents of all of them are among them. For deterministic drafts."""
        lengths = keep.sum(1)
        order = np.argsort(~keep, axis=1, kind="stable")[:, : int(lengths.max(initial=0))]
        parents = None
        if not self.is_chain:
            above = np.take_along_axis(self.parent_index, order, axis=1)
            moved = np.take_along_axis(keep.cumsum(1) - 1, np.maximum(above, 0), axis=1)
            parents = np.where(np.take_along_axis(keep, order, axis=1) & (above >= 0), moved, -1)
        index = torch.from_numpy(order).to(self.tokens.device)
        return DraftTrees(self.tokens.gather(1, index), lengths.tolist(), parents)

    def first_path(self, row: int) -> list[int]:
        """The path from a row's root on which every node is the first child of the one before."""
        path, at = [], -1
        for node, parent in enumerate(self.parent_index[row, : self.lengths[row]].tolist()):
            if parent == at:
                path.append(node)
                at = node
        return path

    def spread(self, rows: list[int], batch_size: int) -> DraftTrees:
        """A batch whose given rows have these trees and whose other rows have empty trees."""
        place = dict(zip(rows, range(len(rows)), strict=True))
        trees = self.select([place.get(row, 0) for row in range(batch_size)])
        trees.lengths = [length if row in place else 0 for row, length in enumerate(trees.lengths)]
        return trees

    def select(self, rows: list[int]) -> DraftTrees:
        """The trees of the given rows."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.tokens.device)
        return DraftTrees(
            tokens=self.tokens[index],
            lengths=[self.lengths[i] for i in rows],
            parents=None if self.parents is None else self.parents[rows],
            probs=None if self.probs is None else self.probs[index],
            prob_index=None if self.prob_index is None else self.prob_index[rows],
        )
