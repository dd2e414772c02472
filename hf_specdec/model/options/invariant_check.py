"""Whether a deterministic model keeps its promise: the same bits token by token, together, and in a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ...core.errors import UnsupportedModel
from ...core.names import ATTENTION_NAME
from ...core.rows import RowInput
from ...kernels import invariant
from ...kernels.dispatch import VARIABLE
from .. import self_test

if TYPE_CHECKING:
    from ..packed_model import PackedModel

_checked: dict[tuple, str] = {}  # what is wrong; empty: nothing

_TEXT, _NODES = 4, 5
# Behind the second text: 0 and 1 after its last token, 2 after 1, 3 after 0, 4 after 2. Paths (0, 3) and (1, 2, 4).
_PATHS = ((0, 3), (1, 2, 4))


def check(packed: PackedModel) -> None:
    """Compare logits bit for bit, once per class and configuration; costs some ten forwards over a few tokens.

    Raises:
        UnsupportedModel: the mode cannot serve the model; the message says why.
    """
    name = type(packed.model).__name__
    if packed.gather:
        raise UnsupportedModel(
            f"'deterministic' needs a model whose attention can be replaced; {name} attends to the keys of all rows at once, which "
            "sums in another order in every batch. Leave the key out."
        )
    if not invariant.is_served(packed.device):
        raise UnsupportedModel(
            f"'deterministic' runs on a CPU, and on CUDA devices that Triton's kernels serve (compute capability 8.0 and above, Triton "
            f"installed, {VARIABLE} not 'reference'); {name} is on {packed.device}. Leave the key out."
        )
    if packed.config._attn_implementation == ATTENTION_NAME:  # inside another's `active()`, as `self_test.check`
        return
    key = (
        *self_test.signature(packed),
        torch.get_num_threads(),
        invariant.implementation(packed.device),
        packed.device,
    )
    if key not in _checked:
        with torch.no_grad(), self_test.evaluating(packed.model):
            _checked[key] = _problem(packed)
    if _checked[key]:
        raise UnsupportedModel(f"'deterministic': {name} {_checked[key]}. Leave the key out.")


def _problem(packed: PackedModel) -> str:
    together, alone = _logits_together(packed), _logits_alone(packed)
    wrong = [i for i in range(len(alone)) if not torch.equal(together[i], alone[i])]
    if not wrong:
        problem = self_test.problem_of(packed)  # equal bits are not yet right ones
        return "" if problem is None else f"does not compute what it computes without the mode: {problem}"
    worst = max(float((together[i] - alone[i]).abs().max()) for i in wrong)
    return (
        f"computes other logits for {len(wrong)} of {len(alone)} tokens together than one by one (by up to {worst:.3g})"
    )


def _texts(packed: PackedModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count = 2 * _TEXT + _NODES
    ids = (np.arange(1, count + 1) * max(1, packed.vocab_size // (count + 1))) % packed.vocab_size
    return ids[:_TEXT], ids[_TEXT : 2 * _TEXT], ids[2 * _TEXT :]


def _logits_together(packed: PackedModel) -> list[torch.Tensor]:
    """Of the first text, the second, and its tree: two tokens of each text, then everything else in one forward."""
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
        begun = packed.forward(
            [RowInput(0, first[:2], 0, logits=2), RowInput(1, second[:2], 0, logits=2)], cache
        ).logits
        tree = RowInput(1, tokens, 2, positions, visibility, positions, logits=len(tokens))
        ended = packed.forward([RowInput(0, first[2:], 2, logits=own), tree], cache).logits
    return [*begun[:2], *ended[:own], *begun[2:], *ended[own:]]


def _logits_alone(packed: PackedModel) -> list[torch.Tensor]:
    """The same, token by token, the paths as texts."""
    first, second, nodes = _texts(packed)
    of_nodes: dict[int, torch.Tensor] = {}
    of_texts = [_line(packed, first)]
    for path in _PATHS:
        logits = _line(packed, np.concatenate([second, nodes[list(path)]]))
        of_nodes.update(zip(path, logits[_TEXT:], strict=True))
    of_texts.append(logits[:_TEXT])
    return [*of_texts[0], *of_texts[1], *(of_nodes[node] for node in range(_NODES))]


def _line(packed: PackedModel, tokens: np.ndarray) -> list[torch.Tensor]:
    cache = packed.new_cache(num_blocks=1, block_size=16, share_prefixes=False)
    cache.add(0)
    cache.reserve(0, len(tokens))
    with packed.active():
        return [
            packed.forward([RowInput(0, tokens[i : i + 1], i)], cache).logits[0].clone() for i in range(len(tokens))
        ]
