"""Checks that a deterministic model gives the same bits token by token, many tokens at once, and in a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ...core.errors import UnsupportedModel
from ...core.names import ATTENTION_NAME
from ...core.rows import RowInput
from ...kernels import invariant
from ...kernels.dispatch import VARIABLE, uses_triton
from .. import self_test

if TYPE_CHECKING:
    from ..packed_model import PackedModel

_checked: dict[tuple, str] = {}  # by signature: what is wrong; empty if nothing is

_TRIAL = self_test.Trial((4, 4), (-1, -1, 1, 0, 2))


def check(packed: PackedModel) -> None:
    """Compare logits bit for bit, once per class and configuration. Costs about ten forwards over a few tokens. Raises UnsupportedModel:
    the model cannot run deterministically; the message says why."""
    name = type(packed.model).__name__
    if packed.gather:
        raise UnsupportedModel(
            f"'deterministic' needs a model whose attention can be replaced; {name} attends to the keys of all rows at once and "
            "sums them in an order that depends on the batch. Leave the key out."
        )
    if not invariant.is_served(packed.device):
        raise UnsupportedModel(
            f"'deterministic' runs on CPUs and on CUDA devices that can run the Triton kernels (compute capability 8.0 or higher, "
            f"Triton installed, {VARIABLE} not 'reference'); {name} is on {packed.device}. Leave the key out."
        )
    if packed.config._attn_implementation == ATTENTION_NAME:  # inside another `active()`, see `self_test.check`
        return
    key = (*self_test.signature(packed), torch.get_num_threads(), uses_triton(packed.device), packed.device)
    if key not in _checked:
        with torch.no_grad(), self_test.evaluating(packed.model):
            _checked[key] = _problem(packed)
    if _checked[key]:
        raise UnsupportedModel(f"'deterministic': {name} {_checked[key]}. Leave the key out.")


def _problem(packed: PackedModel) -> str:
    """What is wrong with the logits; empty if nothing is."""
    together = _TRIAL.packed_logits(packed)
    alone = _TRIAL.in_packed_order([_logits_of_line(packed, line) for line in _TRIAL.lines(packed.vocab_size)])
    wrong = [i for i in range(len(alone)) if not torch.equal(together[i], alone[i])]
    if not wrong:
        problem = self_test.problem_of(packed)  # equal bits may still be wrong
        return "" if problem is None else f"does not compute the same logits as without the mode: {problem}"
    worst = max(float((together[i] - alone[i]).abs().max()) for i in wrong)
    return (
        f"computes other logits for {len(wrong)} of {len(alone)} tokens together than one by one (by up to {worst:.3g})"
    )


def _logits_of_line(packed: PackedModel, tokens: np.ndarray) -> torch.Tensor:
    """Logits [S, V] after each token of a text, from one forward per token."""
    cache = packed.new_cache(num_blocks=1, block_size=16, share_prefixes=False, is_trial=True)
    cache.add(0)
    cache.reserve(0, len(tokens))
    with packed.active():
        logits = [packed.forward([RowInput(0, tokens[i : i + 1], i)], cache).logits for i in range(len(tokens))]
    return torch.cat(logits)
