"""Weights: writes new weights into a served model, from a folder, from tensors, or from a trainer's broadcasts."""

from __future__ import annotations

import copy
import datetime
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...model.adapters import lora_layers
from ...model.packed_model import PackedModel
from ...model.structure import place_of
from .params import GROUP_NAME

_GROUP_SECONDS = 120  # for the other ranks to join, and for a tensor to arrive
_NO_MATTER = {"_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"}


def join_group(
    address: str, port: int, rank: int, world_size: int, backend: str = "gloo", name: str = GROUP_NAME
) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
    """Join a process group beside torch's default one, as trainers of SGLang's servers make it. Waits for all ranks. Raises RuntimeError:
    they do not join in time.

    Args:
        address: of rank 0, the trainer.
        backend: "gloo", or "nccl" between GPUs.
        name: the same on all ranks.
    """
    timeout = datetime.timedelta(seconds=_GROUP_SECONDS)
    store: Any = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout)  # pyright: ignore[reportPrivateImportUsage]
    for prefix in (name, f"{name}/", "cuda/" if backend == "nccl" else "cpu/"):
        store = dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    return dist.ProcessGroupGloo(store, rank, world_size, timeout)


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    """Send a contiguous tensor from rank 0 to the others, which get it in theirs. Raises RuntimeError: a rank is gone or too slow."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


class Weights:
    """The weights of a model that is served. Names are those of its `state_dict()`. Call methods outside `decoder.active()`.

    New values are written into the tensors that the model has. So whatever reads these tensors, such as a drafter that borrows the
    model's embeddings, follows; what was copied from them is the caller's to renew.

    Args:
        exchanges_kv: with other engines, whose weights must be the same: nothing is written then.

    Attributes:
        unsure: names whose values are not whole: memory that was freed at `put_away(2)`, or an update that ended in the middle.
    """

    def __init__(self, target: PackedModel, exchanges_kv: bool = False):
        self._target, self._exchanges_kv = target, exchanges_kv
        self._group: tuple[Any, torch.device] | None = None  # and where it puts what it receives
        self.unsure: set[str] = set()
        self._put_away: list[tuple[torch.Tensor, torch.device, torch.Size]] = []  # with their place and shape

    def load(self, folder: str | os.PathLike) -> None:
        """Read all weights from a folder in transformers' format. Raises ValueError: it is not of this model; nothing has changed then."""
        self.write(read_folder(self._target.model, self.places(), os.fspath(folder)).items())

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write tensors of any device. Raises ValueError: a name is unknown or a shape wrong; nothing has changed then."""
        tensors, places = list(tensors), self.places()
        for name, tensor in tensors:
            if not is_plain(tensor) or tensor.layout != torch.strided:
                raise ValueError(
                    f"{name} is no plain tensor but offloaded, quantized, sharded or sparse: pass all of its values."
                )
            check_place(places, name, tensor.dtype, tensor.shape)
        _check_ties(places, tensors)
        names = [name for name, _ in tensors]
        self.unsure.update(names)  # an error in the middle leaves them so
        for name, tensor in tensors:
            _copy(places[name], tensor)
        self._written(names, places)

    def join(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str = GROUP_NAME,
        backend: str | None = None
    ) -> None:  # fmt: skip
        """Join the group of a trainer, which is rank 0, in place of an earlier group. Any thread may call it.

        Args:
            rank_offset: rank of this process.
            backend: see `join_group`; None: "nccl" if the model is on a GPU.

        Raises:
            ValueError: the group cannot be joined.
        """
        device = self._target.device
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        if backend not in ("gloo", "nccl") or (backend == "nccl" and device.type != "cuda"):
            raise ValueError(f"backend {backend!r}: use 'gloo', or 'nccl' if the model is on a GPU; it is on {device}.")
        if world_size != 2 or rank_offset != 1:
            raise ValueError("The group has the trainer, rank 0, and this engine: world_size is 2 and rank_offset 1.")
        try:
            group = join_group(master_address, master_port, rank_offset, world_size, backend, group_name)
        except RuntimeError as error:
            raise ValueError(
                f"The process group at {master_address}:{master_port} cannot be joined: {error}"
            ) from error
        self._group = group, device if backend == "nccl" else torch.device("cpu")

    def receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        """Write the tensors that the trainer broadcasts one by one, in this order.

        Args:
            dtype_names: torch's names, such as "bfloat16".

        Raises:
            ValueError: there is no group, or the tensors are not this model's: all are received, and none is written. Or the transfer
                was cut off, or two tensors differ that are one in the model: all are `unsure`.
        """
        if (joined := self._group) is None:
            raise ValueError("There is no trainer's group: call /init_weight_transfer_engine first.")
        kinds: list[Any] = [getattr(torch, name.removeprefix("torch."), None) for name in dtype_names]
        if not len(names) == len(kinds) == len(shapes) or not all(isinstance(kind, torch.dtype) for kind in kinds):
            raise ValueError("names, dtype_names and shapes must have equal lengths, and dtype_names be torch's names.")
        places, refused = {}, None
        try:
            places = self.places()
            for name, kind, shape in zip(names, kinds, shapes, strict=True):
                check_place(places, name, kind, torch.Size(shape))
        except ValueError as error:
            refused = error
        written: set[tuple] = set()
        for name, kind, shape in zip(names, kinds, shapes, strict=True):
            try:
                value = torch.empty(shape, dtype=kind, device=joined[1])
                broadcast(joined[0], value)
            except RuntimeError as error:
                self._group = None if self._group is joined else self._group
                raise refused or ValueError(
                    f"The transfer was cut off before {name} ({error}): send all weights again."
                ) from error
            if refused is None:
                self.unsure.update(() if written else names)  # until all have come
                place = places[name]
                if place_of(place) in written and not torch.equal(value.to(place), place):
                    refused = ValueError(
                        f"{name} differs from an earlier name's, and the model has one tensor for both: send all weights again."
                    )
                _copy(place, value)
                written.add(place_of(place))
        if refused is not None:
            raise refused
        self._written(names, places)

    def _written(self, names: Iterable[str], places: dict[str, torch.Tensor]) -> None:
        if self.unsure:
            memory = {place_of(places[name]) for name in names}
            self.unsure = {name for name in self.unsure if place_of(places[name]) not in memory}

    def put_away(self, level: int) -> None:
        """Level 1: move the weights from the GPU to host memory, where a CPU's are anyhow. Level 2: free them; buffers, which trainers do
        not send, are moved. A second call may go on from level 1 to level 2."""
        places = self.places(even_away=True)
        origins = {id(away[0]): away for away in self._put_away}
        self._put_away = []
        freed = {name for name, tensor in places.items() if level == 2 and isinstance(tensor, nn.Parameter)}
        self.unsure |= freed
        for name, tensor in {id(tensor): (name, tensor) for name, tensor in places.items()}.values():
            if name in freed or tensor.device.type != "cpu" or id(tensor) in origins:
                self._put_away.append(origins.get(id(tensor), (tensor, tensor.device, tensor.shape)))
                tensor.data = tensor.data.new_empty(0) if name in freed else tensor.data.cpu()

    def bring_back(self) -> None:
        """Undo `put_away`. What level 2 has freed has memory again, and is `unsure`."""
        for tensor, device, shape in self._put_away:
            held = tensor.data if tensor.shape == shape else tensor.data.new_empty(shape)
            tensor.data = held.to(device)
        self._put_away.clear()

    def places(self, even_away: bool = False) -> dict[str, torch.Tensor]:
        """The model's weights and kept buffers by name, without those of LoRA adapters. Raises ValueError: they cannot be written, also,
        unless `even_away`, because they are put away."""
        model = self._target.model
        kind = type(model).__name__
        if self._exchanges_kv:
            raise ValueError("kv_transfer_config: engines that exchange KV must keep their weights.")
        if self._put_away and not even_away:
            raise ValueError("The weights are put away: wake them up first (/wake_up).")
        if self._target.ranks is not None:
            raise ValueError(f"{kind} is sharded (tensor_parallel_size): its weights cannot be updated.")
        if any(layer.merged for layer in lora_layers(model)):
            raise ValueError(f"An adapter is merged into {kind}: unmerge it before its weights are updated.")
        places = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if ".lora_" in name:
                continue
            if not is_plain(tensor):
                what = "offloaded" if tensor.device.type == "meta" else "quantized"
                raise ValueError(
                    f"{kind} has {what} weights ({name}), which cannot be updated: load it as plain tensors."
                )
            places[name.replace(".base_layer.", ".")] = tensor
        if getattr(model, "hf_quantizer", None) is not None:
            raise ValueError(f"{kind} has quantized weights, which cannot be updated: load it as plain tensors.")
        return places


def is_plain(tensor: Any) -> bool:
    """True for a tensor of torch's own classes that has values."""
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.device.type != "meta"


@torch.no_grad()
def _copy(place: torch.Tensor, value: torch.Tensor) -> None:
    place.copy_(value)


def check_place(places: dict[str, torch.Tensor], name: str, dtype: torch.dtype, shape: torch.Size) -> None:
    """Raise ValueError unless a tensor of this dtype and shape can be written into the model's tensor of this name."""
    if name not in places:
        raise ValueError(f"The model has no weight {name!r}.")
    here = places[name]
    if here.shape != shape:
        raise ValueError(f"{name} has the shape {list(shape)}; the model's has {list(here.shape)}.")
    if here.dtype.is_floating_point != dtype.is_floating_point:
        raise ValueError(f"{name} is {dtype}; the model's is {here.dtype}.")


def _check_ties(places: dict[str, torch.Tensor], tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError if two tensors differ that are one in the model."""
    seen: dict[tuple, tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        other, value = seen.setdefault(place_of(places[name]), (name, tensor))
        if value is not tensor and not torch.equal(value.to(tensor), tensor):
            raise ValueError(f"{other} and {name} differ, and the model has one tensor for both.")


def read_folder(model: Any, places: dict[str, torch.Tensor], folder: str) -> dict[str, torch.Tensor]:
    """The weights in a folder by the model's names, on the CPU. Raises ValueError: they are not exactly this model's, or no safetensors."""
    if not os.path.isdir(folder):
        raise ValueError(f"{folder!r} is no folder on the server's machine.")
    if os.path.exists(os.path.join(folder, "adapter_config.json")):
        raise ValueError(f"{folder} has a LoRA adapter: merge it into the weights first.")
    try:
        kind = type(model.config)
        stored, _ = kind.get_config_dict(folder)
        given = {**kind.from_dict(stored).to_dict(), "model_type": stored.get("model_type", kind.model_type)}
        options = {"config": copy.deepcopy(model.config), "dtype": model.dtype, "use_safetensors": True}
        loaded, report = type(model).from_pretrained(folder, output_loading_info=True, local_files_only=True, **options)
    except Exception as error:  # what transformers raises for files of another kind differs from version to version
        raise ValueError(f"{folder} cannot be read: {' '.join(str(error).split())}") from error
    setting = _difference(model.config.to_dict(), given)
    if setting is not None:
        raise ValueError(f"{folder} is of another model: its config.json differs in {setting!r}.")
    for what in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, report[f"{what}_keys"])):
            raise ValueError(f"{folder} is not of this model: {what} {', '.join(names[:3])}.")
    tensors = loaded.state_dict()
    return {name: tensors[name] for name in places}


def _difference(ours: Any, given: Any) -> str | None:
    """The first setting in which two configurations differ so that the models may; None: there is none."""
    if not isinstance(ours, dict) or not isinstance(given, dict):
        return None if ours == given else ""
    for name in ours.keys() | given.keys():
        if name in _NO_MATTER or str(name).endswith("_token_id"):
            continue
        inner = _difference(ours.get(name), given.get(name))
        if inner is not None:
            return f"{name}.{inner}" if inner else name
    return None
