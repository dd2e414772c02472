"""The drafter: a causal language model of transformers."""

from __future__ import annotations

import threading
import weakref

from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...bundled import resolve_model
from ...model.architectures import has_repository_code
from ...model.options.quantized import quantizes_natively
from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.files import Checkpoint, register_format, versions_of
from .config import DraftModelConfig


def _matches(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and checkpoint.any(
        r"(model|transformer|gpt_neox|decoder|backbone)\."
    )


register_format("a causal language model of transformers", "draft_model", _matches, last=True)

_loading = threading.Lock()
_loaded = weakref.WeakKeyDictionary[PreTrainedModel, "weakref.WeakValueDictionary[tuple, PreTrainedModel]"]()


def load_drafter(config: DraftModelConfig, target: PackedModel, context: DrafterContext) -> PreTrainedModel:
    """The drafter: the target itself (early exit), `generate(assistant_model=)`, or the configured model.

    A configured model is loaded once per target, so that configurations with other draft lengths share it.
    """
    if context.assistant_model is not None:
        given = "model" if config.model is not None else "early_exit" if config.early_exit is not None else None
        if given is not None:
            raise config.fail(given, "and generate(assistant_model=...) both name a drafter: pass one of them.")
        return context.assistant_model
    if config.early_exit is not None:
        return target.model
    if config.model is None:
        raise config.fail(
            "model", "is missing: name a smaller model, pass assistant_model= to generate(), or set 'early_exit'."
        )
    name = resolve_model(config.model)
    shards = config.draft_tensor_parallel_size or 1
    sharding = {}
    if shards > 1 and target.ranks is not None:  # as the target is, over the same ranks
        from transformers.distributed import DistributedConfig

        sharding["distributed_config"] = DistributedConfig(tp_size=shards)
    quantization = config.quantization and (config.quantization, quantizes_natively(config))
    key = (name, versions_of(name), config.revision, quantization, target.model.dtype, target.device, len(sharding))
    # transformers patches its own classes while it loads: two loads at once would leave them patched.
    with _loading:
        loaded = _loaded.setdefault(target.model, weakref.WeakValueDictionary())
        model = loaded.get(key)
        if model is None:
            try:
                revision = config.revision or "main"
                trusted = has_repository_code(target.model) and not is_known(name, revision)
                model = AutoModelForCausalLM.from_pretrained(
                    name, revision=revision, dtype=target.model.dtype, trust_remote_code=trusted, **sharding
                )
            except (OSError, ValueError) as error:
                raise config.fail("model", f"could not be loaded from {name!r}: {error}") from error
            model = loaded[key] = (model if sharding else model.to(target.device)).eval()
    return model


def is_known(name: str, revision: str) -> bool:
    """True if transformers has the code of a model: then no code of its repository is run."""
    values, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    return values.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
