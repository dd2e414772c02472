"""Differences of draft logits from a reference; `scripts/format_differences.py` collects them by test."""

from collections.abc import Iterable

import torch

measured: list[float] = []


def largest_difference(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest absolute difference of pairs of equal shape."""
    largest = max(float((found.double() - expected.double()).abs().max()) for found, expected in pairs)
    measured.append(largest)
    return largest
