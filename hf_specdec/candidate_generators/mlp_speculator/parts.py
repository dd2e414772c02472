"""What MLP speculators, in IBM's and Snowflake's formats, are made of: the recurrence, its norm, tied tensors, their numbers."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..checkpoints.files import Checkpoint

EPSILON = 1e-6
_PREFIX = "speculator."


class ScaledNorm(nn.Module):
    """Root-mean-square norm with a weight and a bias (mean over the width, in float32, epsilon 1e-6)."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., width] to the same."""
        return F.rms_norm(x, self.weight.shape, self.weight, EPSILON) + self.bias


class Speculator(nn.Module, ABC):
    """A recurrence with one step per drafted token, started from the target's last hidden state.

    Token embeddings are added to the projected state with a weight that leaves half of the state's variance to the target's
    hidden state after all `n_predict` steps, whatever number of them is used (Wertheimer et al. 2024, "Accelerating
    Production LLMs with Combined Token/Embedding Speculators").

    Args:
        n_predict: tokens it was trained to predict.
        width: of the sum of state and embedding.
        scale_input: normalise the target's hidden state.
    """

    def __init__(self, n_predict: int, width: int, scale_input: bool):
        super().__init__()
        self.n_predict, self.scale_input = n_predict, scale_input
        state_weight = 0.5 ** (0.5 / n_predict)
        self.embedding_scale = math.sqrt((1 - state_weight**2) * width / 2) / state_weight

    def entered(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [N, H] as the first step reads them."""
        return F.rms_norm(hidden, hidden.shape[-1:], eps=EPSILON) * 0.5**0.5 if self.scale_input else hidden

    @abstractmethod
    def step(self, index: int, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, V] of what follows `tokens` [N], and the state [N, S] for the next step.

        Args:
            index: of the step. In step 0 `state` is the target's last hidden state [N, H].
        """


class SumSpeculator(Speculator):
    """s' = GELU(norm_i(proj_i(s) + scale * emb_i(token))), logits = head_i(s').

    Args:
        emb, proj, ln, head: one module per step; where there are fewer, the last one serves the other steps too.
    """

    def __init__(self, n_predict: int, width: int, scale_input: bool, emb: list, proj: list, ln: list, head: list):
        super().__init__(n_predict, width, scale_input)
        self.emb, self.proj = nn.ModuleList(emb), nn.ModuleList(proj)
        self.ln, self.head = nn.ModuleList(ln), nn.ModuleList(head)

    def step(self, index: int, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Speculator; the state is s'."""
        emb, proj, ln, head = (each[min(index, len(each) - 1)] for each in (self.emb, self.proj, self.ln, self.head))
        projected = proj(self.entered(state) if index == 0 else state)
        state = F.gelu(ln(torch.add(projected, emb(tokens), alpha=self.embedding_scale)))
        return head(state), state


# ---- tensors --------------------------------------------------------------------------------------------------------


def unprefixed(name: str) -> str:
    """A tensor's name without `speculator.`."""
    return name.removeprefix(_PREFIX)


def tied_name(name: str, n_predict: int) -> str:
    """The canonical name of a tensor in a checkpoint with tied weights: of step 0, of step 1 for later projections."""
    match = re.fullmatch(r"(\w+)\.(\d+)\.(.+)", name)
    if match is None or int(match[2]) >= n_predict:
        return name
    first = min(int(match[2]), 1) if match[1].endswith("proj") else 0
    return f"{match[1]}.{first}.{match[3]}"


def sharing(checkpoint: Checkpoint, canonical: Callable[[str], str]) -> Callable[[str], str | None]:
    """A `Plan`'s renaming where tensors with one canonical name are one tensor: stored once, or several times and equal.

    Raises:
        CheckpointError: (the renaming) copies differ.
    """
    first: dict[str, str] = {}

    def rename(name: str) -> str | None:
        target = canonical(unprefixed(name))
        kept = first.setdefault(target, name)
        if kept == name:
            return target
        if checkpoint.shape(kept) != checkpoint.shape(name) or not torch.equal(
            checkpoint.tensor(kept), checkpoint.tensor(name)
        ):
            raise checkpoint.error(f"ties its weights, but {kept} and {name} differ.")
        return None

    return rename


def check_steps(checkpoint: Checkpoint, n_predict: int, tied: bool) -> None:
    """Raise CheckpointError if config.json speaks of more steps than the file has weights for: none is built without."""
    numbers = {
        int(match[1])
        for match in (re.match(r"head\.(\d+)\.", unprefixed(name)) for name in checkpoint.names())
        if match
    }
    if not tied and n_predict > len(numbers):
        raise checkpoint.error(
            f"config.json has n_predict = {n_predict}, but the file has the heads of {len(numbers)} steps."
        )


# ---- config.json ----------------------------------------------------------------------------------------------------


def integer(checkpoint: Checkpoint, key: str, default: int | None = None, minimum: int = 1) -> int:
    """A whole number of config.json.

    Raises:
        CheckpointError: it is missing (and there is no default) or something else.
    """
    value = checkpoint.config.get(key, default)
    if type(value) is not int or value < minimum:
        raise checkpoint.error(f"config.json has {key} = {value!r}; it must be an integer of at least {minimum}.")
    return value


def flag(checkpoint: Checkpoint, key: str) -> bool:
    """A switch of config.json, off if it is not there."""
    value = checkpoint.config.get(key, False)
    if not isinstance(value, bool):
        raise checkpoint.error(f"config.json has {key} = {value!r}; it must be true or false.")
    return value


def widths(checkpoint: Checkpoint, key: str, default: int | None = None) -> list[int]:
    """Widths of config.json: 4096, [4096, 4096] or "4096.4096"."""
    value: Any = checkpoint.config.get(key, default)
    parts = value.split(".") if isinstance(value, str) else value if isinstance(value, list) else [value]
    numbers = [int(part) for part in parts if type(part) is int or (isinstance(part, str) and part.isdecimal())]
    if not parts or len(numbers) < len(parts) or min(numbers) < 0:
        raise checkpoint.error(
            f"config.json has {key} = {value!r}; it must be a width, a list of widths or text like '4096.4096'."
        )
    return numbers
