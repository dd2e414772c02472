"""`draft_vocabulary`: the tokens that a drafter scores."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...bundled import BUNDLED_PROMPTS
from ...jsonl import read_rows
from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..growing.tree_shapes import TreeDraftingConfig
from .target_parts import tokenizer_of

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
