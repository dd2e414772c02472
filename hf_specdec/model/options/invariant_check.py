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

_TEXT, _NODES = 4, 5  # tokens of each of two texts, and nodes of a tree after the second one
_PATHS = ((0, 3), (1, 2, 4))  # of the tree, root to leaf


def check(packed: PackedModel) -> None:
    """Compare logits bit for bit, once per class and configuration. Costs about ten forwards over a few tokens.

    Raises:
        UnsupportedModel: the model cannot run deterministically; the message says why.
    """
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
    key = (
        *self_test.signature(packed),
        torch.get_num_threads(),
        uses_triton(packed.device),
        packed.device,
    )
    if key not in _checked:
        with torch.no_grad(), self_test.evaluating(packed.model):
            _checked[key] = _problem(packed)
    if _checked[key]:
        raise UnsupportedModel(f"'deterministic': {name} {_checked[key]}. Leave the key out.")


def _problem(packed: PackedModel) -> str:
    """What is wrong with the logits; empty if nothing is."""
    together, alone = _logits_together(packed), _logits_alone(packed)
    wrong = [i for i in range(len(alone)) if not torch.equal(together[i], alone[i])]
    if not wrong:
        problem = self_test.problem_of(packed)  # equal bits may still be wrong
        return "" if problem is None else f"does not compute the same logits as without the mode: {problem}"
    worst = max(float((together[i] - alone[i]).abs().max()) for i in wrong)
    return (
        f"computes other logits for {len(wrong)} of {len(alone)} tokens together than one by one (by up to {worst:.3g})"
    )


def _texts(packed: PackedModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids of the two texts and of the tree's nodes, spread over the vocabulary."""
    count = 2 * _TEXT + _NODES
    ids = (np.arange(1, count + 1) * max(1, packed.vocab_size // (count + 1))) % packed.vocab_size
    return ids[:_TEXT], ids[_TEXT : 2 * _TEXT], ids[2 * _TEXT :]


def _logits_together(packed: PackedModel) -> list[torch.Tensor]:
    """Logits of the first text, the second and its tree from two forwards: two tokens of each text, then everything else."""
    first, second, nodes = _texts(packed)
    cache = packed.new_cache(num_blocks=2, block_size=16, share_prefixes=False)
    for row in (0, 1):
        cache.add(row)
        cache.reserve(row, 16)
    own = _TEXT - 2
    visibility = np.tri(own + _NODES, dtype=bool)
    visibility[own:, own:] = False
    positions = np.arange(2, 2 + own + _NODES)
    for path in _PATHS:
        for depth, node in enumerate(path):
            visibility[own + node, own + np.array(path[: depth + 1])] = True
            positions[own + node] = _TEXT + depth
    tokens = np.concatenate([second[2:], nodes])
    with packed.active():
        beginnings = packed.forward(
            [RowInput(0, first[:2], 0, logits=2), RowInput(1, second[:2], 0, logits=2)], cache
        ).logits
        tree = RowInput(1, tokens, 2, positions, visibility, positions, logits=len(tokens))
        rests = packed.forward([RowInput(0, first[2:], 2, logits=own), tree], cache).logits
    return [*beginnings[:2], *rests[:own], *beginnings[2:], *rests[own:]]


def _logits_alone(packed: PackedModel) -> list[torch.Tensor]:
    """The same logits from one forward per token, where each path is a text after the second text."""
    first, second, nodes = _texts(packed)
    of_nodes: dict[int, torch.Tensor] = {}
    of_texts = [_logits_of_line(packed, first)]
    for path in _PATHS:
        logits = _logits_of_line(packed, np.concatenate([second, nodes[list(path)]]))
        of_nodes.update(zip(path, logits[_TEXT:], strict=True))
    of_texts.append(logits[:_TEXT])
    return [*of_texts[0], *of_texts[1], *(of_nodes[node] for node in range(_NODES))]


def _logits_of_line(packed: PackedModel, tokens: np.ndarray) -> list[torch.Tensor]:
    """Logits after each token of a text, from one forward per token."""
    cache = packed.new_cache(num_blocks=1, block_size=16, share_prefixes=False)
    cache.add(0)
    cache.reserve(0, len(tokens))
    with packed.active():
        return [
            packed.forward([RowInput(0, tokens[i : i + 1], i)], cache).logits[0].clone() for i in range(len(tokens))
        ]
