"""NativeRunner: runs a model's small forward passes as one call of the native library, where that is shown to be right."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...cache import PagedStaticCache
from ...core.errors import UnsupportedModel
from ...core.output import PackedOutput
from ...core.rows import RowInput
from ...kernels.dispatch import uses_native
from ...kernels.native import TYPES
from .. import architectures
from ..packed_batch import PackedBatch
from .building import build
from .program import Program, addresses
from .tape import NotLowered

if TYPE_CHECKING:
    from ..packed_model import Activated, PackedModel

logger = logging.getLogger(__name__)

# Programs of a model by what is tapped and how many layers run: the state they were made for, and the program or why there is none.
_made = weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple[tuple, Program | str]]]()


class NativeRunner:
    """The program of a PackedModel, made when it is first needed and again when the model has changed.

    Args:
        otherwise: faster linear layers for the model as long as it has no program.
        required: a model that cannot have a program is an error.

    Attributes:
        refused: why the model runs without a program; None: it has one, or nothing has been tried.
    """

    def __init__(self, packed: PackedModel, otherwise: Activated | None = None, required: bool = False):
        self._packed, self._otherwise, self._required = packed, otherwise, required
        self._program: Program | None = None
        self.refused: str | None = None
        self.is_on = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, `run` uses a program that is right for the model as it is now."""
        self._prepare()
        self.is_on = self._program is not None
        try:
            with contextlib.nullcontext() if self.is_on or self._otherwise is None else self._otherwise.active():
                yield
        finally:
            self.is_on = False

    def _prepare(self) -> None:
        model = self._packed.model
        made, key, state = _made.setdefault(model, {}), (self._packed.taps, self._packed.num_layers), state_of(model)
        if key not in made or made[key][0] != state:
            made[key] = state, self._built(model)
        found = made[key][1]
        self._program = found if isinstance(found, Program) else None
        self.refused = found if isinstance(found, str) else None
        if self._program is not None:
            self._program.num_positions = 0  # a module's frequencies may have changed
        elif self._required:
            raise UnsupportedModel(
                f"'native' cannot run {type(model).__name__}, because of {found}. Leave the key out."
            )

    def _built(self, model: nn.Module) -> Program | str:
        problem = obstacle(model)
        try:
            if problem is not None:
                raise NotLowered(problem)
            return build(self._packed)
        except NotLowered as error:
            logger.info("%s runs operator by operator on the CPU: %s.", type(model).__name__, error)
            return str(error)

    def run(self, rows: list[RowInput], cache: PagedStaticCache) -> PackedOutput | None:
        """The outputs of a forward over `rows`; None if the model must run it itself."""
        if not self.is_on or torch.is_autocast_enabled("cpu"):
            return None
        assert self._program is not None
        if not 0 < sum(row.num_tokens for row in rows) <= self._program.most_tokens:
            return None
        batch = PackedBatch.pack(rows, cache, self._packed.device, gather=False)
        return output_of(self._packed, batch, self._program.run(batch, addresses(self._program, cache)))


def output_of(packed: PackedModel, batch: PackedBatch, results: list[torch.Tensor]) -> PackedOutput:
    """The outputs of a forward from those of the program, in the order of `building.outputs_of`."""
    remaining = iter(results)
    taps = packed.taps
    return PackedOutput(
        logits=next(remaining),
        last_hidden=next(remaining) if taps.last_hidden else None,
        layers={index: next(remaining) for index in taps.layers},
        input_ids=batch.input_ids[0],
        all_logits=next(remaining) if taps.logits else None,
    )


def can_try(packed: PackedModel) -> bool:
    """True if a program might run this model: on a CPU with the library, reading pages, with rows that are only text."""
    plain = packed.recurrent is None and not packed.gather and not packed.deterministic and packed.graphs is None
    return plain and uses_native(packed.device) and packed.model.dtype in TYPES


def state_of(model: nn.Module) -> tuple:
    """What a program depends on besides the contents of weights: modules, their settings, where weights are."""
    found: list[Any] = []
    for module in architectures.all_modules(model):
        kind = type(module)
        settings = tuple(value for value in vars(module).values() if type(value) in _SETTINGS)
        hooks = len(_hooks_of(module)), len(module._forward_pre_hooks), "forward" in vars(module)
        found.append((kind, kind.forward, settings, hooks))
        for tensors in (module._parameters, module._buffers):
            found += [
                None if each is None else (each.data_ptr(), each.shape, each.stride(), each.dtype, each.device)
                for each in tensors.values()
            ]
    config = getattr(model, "config", None)
    return tuple(found), repr(sorted((name, repr(value)) for name, value in vars(config).items())) if config else ""


_SETTINGS = {int, float, bool, str, type(None)}


def _hooks_of(module: nn.Module) -> list[Any]:
    """A module's forward hooks, without those by which transformers records hidden states. These stay on a model after a call that
    wanted hidden states, and do nothing in other calls."""
    hooks = module._forward_hooks.values()
    return [each for each in hooks if getattr(each, "__module__", None) != "transformers.utils.output_capturing"]


def obstacle(model: nn.Module) -> str | None:
    """Why a model's forward cannot stand for all its forwards; None: it can.

    Modules must be torch's or transformers' own, unhooked and unwrapped: adapters and quantized layers keep settings where a
    comparison does not find them.
    """
    text = model.config.get_text_config(decoder=True)  # pyright: ignore
    kinds = {each.get("rope_type") for each in architectures._rope_parameters(getattr(text, "rope_parameters", None))}
    if kinds & {"dynamic", "longrope"}:
        return "its rotary frequencies depend on the length of the text"
    for module in architectures.all_modules(model):
        name = type(module).__name__
        if not type(module).__module__.startswith(("torch.nn.modules.", "transformers.")):
            return f"{name} is neither torch's nor transformers'"
        if _hooks_of(module) or module._forward_pre_hooks or "forward" in vars(module):
            return f"its {name} is hooked or wrapped"
        for each in (*module._parameters.values(), *module._buffers.values()):
            if each is not None and (
                each.device.type != "cpu" or type(each) not in (nn.Parameter, torch.Tensor, nn.Buffer)
            ):
                return f"weights of its {name} are not plain tensors on the CPU"
    return None
