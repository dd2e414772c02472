"""Differences of draft logits from a reference; `scripts/format_differences.py` collects them by test, as shares of the largest logit."""

from collections.abc import Iterable

import torch

measured: list[float] = []


def largest_difference(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest absolute difference of pairs of equal shape."""
    largest = 0.0
    for found, expected in pairs:
        difference = measure(found, expected)
        largest = max(largest, difference)
    return largest


def measure(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute difference; its share of the largest expected number goes to `measured`. Infinite numbers are left out."""
    finite = torch.isfinite(expected)
    difference = float((found.double() - expected.double())[finite].abs().max())
    measured.append(difference / float(expected[finite].abs().max()))
    return difference
