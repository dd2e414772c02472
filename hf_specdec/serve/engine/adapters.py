"""Adapters: the LoRA adapters that an engine's requests may name. They are loaded into the unmodified model beside one another."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from ...candidate_generators.base import CandidateGenerator
from ...core.errors import is_failure
from ...model.adapters import check_mixed, lora_layers
from ...model.threads import replaced_values

logger = logging.getLogger(__name__)

# Of PEFT's ways to begin an adapter, those that leave the model's own weights as they are.
_HARMLESS_BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")
_PREFIX = "base_model.model."  # of names in PEFT's files


class Adapters:
    """The adapters of an engine by name, and those that only running rows still use. Call methods outside `decoder.active()`.

    A name that is loaded again stands for another adapter, with another id, so that no row, prefix or table mixes the two.

    Attributes:
        paths: folder, or id on the Hub, by name.
    """

    _next_number = itertools.count(1).__next__  # of all engines, which may share a model

    def __init__(self, generator: CandidateGenerator):
        self._model: Any = generator.target.model
        self._config = generator.config
        self.paths: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._leaving: set[str] = set()

    def id_of(self, name: str | None) -> str | None:
        """What `Sequence.adapter` calls an adapter; None for None. Raises ValueError: there is none of this name."""
        if name is not None and name not in self._ids:
            raise ValueError(f"lora {name!r} is not loaded. Loaded: {', '.join(self._ids) or 'none'}.")
        return None if name is None else self._ids[name]

    def load(self, name: str, path: str, replaces: bool = False) -> None:
        """Load a LoRA adapter that PEFT has saved, in the model's precision. Nothing has changed after an error.

        Args:
            path: a folder, or an id on the Hub.
            replaces: rows that begin from now on use it in place of an adapter of the same name.

        Raises:
            ValueError: it is no LoRA of this model, or cannot be mixed with others; or the name is in use.
            ImportError: peft is not installed.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"The name of a lora adapter must be a text, and not empty: it is {name!r}.")
        if name in self._ids and not replaces:
            raise ValueError(
                f"The lora adapter {name!r} has already been loaded. Unload it first, or set load_inplace."
            )
        number = f"specdec{Adapters._next_number()}"
        try:
            self._load(number, path)
        except BaseException as error:
            self._delete(number)
            if isinstance(error, ImportError):
                raise ImportError(f"LoRA adapters need peft ({error}): pip install peft") from error
            if not is_failure(error):
                raise
            reason = " ".join(str(error).split())
            raise ValueError(f"The lora adapter {name!r} cannot be loaded from {path}: {reason}") from error
        self.unload(name, must_exist=False)
        self._ids[name], self.paths[name] = number, path
        logger.info("LoRA adapter %r is loaded from %s.", name, path)

    def unload(self, name: str, must_exist: bool = True) -> None:
        """Forget a name at once. Rows that use its adapter go on; `free` then frees its weights. Raises ValueError: there is none."""
        if must_exist:
            self.id_of(name)
        if name in self._ids:
            self._leaving.add(self._ids.pop(name))
            del self.paths[name]

    def unused(self, used: Iterable[str | None]) -> set[str]:
        """Ids of the adapters whose names are gone and that none of the rows uses, whose adapters are `used`."""
        return self._leaving.difference(used) if self._leaving else set()

    def free(self, used: Iterable[str | None]) -> None:
        """Free the weights of the `unused`."""
        for number in self.unused(used):
            self._delete(number)
            self._leaving.discard(number)

    def close(self) -> None:
        """Free all weights: the model is as before."""
        for name in list(self._ids):
            self.unload(name)
        self.free(())

    def _load(self, number: str, path: str) -> None:
        from peft import PeftConfig, inject_adapter_in_model, set_peft_model_state_dict
        from peft.utils import get_peft_model_state_dict, load_peft_weights

        if self._config.compile:
            raise self._config.fail("compile", "compiles layers without adapters: leave it out.")
        config: Any = PeftConfig.from_pretrained(path)
        _check_config(config)
        weights = load_peft_weights(path, device="cpu")
        trained = {parameter: parameter.requires_grad for parameter in self._model.parameters()}
        apart, known = _Apart(self._model), set(self._model.modules())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are several adapters
            try:
                stay = [(vars(layer), "set_adapter", lambda *_, **__: None) for layer in lora_layers(self._model)]
                with torch.device("meta"), replaced_values(stay):  # no memory for shapes that the file may not have
                    inject_adapter_in_model(config, apart.model, number)
            finally:
                for parameter in apart.model.parameters():  # PEFT freezes the model
                    parameter.requires_grad_(trained.get(parameter, False))
            for module in set(apart.model.modules()) - known:
                module.training = False
            expected = get_peft_model_state_dict(apart.model, adapter_name=number, save_embedding_layers=False)
            _compare(changes := _changes(weights, apart.model), expected)
            set_peft_model_state_dict(apart.model, changes, adapter_name=number, low_cpu_mem_usage=True)
        check_mixed(apart.model, {number})
        apart.put_in_place()
        self._model.peft_config = apart.model.peft_config

    def _delete(self, number: str) -> None:
        """Remove an adapter from the model, and the layers that were made for adapters once they have none."""
        configs = getattr(self._model, "peft_config", {})
        configs.pop(number, None)
        if not configs and "peft_config" in vars(self._model):
            del self._model.peft_config
        layers, modules = set(lora_layers(self._model)), list(self._model.named_modules())
        for name, layer in modules:
            if layer in layers and number in layer._all_available_adapter_names():
                layer.delete_adapter(number)
                if not layer._all_available_adapter_names():
                    parent, _, child = name.rpartition(".")
                    setattr(self._model.get_submodule(parent), child, layer.base_layer)


class _Apart:
    """A model for PEFT to change, whose modules with children are copies. LoRA layers, and what PEFT wraps in new ones, are the model's.

    So other threads, which may run the model meanwhile, see no layer before its weights are loaded.
    """

    def __init__(self, model: Any):
        self._copies, self._layers = dict[Any, Any](), set(lora_layers(model))
        self.model = self._copy(model)

    def _copy(self, module: Any) -> Any:
        if module is None or not module._modules or module in self._layers:
            return module
        if module not in self._copies:
            copied = self._copies[module] = object.__new__(type(module))
            vars(copied).update(
                vars(module), _modules={name: self._copy(child) for name, child in module._modules.items()}
            )
        return self._copies[module]

    def put_in_place(self) -> None:
        """Put the new LoRA layers into the model, with no active adapter."""
        new = set(lora_layers(self.model)) - self._layers
        for module, copied in self._copies.items():
            for name, layer in copied._modules.items():
                if layer in new:
                    layer.set_adapter([], inference_mode=True)
                    layer.base_layer = module._modules[name]
                    module._modules[name] = layer


def _check_config(config: Any) -> None:
    """Raise ValueError for adapters that are no LoRA, or more."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ValueError(f"it is a {kind} adapter, and only LORA can be served.")
    whole = [
        name
        for name in ("modules_to_save", "trainable_token_indices", "layer_replication")
        if getattr(config, name, None)
    ]
    whole += [] if config.bias == "none" else ["bias"]
    if whole:
        raise ValueError(f"its {whole[0]} changes weights of the model itself, which other rows read.")
    if config.init_lora_weights not in _HARMLESS_BEGINNINGS:
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} changes the model's own weights: convert it with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)."
        )


def _changes(weights: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """The weights without those of the model's own embeddings and head, which PEFT saves too. Raises ValueError: these are others."""
    kept, tensors = {}, model.state_dict()
    for name, tensor in weights.items():
        of_model = tensors.get(name.removeprefix(_PREFIX)) if name.endswith(".base_layer.weight") else None
        if of_model is None:
            kept[name] = tensor.clone()  # not the file's memory, which changes with the file
        elif tensor.shape != of_model.shape or not torch.equal(tensor.to(of_model), of_model):
            raise ValueError(f"its {name} differs from the model's: it was made for another model.")
    return kept


def _compare(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Raise ValueError unless a file has the tensors that its configuration and this model ask for."""
    stored, wanted = (
        {name.removeprefix(_PREFIX): tuple(tensor.shape) for name, tensor in names.items()}
        for names in (weights, expected)
    )
    for name in (*wanted, *stored):
        if name not in stored or name not in wanted:
            where = "the file has no" if name in wanted else "the model or adapter_config.json has no place for its"
            raise ValueError(f"{where} {name}.")
        if stored[name] != wanted[name]:
            shapes = f"{list(stored[name])}, and this model and adapter_config.json ask for {list(wanted[name])}"
            raise ValueError(f"{name} has the shape {shapes}.")
