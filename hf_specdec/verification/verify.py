"""Verify drafts by the configured rule: a pure function of drafts, scores and noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..kernels.dispatch import current, uses_native
from ..kernels.transfer import upload
from ..kernels.verification import greedy_tokens, native
from ..sampling.parameters import FusedSampling
from .rules import RULES, follow_target, streams_of


@dataclass
class Verdict:
    """The accepted path of every row, and the token after it.

    Attributes:
        accepted: bool numpy [B, N].
        next_tokens: int64 numpy [B], the bonus token (if the whole path was accepted) or the recovered one.
        tokens: int64 numpy [B, N], the drafted ids.
    """

    accepted: np.ndarray
    next_tokens: np.ndarray
    tokens: np.ndarray


class NothingToSample(RuntimeError):
    """No token can be drawn from the logits."""


class PendingVerdict:
    """A verdict that is being copied from the device. The host waits for it only in `wait`.

    Args:
        table: int64 [B, 2 N + 1]: accepted nodes, drafted ids, and the token after them. If `checked`, [B, 2 N + 2]: the last
            column marks rows that had nothing to sample from.

    Attributes:
        next_tokens: int64 [B], the token after each row's accepted path, on the device.
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
        """Wait for the verdict and return it. Raises NothingToSample: a row should sample, but its logits hold NaN or infinity, or all
        tokens were removed."""
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
    sampling: FusedSampling | None = None,
    agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> PendingVerdict:
    """Verify every row's tree by `config.verification_rule` (docs/verification.md compares the rules).

    Args:
        scores: float32 [R, V], the target's processed logits after the root and after each node of row 0, then of row 1, ..
        sequences: the B rows, not extended yet. Greedy rows follow the argmax under every rule except "synthetic".
        config: the rule, and the rule's own keys.
        sampling: sampling parameters that the rule's kernel must still apply; None: `scores` already include them.
        agree: applied to the verdict's table (see PendingVerdict), before it is copied to the host.
    """
    rule = config.verification_rule
    sampled = any(seq.do_sample for seq in sequences)
    if not (sampled or trees.tokens.shape[1] or sampling):  # plain greedy decoding: the same under every rule
        with current(scores.device):
            table = greedy_tokens(scores)[:, None]
            return PendingVerdict(table if agree is None else agree(table))
    groups = _rows_by_rule(sequences, rule)
    if len(groups) == 1 and RULES[groups[0][0]] is follow_target and uses_native(scores.device):
        table = native.verdicts(trees, scores, streams_of(sequences))
        return PendingVerdict(table if agree is None else agree(table), checked=True)
    score_rows = _score_rows(trees)
    tokens = trees.tokens.to(scores.device)
    with current(scores.device):
        if len(groups) == 1:
            accepted, next_tokens = RULES[groups[0][0]](trees, scores, score_rows, sequences, config, sampling)
        else:
            accepted = torch.zeros(tokens.shape, dtype=torch.bool, device=scores.device)
            next_tokens = torch.zeros(len(sequences), dtype=torch.long, device=scores.device)
            for name, rows in groups:
                members, at = [sequences[i] for i in rows], upload(rows, scores.device)
                parameters = None if sampling is None else sampling.select(rows)
                path, after = RULES[name](trees.select(rows), scores, score_rows[rows], members, config, parameters)
                accepted[at], next_tokens[at] = path, after
    columns = [accepted, tokens] if tokens.shape[1] else []
    columns.append(next_tokens[:, None])
    if sampled:
        columns.append(_nothing_to_sample(scores, score_rows, accepted, sequences)[:, None])
    table = torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]
    return PendingVerdict(table if agree is None else agree(table), sampled)


def _nothing_to_sample(
    scores: torch.Tensor, score_rows: np.ndarray, accepted: torch.Tensor, sequences: list[Sequence]
) -> torch.Tensor:
    """Rows bool [B] sampled from scores without a finite maximum, of which softmax would be NaN; filters keep the best score."""
    broken = ~scores.amax(1).isfinite()[upload(score_rows, scores.device)]  # [B, N + 1]
    broken[:, 1:] &= accepted  # the root always counts
    return broken.any(1) & upload([seq.do_sample for seq in sequences], scores.device)


def _rows_by_rule(sequences: list[Sequence], rule: str) -> list[tuple[str, list[int]]]:
    """(rule, row numbers) without empty groups: rules for sampling leave greedy rows to "greedy"."""
    if rule in ("greedy", "coupled", "synthetic"):  # these handle both kinds of rows
        return [(rule, list(range(len(sequences))))]
    groups = [("greedy", [i for i, seq in enumerate(sequences) if not seq.do_sample])]
    groups.append((rule, [i for i, seq in enumerate(sequences) if seq.do_sample]))
    return [(name, rows) for name, rows in groups if rows]


def _score_rows(trees: DraftTrees) -> np.ndarray:
    """int64 [B, N + 1]: the row of scores of each (root, nodes); padding points to the root's."""
    counts = np.asarray(trees.lengths, dtype=np.int64) + 1
    first = np.cumsum(counts) - counts
    offsets = np.arange(trees.tokens.shape[1] + 1)[None, :]
    return first[:, None] + np.where(offsets < counts[:, None], offsets, 0)
