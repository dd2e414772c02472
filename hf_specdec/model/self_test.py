"""Checks at a model's first use that its packed forward gives the same logits as its plain forward.

Some models pass all checks of their configuration and are still wrong over packed rows: they build masks from memory order,
recompute positions, or do not pass arguments on.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..core.errors import UnsupportedModel
from ..core.names import ATTENTION_NAME, CACHE
from ..core.rows import RowInput
from . import architectures
from .architectures import all_modules
from .encoder_decoder.source import dummy_sources, encoder_output
from .structure import forwards_of, interventions

if TYPE_CHECKING:
    from .packed_model import PackedModel

logger = logging.getLogger(__name__)

# Largest error of the logits, relative to their spread, that rounding explains.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# If a model's own logits vary more from batch to batch, this many times their variation is tolerated, up to a limit. The
# limit is high only for low precision, where one rounding can choose other experts. A wrong mask costs about the whole spread.
_NOISE_FACTOR = 10
_MOST_NOISE = {torch.float64: 1e-4, torch.float32: 1e-2}
MOST_NOISE_LOW_PRECISION = 0.25
_NUDGE = 1e-4  # relative change of embeddings that makes layers which round their inputs round some of them otherwise

# How it attends, "paged" or "gather", and whether its layers round; refusals are not kept, because what was in the way may go.
_verdicts: dict[tuple, tuple[str, bool]] = {}
_MOST_VERDICTS = 256  # the oldest goes first


@dataclass(frozen=True)
class Trial:
    """Two texts that are read in two forwards, so that the second one attends to cached keys: the first `read` tokens of each text, then
    the rest, with a tree after the second text. For layers with a recurrent state, the first `read` tokens are the prompt.

    Attributes:
        lengths: of the texts.
        parents: of the tree's nodes; -1: the second text. In memory siblings lie between parents and children.
    """

    lengths: tuple[int, int]
    parents: tuple[int, ...]
    read: int = 2

    def texts(self, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids of the two texts and of the nodes, spread over the vocabulary; all different if the vocabulary is large enough."""
        count = sum(self.lengths) + len(self.parents)
        ids = (np.arange(1, count + 1) * max(1, vocab_size // (count + 1))) % vocab_size
        return ids[: self.lengths[0]], ids[self.lengths[0] : sum(self.lengths)], ids[sum(self.lengths) :]

    def _path_to(self, node: int) -> list[int]:
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    @property
    def paths(self) -> list[list[int]]:
        """The nodes from the root to each leaf."""
        return [self._path_to(node) for node in range(len(self.parents)) if node not in self.parents]

    def lines(self, vocab_size: int) -> list[np.ndarray]:
        """Ids of the first text, and of the second text with each path of the tree."""
        first, second, nodes = self.texts(vocab_size)
        return [first, *(np.concatenate([second, nodes[path]]) for path in self.paths)]

    def in_packed_order(self, logits: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of the first text, the second, and each node once, from those of `lines`: the first path that contains it."""
        of_nodes: dict[int, torch.Tensor] = {}
        for line, path in enumerate(self.paths, start=1):
            for depth, node in enumerate(path):
                of_nodes.setdefault(node, logits[line][self.lengths[1] + depth])
        nodes = torch.stack([of_nodes[node] for node in range(len(self.parents))])
        return torch.cat([logits[0][: self.lengths[0]], logits[1][: self.lengths[1]], nodes])

    def packed_logits(self, packed: PackedModel) -> torch.Tensor:
        """The same logits [T, V] from two packed forwards."""
        first, second, nodes = self.texts(packed.vocab_size)
        cache = packed.new_cache(num_blocks=2, block_size=16, share_prefixes=False, is_trial=True)
        sources = [None, None] if packed.family is None else dummy_sources(packed.model, 2, packed.device)
        read, split, rows = self.read, self.lengths[0] - self.read, []
        for row, text in enumerate((first, second)):
            cache.add(row)
            cache.reserve(row, 16)
            packed.read_source(cache, row, sources[row])
            rows.append(RowInput(row, text[:read], 0, logits=read, prompt=read))
        with packed.active():
            beginnings = packed.forward(rows, cache).logits
            rest = RowInput(0, first[read:], read, logits=split)
            rests = packed.forward([rest, self._tree_row(second, nodes)], cache).logits
        return torch.cat([beginnings[:read], rests[:split], beginnings[read:], rests[split:]])

    def _tree_row(self, text: np.ndarray, nodes: np.ndarray) -> RowInput:
        """The rest of the second text with the tree after it."""
        before = len(text) - self.read
        count = before + len(nodes)
        visibility = np.tri(count, dtype=bool)
        visibility[before:, before:] = False
        positions = np.arange(self.read, self.read + count)
        for node in range(len(nodes)):
            path = self._path_to(node)
            visibility[before + node, before + np.array(path)] = True
            positions[before + node] = len(text) - 1 + len(path)
        ids = np.concatenate([text[self.read :], nodes])
        return RowInput(1, ids, self.read, positions, visibility, positions, logits=count)


_TRIAL = Trial((3, 3), (-1, -1, 1, 0))


def check(packed: PackedModel) -> None:
    """Compare a short packed forward with the model's own, once per configuration and all that the forward calls. Where others
    intervene, a verdict holds for one call: a vector or a flag that a hook reads is nowhere to be seen.

    Sets `packed.gather` if attention through pages is wrong but attention to gathered keys is right, and logs one warning. Sets
    `packed.rounds`.
    Costs three forwards over about ten tokens each. Does nothing inside another PackedModel's `active()` of the same model,
    because the model's own attention is replaced there.

    Raises:
        UnsupportedModel: the model's packed logits are wrong either way; the message has the numbers.
    """
    if packed.config._attn_implementation == ATTENTION_NAME:
        return
    # If pages are wrong for the whole model, its first layers are not tried with pages, and there is no second warning.
    if packed.num_layers is not None and _verdicts.get(signature(packed, whole=True), [""])[0] == "gather":
        packed.gather = True
    key = signature(packed)
    known = int(key in _verdicts and not interventions(packed.model))
    if packed.ranks is not None:
        known = packed.ranks.least(known)  # a process may have judged this model before its other ranks were started
    if not known:
        with torch.no_grad(), evaluating(packed.model):
            _verdicts[key] = _judge(packed)
        if len(_verdicts) > _MOST_VERDICTS:
            del _verdicts[next(iter(_verdicts))]
    way, packed.rounds = _verdicts[key]
    packed.gather = way == "gather"


def is_intervened(packed: PackedModel) -> bool:
    """True if others intervene in the model's forward, on any of its ranks."""
    intervenes = bool(interventions(packed.model))
    return intervenes if packed.ranks is None else not packed.ranks.least(int(not intervenes))


def signature(packed: PackedModel, whole: bool = False) -> tuple:
    """Everything that the verdict depends on. `whole`: the signature of the whole model, without early exit."""
    model = packed.model
    fields = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    config = json.dumps(fields, sort_keys=True, default=str)
    layers = None if whole else packed.num_layers
    size = 1 if packed.ranks is None else packed.ranks.size  # a verdict on the whole model says nothing of its shards
    kind = type(model), forwards_of(model)
    return kind, size, packed.config._attn_implementation, model.dtype, layers, packed.gather, config


def _judge(packed: PackedModel) -> tuple[str, bool]:
    """The first way to attend, "paged" or "gather", that gives the model's own logits, and whether its layers round what they read.
    Raises UnsupportedModel if neither does."""
    name = type(packed.model).__name__
    what = name if packed.num_layers is None else f"{name} with its first {packed.num_layers} layers"
    expected = _Expected(packed)
    expected.check_rounding()
    ways = ["gather"] if packed.gather else ["paged"] if packed.segments else ["paged", "gather"]
    problems = []
    for way in ways:
        packed.gather = way == "gather"
        problem = problem_of(packed, expected)
        if problem is None:
            if problems:
                message = "%s: with attention through the paged cache, %s. It runs with gathered keys instead, which is slower."
                logger.warning(message, what, problems[0])
            return way, expected.rounds
        problems.append(problem)
    others = ", ".join(interventions(packed.model))
    because = f" Rows are packed into one line of tokens, which these must not notice: {others}." if others else ""
    raise UnsupportedModel(
        f"{what} does not compute the same logits over packed rows as alone: "
        f"{'; '.join(map('{}: {}'.format, ways, problems))}.{because} Call generate() without speculative_config."
    )


def problem_of(packed: PackedModel, expected: _Expected | None = None) -> str | None:
    """Describe what is wrong with the packed logits, for the way in which `packed` attends now; None if they are right."""
    expected = expected or _Expected(packed)
    try:
        error = relative_error(_TRIAL.packed_logits(packed), expected.logits)
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # an unknown model may raise anything, and the other way may still work
        return f"its forward raised {type(failure).__name__} ({failure})"
    tolerance = TOLERANCES.get(packed.model.dtype, 5e-2)
    if error > tolerance:
        # Low precision and sparse experts can be noisier: measure how much the model itself varies from batch to batch.
        limit = (
            MOST_NOISE_LOW_PRECISION
            if expected.rounds
            else _MOST_NOISE.get(packed.model.dtype, MOST_NOISE_LOW_PRECISION)
        )
        tolerance = max(tolerance, min(_NOISE_FACTOR * expected.noise(), limit))
    if error <= tolerance:
        return None
    return f"its logits differ by {error:.2g} of their spread (rounding explains {tolerance:.2g})"


# ---- the two computations -------------------------------------------------------------------------------------------


class _Expected:
    """The logits of every packed token from the model's plain forward: no cache, its own attention, one line per tree path.
    Some models read the first tokens at once and the others one by one with their own cache, as `generate()` does: those with a
    recurrent state, which for many tokens may differ by more than rounding, and those with hooks or forwards of others, which may
    depend on the number of tokens.

    Raises:
        UnsupportedModel: the plain forward fails on token ids alone, or attends to later tokens.
    """

    def __init__(self, packed: PackedModel):
        self.packed, self.rounds = packed, False
        self._by_token = packed.recurrent is not None or is_intervened(packed)
        self._ids = "input_ids" if packed.family is None else f"{packed.family.prefix}input_ids"
        self.paths = [torch.from_numpy(line).to(packed.device) for line in _TRIAL.lines(packed.vocab_size)]
        # Padding is on the right, where causal attention does not see it.
        batch = torch.nn.utils.rnn.pad_sequence(self.paths, batch_first=True, padding_value=int(self.paths[0][0]))
        try:
            lines = self._plain_forward(batch)
        except (torch.OutOfMemoryError, UnsupportedModel):
            raise
        except Exception as failure:
            raise UnsupportedModel(
                f"{type(packed.model).__name__} cannot run on token ids alone: its own forward raised {type(failure).__name__} ({failure})."
            ) from failure
        self.logits = _TRIAL.in_packed_order(lines)
        self._check_causal(batch, lines)

    def _check_causal(self, batch: torch.Tensor, lines: torch.Tensor) -> None:
        """Raise UnsupportedModel unless lines with the same first tokens have the same logits there.

        No other comparison can find attention to later tokens. Where weights are small, such attention changes logits no more
        than rounding does; then gradients tell the two apart, because rounding has none.
        """
        texts = lines[1:, : _TRIAL.lengths[1]]
        error = max(relative_error(text, texts[0]) for text in texts[1:])
        tolerance = TOLERANCES.get(self.packed.model.dtype, 5e-2)
        if error > tolerance or (error > 0 and self._has_gradient_from_later(batch)):
            name = type(self.packed.model).__name__
            raise UnsupportedModel(
                f"{name} attends to later tokens: its logits at a token change by {error:.2g} of their spread with the tokens "
                "after it, so it cannot decode text token by token. A model that can be an encoder or a decoder needs "
                "is_decoder=True in its configuration."
            )

    def _has_gradient_from_later(self, batch: torch.Tensor) -> bool:
        """True if logits have a gradient with respect to the embeddings of later tokens.

        False also where this cannot be asked: of layers that have no backward pass (quantized ones), of models that read token by
        token, and of a model spread over several processes.
        """
        model, embeddings = self.packed.model, []
        if self._by_token or self.packed.ranks is not None or self.packed.family is not None:
            return False

        def follow(module, args, output):
            embeddings.append(output.detach().requires_grad_())
            return embeddings[-1]

        try:
            handle = model.get_input_embeddings().register_forward_hook(follow)
        except (NotImplementedError, AttributeError):  # a model that does not say which module embeds
            return False
        seen = _TRIAL.lengths[1]
        try:
            with handle, torch.inference_mode(False), torch.enable_grad():
                logits = self._plain_forward(batch.clone())[:, :seen]
                weights = torch.linspace(1, 2, logits.numel(), device=logits.device).view_as(logits)
                gradients = torch.autograd.grad((logits * weights).sum(), embeddings)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # autograd's error for operators without a backward pass
            return False
        return any(bool(gradient[:, seen:].any()) for gradient in gradients)

    def check_rounding(self) -> None:
        """Find layers that round what they read, and set `rounds`: then the smallest difference of two computations may become one of
        a rounding step. One warning says where texts may differ for it.

        Raises:
            UnsupportedModel: in float32, a layer rounds by what else is in a forward, so a token's logits change with the drafts.
        """
        name = type(self.packed.model).__name__
        others, alone = (
            rounding_layers(self.packed.model, self.packed.device) if self.packed.ranks is None else ([], [])
        )
        self.rounds = bool(others or alone)
        what = "{} of {} rounds its inputs by all tokens of a forward, so a token's logits change with the drafts beside it"
        if others and self.packed.model.dtype in _MOST_NOISE:
            what = what.format(", ".join(others), name)
            raise UnsupportedModel(f"{what}. Quantize weights only, or call generate() without speculative_config.")
        if others:
            logger.warning("%s: greedy texts may depend on drafts.", what.format(", ".join(others), name))
        if alone and self.packed.model.dtype in _MOST_NOISE:
            text = "%s of %s rounds its inputs, so near ties of logits are more frequent: greedy texts may differ from generate()'s."
            logger.warning(text, ", ".join(alone), name)

    def noise(self) -> float:
        """Relative difference between the logits of the lines run as one batch and one by one; where layers round their inputs, also if
        these are changed a little."""
        noise = relative_error(self._one_by_one(), self.logits)
        if not self.rounds:
            return noise

        def nudge(module, args, output):
            signs = torch.tensor([1.0, -1.0], device=output.device, dtype=output.dtype).repeat(output.shape[-1])
            return output * (1 + _NUDGE * signs[: output.shape[-1]])

        with self.packed.model.get_input_embeddings().register_forward_hook(nudge):
            return max(noise, relative_error(self._one_by_one(), self.logits))

    def _one_by_one(self) -> torch.Tensor:
        lines = [self._plain_forward(path[None], [i])[0] for i, path in enumerate(self.paths)]
        return _TRIAL.in_packed_order(lines)

    def _plain_forward(self, ids: torch.Tensor, lines: list[int] | None = None) -> torch.Tensor:
        """Logits [B, S, V] of texts [B, S], which are these `lines` of the trial; None: all of them."""
        with architectures.first_layers(self.packed.model, self.packed.num_layers):
            given = self._sources_of(range(len(ids)) if lines is None else lines)
            if self._by_token:
                return self._token_by_token(ids, given)
            if given:
                return self.packed.model(**given, **{self._ids: ids}, use_cache=False, return_dict=True).logits.float()
            more = self._positions(ids)
            if architectures.has_bidirectional_prompts(self.packed.model):  # these make it causal
                more["token_type_ids"] = torch.ones_like(ids)
            return self.packed.model(input_ids=ids, use_cache=False, return_dict=True, **more).logits.float()

    def _positions(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """`position_ids` if generate() would pass them, which is not always what the model counts without them (RoBERTa).

        Classes with a text model inside count the same in both ways, or on several axes, and are left to count.
        """
        model: Any = self.packed.model
        if "position_ids" not in self.packed.forward_parameters or architectures.is_multimodal(model):
            return {}
        positions = torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape)
        inputs = model.prepare_inputs_for_generation(
            ids, position_ids=positions, attention_mask=None, use_cache=False, is_first_iteration=True
        )
        given = inputs.get("position_ids")
        return {} if given is None else {"position_ids": given}

    def _sources_of(self, lines: Sequence[int]) -> dict[str, Any]:
        """The encoder's output for some lines of the trial, whose first text has the first source, and all others the second."""
        if self.packed.family is None:
            return {}
        sources = dummy_sources(self.packed.model, 2, self.packed.device)
        return {"encoder_outputs": encoder_output(torch.cat([sources[min(line, 1)].read()[0] for line in lines]))}

    def _token_by_token(self, ids: torch.Tensor, sources: dict[str, Any]) -> torch.Tensor:
        given, cache, logits = {} if sources else self._positions(ids), None, []
        if self.packed.recurrent is not None and "position_ids" in self.packed.forward_parameters:
            given = {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape)}
        for piece in (slice(0, _TRIAL.read), *(slice(i, i + 1) for i in range(_TRIAL.read, ids.shape[1]))):
            more = {name: positions[:, piece] for name, positions in given.items()} | {
                self.packed.cache_argument: cache
            }
            output = self.packed.model(
                use_cache=True, return_dict=True, **sources, **more, **{self._ids: ids[:, piece]}
            )
            cache = getattr(output, CACHE)
            logits.append(output.logits.float())
        return torch.cat(logits, dim=1)


def relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance of a token's logits from the expected ones, both [T, V], in units of these logits' spread.

    NaN counts as infinite. Entries that are not finite in `expected` are ignored.
    """
    logits, expected = logits.detach().to(expected.device), expected.double()
    finite = expected.isfinite()
    count = finite.sum(1).clamp(min=1)
    centred = expected - (expected.where(finite, 0).sum(1) / count)[:, None]
    spread = centred.where(finite, 0).norm(dim=1).clamp(min=1e-12)
    distance = (logits.double() - expected).where(finite, 0).norm(dim=1)
    return float((distance / spread).nan_to_num(nan=float("inf")).max())


@contextlib.contextmanager
def evaluating(model: PreTrainedModel):
    """Inside the context, all modules are in evaluation mode (no dropout); each one's mode is restored on exit."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


# Relative errors of products of random rows. Measured on CPUs: a layer that rounds with other rows (bitsandbytes int8) differs by 8e-3; one
# that rounds by itself is nonlinear by 3e-3 (bf16) to 4e-2 (fp8), in bfloat16 by 2e-2 to 7e-2; weight-only formats by 4e-7 in float32 and
# 5e-3 to 8e-3 in bfloat16.
_WITH_OTHERS, _NONLINEAR, _NONLINEAR_LOW_PRECISION = 5e-3, 1e-3, 1.2e-2
# Layers of these round nothing, or are no products.
_PLAIN = ("torch.nn.", "torch.distributed.", "transformers.models.", "peft.")


def rounding_layers(model: PreTrainedModel, device: torch.device) -> tuple[list[str], list[str]]:
    """The kinds of linear layers that round their inputs by the other rows of a product; and those that round each row alone. One layer of
    a kind is run, in models that were loaded quantized, or whose weights or layers are of a library that quantizes. The model has run
    before: some layers quantize at their first call.
    """
    kinds, is_quantized = {}, getattr(model, "hf_quantizer", None) is not None
    for module in all_modules(model):
        origin = _origin(module)
        suspect = is_quantized or origin.startswith("torch.ao.") or _is_of_own_class(getattr(module, "weight", None))
        if suspect and not origin.startswith(_PLAIN) and isinstance(getattr(module, "in_features", None), int):
            kinds.setdefault(f"{type(module).__name__} ({origin.split('.')[0]})", module)
    others, alone = [], []
    for name, layer in kinds.items():
        rows = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
        first, second, third = rows.to(device, model.dtype)[:, None, None]
        by_itself = layer(first)
        if _difference(layer(torch.cat([first, 100 * second], dim=1))[:, :1], by_itself) > _WITH_OTHERS:
            others.append(name)
            continue
        added = layer(first + second) - by_itself
        most = _NONLINEAR if model.dtype == torch.float32 else _NONLINEAR_LOW_PRECISION
        if _difference(layer(third + second) - layer(third), added) > most:
            alone.append(name)
    return others, alone


def _origin(module: nn.Module) -> str:
    """The Python module of what computes a layer's output: a forward in place of its own, its weight's class, or its class."""
    forward: Any = vars(module).get("forward")
    function = getattr(forward, "func", forward)
    replaced = getattr(getattr(function, "__func__", function), "__globals__", {}).get("__name__")
    weight = getattr(module, "weight", None)
    made = type(weight) if type(module) is nn.Linear and _is_of_own_class(weight) else type(module)
    return f"{made.__module__ if replaced is None or replaced.startswith('accelerate.') else replaced}."


def _is_of_own_class(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and type(weight) not in (torch.Tensor, nn.Parameter)


def _difference(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))
