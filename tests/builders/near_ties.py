"""The one excuse for a greedy difference: the target itself could not tell the two tokens apart."""

from __future__ import annotations

import torch

TIE = 1e-5


def first_difference_is_a_tie(model, expected: list[int], actual: list[int], prompt_length: int) -> bool:
    """Whether two outputs first differ where the target's two best logits are within `TIE`.

    Args:
        expected, actual: whole rows without padding, prompt included.
    """
    at = next((i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), None)
    if at is None or at < prompt_length:
        return False
    with torch.no_grad():
        logits = model(torch.tensor([expected[:at]]), use_cache=False).logits[0, -1].double()
    best = logits.topk(2)
    return bool(best.values[0] - best.values[1] <= TIE) and {expected[at], actual[at]} == set(best.indices.tolist())
