"""Which drafted tokens count, and which token follows them: a pure function of drafts, scores and noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..kernels.dispatch import current
from ..kernels.transfer import upload
from ..runtime import DraftTrees, Sequence
from .rules.speculative_sampling import accept_block, reject_tokens
from .rules.synthetic import accept_at_rates
from .rules.target_choice import follow_target
from .rules.typical import accept_typical
from .sampling import RowSampling

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


class PendingVerdict:
    """A verdict on its way from the device: one transfer, which the host need not wait for yet.

    Args:
        table: int64 [B, 2 N + 1]: accepted nodes, drafted ids, the token after them.

    Attributes:
        next_tokens: int64 [B], the tokens after what is accepted, on the device.
    """

    def __init__(self, table: torch.Tensor):
        self._table, self._event = table, None
        self.next_tokens = table[:, -1]
        if table.is_cuda:
            self._table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self._table.copy_(table, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(table.device))

    def wait(self) -> Verdict:
        """The verdict, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        table = self._table.cpu().numpy()
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
    columns = next_tokens[:, None]
    return PendingVerdict(torch.cat([accepted, tokens, columns], dim=1) if tokens.shape[1] else columns)


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
