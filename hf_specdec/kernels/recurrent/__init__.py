"""Layers with a state over drafts, in Triton only: recurrences along chains and trees, where a token's state comes from its parent's, and
the short convolution before them. Elsewhere tokens are read one by one, by the functions of transformers' modules.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Walk(NamedTuple):
    """How lines of T tokens are read, column after column. A token's parent stands in a column before its own.

    Attributes:
        parents: int32 [n, T], the column of the token whose state each token starts from; -1: the state before the line; -2: no
            token, skipped.
        into: int32 [n, T], the place in a pool of states for the state after each token; -1: it is not kept.
        saved: int32 [n, T], places for states that a token other than the next one needs again; -1: the state is not saved.
        num_saved: how many places `saved` names.
    """

    parents: torch.Tensor
    into: torch.Tensor
    saved: torch.Tensor
    num_saved: int
