"""A model's first use: does it compute here what it computes alone? Some models pass every look at their configuration
and are still wrong over packed rows (masks made from memory order, positions recomputed, arguments not handed on)."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from ..core.errors import UnsupportedModel
from ..core.names import ATTENTION_NAME
from ..core.rows import RowInput
from . import architectures

if TYPE_CHECKING:
    from .packed_model import PackedModel

logger = logging.getLogger(__name__)

# Two texts read in two forwards, so that cached keys are read too: first `read` tokens of each, then the rest; behind
# the second text hangs a tree whose siblings stand between parents and children, as memory order would not have it.
_READ = 2
_LENGTHS = (3, 3)
_PARENTS = np.array([-1, -1, 1, 0])
_NUM_TOKENS = sum(_LENGTHS) + len(_PARENTS)
# Largest error of the logits, relative to their spread, that rounding explains.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# A wrong mask is off by about the whole spread. Only low precision explains much: there one rounding can choose other experts.
_NOISE_FACTOR = 10
_MOST_NOISE = {torch.float64: 1e-4, torch.float32: 1e-2}
_MOST_NOISE_ELSE = 0.25

_verdicts: dict[tuple, tuple[str | None, str]] = {}  # how to attend; or None, and why nothing works


def check(packed: PackedModel) -> None:
    """Compare a short packed forward with the model's own, once per class and configuration.

    Sets `packed.gather` if attention through pages is wrong but attention to gathered keys is right (one warning).
    Costs three forwards over about ten tokens each. Inside another PackedModel's `active()` of the same model nothing is
    checked: the model's own attention is not in place.

    Raises:
        UnsupportedModel: the model's packed logits are wrong either way; the message has the numbers.
    """
    if packed.config._attn_implementation == ATTENTION_NAME:
        return
    if packed.num_layers is not None and _verdicts.get(signature(packed, whole=True), ("", ""))[0] == "gather":
        packed.gather = True  # what the whole model cannot do, its first layers cannot; no second warning
    key = signature(packed)
    if key not in _verdicts:
        with torch.no_grad(), evaluating(packed.model):
            _verdicts[key] = _judge(packed)
    way, reason = _verdicts[key]
    if way is None:
        raise UnsupportedModel(reason)
    packed.gather = way == "gather"


def signature(packed: PackedModel, whole: bool = False) -> tuple:
    """What the verdict depends on; `whole`: without early exit."""
    model = packed.model
    fields = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    config = json.dumps(fields, sort_keys=True, default=str)
    layers = None if whole else packed.num_layers
    return type(model), packed.config._attn_implementation, model.dtype, layers, packed.gather, config


def _judge(packed: PackedModel) -> tuple[str | None, str]:
    """The first way to attend that gives the model's own logits, with the reason if there is none."""
    name = type(packed.model).__name__
    what = name if packed.num_layers is None else f"{name} with its first {packed.num_layers} layers"
    wanted = _Expected(packed)
    ways = ["gather"] if packed.gather else ["paged", "gather"]
    problems = []
    for way in ways:
        packed.gather = way == "gather"
        problem = _problem(packed, wanted)
        if problem is None:
            if problems:
                logger.warning(
                    "%s: with attention through the paged cache, %s. It runs with gathered keys instead, which is slower.",
                    what,
                    problems[0],
                )
            return way, ""
        problems.append(problem)
    return None, (
        f"{what} does not compute over packed rows what it computes alone: {'; '.join(map('{}: {}'.format, ways, problems))}. "
        "Call generate() without speculative_config."
    )


def problem_of(packed: PackedModel) -> str | None:
    """What is wrong with the packed logits, in the way that `packed` attends; None: nothing."""
    return _problem(packed, _Expected(packed))


def _problem(packed: PackedModel, wanted: _Expected) -> str | None:
    """What is wrong with the packed logits, or None."""
    try:
        error = _relative_error(_packed_logits(packed), wanted.logits)
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # whatever an unknown model raises, the other way may still work
        return f"its forward raised {type(failure).__name__} ({failure})"
    tolerance = _TOLERANCES.get(packed.model.dtype, 5e-2)
    if error <= tolerance:
        return None
    # Low precision and sparse experts can be noisier: what does the model itself do in another batch?
    most = _MOST_NOISE.get(packed.model.dtype, _MOST_NOISE_ELSE)
    tolerance = max(tolerance, min(_NOISE_FACTOR * wanted.noise(), most))
    if error <= tolerance:
        return None
    return f"its logits differ by {error:.2g} of their spread (rounding explains {tolerance:.2g})"


# ---- the two computations -------------------------------------------------------------------------------------------


class _Expected:
    """The logits of every packed token by the model's plain forward: no cache, its own attention, one line per path."""

    def __init__(self, packed: PackedModel):
        self.packed = packed
        first, second, nodes = _texts(packed.vocab_size)
        paths = [first] + [np.concatenate([second, nodes[path]]) for path in _leaf_paths()]
        self.paths = [torch.from_numpy(path).to(packed.device) for path in paths]
        # Padding stands on the right, where causal attention never sees it.
        batch = torch.nn.utils.rnn.pad_sequence(self.paths, batch_first=True, padding_value=int(first[0]))
        try:
            lines = self._plain_forward(batch)
        except (torch.OutOfMemoryError, UnsupportedModel):
            raise
        except Exception as failure:
            raise UnsupportedModel(
                f"{type(packed.model).__name__} cannot run on token ids alone: {failure}"
            ) from failure
        self.logits = self._in_packed_order(lines)
        self._check_causal(lines)

    def _check_causal(self, lines: torch.Tensor) -> None:
        """Texts that begin alike must have the same logits there, whatever comes later.

        Raises:
            UnsupportedModel: they have not; the error of attention to later tokens hides in every other comparison.
        """
        texts = lines[1:, : _LENGTHS[1]]
        error = max(_relative_error(text, texts[0]) for text in texts[1:])
        if error > _TOLERANCES.get(self.packed.model.dtype, 5e-2):
            name = type(self.packed.model).__name__
            raise UnsupportedModel(
                f"{name} attends to later tokens: its logits at a token change by {error:.2g} of their spread with what follows. "
                "Text cannot be decoded token by token with it; a model that can be trained in both ways needs is_decoder=True in "
                "its configuration."
            )

    def noise(self) -> float:
        """Relative difference between the paths run together and one by one."""
        lines = [self._plain_forward(path[None])[0] for path in self.paths]
        return _relative_error(self._in_packed_order(lines), self.logits)

    def _plain_forward(self, ids: torch.Tensor) -> torch.Tensor:
        with architectures.first_layers(self.packed.model, self.packed.num_layers):
            return self.packed.model(input_ids=ids, use_cache=False, return_dict=True).logits.float()

    @staticmethod
    def _in_packed_order(lines) -> torch.Tensor:
        """[T, V]: the first text, the second, then each node once, from the first path it is on."""
        node_lines = {}
        for line, path in enumerate(_leaf_paths(), start=1):
            for depth, node in enumerate(path):
                node_lines.setdefault(node, lines[line][_LENGTHS[1] + depth])
        nodes = torch.stack([node_lines[node] for node in range(len(_PARENTS))])
        return torch.cat([lines[0][: _LENGTHS[0]], lines[1][: _LENGTHS[1]], nodes])


def _packed_logits(packed: PackedModel) -> torch.Tensor:
    """The same logits [T, V] from two packed forwards: the beginnings of both texts, then the rest with the tree."""
    texts = _texts(packed.vocab_size)
    cache = packed.new_cache(num_blocks=2, block_size=16, share_prefixes=False)
    rows = []
    for row in (0, 1):
        cache.add(row)
        cache.reserve(row, 16)
        rows.append(RowInput(row, texts[row][:_READ], 0, logits=_READ))
    rest = RowInput(0, texts[0][_READ:], _READ, logits=_LENGTHS[0] - _READ)
    with packed.active():
        begun = packed.forward(rows, cache).logits
        ended = packed.forward([rest, _tree_row(texts)], cache).logits
    split = _LENGTHS[0] - _READ
    return torch.cat([begun[:_READ], ended[:split], begun[_READ:], ended[split:]])


def _tree_row(texts) -> RowInput:
    _, text, nodes = texts
    own = len(text) - _READ
    count = own + len(nodes)
    visibility = np.tri(count, dtype=bool)
    visibility[own:, own:] = False
    positions = np.arange(_READ, _READ + count)
    for node in range(len(nodes)):
        path = _path_to(node)
        visibility[own + node, own + np.array(path)] = True
        positions[own + node] = len(text) - 1 + len(path)
    return RowInput(1, np.concatenate([text[_READ:], nodes]), _READ, positions, visibility, positions, logits=count)


def _texts(vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids of the two texts and of the nodes: spread over the vocabulary, all different if there are enough."""
    ids = (np.arange(1, _NUM_TOKENS + 1) * max(1, vocab_size // (_NUM_TOKENS + 1))) % vocab_size
    return ids[: _LENGTHS[0]], ids[_LENGTHS[0] : sum(_LENGTHS)], ids[sum(_LENGTHS) :]


def _path_to(node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = int(_PARENTS[node])
    return path[::-1]


def _leaf_paths() -> list[list[int]]:
    return [_path_to(node) for node in range(len(_PARENTS)) if node not in _PARENTS]


def _relative_error(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest distance of a token's logits [V] from what is wanted, in units of their spread; NaN counts as infinite.

    Entries that are not finite in `wanted` say nothing and are left out.
    """
    logits, wanted = logits.detach().to(wanted.device), wanted.double()
    finite = wanted.isfinite()
    count = finite.sum(1).clamp(min=1)
    centred = wanted - (wanted.where(finite, 0).sum(1) / count)[:, None]
    spread = centred.where(finite, 0).norm(dim=1).clamp(min=1e-12)
    distance = (logits.double() - wanted).where(finite, 0).norm(dim=1)
    return float((distance / spread).nan_to_num(nan=float("inf")).max())


@contextlib.contextmanager
def evaluating(model: PreTrainedModel):
    """No dropout inside; every module's mode is restored."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
