"""Log-probabilities of tokens, from logits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .outputs import Logprob


def logprobs_of(
    logits: torch.Tensor, tokens: list[int], count: int, text_of: Callable[[int], str | None]
) -> list[dict[int, Logprob]]:
    """For each row of logits, the log-probabilities of its `count` most probable tokens and of one given token.

    Args:
        logits: [R, V].
        tokens: R ids, one for each row.
        text_of: the text of an id.
    """
    scores = logits.float().log_softmax(-1)
    own = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])
    ranks = (scores > own).sum(1).add(1).tolist()
    best = scores.topk(count, dim=1)
    found = []
    rows = zip(tokens, own[:, 0].tolist(), ranks, best.indices.tolist(), best.values.tolist(), strict=True)
    for token, value, rank, ids, values in rows:
        ranked = enumerate(zip(ids, values, strict=True), 1)
        each = {other: Logprob(v, r, text_of(other)) for r, (other, v) in ranked}
        each.setdefault(token, Logprob(value, rank, text_of(token)))
        found.append(each)
    return found
