"""FeatureGenerator: base of drafters that read the target's hidden states and keep a KV cache of their own (EAGLE, MTP)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from ...cache import PagedStaticCache
from ...core.outcome import StepOutcome
from ...core.output import PackedOutput, Taps
from ...core.rows import RowInput
from ...core.sequence import Sequence
from ...kernels.transfer import upload
from ...model.native import natively
from ...model.packed_head import PackedHead
from ...model.packed_model import PackedModel
from ..base import DrafterContext, RunsModel, SharesPrefixes, Transferable
from ..checkpoints.layers import LoadedHead
from .own_cache import OwnsCache
from .tree_growth import DraftLevel
from .tree_shapes import TreeDraftingConfig, TreeShape

Head = TypeVar("Head", bound=PackedHead)


class FeatureGenerator(OwnsCache, SharesPrefixes, Transferable, RunsModel):
    """Drafts from pairs of a token and the feature before it.

    The head's row p takes token p + 1 and the target's feature at p, has position p, and predicts token p + 2. Each row of the
    text is read once with the target's own features, accepted drafts included: this overwrites the keys and values
    written while drafting. While drafting, the head's own output takes the place of the feature.

    A subclass calls `use` in its `__init__`, or sets `vocabulary`, `lm_head` and `head` (see `captured`). It overrides `logits` (with
    `scoring_modules`) and (with `taps`) `features` where it differs from EAGLE-1.

    Attributes:
        unread: per sequence, features [n, F] that the head has not read yet.
    """

    AT_ONCE = 64  # steps whose features are sorted into `unread` together
    taps = Taps(last_hidden=True)
    head: PackedHead
    lm_head: nn.Module
    tokens_ahead = 1  # the head reads the feature of a token together with the token so many places after it
    expands_alone = False  # whether `state`, `head` and `score` are all that `expand` computes with
    drafts_twice = False  # whether it can draft again for a text that it has read to its end

    def __init__(
        self, config: TreeDraftingConfig, target: PackedModel, context: DrafterContext | None = None,
        shape: TreeShape | None = None, has_loop: bool = True,
    ):  # fmt: skip
        super().__init__(config, target, context)
        self.grow_as(shape or config.shape(), has_loop)
        self.unread: dict[int, list[torch.Tensor]] = {}
        # of steps of one token per row, not yet in `unread`
        self._newest: list[tuple[list[Sequence], torch.Tensor]] = []

    # ---- hooks of a method ------------------------------------------------------------------------------------------

    def features(self, output: PackedOutput, index: torch.Tensor) -> torch.Tensor:
        """The head's features [n, F] of the packed tokens `index` [n] in a target forward; by default its final hidden states."""
        assert output.last_hidden is not None
        return output.last_hidden[index.to(output.last_hidden.device)].to(self.head.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, Vd] from the head's hidden states [n, H]."""
        return self.lm_head(hidden)

    def scoring_modules(self) -> list[nn.Module]:
        """The modules that `logits` calls."""
        return [self.lm_head]

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """`logits`, computed by the native library if the head runs there."""
        native = self.head.native
        return self.logits(hidden) if native is None else native.apply(self.logits, self.scoring_modules(), hidden)

    def score_only(self, rows: Callable[[nn.Module], nn.Module]) -> None:
        self.lm_head = rows(self.lm_head)

    def captured(self, head: Head, native: bool = True, graphs: bool = True) -> Head:
        """The head with `draft_window`, and with CUDA graphs if the configuration asks for them, or if it leaves the choice and the head
        supports them; otherwise the head in the native library, if it can run there. Rounds are captured only if the head is.

        Args:
            native, graphs: False: never use the native library, or CUDA graphs.
        """
        if self.config.window is not None:
            head = copy.copy(head)
            head.window = self.config.window
        rewritten = self.config.compile is not False and self.config.quantization is None
        head = head.with_graphs(self.config.cuda_graphs if graphs else False, rewritten)
        self.has_graphs = head.graphs is not None
        if not self.has_graphs:
            self.rounds = None
        return natively(head, self.config.native) if native else head

    def use(self, loaded: LoadedHead, native: bool = True, graphs: bool = True) -> Any:
        """Draft with a loaded head, `captured`; returns it."""
        self.loaded = loaded  # which others that load it share as long as somebody holds it
        self.lm_head, self.vocabulary = loaded.lm_head, loaded.vocabulary
        self.head = self.captured(loaded.head, native, graphs)
        return self.head

    def modules(self) -> list[nn.Module]:
        """As in the base, and the head's layers and its language-model head."""
        lm_heads = [self.lm_head] if hasattr(self, "lm_head") else []
        return [self.head.module, *lm_heads, *super().modules()]

    # ---- memory -----------------------------------------------------------------------------------------------------

    def new_cache(self, num_blocks: int, block_size: int) -> PagedStaticCache:
        return self.head.new_cache(num_blocks, block_size)

    def start(self, seq: Sequence) -> None:
        """Join; the first draft comes after the target has read the prompt."""
        super().start(seq)
        self.unread[seq.id] = []

    def evict(self, seq: Sequence) -> None:
        """Drop KV and features; the target will read the text again."""
        self._sort_newest()
        super().evict(seq)
        self.unread[seq.id] = []

    def stop(self, seq: Sequence) -> None:
        self._sort_newest()
        super().stop(seq)
        del self.unread[seq.id]

    def active(self):
        return self.head.active()

    # ---- prefixes, and rows from another process --------------------------------------------------------------------

    def known_prefix(self, seq: Sequence) -> int:
        return self.cache.known_prefix(seq.id, seq.tokens) if seq.is_text and self.pages is not None else 0

    def share_prefix(self, seq: Sequence, num_tokens: int) -> None:
        self.cache.match_prefix(seq.id, seq.tokens, num_tokens)

    def moved_caches(self) -> list[PagedStaticCache] | None:
        return [self.cache]

    def read_features(self, seq: Sequence, count: int) -> None:
        """Let the head read these rows of the text; later features stay unread."""
        while (start := self.num_read(seq)) < count:
            chunk = min(count - start, self.config.prefill_chunk_size)
            self.cache.reserve(seq.id, start + chunk)
            self.read([seq], chunk)

    def warm_up(self, row: RowInput, output: PackedOutput) -> None:
        features = self.features(output, torch.zeros(1, dtype=torch.int64, device=self.head.device))
        self.head.read([row], features, self.cache)

    # ---- reading the text -------------------------------------------------------------------------------------------

    def observe(self, outcome: StepOutcome) -> None:
        """Keep the features of the tokens that the target has read. Long texts are read into the cache at once, to free their features."""
        assert outcome.output is not None
        sequences, rows, counts = outcome.read_rows()
        taken = self.features(outcome.output, upload(rows, self.head.device))
        if len(taken) == len(sequences) and not any(seq.finished for seq in sequences):
            self._newest.append((sequences, taken))
            if len(self._newest) < self.AT_ONCE:
                return
            self._sort_newest()
        else:
            self._sort_newest()
            self._sort_in(sequences, taken.split(counts))
        chunk = self.config.prefill_chunk_size
        while long := [seq for seq in sequences if self.num_unread(seq) > chunk]:
            if not all(self.try_reserve(seq, self.num_read(seq) + chunk) for seq in long):
                break  # no free blocks: keep the features
            self.read(long, chunk)
        if self.outlives_texts:
            self._read_ended([seq for seq in sequences if seq.finished])

    def _sort_in(self, sequences: list[Sequence], features: tuple[torch.Tensor, ...]) -> None:
        for seq, taken in zip(sequences, features, strict=True):
            if not seq.finished:
                self.unread[seq.id].append(taken)
            elif self.outlives_texts:  # a row needs the next token, which rows at the text's end do not have
                room = len(seq.tokens) - 1 - self.num_read(seq) - self.num_unread(seq)
                self.unread[seq.id].append(taken[: max(room, 0)])

    def _sort_newest(self) -> None:
        """Add the newest features to each sequence's `unread`. This is done for many steps at once, since most of them draft nothing."""
        steps, self._newest = self._newest, []
        while steps:
            sequences = steps[0][0]
            ids = [seq.id for seq in sequences]
            same = next((i for i, (other, _) in enumerate(steps) if [seq.id for seq in other] != ids), len(steps))
            by_row = torch.stack([taken for _, taken in steps[:same]], dim=1)
            for seq_id, taken in zip(ids, by_row, strict=True):
                self.unread[seq_id].append(taken)
            steps = steps[same:]

    def _read_ended(self, sequences: list[Sequence]) -> None:
        """Read the unread part of texts that have ended, if it completes blocks that later texts can share."""
        ended = []
        for seq in sequences:
            unread = self.num_unread(seq)
            if unread >= self.config.block_size and self.try_reserve(seq, self.num_read(seq) + unread):
                ended.append(seq)
        if ended:
            self.read_all(ended)

    def num_unread(self, seq: Sequence) -> int:
        """Number of rows of the text whose features are known but not read yet."""
        self._sort_newest()
        return sum(len(features) for features in self.unread[seq.id])

    def taken(self, seq: Sequence, chunk: int) -> torch.Tensor:
        """Up to `chunk` of a text's unread features [n, F], which then count as read."""
        features = joined(self.unread[seq.id])
        self.unread[seq.id] = [features[chunk:]] if len(features) > chunk else []
        return features[:chunk]

    def take(self, sequences: list[Sequence], chunk: int) -> tuple[list[RowInput], list[torch.Tensor]]:
        """Up to `chunk` rows of each text that the head has not read: the inputs, and their features [n, F]."""
        inputs, features = [], []
        for seq in sequences:
            features.append(self.taken(seq, chunk))
            start = self.num_read(seq)
            first = start + self.tokens_ahead
            tokens = np.asarray(seq.tokens[first : first + len(features[-1])], dtype=np.int64)
            inputs.append(RowInput(seq.id, tokens, start))
        return inputs, features

    def read(self, sequences: list[Sequence], chunk: int) -> torch.Tensor | None:
        """Read up to `chunk` rows of each text into the cache, whose slots are reserved; returns each text's last hidden state [R, H], or
        None from heads that compute only keys and values of a text."""
        inputs, features = self.take(sequences, chunk)
        hidden = self.head.read(inputs, joined(features), self.cache)
        for seq, row in zip(sequences, inputs, strict=True):
            self.has_read(seq, row.start + len(row.tokens))
        if hidden is None:
            return None
        if len(inputs) == 1:
            return hidden[-1:]
        last = np.cumsum([len(row.tokens) for row in inputs]) - 1
        return hidden.index_select(0, upload(last, hidden.device))

    def has_read(self, seq: Sequence, end: int) -> None:
        """The rows of the text up to `end` are in the cache, with the target's own features: they stay, and others may share them, once all
        heads have read their tokens for a block."""
        self.cache.tables[seq.id].length = end
        if seq.is_text:  # otherwise equal ids do not mean equal texts
            self.cache.register_prefix(seq.id, seq.tokens, end + 1 - self.num_heads)

    def read_all_but_last_chunk(self, sequences: list[Sequence]) -> None:
        """Read long texts until each has at most one chunk left."""
        chunk = self.config.prefill_chunk_size
        while long := [seq for seq in sequences if self.num_unread(seq) > chunk]:
            self.read(long, chunk)

    def read_all(self, sequences: list[Sequence]) -> Any:
        """Read all unread rows of each text; returns what `read` does."""
        self.read_all_but_last_chunk(sequences)
        return self.read(sequences, self.config.prefill_chunk_size)

    # ---- drafting ---------------------------------------------------------------------------------------------------

    def reach(self, seq: Sequence, limit: int) -> int:
        """The limit; 0 if the text cannot be read to its end yet, or there are no free blocks."""
        start = self.num_read(seq)
        end = start + self.num_unread(seq)
        complete = end == len(seq.tokens) - 1 and (self.drafts_twice or start < end)
        return limit if complete and self.try_reserve(seq, end + self.slots_of_draft(limit)) else 0

    def slots_of_draft(self, limit: int) -> int:
        """Cache slots that a draft of that depth needs after the text."""
        return self.shape.num_expanded(limit)

    def roots(self, sequences: list[Sequence], limits: list[int]) -> tuple[torch.Tensor, ...]:
        """Read all unread rows of each text; returns the head's hidden states [R, H] at the texts' ends."""
        return (self.read_all(sequences),)

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        (hidden,) = roots
        self.state = hidden[:, None]
        return self.score(hidden)

    def expand(self, level: DraftLevel) -> torch.Tensor:
        """Run the head over the nodes of one depth: logits [R, F, Vd]."""
        rows, count = level.tokens.shape
        features = self.carried(level).flatten(0, 1)
        hidden = self.over_nodes(self.head, level, level.tokens, level.ancestors, features=features)
        self.state = hidden.view(rows, count, -1)
        return self.score(hidden).view(rows, count, -1)

    def round_programs(self) -> tuple[Any, Any] | None:
        """The programs of `head` and of `score`."""
        if not self.expands_alone or self.head.native is None or self.window_stays:
            return None
        forward, head = self.head.native.current("drafts"), self.head.native.current("rows")
        return None if forward is None or head is None else (forward, head)


def joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Tensors [n, ..] as one."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
