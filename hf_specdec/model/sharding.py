"""Models whose weights are sharded over ranks by transformers (tensor and expert parallel): what is refused, and whole copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from ..core.errors import UnsupportedModel
from ..core.ranks import Ranks, ranks_of
from .architectures import setting
from .encoder_decoder import is_encoder_decoder

if TYPE_CHECKING:  # older versions of transformers lack it, and shard nothing
    from transformers.distributed.tensor_parallel import TensorParallelLayer

_whole = weakref.WeakKeyDictionary[nn.Module, nn.Module]()
_whole_parameters = WeakTensorKeyDictionary()


def checked_ranks(model: PreTrainedModel) -> Ranks | None:
    """The ranks that hold the model's shards; None: it is whole. Raises UnsupportedModel: it is sharded in a way that would give wrong
    text."""
    mesh = getattr(model, "_device_mesh", None)
    sizes: dict[str, int] = {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    name = type(model).__name__
    if sizes.get("pp", 1) > 1:
        raise UnsupportedModel(
            f"{name} is split into {sizes['pp']} pipeline stages (pp_size), and a rank that holds some of the layers has neither the "
            "hidden states nor the keys of the others. Use tp_size, or a device_map in one process."
        )
    ranks = ranks_of(model)
    if ranks is None:
        return None
    if is_encoder_decoder(model):
        raise UnsupportedModel(
            f"{name} is a sharded encoder-decoder model: load it whole, or call generate() without speculative_config."
        )
    if sizes.get("fsdp", 1) > 1 or sizes.get("dp_replicate", 1) > 1:
        raise UnsupportedModel(
            f"{name} is sharded by tp_size and by fsdp_size: ranks with different batches would have to take the same number of steps. Use "
            "tp_size (and ep_size) alone, and one process group per replica."
        )
    _check_heads(model, ranks.size)
    note_linears(model)
    return ranks


def _check_heads(model: PreTrainedModel, size: int) -> None:
    """Raise UnsupportedModel unless every rank holds whole KV heads, and those that its query heads read."""
    config = model.config.get_text_config(decoder=True)
    if setting(config, "kv_lora_rank") is not None:  # keys are expanded from what every rank computes
        return
    heads = setting(config, "num_key_value_heads") or setting(config, "num_attention_heads")
    by_layer = [layer.get("num_key_value_heads") for layer in (setting(config, "per_layer_config") or {}).values()]
    plan = model.tp_plan or {}
    styles = {key.rsplit(".", 1)[-1]: style for key, style in plan.items()}
    queries, keys = styles.get("q_proj"), styles.get("k_proj", styles.get("qkv_proj"))
    counts = [count for count in (*(heads if isinstance(heads, (list, tuple)) else [heads]), *by_layer) if count]
    if keys == "colwise" and any(count % size for count in counts):
        raise UnsupportedModel(
            f"{type(model).__name__} has {heads} KV heads, which {size} ranks cannot share: each rank would hold a part of a head. Use a "
            "tp_size that divides them."
        )
    if queries == "colwise" and keys not in (None, "colwise") and any(count > 1 for count in counts):
        raise UnsupportedModel(
            f"{type(model).__name__} has its query heads split over {size} ranks and all {heads} KV heads on each (the tp_plan says "
            f"{keys!r}), so that queries would read the keys of other heads. Split both, or neither."
        )


def _is_shard(tensor: Any) -> bool:
    """True for torch's DTensor, which not every build of torch has."""
    return hasattr(tensor, "to_local")


def is_sharded(module: nn.Module) -> bool:
    """True if one of the module's own parameters is a shard."""
    return any(_is_shard(parameter) for parameter in module._parameters.values())


def whole(module: nn.Module) -> nn.Module:
    """The module with whole weights: itself, or for a sharded one a copy, made once, whose forward takes part in no collective.

    The first call for a sharded module is a collective: every rank must make it. A later change of the weights is not seen.
    """
    if not is_sharded(module):
        return module
    copy = _whole.get(module)
    if copy is None:
        copy = module.__class__.__new__(module.__class__)
        # without the sharded `forward`, so that the class's own is used
        vars(copy).update({key: value for key, value in vars(module).items() if key != "forward"})
        vars(copy)["_parameters"] = {
            key: None if tensor is None else _whole_parameter(tensor) for key, tensor in module._parameters.items()
        }
        _whole[module] = copy
    return copy


def _whole_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """The whole parameter; tied weights get one copy."""
    if not _is_shard(parameter):
        return parameter
    copy = _whole_parameters.get(parameter)
    if copy is None:
        with torch.no_grad():
            full: Any = parameter.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
        copy = _whole_parameters[parameter] = nn.Parameter(full.detach().clone(), requires_grad=False)
    return copy


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard of a weight, or the whole weight."""
    return tensor.to_local() if _is_shard(tensor) else tensor


# ---- linear layers, as this rank computes them -----------------------------------------------------------------------


# How a layer is split, over which mesh.
_styles = weakref.WeakKeyDictionary[nn.Module, "tuple[TensorParallelLayer, Any]"]()


def note_linears(model: PreTrainedModel) -> None:
    """Find the sharded linear layers of a model, and how each is split, for `sharded_forward`."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard
    from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel

    mesh: Any = model._device_mesh
    for name, module in model.named_modules():
        style: Any = ALL_PARALLEL_STYLES.get((model.tp_plan or {}).get(replace_layer_number_by_wildcard(name)))
        if type(module) is nn.Linear and type(style) in (ColwiseParallel, RowwiseParallel) and is_sharded(module):
            _styles[module] = style, mesh["tp"]


def sharded_forward(linear: nn.Module) -> Callable[[Callable[[torch.Tensor], torch.Tensor]], Callable] | None:
    """A function that makes a forward of a sharded linear layer from a product of its shard; None if the layer is whole, or its forward
    is not transformers' own.

    Around the product, it communicates as transformers does: a layer split by outputs gets whole input rows, a layer split by inputs adds
    up the ranks' outputs, and the language-model head gathers them. The forward supports no gradients.
    """
    name = getattr(vars(linear).get("forward"), "__qualname__", None)
    if name != "TensorParallelLayer.install_forward.<locals>.tp_forward" or linear not in _styles:
        return None
    style, mesh = _styles[linear]

    def around(product: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            (x,), _ = style.transform_inputs_pre_forward(linear, (x,), {}, mesh)
            return style.transform_output_post_forward(linear, product(x), mesh)

        return forward

    return around


def weight_of(linear: nn.Linear) -> torch.Tensor:
    """The weight [out, in] that this rank multiplies by."""
    return local(linear.weight)


def bias_of(linear: nn.Linear) -> torch.Tensor | None:
    """The bias that belongs to this rank's product. A layer that is split by inputs adds its bias once, after the sum."""
    weight: Any = linear.weight
    if linear.bias is None or (_is_shard(weight) and weight.placements[0].is_shard(1)):
        return None
    return local(linear.bias)
