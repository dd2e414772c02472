"""Losses of drafted tokens, against the text's tokens or the target's distributions; how they are weighted by depth; logits in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .base import HeadTrainer, StepLoss
from .batch import Batch, Places

TAUGHT = ("kl", "lk")  # losses that read the target's distributions
LogitsOf = Callable[[torch.Tensor], torch.Tensor]
Depth = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_LOGITS_KEPT = 2**26  # more logits than this are recomputed in the backward pass, in parts of this size
_BLEND = (
    3.0  # of `lk`, per unit of acceptance, speculators' default: at an acceptance of one half, KL has a share of 0.22
)
_TRUST = 0.5  # of `dpace`: share of a token's acceptance that is taken for granted, speculators' default


def token_loss(loss: str, logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor | None) -> torch.Tensor:
    """The loss of each of n tokens, in nats [n].

    `kl` is KL(p || q), with q of the head and p of the target. `lk` blends it with 1 - a, where a = sum min(p, q) is the rate at which
    drafts are accepted: s KL + (1 - s) (1 - a) with s = exp(-3 a), which has no gradient (https://arxiv.org/abs/2602.23881). Others
    are cross-entropies of the labels.

    Args:
        logits: of the head, float32 [n, V].
        labels: int64 [n].
        teacher: p [n, V], if `loss` is among TAUGHT.
    """
    if teacher is None or loss not in TAUGHT:
        return F.cross_entropy(logits, labels, reduction="none")
    divergence = F.kl_div(logits.log_softmax(-1), teacher, reduction="none").sum(-1)
    if loss == "kl":
        return divergence
    accepted = acceptance(logits, teacher)
    share = torch.exp(-_BLEND * accepted.detach())
    return share * divergence + (1 - share) * (1 - accepted)


def acceptance(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The probability [n] that a token drawn from the head's logits [n, V] is accepted: sum min(p, q)."""
    return torch.minimum(logits.softmax(-1), teacher).sum(-1)


def depth_weights(losses: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """D-PACE's weights [N, K] of cross-entropies [N, K] of drafts, without gradients (https://arxiv.org/abs/2605.18810). `there`: bool
    [N, K], which of these exist.

    With c_i = 0.5 + 0.5 q_i, where q_i is the probability that the head gives the i-th token, the weight of depth j is the sum of
    c_1 .. c_k over k >= j: what depth j adds to the length of the draft.
    """
    prefix = (_TRUST + (1 - _TRUST) * torch.exp(-losses.detach())).masked_fill(~there, 1.0).cumprod(1)
    return (prefix * there).flip(1).cumsum(1).flip(1) * there


def draft_loss(loss: str, weights: Sequence[float], num_drafts: int, depths: Iterable[Depth]) -> StepLoss:
    """The sum over drafts and depths of the losses by weight; its own weight is the number of drafts with a first token.

    Args:
        weights: of the depths; `dpace` takes D-PACE's instead.
        depths: for each, the drafts int64 [n] that have it, the losses of their tokens [n], these with all that is added [n], and
            whether the head's likeliest token is right, bool [n].
    """
    found, whole, there, metrics = [], [], [], {}
    for k, (drafts, losses, added, right) in enumerate(depths, 1):
        empty = losses.new_zeros(num_drafts)
        found.append(empty.index_put((drafts,), losses.detach()))
        whole.append(empty.index_put((drafts,), added))
        there.append(empty.index_fill(0, drafts, 1.0).bool())
        metrics[f"accuracy_{k}"] = (right.sum(), there[-1].sum())
    total, exists = torch.stack(whole, 1), torch.stack(there, 1)
    by_depth = total.new_tensor(weights) if loss != "dpace" else depth_weights(torch.stack(found, 1), exists)
    return StepLoss((by_depth * total).sum(), exists[:, 0].sum(), metrics)


def scored(
    loss: str, logits_of: LogitsOf, size: int, hidden: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [n] of the logits [n, size] of hidden states [n, H], and whether their argmax is the label, bool [n].

    Large logits are not kept for the backward pass but recomputed in parts.
    """

    def part(hidden, labels, teacher):
        logits = logits_of(hidden).float()
        return token_loss(loss, logits, labels, teacher), logits.argmax(-1) == labels

    if len(labels) * size <= _LOGITS_KEPT:
        return part(hidden, labels, teacher)
    rows = max(1, _LOGITS_KEPT // size)
    teachers = [None] * -(-len(labels) // rows) if teacher is None else teacher.split(rows)
    parts = zip(hidden.split(rows), labels.split(rows), teachers, strict=True)
    losses, rights = zip(*(checkpoint(part, *tensors, use_reentrant=False) for tensors in parts), strict=True)
    return torch.cat(losses), torch.cat(rights)


@dataclass
class Lesson:
    """What a head that drafts from every place of a text learns: tokens [N] at `places`, and the target's distributions [N, V] there."""

    loss: str
    batch: Batch
    places: Places
    labels: torch.Tensor
    teacher: torch.Tensor | None

    @classmethod
    def of(
        cls, trainer: HeadTrainer, batch: Batch, num_steps: int, draft_ids: Any = None, draft_places: Any = None
    ) -> Lesson:
        """The lesson in a batch. The labels are the text's tokens, or if distributions are learnt, the target's choices.

        Args:
            draft_ids, draft_places: the tokens [Vd] that the head can draft, and every token's place among them, or -1. Places with other
                labels are left out; distributions are renormalised.
        """
        target, loss = trainer.target, trainer.options.loss
        places, teacher, is_taught = Places.of(batch, num_steps), None, loss in TAUGHT
        labels, hidden = places.at(batch.ahead(batch.input_ids, 1)), places.at(batch.hidden())
        if draft_places is not None:
            labels = draft_places[argmax_of(target.logits, hidden, target.vocab_size) if is_taught else labels]
            known = labels >= 0
            places, labels, hidden = places.keep(known), labels[known], hidden[known]
        if is_taught:
            teacher = probabilities(target.logits, hidden, target.vocab_size, draft_ids)
            labels = teacher.argmax(-1)
        return cls(loss, batch, places, labels, teacher)

    def graded(
        self,
        weights: Sequence[float],
        size: int,
        steps: Iterable[tuple[LogitsOf, torch.Tensor, Any]],
        share: float = 1.0,
    ) -> StepLoss:
        """The loss of a head that makes, at every step, logits over `size` tokens from hidden states [n, H] of the columns that guess.

        Args:
            weights: of the steps.
            steps: for each, the function from hidden states to logits, these states, and what is added to their losses [n].
            share: factor of the tokens' losses.
        """
        depths = self._depths(size, steps, share)
        return draft_loss(self.loss, weights, self.batch.input_ids.numel(), depths)

    def _depths(self, size: int, steps: Iterable[tuple[LogitsOf, torch.Tensor, Any]], share: float) -> Iterator[Depth]:
        for k, (logits_of, hidden, added) in enumerate(steps):
            count = self.places.counts[k]
            teacher = None if self.teacher is None else self.teacher[:count]
            losses, right = scored(self.loss, logits_of, size, hidden, self.labels[:count], teacher)
            yield self.places.columns(k), losses, share * losses + added, right


def follow_text(
    batch: Batch,
    places: Places,
    state: Callable[[torch.Tensor], torch.Tensor],
    step: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[torch.Tensor]:
    """What a recurrence over the text's own tokens makes at every step, [n, ..] for the columns that guess.

    Args:
        state: the first state [m, H] of the columns, bool [B, S], that some step uses.
        step: from k, the state and the tokens x_{t+1+k} [m], what it makes [m, ..] and the next state.
    """
    used = torch.stack([batch.labels(k)[1] for k in range(len(places.counts))]).any(0)
    rows, current = used.flatten().cumsum(0) - 1, state(used)
    for k in range(len(places.counts)):
        made, current = step(k, current, batch.ahead(batch.input_ids, 1 + k)[used])
        yield made.index_select(0, rows[places.columns(k)])


def argmax_of(logits_of: LogitsOf, hidden: torch.Tensor, size: int) -> torch.Tensor:
    """Argmax [n] of logits over `size` tokens from hidden states [n, H], a part at a time."""
    return torch.cat([logits_of(part).argmax(-1) for part in hidden.split(max(1, _LOGITS_KEPT // size))])


@torch.no_grad()
def probabilities(
    logits_of: LogitsOf, hidden: torch.Tensor, size: int, among: torch.Tensor | None = None
) -> torch.Tensor:
    """The target's probabilities, float32 [n, size], from hidden states [n, H]; renormalised over the tokens `among` [Vd]."""
    parts = [logits_of(part) for part in hidden.split(max(1, _LOGITS_KEPT // size))]
    return torch.cat([(part if among is None else part[:, among]).softmax(-1, dtype=torch.float32) for part in parts])
