"""Parts that draft heads share with their target: embeddings, language-model head, vocabulary, device and dtype; `draft_vocabulary`."""

from __future__ import annotations

import json
import logging
import os
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from ...bundled import BUNDLED_PROMPTS
from ...config import nearest_hint
from ...jsonl import read_rows
from ...kernels import drafting
from ...model.architectures import has_repository_code
from ...model.options.quantized import quantizes_natively
from ...model.packed_model import PackedModel
from ...model.sharding import whole
from ..base import DrafterContext
from ..growing.tree_shapes import TreeDraftingConfig
from .files import BAD_VALUES, Checkpoint, Plan, load_module, versions_of

logger = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")
Head = TypeVar("Head", bound=nn.Module)
_loaded = weakref.WeakKeyDictionary[nn.Module, "weakref.WeakValueDictionary[tuple, Any]"]()
_copies = weakref.WeakKeyDictionary[nn.Linear, tuple["weakref.ref[nn.Module]", torch.Tensor]]()
_PADDING = 512  # embeddings and heads may be padded to a multiple of this, or of a smaller power of two


def load_once(config: Any, target: PackedModel, load: Callable[[], Loaded], *more: Any) -> Loaded:
    """The result of `load`, called once per target and checkpoint, so that configurations with other draft lengths share it. It is kept
    as long as the target and some user of it are.

    Args:
        config: of a drafter that is loaded from `model`.
        more: other values that the result depends on.
    """
    versions = config.model and versions_of(config.model)
    quantization = config.quantization and (config.quantization, quantizes_natively(config))
    key = (
        config.method, config.model, config.revision, versions, quantization, config.prepack_weights, target.model.dtype, target.device,
        *more,
    )  # fmt: skip
    loaded = _loaded.setdefault(target.model, weakref.WeakValueDictionary())
    made = loaded.get(key)
    if made is None:
        made = loaded[key] = load()
    return made


class DraftVocabulary:
    """Scores of the target's V tokens from a head's logits over its own Vd.

    Args:
        target_ids: int64 [Vd], the target's id of each draft token; None: they are the same (Vd may be padded).
    """

    in_target_vocabulary = True  # if False, processors and noise, which refer to the target's tokens, are not applied

    def __init__(self, vocab_size: int, target_ids: torch.Tensor | None = None):
        self.vocab_size, self.target_ids = vocab_size, target_ids
        self._table = None if target_ids is None else drafting.DraftVocabularyTable(target_ids, vocab_size)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, V] from [R, Vd]; tokens outside the draft vocabulary get minus infinity."""
        if self._table is not None:
            return self._table.scores(logits)
        logits = logits.to(torch.float32)
        if logits.shape[1] >= self.vocab_size:
            return logits[:, : self.vocab_size]
        return nn.functional.pad(logits, (0, self.vocab_size - logits.shape[1]), value=float("-inf"))


def gather_features(
    layers: list[torch.Tensor], index: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Hidden states of the packed tokens `index` [n], layers concatenated: [n, L * H] on the head's device.

    Args:
        layers: L hidden states [T, H] of the target, on any devices.
    """
    first = layers[0]
    if any((states.device, states.dtype) != (first.device, first.dtype) for states in layers):
        return torch.cat([gather_features([states], index, device, dtype) for states in layers], dim=-1)
    return drafting.gather_features(layers, index.to(first.device), dtype).to(device)


def checked_ids(checkpoint: Checkpoint, target: PackedModel, name: str, ids: torch.Tensor, size: int) -> torch.Tensor:
    """The target's ids int64 [size] of a draft vocabulary's tokens, on the device for heads. Raises CheckpointError: another length, ids
    out of the target's range, or a token twice."""
    if tuple(ids.shape) != (size,):
        raise checkpoint.error(f"{name} has shape {list(ids.shape)} for a draft vocabulary of {size} tokens.")
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        raise checkpoint.error(
            f"{name} names tokens {int(ids.min())} to {int(ids.max())}, the target has {target.vocab_size}: it belongs to another "
            "target, or holds ids where offsets belong." + trained_for(checkpoint)
        )
    if len(torch.unique(ids)) != size:
        raise checkpoint.error(f"{name} names a token of the target twice.")
    return ids.to(device_and_dtype(target)[0])


def mapped_ids(checkpoint: Checkpoint, plan: Plan, target: PackedModel, size: int | None = None) -> torch.Tensor | None:
    """The target's ids int64 [Vd] of a reduced draft vocabulary; None: it is the whole one. The table `d2t`, offsets from the draft
    vocabulary's ids to the target's, and `t2d`, are removed from the plan.

    Args:
        size: rows of the file's language-model head; None: it has none.

    Raises:
        CheckpointError: the table does not fit the head or the target, or `t2d`, bool [V], names other tokens.
    """
    source, other = plan.sources.pop("d2t", None), plan.sources.pop("t2d", None)
    if source is None:
        return None
    offsets = checkpoint.tensor(source).to(torch.long)
    ids = offsets + (torch.arange(len(offsets)) if offsets.dim() == 1 else 0)
    ids = checked_ids(checkpoint, target, "d2t", ids, offsets.numel() if size is None else size)
    if other is not None:
        known = checkpoint.tensor(other).to(torch.bool).nonzero().flatten()
        if not torch.equal(known, ids.sort().values.cpu()):
            raise checkpoint.error(f"t2d and d2t name different tokens: {len(known)} and {len(ids)} of them.")
    return ids


def shared_head(checkpoint: Checkpoint, target: PackedModel, ids: torch.Tensor | None) -> nn.Module:
    """The target's language-model head for a file without one; its rows of the draft vocabulary, if that is reduced."""
    return target_head(target) if ids is None else rows_of(target_head(target), ids, checkpoint.error)


def rows_of(head: Any, ids: torch.Tensor, fail: Callable[[str], Exception]) -> nn.Linear:
    """A linear layer with a copy of these rows of a language-model head; where that is impossible, `fail` makes the error."""
    weight = head.weight
    plain = isinstance(head, nn.Linear) and type(weight) is nn.Parameter and weight.is_floating_point()
    if not plain or weight.is_meta:
        raise fail(f"cannot be used: the language-model head, {type(head).__name__}, has no plain weights.")
    if int(ids.max()) >= len(weight):
        raise fail(f"has the id {int(ids.max())}, and the drafter scores {len(weight)} tokens.")
    ids = ids.to(weight.device)
    rows = nn.Linear(weight.shape[1], len(ids), bias=head.bias is not None, device="meta")
    rows.weight = nn.Parameter(weight.detach()[ids], requires_grad=False)
    if head.bias is not None:
        rows.bias = nn.Parameter(head.bias.detach()[ids], requires_grad=False)
    _copies[rows] = weakref.ref(head), ids
    return rows


@torch.no_grad()
def renew_copies(model: PreTrainedModel) -> None:
    """Copy the rows of `rows_of` again from a model's language-model head, whose weights have changed."""
    head: Any = model.get_output_embeddings()
    for rows, (source, ids) in _copies.items():
        if source() is not head:
            continue
        if type(rows.weight) is not nn.Parameter:
            logger.warning("A drafter keeps its quantized rows of the language-model head, whose weights have changed.")
            continue
        rows.weight.copy_(head.weight[ids])
        if head.bias is not None:
            rows.bias.copy_(head.bias[ids])


def vocabulary_of(
    checkpoint: Checkpoint, plan: Plan, target: PackedModel, width: int, stated: int | None = None, whole: int | None = None
) -> tuple[DraftVocabulary, nn.Module | None]:  # fmt: skip
    """The draft vocabulary of a head of that width (see `mapped_ids`), and the `shared_head` if the file has none.

    Args:
        stated, whole: number of tokens of the draft vocabulary and of the whole one, as config.json says.

    Raises:
        CheckpointError: the file contradicts itself or the target.
    """
    size = plan.matrix("lm_head.weight")[0] if "lm_head.weight" in plan else None
    if size is None and width != target.config.hidden_size:
        raise checkpoint.error(
            f"has no lm_head.weight, and the target's reads hidden states of width {target.config.hidden_size}, not {width}."
        )
    ids = mapped_ids(checkpoint, plan, target, size)
    shared: Any = shared_head(checkpoint, target, ids) if size is None else None
    size, whole = size or len(shared.weight), whole or target.vocab_size
    if stated is not None and ids is None and (stated < whole or stated not in (size, whole)):
        raise checkpoint.error(f"has draft_vocab_size {stated} and no table d2t of these tokens.")
    if stated not in (None, size) and ids is not None:
        raise checkpoint.error(f"has draft_vocab_size {stated}, but logits for {size} tokens.")
    if ids is None:
        check_vocabulary(checkpoint, target, size)
    return DraftVocabulary(target.vocab_size, ids), shared


def tokenizer_of(model: PreTrainedModel) -> Any:
    """The tokenizer that a model was loaded with, or None."""
    name = model.name_or_path
    if not name:
        return None
    try:
        return AutoTokenizer.from_pretrained(
            name, local_files_only=os.path.isdir(name), trust_remote_code=has_repository_code(model)
        )
    except (OSError, ValueError) as error:
        logger.info("No tokenizer found for %s (%s).", name, error)
        return None


def target_embeddings(target: PackedModel) -> nn.Module:
    """The target's input embeddings; a whole copy of them if they are sharded (see `model.sharding.whole`)."""
    return whole(target.model.get_input_embeddings())


def target_head(target: PackedModel) -> nn.Module:
    """The target's language-model head; a whole copy of it if it is sharded. Every supported target has one."""
    head: Any = target.model.get_output_embeddings()
    return whole(head)


def device_and_dtype(target: PackedModel) -> tuple[torch.device, torch.dtype]:
    """Device and dtype for heads: those of the target's language-model head, where its features are."""
    head: Any = target.model.get_output_embeddings()
    device = head.weight.device
    return target.device if device.type == "meta" else device, target.model.dtype


def built(
    checkpoint: Checkpoint, plan: Plan, target: PackedModel, make: Callable[[], Head], precise: Iterable[str] = ()
) -> Head:
    """A head that `make` builds, filled from its checkpoint, on the device and in the dtype for heads (`precise`: see `load_module`).
    Raises CheckpointError: config.json describes no module that can be built, or the tensors do not fit it."""
    with checkpoint.building():
        module = make()
    load_module(module, plan, *device_and_dtype(target), precise)
    return module


def layer_config(checkpoint: Checkpoint, values: dict[str, Any], default_type: str = "llama") -> PretrainedConfig:
    """transformers' configuration of a head's decoder layers.

    Args:
        values: the checkpoint's keys that describe them; without `model_type`, `default_type` is used.
    """
    values = {"model_type": default_type} | {k: v for k, v in values.items() if k not in ("architectures", "auto_map")}
    model_type = values.pop("model_type")
    for key in ("hidden_act", "hidden_activation"):
        if (act := values.get(key)) is not None and act not in ACT2FN:
            raise checkpoint.error(
                f"config.json has {key} = {act!r}{nearest_hint(act, ACT2FN)}, which transformers does not know."
            )
    try:
        return AutoConfig.for_model(model_type, **values)
    except BAD_VALUES as error:
        raise checkpoint.error(f"its configuration of model_type {model_type!r} cannot be read: {error}") from None


def plain_rope(values: dict[str, Any]) -> dict[str, Any]:
    """A layer's configuration with plain rotary embeddings in place of "mrope", whose three positions are equal in text."""
    values = dict(values)
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key)
        if isinstance(rope, dict) and (rope.get("rope_type", rope.get("type")) == "mrope" or "mrope_section" in rope):
            kind = rope.get("rope_type", rope.get("type"))
            kept = {
                k: v for k, v in rope.items() if k not in ("type", "rope_type", "mrope_section", "mrope_interleaved")
            }
            values[key] = kept | {"rope_type": "default" if kind in (None, "mrope") else kind}
    return values


def trained_for(checkpoint: Checkpoint) -> str:
    """' This head was trained for X.' if the checkpoint names its target (speculators' verifier), else ''."""
    verifier = checkpoint.section("speculators_config").get("verifier")
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return f" This head was trained for {name!r}." if name else ""


def check_target(checkpoint: Checkpoint, target: PackedModel, hidden_size: int | None, vocab_size: int | None) -> None:
    """Raise CheckpointError if a head was made for another target.

    Args:
        hidden_size: width of the features it reads; None: not known.
        vocab_size: of its target; may be padded differently.
    """
    width = target.config.hidden_size
    if hidden_size is not None and hidden_size != width:
        raise checkpoint.error(
            f"reads hidden states of width {hidden_size}; the target's have {width}. It is for another target."
            + trained_for(checkpoint)
        )
    if vocab_size is not None:
        check_vocabulary(checkpoint, target, vocab_size)


def fits_vocabulary(size: int, target_size: int) -> bool:
    """True if a head for `size` tokens can serve the target: the same, a few less (tokens were added to the target later), or the
    target's rounded up to a multiple of a power of two from 8 to `_PADDING`."""
    if size <= target_size:
        return target_size - size <= _PADDING
    multiples = [2**power for power in range(3, _PADDING.bit_length())]
    return size in [-(-target_size // multiple) * multiple for multiple in multiples]


def check_vocabulary(checkpoint: Checkpoint, target: PackedModel, vocab_size: int) -> None:
    """Raise CheckpointError if a head's vocabulary is not the target's, which may be padded differently."""
    if not fits_vocabulary(vocab_size, target.vocab_size):
        raise checkpoint.error(
            f"is for a vocabulary of {vocab_size} tokens; the target has {target.vocab_size}." + trained_for(checkpoint)
        )


_KEY = "draft_vocabulary"


def most_frequent(texts: Iterable[list[int]], count: int) -> list[int]:
    """The `count` most frequent ids of some texts, or all if they are fewer; ties: the lowest."""
    counted = Counter(token for text in texts for token in text)
    return sorted(counted, key=lambda token: (-counted[token], token))[:count]


def draft_ids(config: TreeDraftingConfig, target: PackedModel, context: DrafterContext | None) -> torch.Tensor | None:
    """The target's ids int64 [Vd] that a drafter scores, on the host; None: all. Raises SpeculativeConfigError: the file cannot be read,
    or holds anything but different ids of the target; or a number that no count fits."""
    given, size = config.draft_vocabulary, target.vocab_size
    if given is None:
        return None
    if isinstance(given, str):
        ids = _read(config, given)
    elif type(given) is int and 1 <= given <= size:
        ids = _of_prompts(config, target, context, given)
    else:
        raise config.fail(_KEY, f"must be a file, or a number of tokens from 1 to the target's {size}, not {given!r}.")
    wrong = [token for token in ids if not 0 <= token < size]
    if not ids or wrong or len(set(ids)) < len(ids):
        what = "holds no id" if not ids else f"holds the id {wrong[0]}" if wrong else "holds an id twice"
        raise config.fail(_KEY, f"{what}: {given!r} must list different ids of the target's {size} tokens.")
    return torch.tensor(ids)


def _read(config: TreeDraftingConfig, path: str) -> list[int]:
    """The ids in a file: .npy, .pt (SGLang's token maps), a JSON list, or text with an id a line."""
    file = Path(path).expanduser()
    try:
        if file.suffix == ".npy":
            ids = np.load(file, allow_pickle=False).tolist()
        elif file.suffix == ".pt":
            ids = torch.as_tensor(torch.load(file, map_location="cpu", weights_only=True)).tolist()
        else:
            text = file.read_text(encoding="utf-8")
            ids = json.loads(text) if text.lstrip()[:1] in ("[", "{") else [int(line) for line in text.split()]
    except (OSError, ValueError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise config.fail(_KEY, f"cannot be read from {path!r}: {error}.") from None
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise config.fail(_KEY, f"is {path!r}, which holds no list of token ids (JSON, .npy, .pt, or an id a line).")
    return ids


def _of_prompts(
    config: TreeDraftingConfig, target: PackedModel, context: DrafterContext | None, count: int
) -> list[int]:
    """The ids of the bundled prompts by frequency, then the lowest: tokenizers give frequent tokens low ids."""
    tokenizer: Any = (context and context.tokenizer) or tokenizer_of(target.model)
    if tokenizer is None:
        raise config.fail(
            _KEY, f"is {count}, but the target's tokenizer is not known: pass tokenizer=, or give a file of ids."
        )
    texts = [tokenizer.encode(row["prompt"]) for row in read_rows(BUNDLED_PROMPTS, "prompt")]
    return most_frequent([*texts, list(range(target.vocab_size))], count)
