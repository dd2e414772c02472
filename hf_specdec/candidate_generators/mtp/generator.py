"""Drafting with the multi-token-prediction (MTP) modules that target checkpoints bring along, and the keys of method `mtp`.

Gloeckle et al. 2024; DeepSeek-V3 report, section 2.2.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from ...cache import PagedStaticCache
from ...config import config_key
from ...core.rows import RowInput
from ...core.sequence import Sequence
from ...kernels.transfer import upload
from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.config import HeadConfig
from ..checkpoints.files import Checkpoint, open_checkpoint
from ..checkpoints.target_parts import DraftVocabulary, load_once
from ..growing.features import FeatureGenerator
from ..growing.tree_growth import DraftLevel
from ..registry import register
from .checkpoint import load_mtp
from .layouts import is_mtp_tensor


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


@dataclass
class MtpConfig(HeadConfig):
    """The target's own multi-token-prediction layers draft: DeepSeek-V3, GLM-4.5, Qwen3.5, MiMo, Ernie 4.5 and others, in chains
    or trees."""

    name = "mtp"
    requires = ("MTP layers: in the target's own checkpoint, or in 'model'",)
    default_num_speculative_tokens: ClassVar[int] = 1

    recycle_normed: bool | None = config_key(
        None,
        "whether a draft step reads the previous step's output after the module's last norm (true) or before it (false); "
        "by default as the family's reference does",
    )

    def open_for(self, target: PackedModel) -> Checkpoint:
        """Open the checkpoint with the MTP layers: 'model', or the target's own. Raises SpeculativeConfigError: it cannot be opened, or
        the target was not loaded from a checkpoint."""
        wanted = is_mtp_tensor(target.config.num_hidden_layers)
        if self.model is not None:
            return self.open(wanted)
        model = target.model
        if not model.name_or_path:
            raise self.fail(
                "model", "is missing, and the target does not know where it was loaded from: name its folder or Hub id."
            )
        revision = self.revision or getattr(model.config, "_commit_hash", None)
        return open_checkpoint(model.name_or_path, revision, self.token, wanted)


@register(MtpConfig)
class MtpGenerator(FeatureGenerator):
    """Drafts with the target's MTP modules, each a decoder layer of the target's own class, with KV of its own. Draft step s (0, 1, ..)
    is made by module s mod N of N modules.

    The first step reads the target's final hidden state, after the last norm. Later steps read the module's output as the family's
    reference does (`MtpLayout.normed_output`): for DeepSeek-V3's layout after `shared_head.norm`, as in transformers and SGLang;
    older versions of vLLM read it before this norm (`recycle_normed: false`).

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

    Attributes:
        boundaries: the modules' states at the ends of blocks; new with every cache.
        reached: per sequence: x_j of its last read token [H], per module j.
    """

    config: MtpConfig
    draft: DraftNodes  # of the current round

    def __init__(self, config: MtpConfig, target: PackedModel, context: DrafterContext | None = None):
        loaded = self.loaded = load_once(
            config, target, lambda: load_mtp(config.open_for(target), target, config.prepack_weights)
        )
        length = loaded.proposed_length or len(loaded.heads)
        super().__init__(config.with_default_length(length), target, context)
        normed = config.recycle_normed
        self.hands_on_normed = loaded.layout.normed_output if normed is None else normed
        self.heads = [self._handing_on(head) for head in loaded.heads[: self.shape.depth]]
        self.head, self.num_heads = self.heads[0], len(self.heads)
        self.expands_alone = self.num_heads == 1
        self.mtp_modules: list[Any] = [head.module for head in self.heads]
        self.lm_heads = [module.shared["lm_head"] for module in self.mtp_modules]
        self.vocabulary = DraftVocabulary(target.vocab_size, loaded.target_ids)
        self.boundaries = BlockEnds()
        self.reached: dict[int, list[torch.Tensor | None]] = {}

    def new_cache(self, num_blocks: int, block_size: int) -> PagedStaticCache:
        """A cache with one layer per module in use, which grows up to `num_blocks`. Slot s of module j holds token s + 1 + j, so the
        contents of slot s depend on as many later tokens as there are modules (`ahead`)."""
        for head in self.heads:
            if head.graphs is not None:
                head.graphs.captures.clear()
        self.boundaries = BlockEnds()
        weights = [weight for head in self.heads for weight in head.module.parameters()]
        return PagedStaticCache(
            self.num_heads,
            num_blocks,
            block_size,
            weights=weights,
            ahead=self.num_heads,
            window=self.config.window,
            is_latent=self.heads[0].is_latent,
        )

    def modules(self) -> list[nn.Module]:
        return [*self.mtp_modules[1:], *self.lm_heads, *super().modules()]

    # ---- the modules' outputs ---------------------------------------------------------------------------------------

    def _handing_on(self, head: Any) -> Any:
        """The head, `captured`, with x as its output: the state that it passes on, after its last norm if `hands_on_normed`."""
        head = copy.copy(head)
        head.after = head.module.norm if self.hands_on_normed else None
        return self.captured(head)

    def logits_of(self, module: int, state: torch.Tensor) -> torch.Tensor:
        """Logits [n, Vd] from x [n, H]."""
        return self.lm_heads[module](state if self.hands_on_normed else self.mtp_modules[module].norm(state))

    def score_of(self, module: int, state: torch.Tensor) -> torch.Tensor:
        """`logits_of`, computed by the native library if the module runs there."""
        native, function = self.heads[module].native, partial(self.logits_of, module)
        if native is None:
            return function(state)
        return native.apply(function, [self.lm_heads[module], self.mtp_modules[module].norm], state)

    def score_only(self, rows: Callable[[nn.Module], nn.Module]) -> None:
        self.lm_heads = list(map(rows, self.lm_heads))

    # ---- memory -----------------------------------------------------------------------------------------------------

    def release(self) -> None:
        super().release()
        self.boundaries.forget()

    def start(self, seq: Sequence) -> None:
        super().start(seq)
        self.reached[seq.id] = [None] * self.num_heads

    def evict(self, seq: Sequence) -> None:
        super().evict(seq)
        self.boundaries.drop(seq.id)
        self.reached[seq.id] = [None] * self.num_heads

    def stop(self, seq: Sequence) -> None:
        super().stop(seq)
        self.boundaries.drop(seq.id)
        del self.reached[seq.id]

    @contextlib.contextmanager
    def active(self):
        with contextlib.ExitStack() as stack:
            for head in self.heads:
                stack.enter_context(head.active())
            yield

    def moved_caches(self) -> list[PagedStaticCache] | None:
        """The cache of a single module; None for several modules, because each row also depends on the modules' own states."""
        return super().moved_caches() if self.num_heads == 1 else None

    def known_prefix(self, seq: Sequence) -> int:
        """Number of leading tokens whose rows are in the cache, as far as the modules' states at the blocks' ends are known."""
        if not seq.is_text or self.pages is None:
            return 0
        hashes = [content for content, _ in self.cache.known_blocks(seq.id, seq.tokens)]
        known = len(hashes) if self.num_heads == 1 else self.boundaries.num_known(hashes)
        return known * self.cache.block_size

    def share_prefix(self, seq: Sequence, num_tokens: int) -> None:
        """Share the cached rows of these tokens, and the states at their end."""
        super().share_prefix(seq, num_tokens)
        hashes = self.cache.tables[seq.id].hashes
        if hashes and self.num_heads > 1:
            states = self.boundaries.at(hashes[-1])
            self.reached[seq.id] = [*states, *[None] * (self.num_heads - len(states))]

    def forget_prefixes(self) -> None:
        super().forget_prefixes()
        self.boundaries.forget()

    def has_read(self, seq: Sequence, end: int) -> None:
        """As in the base. The modules' states are kept where others may share rows."""
        super().has_read(seq, end)
        if seq.is_text:
            self.boundaries.keep(seq.id, self.cache)

    # ---- reading the text -------------------------------------------------------------------------------------------

    def read(self, sequences: list[Sequence], chunk: int) -> torch.Tensor:
        """Read up to `chunk` rows of each text with every module; the first module's x [R, H] at the last tokens."""
        below, starts, ends = [], [], []  # below: x_{j-1}(t - 1) for the tokens t that module j reads, per row
        for seq in sequences:
            below.append(self.taken(seq, chunk))
            starts.append(self.num_read(seq))
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
            hidden = head.forward(inputs, torch.cat([below[i] for i in rows]), self.cache)
            counts = [len(row.tokens) for row in inputs]
            last = hidden[upload(np.cumsum(counts) - 1, hidden.device)]
            first_states = last if j == 0 else first_states
            if j + 1 < self.num_heads:
                made = hidden.split(counts)
                below = self._below_next(sequences, rows, made, j)
                for i, row, states in zip(rows, inputs, made, strict=True):
                    if self.cache.share_prefixes and sequences[i].is_text:
                        self.boundaries.note(row.seq_id, row.start + 1 + j, states, self.cache.block_size)
            for i, state in zip(rows, last.unbind(), strict=True):
                self.reached[sequences[i].id][j] = state
        for seq, end in zip(sequences, ends, strict=True):
            self.has_read(seq, end)
        assert first_states is not None
        return first_states

    def _below_next(self, sequences, rows, made, module: int) -> list[torch.Tensor]:
        """The states that the next module reads, per row: x at the tokens before its own; empty if it reads none."""
        below = [made[0][:0]] * len(sequences)
        for i, states in zip(rows, made, strict=True):
            before = self.reached[sequences[i].id][module]
            below[i] = states[:-1] if before is None else torch.cat([before[None], states[:-1]])
        return below

    # ---- drafting ---------------------------------------------------------------------------------------------------

    def reach(self, seq: Sequence, limit: int) -> int:
        """As in the base, but a text with fewer tokens than there are modules gets at most as many draft tokens as it has tokens."""
        limit = super().reach(seq, limit)
        return limit if len(seq.tokens) >= self.num_heads else min(limit, len(seq.tokens))

    def roots(self, sequences: list[Sequence], limits: list[int]) -> tuple[torch.Tensor, ...]:
        """Read all unread rows of each text; every module's x [R, H] at the last token: zeros if the text is too short for the module,
        which then has no turn."""
        first = self.read_all(sequences)
        reached = zip(*(self.reached[seq.id][1:] for seq in sequences), strict=True)
        none = torch.zeros_like(first[0])
        return first, *(torch.stack([none if state is None else state for state in states]) for states in reached)

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        self.draft, self.state = DraftNodes(list(roots)), roots[0][:, None].clone()
        return self.score_of(0, roots[0])

    def expand(self, level: DraftLevel) -> torch.Tensor:
        """Let the module whose turn it is read the nodes it has not read; logits [R, F, Vd] of the tokens after this level's nodes."""
        draft = self.draft
        draft.add(level)
        assert draft.ancestors is not None
        module, (rows, width) = level.depth % self.num_heads, level.tokens.shape
        first = draft.num_read(module)
        features = draft.features(module).flatten(0, 1)
        tokens, ancestors = draft.tokens[:, first:], draft.ancestors[:, first:]
        hidden = self.over_nodes(self.heads[module], level, tokens, ancestors, shift=module, features=features)
        hidden = hidden.view(rows, tokens.shape[1], -1)
        draft.made(module, hidden, width)
        return self.score_of(module, hidden[:, -width:].flatten(0, 1)).view(rows, width, -1)
