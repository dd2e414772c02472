"""Losses of drafted tokens, against the text's tokens or the target's distributions; how they are weighted by depth; logits in parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .base import Guesses, HeadTrainer, StepLoss
from .batch import Batch, Places
from .target import LogitsOf, argmax_of

TAUGHT = ("kl", "lk")  # losses that read the target's distributions
Depth = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_LOGITS_KEPT = 2**26  # more logits than this are recomputed in the backward pass, in parts of this size
# Of `lk`, per unit of acceptance, speculators' default: at an acceptance of one half, KL has a share of 0.22.
_BLEND = 3.0
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
    nats, whole, there, metrics = [], [], [], {}
    for k, (drafts, losses, added, right) in enumerate(depths, 1):
        empty = losses.new_zeros(num_drafts)
        nats.append(empty.index_put((drafts,), losses.detach()))
        whole.append(empty.index_put((drafts,), added))
        there.append(empty.index_fill(0, drafts, 1.0).bool())
        metrics[f"accuracy_{k}"] = (right.sum(), there[-1].sum())
    total, exists = torch.stack(whole, 1), torch.stack(there, 1)
    by_depth = total.new_tensor(weights) if loss != "dpace" else depth_weights(torch.stack(nats, 1), exists)
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


class StepTrainer(HeadTrainer):
    """Trains a head that guesses a token at every step, from every place of a text, which it learns with the weights of the steps.

    Attributes:
        weights: of the steps trained in the loss, set by `build` at the latest.
        draft_ids, draft_places: the tokens [Vd] that the head can draft, and every token's place among them, or -1. None: all. Places
            with other labels are left out; distributions are renormalised.
        down_sample_ratio: see `Places.sampled`; only for heads whose `steps` can run some of the columns.
    """

    weights: Sequence[float]
    draft_ids: torch.Tensor | None = None
    draft_places: torch.Tensor | None = None
    down_sample_ratio: float = 1.0

    @abstractmethod
    def steps(self, batch: Batch, places: Places) -> Iterator[tuple[LogitsOf, torch.Tensor]]:
        """For each step of `places`, the function from hidden states to logits, and the states [n, H] in the columns that guess. The head
        reads the text's own tokens.
        """

    def whole_loss(self, losses: torch.Tensor, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The losses [n] of tokens, with what else is learnt from the states [n, H] and the target's states there."""
        return losses

    def loss(self, batch: Batch) -> StepLoss:
        """The sum over steps of their weight times the tokens' losses. The labels are the text's tokens, or if distributions are learnt,
        the target's choices.
        """
        loss, target, ids, teacher = self.options.loss, self.target, self.draft_ids, None
        places, size = Places.of(batch, len(self.weights)), target.vocab_size
        labels, wanted = places.at(batch.ahead(batch.input_ids, 1)), places.at(batch.hidden())
        if self.draft_places is not None:
            labels = self.draft_places[argmax_of(target.logits, wanted, size) if loss in TAUGHT else labels]
            known = labels >= 0
            places, labels, wanted = places.keep(known), labels[known], wanted[known]
        if self.down_sample_ratio < 1:
            places = places.sampled(self.down_sample_ratio)
        if loss in TAUGHT:
            teacher = target.probabilities(wanted, ids)
            labels = teacher.argmax(-1)

        def depths() -> Iterator[Depth]:
            for k, (logits_of, hidden) in enumerate(self.steps(batch, places)):
                taken, vocabulary = places.taken[k], size if ids is None else len(ids)
                taught = None if teacher is None else teacher[taken]
                losses, right = scored(loss, logits_of, vocabulary, hidden, labels[taken], taught)
                whole = self.whole_loss(losses, hidden, wanted[taken]) / (places.shares[k] or 1.0)
                yield places.columns(k), losses, whole, right

        return draft_loss(loss, self.weights, batch.input_ids.numel(), depths())

    def guesses(self, batch: Batch) -> Guesses:
        """Greedy guesses under teacher forcing, in the columns whose first guess counts: others are never compared."""
        places, size = Places.of(batch, self.num_guesses, stride=0), self.target.vocab_size
        tokens = torch.stack([argmax_of(*step, size) for step in self.steps(batch, places)], dim=1)
        return Guesses(tokens if self.draft_ids is None else self.draft_ids[tokens], places.rows, places.places)


def follow_text(
    batch: Batch,
    places: Places,
    states: torch.Tensor,
    step: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[torch.Tensor]:
    """What a recurrence over the text's own tokens makes at every step, [n, ..] for the columns that guess.

    Args:
        states: the first states [B, S, H].
        step: from k, the states [m, H] and the tokens x_{t+1+k} [m] of the columns t that some step uses, what it makes [m, ..] and the
            next states.
    """
    used = places.used()
    rows, current = used.flatten().cumsum(0) - 1, states[used]
    for k in range(places.num_steps):
        made, current = step(k, current, batch.ahead(batch.input_ids, 1 + k)[used])
        yield made.index_select(0, rows[places.columns(k)])
