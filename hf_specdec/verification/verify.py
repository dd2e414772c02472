"""Which drafted tokens count, and which token follows them: a pure function of drafts, scores and noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..kernels.dispatch import current, uses_triton
from ..kernels.transfer import upload
from ..sampling.fused import RowSampling
from .speculative_sampling import accept_block, reject_tokens
from .synthetic import accept_at_rates
from .target_choice import follow_target
from .typical import accept_typical

# What each rule does with rows that sample.
RULES = {
    "greedy": follow_target,
    "coupled": follow_target,
    "rejection": reject_tokens,
    "block": accept_block,
    "typical": accept_typical,
    "synthetic": accept_at_rates,
}


@dataclass
class Verdict:
    """Per row: the accepted path and the token after it.

    Attributes:
        accepted: bool numpy [B, N].
        next_tokens: int64 numpy [B], the bonus token (whole path accepted) or the recovered one.
        tokens: int64 numpy [B, N], the drafted ids.
    """

    accepted: np.ndarray
    next_tokens: np.ndarray
    tokens: np.ndarray


class NothingToSample(RuntimeError):
    """Logits from which no token can be drawn."""


class PendingVerdict:
    """A verdict on its way from the device: one transfer, which the host need not wait for yet.

    Args:
        table: int64 [B, 2 N + 1]: accepted nodes, drafted ids, the token after them; with `checked` [B, 2 N + 2], the last
            column tells which rows had nothing to sample from.

    Attributes:
        next_tokens: int64 [B], the tokens after what is accepted, on the device.
    """

    def __init__(self, table: torch.Tensor, checked: bool = False):
        self._table, self._event, self._checked = table, None, checked
        self.next_tokens = table[:, -2 if checked else -1]
        if table.is_cuda:
            self._table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self._table.copy_(table, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(table.device))

    def wait(self) -> Verdict:
        """The verdict, once it is there.

        Raises:
            NothingToSample: a row was to sample from logits with NaN or infinity among them, or with all tokens removed.
        """
        if self._event is not None:
            self._event.synchronize()
        table = self._table.cpu().numpy()
        if self._checked:
            table, broken = table[:, :-1], np.flatnonzero(table[:, -1])
            if len(broken):
                raise NothingToSample(
                    f"No token can be sampled in row {broken[0]} of this step: its processed logits hold NaN or infinity, or every "
                    "token was removed (-inf). Look for overflow in the model's dtype, or at the logits processors."
                )
        width = table.shape[1] // 2
        return Verdict(table[:, :width] > 0, table[:, -1], table[:, width : 2 * width])


def begin_verification(
    trees: DraftTrees,
    scores: torch.Tensor,
    sequences: list[Sequence],
    config: SpeculativeConfig,
    sampling: RowSampling | None = None,
) -> PendingVerdict:
    """Verify every row's tree by `config.verification_rule` (docs/verification.md compares the rules).

    Args:
        trees: drafts of B rows.
        scores: float32 [R, V], the target's processed logits after the root and after each node of row 0, then of row 1, ..
        sequences: the B rows, not yet extended. Greedy ones walk along the argmax under every rule but "synthetic".
        config: the rule, and the rule's own keys.
        sampling: what the rule's kernel has yet to apply to the scores; None: nothing.
    """
    rule = config.verification_rule
    sampled = any(seq.do_sample for seq in sequences)
    if not (sampled or trees.tokens.shape[1] or uses_triton(scores.device)):  # plain greedy decoding, under every rule
        return PendingVerdict(scores.argmax(1, keepdim=True))
    index = _score_rows(trees)
    tokens = trees.tokens.to(scores.device)
    groups = _rows_by_rule(sequences, rule)
    with current(scores.device):
        if len(groups) == 1:
            more = {} if sampling is None else {"sampling": sampling}
            accepted, next_tokens = RULES[groups[0][0]](trees, scores, index, sequences, config, **more)
        else:
            accepted = torch.zeros(tokens.shape, dtype=torch.bool, device=scores.device)
            next_tokens = torch.zeros(len(sequences), dtype=torch.long, device=scores.device)
            for name, rows in groups:
                members, at = [sequences[i] for i in rows], upload(rows, scores.device)
                more = {} if sampling is None else {"sampling": sampling.of(rows)}
                path, after = RULES[name](trees.select(rows), scores, index[rows], members, config, **more)
                accepted[at], next_tokens[at] = path, after
    columns = [accepted, tokens] if tokens.shape[1] else []
    columns.append(next_tokens[:, None])
    if sampled:
        columns.append(_nothing_to_sample(scores, index, accepted, sequences)[:, None])
    return PendingVerdict(torch.cat(columns, dim=1) if len(columns) > 1 else columns[0], sampled)


def _nothing_to_sample(
    scores: torch.Tensor, index: np.ndarray, accepted: torch.Tensor, sequences: list[Sequence]
) -> torch.Tensor:
    """Which rows sample and chose a token by scores without a finite maximum, of which softmax makes NaN; bool [B].

    The maximum is all it takes: NaN and infinity pass through it, and what is removed later (top-k, ..) is never the best token.
    """
    broken = ~scores.amax(1).isfinite()[upload(index, scores.device)]  # [B, N + 1]
    broken[:, 1:] &= accepted  # the root always counts
    return broken.any(1) & upload([seq.do_sample for seq in sequences], scores.device)


def verify(
    trees: DraftTrees,
    scores: torch.Tensor,
    sequences: list[Sequence],
    config: SpeculativeConfig,
    sampling: RowSampling | None = None,
) -> Verdict:
    """`begin_verification`, and wait for it."""
    return begin_verification(trees, scores, sequences, config, sampling).wait()


def _rows_by_rule(sequences: list[Sequence], rule: str) -> list[tuple[str, list[int]]]:
    """(rule, row numbers), without empty groups: where the rule is for sampling, greedy rows go by "greedy"."""
    if rule in ("greedy", "coupled", "synthetic"):  # both kinds of rows in one go
        return [(rule, list(range(len(sequences))))]
    groups = [("greedy", [i for i, seq in enumerate(sequences) if not seq.do_sample])]
    groups.append((rule, [i for i, seq in enumerate(sequences) if seq.do_sample]))
    return [(name, rows) for name, rows in groups if rows]


def _score_rows(trees: DraftTrees) -> np.ndarray:
    """int64 [B, N + 1]: where the scores of (root, nodes) of each row are; padding points at the root's."""
    counts = np.asarray(trees.lengths, dtype=np.int64) + 1
    first = np.cumsum(counts) - counts
    offsets = np.arange(trees.tokens.shape[1] + 1)[None, :]
    return first[:, None] + np.where(offsets < counts[:, None], offsets, 0)
