"""Checkpoints of draft heads: finding the format, and loading every tensor or raising an error that names it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn

from ...bundled import resolve_model
from ...config import SpeculativeConfigError, nearest_hint
from .quantized import QuantizedWeight, quantized_weights

logger = logging.getLogger(__name__)

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")  # of weight files; those of the first kind that is there are read
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "mask_embedding")  # what trainers store beside the weights
_WRAPPED = "module."  # prefix of all names in files saved from a DistributedDataParallel
_PLAIN_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MASK_EMBEDDING = "mask_embedding.pt"  # beside the weights of some DFlash drafters
_NEWLINE = re.compile(r"\s*\n\s*")  # in messages of other libraries
# Left in files by trainers; drafting does not use them.
_IGNORED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|masked_bias|position_ids)$")

# Layers that are made of more than a method here runs: sparse attention, streams that are mixed.
_REFUSED = {
    r"mtp\.\d+\.main_proj\.": "DeepSeek-V4 (DSpark: 'dflash' runs them)",
    r"mtp\.\d+\.attn\.": "DeepSeek-V4 (not DSpark)",
    r"mtp_dspark\.": "Mistral Large 4 (DSpark)",
    r"((language_)?model\.)+mtp\.layers\.\d+\.transformer_layer\.(self_attn|block_sparse_moe)\.": "MiniMax-M3",
}
# What torch and transformers raise for values that do not describe a model.
BAD_VALUES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, StrictDataclassError)


class CheckpointError(SpeculativeConfigError):
    """A checkpoint that cannot be used; the message names the file, tensor or key."""


class NoWeightsError(CheckpointError):
    """A checkpoint that holds none of the tensors that are wanted of it."""


@dataclass(frozen=True)
class Format:
    """A format in which draft heads are stored.

    Attributes:
        name: shown in errors, with an example.
        matches: True for a checkpoint in this format, by its `config` and tensor names alone.
        last: tried only if no other format matches.
    """

    name: str
    method: str
    matches: Callable[[Checkpoint], bool]
    last: bool = False


FORMATS: list[Format] = []


def register_format(name: str, method: str, matches: Callable[[Checkpoint], bool], last: bool = False) -> None:
    """Declare a format of a method, so that the method can be found from the checkpoint."""
    FORMATS.append(Format(name, method, matches, last))


class Checkpoint:
    """A folder with `config.json` and weights in safetensors or pickles, read lazily.

    Args:
        name: the name the user gave, for messages.
        wanted: selects tensors by name (None: all); others are ignored.
        nothing: the error if there are no such tensors; None: which files were looked for.

    Raises:
        CheckpointError: no folder, no weights, a file that cannot be read.
    """

    def __init__(
        self, folder: str | os.PathLike, name: str | None = None, wanted: Callable[[str], bool] | None = None,
        nothing: str | None = None,
    ):  # fmt: skip
        self.folder, self.name, self.wanted, self.nothing = Path(folder), name or os.fspath(folder), wanted, nothing
        self._pickles: dict[Path, dict[str, torch.Tensor]] = {}
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.name!r} is not a folder with a checkpoint.")

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json`, {} if there is none."""
        return self._object("config.json") if (self.folder / "config.json").is_file() else {}

    def _object(self, file: str) -> dict[str, Any]:
        try:
            value = json.loads((self.folder / file).read_text(encoding="utf-8-sig"))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self.error(f"{file} is not valid JSON ({error}).") from None
        if not isinstance(value, dict):
            raise self.error(f"{file} does not hold an object.")
        return value

    def shards(self, index: str) -> list[str]:
        """The files of a sharded checkpoint that hold a `wanted` tensor, from its index."""
        weight_map = self._object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise self.error(f"{index} has no weight_map from tensors' names to files' names.")
        unwrapped = dict(zip(_unwrapped(weight_map), weight_map.values(), strict=True))
        return sorted({shard for name, shard in unwrapped.items() if self.wanted is None or self.wanted(name)})

    @cached_property
    def files(self) -> dict[str, tuple[Path, str]]:
        """Which file each tensor is in, and its name there, which may have the prefix of a wrapper."""
        out: dict[str, tuple[Path, str]] = {}
        if self.index is not None:
            paths = [self.folder / shard for shard in self.shards(self.index)]
        else:
            paths = next(filter(None, map(self.unsharded, _SUFFIXES)), [])
        for path in paths:
            stored = list(self._read(path).keys())
            for name, there in zip(_unwrapped(stored), stored, strict=True):
                if self.wanted is None or self.wanted(name):
                    out[name] = path, there
        if not out:
            what = " with tensors of the drafter." if self.wanted else "."
            nothing = self.nothing or f"holds no weights: looked for *.safetensors, *.bin, *.pt and *.pth{what}"
            raise NoWeightsError(str(self.error(nothing)))
        return out

    @property
    def index(self) -> str | None:
        """The name of its index; None if it is not sharded."""
        return next((index for index in _INDEXES if (self.folder / index).is_file()), None)

    def unsharded(self, suffix: str) -> list[Path]:
        """The weight files of one kind, if there is no index."""
        return sorted(path for path in self.folder.glob(f"*{suffix}") if path.stem not in _NO_WEIGHTS)

    def _read(self, path: Path) -> Any:
        """A file's tensors by name: a dictionary, or safetensors' reader."""
        try:
            if path.suffix == ".safetensors":
                return safe_open(path, framework="pt")
            if path not in self._pickles:
                self._pickles[path] = self._checked(path, torch.load(path, map_location="cpu", weights_only=True))
            return self._pickles[path]
        except FileNotFoundError:
            raise self.error(f"has no file {path.name}, which its index names.") from None
        except SpeculativeConfigError:
            raise
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
            if path.suffix == ".safetensors":
                what = f"cannot be read as safetensors: it is damaged or incomplete ({error})."
            else:
                first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
                what = (
                    "is not a plain file of tensors (damaged, or a pickle with code, which is never run): "
                    f"{first_line} Convert it to safetensors where you trust it."
                )
            raise self.error(f"{path.name} {what}") from None

    def _checked(self, path: Path, state: Any) -> dict[str, torch.Tensor]:
        if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
            state = state["state_dict"]
        items = state.items() if isinstance(state, dict) else [(None, None)]
        if not all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in items):
            raise self.error(f"{path.name} does not hold a dictionary of tensors by name.")
        return state

    @cached_property
    def quantized(self) -> dict[str, QuantizedWeight]:
        """The weights that are stored quantized. Their parts do not count as tensors of the checkpoint."""
        weights = quantized_weights(self)
        if weights:
            logger.info("%s: %d quantized weights are dequantized.", self.name, len(weights))
        return weights

    @cached_property
    def _names(self) -> dict[str, None]:
        parts = {part for weight in self.quantized.values() for part in weight.parts}
        return dict.fromkeys([name for name in self.files if name not in parts] + list(self.quantized))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> list[str]:
        """The tensors' names."""
        return list(self._names)

    def any(self, pattern: str) -> bool:
        """Whether some tensor's name matches the regular expression, from its start."""
        return any(re.match(pattern, name) for name in self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return self.quantized[name].shape if name in self.quantized else self.stored_shape(name)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, as stored; quantized ones in float32."""
        return self.quantized[name].read() if name in self.quantized else self.stored(name)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a stored tensor, which may be a part of a quantized weight."""
        path, there = self.files[name]
        tensors = self._read(path)
        return tuple(tensors[there].shape if isinstance(tensors, dict) else tensors.get_slice(there).get_shape())

    def stored(self, name: str) -> torch.Tensor:
        """A stored tensor, which may be a part of a quantized weight."""
        path, there = self.files[name]
        tensors = self._read(path)
        return tensors[there] if isinstance(tensors, dict) else tensors.get_tensor(there)

    def error(self, what: str) -> CheckpointError:
        """An error about this checkpoint, on one line; the caller raises it."""
        return CheckpointError(f"Draft checkpoint {self.name!r}: {_NEWLINE.sub(' ', what)}")

    def section(self, key: str) -> dict[str, Any]:
        """An object inside config.json; {} if there is none. Other values raise CheckpointError."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{key} in its config.json is not an object.")
        return value or {}

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Build modules from its configuration, on the meta device. Raises CheckpointError: torch or transformers raised: the
        configuration describes no module that can be built."""
        try:
            with torch.device("meta"):
                yield
        except SpeculativeConfigError:
            raise
        except BAD_VALUES as error:
            what = str(error) or type(error).__name__
            raise self.error(f"config.json describes no drafter that can be built: {what}") from error


def open_checkpoint(
    name: str, revision: str | None = None, token: str | bool | None = None, wanted: Callable[[str], bool] | None = None
) -> Checkpoint:
    """Open a checkpoint by bundled name, folder or Hub id (from the Hub cache when offline).

    Args:
        wanted: selects tensors by name; only their shards of a sharded checkpoint are fetched.

    Raises:
        CheckpointError: it is neither on disk nor available from the Hub.
    """
    path = resolve_model(name)
    if os.path.isdir(path):
        return Checkpoint(path, name, wanted)
    try:
        folder = snapshot_download(path, revision=revision, token=token, allow_patterns=["*.json", MASK_EMBEDDING])
        checkpoint = Checkpoint(folder, name, wanted)
        commit = os.path.basename(folder)  # the branch may move on between two calls
        index = checkpoint.index
        if index is not None:
            for shard in checkpoint.shards(index):
                hf_hub_download(path, shard, revision=commit, token=token)
            return checkpoint
        # One kind after the other, because a repository may hold the same weights in several.
        for suffix in _SUFFIXES:
            snapshot_download(path, revision=commit, token=token, allow_patterns=[f"*{suffix}"])
            if checkpoint.unsharded(suffix):
                break
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"Draft checkpoint {name!r} is neither a bundled name nor a folder, and the Hub (or its cache) did not provide it: "
            f"{first_line}"
        ) from error
    return checkpoint


def versions_of(name: str) -> tuple[tuple[str, int, int], ...]:
    """Name, time and size of each file in a checkpoint's folder, for the keys of what is loaded once: a new checkpoint in the same
    folder is then loaded anew. Empty for a Hub id.
    """
    folder = resolve_model(name)
    if not os.path.isdir(folder):
        return ()
    with os.scandir(folder) as entries:
        return tuple(
            sorted((entry.name, entry.stat().st_mtime_ns, entry.stat().st_size) for entry in entries if entry.is_file())
        )


def _unwrapped(names: Iterable[str]) -> list[str]:
    names = list(names)
    return (
        [name.removeprefix(_WRAPPED) for name in names] if all(name.startswith(_WRAPPED) for name in names) else names
    )


def renaming(*rules: tuple[str, str | None]) -> Callable[[str], Any]:
    """A renaming for `Plan`. Each rule in turn replaces what its regular expression matches at a name's beginning; None: a tensor that is
    not used."""

    def canonical(name: str) -> str | None:
        for pattern, replacement in rules:
            if match := re.match(pattern, name):
                if replacement is None:
                    return None
                name = match.expand(replacement) + name[match.end() :]
        return name

    return canonical


def counted(checkpoint: Checkpoint, numbers: Iterable[int], what: str) -> int:
    """How many parts of a kind a file has, from the numbers in its tensors' names. Raises CheckpointError: a number below the greatest
    is missing."""
    present = set(numbers)
    missing = next((i for i in range(len(present)) if i not in present), None)
    if missing is not None:
        raise checkpoint.error(f"has tensors of {what} {max(present)} and none of {what} {missing}.")
    return len(present)


def refused_kind(checkpoint: Checkpoint) -> str | None:
    """What a checkpoint in no format is, if that is known."""
    if kind := checkpoint.config.get("speculators_model_type"):
        return f"is of speculators type {kind!r}"
    for pattern, owner in _REFUSED.items():
        if checkpoint.any(pattern):
            return f"holds MTP layers of {owner}"
    return None


def infer_format(checkpoint: Checkpoint) -> Format:
    """The format of a checkpoint. Raises CheckpointError: no format matches (the message lists those tried), or several do, which is a
    bug."""
    fitting = [form for form in FORMATS if not form.last and form.matches(checkpoint)]
    fitting = fitting or [form for form in FORMATS if form.last and form.matches(checkpoint)]
    if len({form.method for form in fitting}) == 1:
        return fitting[0]
    tried = "; ".join(form.name for form in FORMATS)
    if fitting:
        raise checkpoint.error(f"fits several formats ({'; '.join(f.name for f in fitting)}): name the 'method'.")
    if what := refused_kind(checkpoint):
        raise checkpoint.error(f"{what}, whose drafts no method here can make.")
    some = ", ".join(sorted(checkpoint.names())[:6])
    raise checkpoint.error(f"is in no known format. Tried: {tried}. Its tensors are {some}, ..")


@dataclass
class Plan:
    """The tensors of a checkpoint under canonical names, which are the module's names."""

    checkpoint: Checkpoint
    rename: Callable[[str], str | None]
    sources: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.sources = {}
        for name in self.checkpoint.names():
            target = None if _IGNORED.search(name) else self.rename(name)
            if target is not None:
                if target in self.sources:
                    raise self.checkpoint.error(
                        f"has both {self.sources[target]!r} and {name!r}, which are the same tensor."
                    )
                self.sources[target] = name

    def __contains__(self, canonical: str) -> bool:
        return canonical in self.sources

    def shape(self, canonical: str) -> tuple[int, ...]:
        """A tensor's shape, from the file's header."""
        return self.checkpoint.shape(self.sources[canonical])

    def matrix(self, canonical: str) -> tuple[int, int]:
        """The shape of a tensor of two dimensions. Raises CheckpointError: it has another number of dimensions."""
        shape = self.shape(canonical)
        if len(shape) != 2:
            raise self.checkpoint.error(f"{self.sources[canonical]} has shape {list(shape)}; it must be a matrix.")
        return shape[0], shape[1]

    def tensor(self, canonical: str) -> torch.Tensor:
        """Read a tensor."""
        return self.checkpoint.tensor(self.sources[canonical])


def load_module(
    module: nn.Module, plan: Plan, device: torch.device, dtype: torch.dtype, precise: Iterable[str] = ()
) -> nn.Module:
    """Fill a module built on the meta device. All names and shapes are checked before any tensor is read.

    Args:
        plan: its canonical names are those of the module's `state_dict`.
        precise: parts of names of tensors that stay in float32.

    Raises:
        CheckpointError: tensors that are missing, unused or of another shape, by their names in the file.
    """
    checkpoint, expected = plan.checkpoint, module.state_dict()
    problems = [f"missing {name}" for name in sorted(expected.keys() - plan.sources.keys())]
    for canonical, source in sorted(plan.sources.items()):
        if canonical not in expected:
            problems.append(f"unused {source}{nearest_hint(canonical, expected)}")
        elif checkpoint.shape(source) != tuple(expected[canonical].shape):
            wanted = list(expected[canonical].shape)
            problems.append(f"{source} has shape {list(checkpoint.shape(source))}, the configuration says {wanted}")
    if problems:
        shown = "; ".join(problems[:12]) + ("; .." if len(problems) > 12 else "")
        raise checkpoint.error(f"does not fit {type(module).__name__}: {shown}.")
    state = {}
    for name, parameter in expected.items():
        value = plan.tensor(name)
        if parameter.is_floating_point() and value.dtype not in _PLAIN_FLOATS:
            kind = str(value.dtype).removeprefix("torch.")
            raise checkpoint.error(
                f"{plan.sources[name]} is quantized ({kind}), and config.json has no quantization_config that says how."
            )
        kind = torch.float32 if any(part in name for part in precise) else dtype
        state[name] = value.to(device, kind if value.is_floating_point() else None)
    module.load_state_dict(state, strict=False, assign=True)
    return module.requires_grad_(False).eval()


# ---- tied weights, which a file may hold several times, and modules may share ----------------------------------------


def one_copy(checkpoint: Checkpoint, canonical: Callable[[str], str]) -> Callable[[str], str | None]:
    """A renaming for `Plan` in which all tensors with one canonical name are the same tensor: one copy of it is loaded. Raises
    CheckpointError: (when the renaming is called) two copies differ."""
    first: dict[str, str] = {}

    def rename(name: str) -> str | None:
        target = canonical(name)
        kept = first.setdefault(target, name)
        if kept == name:
            return target
        if checkpoint.shape(kept) != checkpoint.shape(name) or not torch.equal(
            checkpoint.tensor(kept), checkpoint.tensor(name)
        ):
            raise checkpoint.error(f"ties its weights, but {kept} and {name} differ.")
        return None

    return rename


def share_equal(module: nn.Module) -> None:
    """Replace each block by the one before it if their weights are equal.

    The original Medusa and Hydra code repeats one block, and its files hold a copy for every place.
    """
    for blocks in [parts for parts in module.modules() if isinstance(parts, (nn.ModuleList, nn.Sequential))]:
        for i in range(1, len(blocks)):
            weights, before = blocks[i].state_dict(), blocks[i - 1].state_dict()
            if weights.keys() == before.keys() and all(torch.equal(weights[name], before[name]) for name in weights):
                blocks[i] = blocks[i - 1]
