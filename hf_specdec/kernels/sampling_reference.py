"""Temperature, top-k, top-p and min-p in plain torch: the definition, and the CPU path."""

from __future__ import annotations

import torch


def sampling_scores(logits, temperature=None, top_k=None, top_p=None, min_p=None) -> torch.Tensor:
    """Logits over temperature, then top-k, top-p (Holtzman et al. 2020) and min-p (Nguyen et al. 2024) with one sort for all
    three: [R, V], removed tokens at -inf.

    What is kept is what transformers' warpers keep one after the other: top-k keeps all that equal the k-th, top-p removes
    equals in the order of an ascending sort, min-p is relative to the likeliest token; none removes the likeliest.

    Args:
        logits: [R, V].
        temperature, top_k, top_p, min_p: numbers, or tensors [R]: a row's parameter that is 1, 0, 1 or 0 is off. None: all are.
    """
    temperature, top_k, top_p, min_p = (
        each[:, None] if isinstance(each, torch.Tensor) else each for each in (temperature, top_k, top_p, min_p)
    )
    scores = logits if temperature is None else logits / temperature
    if top_k is None and top_p is None and min_p is None:
        return scores
    vocab = scores.shape[-1]
    values, order = scores.sort(dim=-1, descending=False)  # ascending, as transformers' top-p breaks ties
    removed = torch.zeros_like(values, dtype=torch.bool)
    if isinstance(top_k, torch.Tensor):
        kth = values.gather(-1, (vocab - top_k).clamp(0, vocab - 1).long())
        removed |= (values < kth) & (top_k > 0)
    elif top_k is not None:
        removed |= values < values[..., -min(top_k, vocab), None]
    if top_p is not None:
        kept = values.masked_fill(removed, float("-inf"))
        below = kept.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        below[..., -1] = False
        removed |= below & (top_p < 1)
    if min_p is not None:
        probs = values.masked_fill(removed, float("-inf")).softmax(dim=-1)
        low = probs < min_p * probs[..., -1:]
        low[..., -1] = False
        removed |= low
    return scores.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), float("-inf"))
