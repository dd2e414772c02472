"""What several MTP modules that draft in turn pass to each other: within a round, and at the ends of shared prefixes."""

from __future__ import annotations

import numpy as np
import torch

from ...cache import PagedStaticCache
from ..growing.tree_growth import DraftLevel


class BlockEnds:
    """States of the modules at the ends of KV blocks.

    Module j + 1 reads a token together with module j's output at the token before it. If a text shares n rows of another, module j's
    output at token n is not computed again. So it is kept for every block that ends at n: [H] for each module except the last one that
    has begun.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, list[torch.Tensor]] = {}  # by the block's hash
        self._waiting: dict[int, dict[int, list[torch.Tensor]]] = {}  # per sequence, by n: the block has no hash yet

    def note(self, seq_id: int, first: int, states: torch.Tensor, block_size: int) -> None:
        """Note the states [n, H] of a module that has read tokens `first`, `first` + 1, .. of a text. Call for the modules in order."""
        waiting = self._waiting.setdefault(seq_id, {})
        for n in range(-(-first // block_size) * block_size, first + len(states), block_size):
            waiting.setdefault(n, []).append(states[n - first].clone())

    def keep(self, seq_id: int, cache: PagedStaticCache) -> None:
        """Keep the states at the ends of those blocks of the sequence that can be shared by now."""
        waiting, hashes = self._waiting.get(seq_id, {}), cache.tables[seq_id].hashes
        for n in [n for n in waiting if n // cache.block_size <= len(hashes)]:
            self._kept[hashes[n // cache.block_size - 1]] = waiting.pop(n)
        if len(self._kept) > 2 * cache.pool.num_blocks:  # many belong to blocks that were evicted
            self._kept = {key: states for key, states in self._kept.items() if cache.pool.lookup(key) is not None}

    def num_known(self, hashes: list[bytes]) -> int:
        """Number of leading blocks among these hashes whose ends have states."""
        return next((i for i, key in enumerate(hashes) if key not in self._kept), len(hashes))

    def at(self, key: bytes) -> list[torch.Tensor]:
        """The states at the end of the block with this hash."""
        return self._kept[key]

    def drop(self, seq_id: int) -> None:
        """Drop the noted states of a sequence that has ended or will be read again."""
        self._waiting.pop(seq_id, None)

    def forget(self) -> None:
        """Drop all kept states, because the weights have changed."""
        self._kept.clear()


class DraftNodes:
    """The E nodes per row of one round that modules have been given, and the modules' outputs.

    Attributes:
        tokens: int64 [R, E].
        parents: int64 [R, E], 1 + the index of each node's parent; 0 is the text's last token.
        ancestors: bool [R, E, E], the nodes on each node's path, itself included, in the form of `DraftLevel`; None without nodes.
        hidden: per module [R, 1 + nodes read, H]: x at the text's last token, then at the nodes.
        drafted: [R, 1 + nodes, H]: x of the module that drafted the children.
    """

    def __init__(self, roots: list[torch.Tensor]):
        rows, device = roots[0].shape[0], roots[0].device
        self.tokens = torch.zeros(rows, 0, dtype=torch.long, device=device)
        self.parents = self.tokens
        self.ancestors: np.ndarray | torch.Tensor | None = None
        self.hidden = [root[:, None] for root in roots]
        self.drafted = self.hidden[0]
        self._previous = 0  # index of the first node of the previous level

    def num_read(self, module: int) -> int:
        """How many nodes a module has read."""
        return self.hidden[module].shape[1] - 1

    def add(self, level: DraftLevel) -> None:
        """Add the nodes of one depth; rows that have ended are dropped."""
        if self.ancestors is not None and len(level.kept) < len(self.tokens):
            self.ancestors = self.ancestors[level.kept]
        self.tokens, self.parents, self.drafted = map(level.keep, (self.tokens, self.parents, self.drafted))
        self.hidden = [level.keep(states) for states in self.hidden]
        parents = level.parents + (1 + self._previous) if level.depth > 1 else torch.zeros_like(level.parents)
        self.tokens = torch.cat([self.tokens, level.tokens], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        self.ancestors = level.ancestors if self.ancestors is None else _stacked(self.ancestors, level.ancestors)
        self._previous = level.first

    def features(self, module: int) -> torch.Tensor:
        """The features [R, n, H] for the nodes a module has not read: the previous module's outputs at their parents."""
        source = self.hidden[module - 1] if module else self.drafted
        parents = self.parents[:, self.num_read(module) :]
        return source.gather(1, parents[:, :, None].expand(-1, -1, source.shape[2]))

    def made(self, module: int, hidden: torch.Tensor, width: int) -> None:
        """Store a module's outputs at the nodes it had not read [R, n, H]; the last `width` are the current level."""
        self.hidden[module] = torch.cat([self.hidden[module], hidden], dim=1)
        self.drafted = torch.cat([self.drafted, hidden[:, -width:]], dim=1)


def _stacked(above, below):
    """bool [R, E + F, E + F] from the paths of E nodes [R, E, E] and of F further ones [R, F, E + F]."""
    width = below.shape[1]
    if isinstance(below, torch.Tensor):
        return torch.cat([torch.nn.functional.pad(above, (0, width)), below], dim=1)
    return np.concatenate([np.pad(above, ((0, 0), (0, 0), (0, width))), below], axis=1)
