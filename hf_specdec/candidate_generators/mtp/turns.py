"""Several MTP modules that draft in turn, each with its own layer of the KV cache."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from functools import partial

import numpy as np
import torch
from torch import nn

from ...cache import PagedStaticCache
from ...core.rows import RowInput
from ...core.sequence import Sequence
from ...kernels.transfer import upload
from ...model.draft_loop import LevelForward
from ...model.packed_head import PackedHead
from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..growing.captured_rounds import expanded_nodes
from ..growing.features import FeatureGenerator
from ..growing.levels import Level
from ..growing.tree_shapes import TreeDraftingConfig
from .block_ends import BlockEnds


class ModulesInTurn(FeatureGenerator):
    """Draft step s (0, 1, ..) is made by module s mod N of N modules, each with KV of its own.

    Let x_j(t) be the output of module j at token t. The module reads the output of the previous module at the previous token:

        x_j(t) = M_j(token t, x_{j-1}(t - 1)),   x_{-1}(t) = the target's hidden state at token t,

    so x_j(t) predicts token t + 1 and takes the place of the target's hidden state, j + 1 modules deep (DeepSeek-V3 report,
    section 2.2). Module j begins at token j + 1. All modules read each row of the text once, starting from the target's hidden
    states. In the draft's tree, a node's parent takes the place of token t - 1:

        x_j(node) = M_j(token, x_{j-1}(parent)),   x_{-1}(v) = x_s(v) for the module s that drafted v's children,

    and in its turn module j reads all nodes it has not read yet: at step s those of depths up to s. With N = 1 this is the
    recursion of EAGLE. With as many steps as modules it equals transformers' `MtpModel` (5.17 to 5.23), which crops and
    recomputes the rows of rejected drafts, while here every round reads the text's new rows again. Steps beyond N (transformers
    has none) start again with module 0, which then reads the nodes with drafted hidden states.

    The modules share block tables: module j keeps the KV of token t in logical slot t - 1 - j of its layer, at that position. A text
    that shares n rows with another reads tokens n + 1, .. with all modules, which write slots n - j, .. n - 1 again with the same content.

    A subclass sets `heads`, one per module over the same cache, and implements `state_of` and `logits_of`.
    """

    heads: list[PackedHead]
    boundaries: BlockEnds  # new with every cache

    def __init__(self, config: TreeDraftingConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        # per sequence: x_j of its last read token [H], per module j
        self.reached: dict[int, list[torch.Tensor | None]] = {}
        self.draft: _DraftNodes | None = None  # of the current round

    @abstractmethod
    def state_of(self, module: int, hidden: torch.Tensor) -> torch.Tensor:
        """x [n, H], the state that a module passes on, from its layer's output [n, H]."""

    @abstractmethod
    def logits_of(self, module: int, state: torch.Tensor) -> torch.Tensor:
        """Logits [n, Vd] from x [n, H]."""

    @abstractmethod
    def scorers_of(self, module: int) -> list[nn.Module]:
        """The modules that `logits_of` calls."""

    def score_of(self, module: int, state: torch.Tensor) -> torch.Tensor:
        """`logits_of`, computed by the native library if the module runs there."""
        native, function = self.heads[module].native, partial(self.logits_of, module)
        return function(state) if native is None else native.apply(function, self.scorers_of(module), state)

    def modules(self) -> list[nn.Module]:
        """All modules in use, and modules they may share with the target."""
        return [*(head.module for head in self.heads[1:]), *super().modules()]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The first module's logits [n, Vd], from x [n, H]."""
        return self.logits_of(0, hidden)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def start(self, seq: Sequence) -> None:
        """As in the base; no module has read anything yet."""
        super().start(seq)
        self.reached[seq.id] = [None] * len(self.heads)

    def moved_caches(self) -> list[PagedStaticCache] | None:
        """The cache of a single module; None for several modules, because each row also depends on the modules' own states."""
        return super().moved_caches() if len(self.heads) == 1 else None

    def known_prefix(self, seq: Sequence) -> int:
        """Number of leading tokens whose rows are in the cache, as far as the modules' states at the blocks' ends are known."""
        if not seq.is_text:
            return 0
        hashes = [content for content, _ in self.cache.known_blocks(seq.tokens)]
        known = len(hashes) if len(self.heads) == 1 else self.boundaries.num_known(hashes)
        return known * self.cache.block_size

    def share_prefix(self, seq: Sequence, num_tokens: int) -> None:
        """Share the cached rows of these tokens, and the states at their end."""
        super().share_prefix(seq, num_tokens)
        hashes = self.cache.tables[seq.id].hashes
        if hashes and len(self.heads) > 1:
            states = self.boundaries.at(hashes[-1])
            self.reached[seq.id] = [*states, *[None] * (len(self.heads) - len(states))]

    def forget_prefixes(self) -> None:
        """As in the base; also drop the states at the ends of blocks."""
        super().forget_prefixes()
        self.boundaries.forget()

    def has_read(self, seq: Sequence, end: int) -> None:
        """As in the base, but a block can be shared only once all modules have read their tokens for it."""
        self.cache.tables[seq.id].length = end
        if seq.is_text:
            self.cache.register_prefix(seq.id, seq.tokens, end + 1 - len(self.heads))
            self.boundaries.keep(seq.id, self.cache)

    def evict(self, seq: Sequence) -> None:
        """As in the base; all modules will read the text again."""
        super().evict(seq)
        self.boundaries.drop(seq.id)
        self.reached[seq.id] = [None] * len(self.heads)

    def stop(self, seq: Sequence) -> None:
        """Free the cache entry."""
        super().stop(seq)
        self.boundaries.drop(seq.id)
        del self.reached[seq.id]

    @contextlib.contextmanager
    def active(self):
        """A context with all modules' prepacked weights in place."""
        with contextlib.ExitStack() as stack:
            for head in self.heads:
                stack.enter_context(head.active())
            yield

    # ---- reading the text -------------------------------------------------------------------------------------------

    def read(self, sequences: list[Sequence], chunk: int) -> torch.Tensor:
        """Read up to `chunk` rows of each text with every module; the first module's x [R, H] at the last tokens."""
        below, starts, ends = [], [], []  # below: x_{j-1}(t - 1) for the tokens t that module j reads, per row
        for seq in sequences:
            known = self.unread[seq.id]
            known = known[0] if len(known) == 1 else torch.cat(known)
            below.append(known[:chunk])
            self.unread[seq.id] = [known[chunk:]] if len(known) > chunk else []
            starts.append(self.cache.tables[seq.id].length)
            ends.append(starts[-1] + len(below[-1]))
        first_states = None
        for j, head in enumerate(self.heads):
            inputs, rows = [], []
            for i, (seq, start, end) in enumerate(zip(sequences, starts, ends, strict=True)):
                first = max(start, j) + 1
                if first <= end:
                    tokens = np.asarray(seq.tokens[first : end + 1], dtype=np.int64)
                    inputs.append(RowInput(seq.id, tokens, first - 1 - j))
                    rows.append(i)
            if not inputs:
                break  # later modules begin even later
            hidden = self.state_of(j, head.forward(inputs, torch.cat([below[i] for i in rows]), self.cache))
            counts = [len(row.tokens) for row in inputs]
            last = hidden[upload(np.cumsum(counts) - 1, hidden.device)]
            first_states = last if j == 0 else first_states
            if j + 1 < len(self.heads):
                made = hidden.split(counts)
                below = self._below_next(sequences, rows, made, j)
                for i, row, own in zip(rows, inputs, made, strict=True):
                    if self.cache.share_prefixes and sequences[i].is_text:
                        self.boundaries.note(row.seq_id, row.start + 1 + j, own, self.cache.block_size)
            for i, state in zip(rows, last.unbind(), strict=True):
                self.reached[sequences[i].id][j] = state
        for seq, end in zip(sequences, ends, strict=True):
            self.has_read(seq, end)
        assert first_states is not None
        return first_states

    def _below_next(self, sequences, rows, made, module: int) -> list[torch.Tensor]:
        """The states that the next module reads, per row: x at the tokens before its own; empty if it reads none."""
        below = [made[0][:0]] * len(sequences)
        for i, own in zip(rows, made, strict=True):
            before = self.reached[sequences[i].id][module]
            below[i] = own[:-1] if before is None else torch.cat([before[None], own[:-1]])
        return below

    def _roots(self, sequences: list[Sequence], like: torch.Tensor, module: int) -> torch.Tensor:
        """x at each text's last token [R, H]; zeros if the text is too short for the module, which then has no turn."""
        found = [self.reached[seq.id][module] for seq in sequences]
        return torch.stack([torch.zeros_like(like[0]) if each is None else each for each in found])

    # ---- drafting ---------------------------------------------------------------------------------------------------

    def ready(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """As in the base, but a text with fewer tokens than there are modules gets at most as many draft tokens as it has tokens."""
        return [
            limit if len(seq.tokens) >= len(self.heads) else min(limit, len(seq.tokens))
            for seq, limit in zip(sequences, super().ready(sequences, limits), strict=True)
        ]

    def level_forwards(self, depth: int) -> list[LevelForward]:
        """One for each depth but the last: the module whose turn it is reads all nodes it has not read."""
        depths, ancestors = expanded_nodes(self.shape, depth)
        num_read, out = [0] * len(self.heads), []
        for level in range(1, depth):
            module, end = level % len(self.heads), int(np.searchsorted(depths, level + 1))
            first, num_read[module] = num_read[module], end
            seen = None if ancestors is None else ancestors[first:end, :end]
            out.append(LevelForward(level, first, depths[:end], seen, shift=module))
        return out

    def roots(self, sequences: list[Sequence]) -> tuple[torch.Tensor, ...]:
        """Read all unread rows of each text; every module's x [R, H] at the last token."""
        (first,) = super().roots(sequences)
        return first, *(self._roots(sequences, first, j) for j in range(1, len(self.heads)))

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        """Logits [R, Vd] of the token after each text."""
        self.draft = _DraftNodes(list(roots))
        return self.score_of(0, roots[0])

    def expand(self, level: Level) -> torch.Tensor:
        """Let the module whose turn it is read the nodes it has not read; logits [R, F, Vd] of the tokens after this level's nodes."""
        draft = self.draft
        assert draft is not None
        draft.add(level)
        assert draft.ancestors is not None
        module, (rows, width) = level.depth % len(self.heads), level.tokens.shape
        first = draft.num_read(module)
        features = draft.features(module).flatten(0, 1)
        tokens, head = draft.tokens[:, first:], self.heads[module]
        if self.loop is not None:
            hidden = head.forward_batch(
                self.loop.batch(level.depth, tokens, draft.ancestors[:, first:]), features=features
            )
        else:
            hidden = head.forward(self._inputs(level, draft, module), features, self.cache)
        hidden = self.state_of(module, hidden).view(rows, tokens.shape[1], -1)
        draft.made(module, hidden, width)
        return self.score_of(module, hidden[:, -width:].flatten(0, 1)).view(rows, width, -1)

    def _inputs(self, level: Level, draft: _DraftNodes, module: int) -> list[RowInput]:
        """The input rows of a module's forward over the nodes it has not read."""
        first = draft.num_read(module)
        tokens, count = draft.tokens[:, first:], draft.num_nodes - first
        on_host = tokens.numpy() if tokens.device.type == "cpu" else None
        ancestors = None if draft.num_nodes == level.depth else draft.host_ancestors  # None if only chains
        inputs = []
        for i, row in enumerate(level.rows):
            seq = self.sequences[row]
            end = self.cache.tables[seq.id].length - module  # end of the text in this module's slots
            nodes = RowInput(seq.id, tokens[i] if on_host is None else on_host[i], end + first, logits=count)
            if ancestors is not None:
                nodes.positions = end - 1 + level.depths[first:]
                nodes.visibility, nodes.region_positions = ancestors[i, first:], end - 1 + level.depths
            inputs.append(nodes)
        return inputs


class _DraftNodes:
    """The E nodes per row of one round that modules have been given, and the modules' outputs.

    Attributes:
        tokens: int64 [R, E].
        parents: int64 [R, E], 1 + the index of each node's parent; 0 is the text's last token.
        ancestors: bool [R, E, E], the nodes on each node's path, itself included, in the form of `Level`; None without nodes.
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

    @property
    def num_nodes(self) -> int:
        """E, nodes per row."""
        return self.tokens.shape[1]

    @property
    def host_ancestors(self) -> np.ndarray:
        """`ancestors`, on the host."""
        assert self.ancestors is not None
        return self.ancestors.cpu().numpy() if isinstance(self.ancestors, torch.Tensor) else self.ancestors

    def num_read(self, module: int) -> int:
        """How many nodes a module has read."""
        return self.hidden[module].shape[1] - 1

    def add(self, level: Level) -> None:
        """Add the nodes of one depth; rows that have ended are dropped."""
        if len(level.kept) < len(self.tokens):
            index = upload(level.kept, self.tokens.device)
            self.tokens, self.parents, self.drafted = self.tokens[index], self.parents[index], self.drafted[index]
            self.hidden = [each[index] for each in self.hidden]
            self.ancestors = None if self.ancestors is None else self.ancestors[level.kept]
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
