"""Launch temperature, top-k, top-p and min-p, without sorting (definition: `reference.sampling_scores`).

These parameters keep all tokens above a score, and of the tokens with exactly that score those from some id on, because the
definition sorts ascending and stably and removes from the front. `sampling_thresholds` finds this score and id per row, and the
verification kernels apply them while they read the logits. If the scores themselves are needed, for example for drafted trees,
`sampling_scores` writes them, with Gumbel noise if tokens are drawn.

A radix search over the ordered bits of float32 finds the score: three bits per pass, by counts for top-k and by masses for top-p.
It searches the row's likeliest tokens, which are copied out first, or all tokens if these are too many. It is deterministic, and
exact up to the rounding of the masses.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..launching import as_bytes
from .parameters import RowParameters, owners_of
from .triton_kernels import candidates_kernel, scores_kernel, thresholds_kernel

BLOCK = 2048  # ids per iteration of a program
CAPACITY = 4096  # the most candidates of a row


def sampling_thresholds(
    logits: torch.Tensor,
    owners: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    block: int = BLOCK,
    capacity: int = CAPACITY,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the score and id of each row of logits from which sampling parameters keep tokens.

    With scores = logits / temperature, token i of row r is kept if scores[r, i] > threshold[r], or if it equals threshold[r] and
    i >= id[r]. Order and ties are as in `reference.sampling_scores`: top-k keeps all that equal the k-th, top-p removes
    equals from the lowest id on, min-p is relative to the likeliest token; a token whose mass lies within rounding of
    1 - top_p may fall to either side.

    Args:
        logits: float32, bfloat16 or float16 [R, V], without NaN; ids adjacent.
        owners: int64 [R], which parameters each row uses; None: its own index.
        temperature: float32 [B], above 0; top_k: int32 [B], 0: off; top_p: float32 [B], 1: off; min_p: float32 [B], 0: off.
        out: float32 [R] and int32 [R] to write to.

    Returns: thresholds float32 [R], ids int32 [R]. Rows with all parameters off are not read and get -inf, which keeps all tokens.

    Memory traffic: the logits are read three times to find the likeliest tokens (once is the least possible). The search then reads only
    these, 12 times for top-k and 13 for top-p; if they are more than `capacity`, it reads the logits. One program per row.
    """
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be [R, V] with adjacent ids, not {tuple(logits.shape)} by {logits.stride()}.")
    rows, vocab = logits.shape
    device = logits.device
    if out is None:
        out = (
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
        )
    if not rows:
        return out
    scores = torch.empty(rows, capacity, dtype=torch.float32, device=device)
    ids = torch.empty(rows, capacity, dtype=torch.int32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    outside = torch.empty(rows, dtype=torch.float32, device=device)
    flags: dict[str, Any] = dict(
        HAS_OWNERS=owners is not None, HAS_TOP_K=top_k is not None, HAS_TOP_P=top_p is not None,
        HAS_MIN_P=min_p is not None, BLOCK=block, num_warps=16,
    )  # fmt: skip
    heated: Any = temperature is not None
    candidates_kernel[(rows,)](
        logits, owners, temperature, top_k, top_p, min_p, scores, ids, counts, outside, vocab, logits.stride(0), capacity,
        HAS_TEMPERATURE=heated, **flags,
    )  # fmt: skip
    sources: list[tuple[Any, ...]] = [
        (scores, None, capacity, True),
        (logits, temperature, logits.stride(0), False),
    ]
    for source, used, stride, candidates in sources:
        thresholds_kernel[(rows,)](
            source, owners, used, top_k, top_p, min_p, ids, counts, outside, *out, vocab, stride,
            HAS_TEMPERATURE=used is not None,  # pyright: ignore[reportArgumentType]
            CANDIDATES=candidates, **flags,
        )  # fmt: skip
    return out


@dataclass
class Noise:
    """The Gumbel noise to add to rows of logits.

    Attributes:
        seeds, positions, steps: int64 [R].
        do_sample: bool [R], rows that get noise.
        stream: one of the streams of `random_bits`.
    """

    seeds: torch.Tensor
    positions: torch.Tensor
    steps: torch.Tensor
    do_sample: torch.Tensor
    stream: int


def sampling_scores(
    logits: torch.Tensor,
    thresholds: tuple[torch.Tensor, torch.Tensor] | None = None,
    owners: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    noise: Noise | None = None,
    out: torch.Tensor | None = None,
    block: int = BLOCK,
) -> torch.Tensor:
    """logits / temperature with removed tokens at -inf, plus noise: float32 [R, V]. Other arguments: see `sampling_thresholds`.

    Args:
        thresholds: from `sampling_thresholds`; None: no token is removed.
        noise: Gumbel noise, which makes a row's argmax a draw; None: no noise.

    Memory traffic: the logits read once and float32 [R, V] written once. Noise adds a Philox call per 4 ids, one per 32, and two
    logarithms per id.
    """
    rows, vocab = logits.shape
    if logits.stride(1) != 1 or (thresholds is not None and any(each.shape != (rows,) for each in thresholds)):
        raise ValueError("logits must be [R, V] with adjacent ids, thresholds two tensors [R].")
    out = out if out is not None else torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    given = (None, None, None, None)
    if noise is not None:
        given = noise.seeds, noise.positions, noise.steps, as_bytes(noise.do_sample)
    if rows and vocab:
        scores_kernel[(rows, triton.cdiv(vocab, block))](
            logits, owners, temperature, *(thresholds or (None, None)), *given, out, vocab, logits.stride(0),
            HAS_OWNERS=owners is not None, HAS_TEMPERATURE=temperature is not None, HAS_THRESHOLDS=thresholds is not None,
            STREAM=-1 if noise is None else noise.stream, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out


def apply_parameters(logits: torch.Tensor, parameters: RowParameters, rows: torch.Tensor | None) -> torch.Tensor:
    """See `sampling.apply_parameters`."""
    flat, owners = logits.flatten(0, 1), owners_of(logits, rows)
    thresholds = _thresholds(flat, owners, parameters)
    return sampling_scores(flat, thresholds, owners, parameters.temperature).view(logits.shape)


def noisy_scores(
    logits: torch.Tensor,
    parameters: RowParameters,
    ahead: int,
    stream: int,
    shared: bool,
    rows: torch.Tensor | None,
    applied: bool,
) -> torch.Tensor:
    """See `sampling.noisy_scores`."""
    flat, owners = logits.flatten(0, 1), owners_of(logits, rows)
    noise = Noise(*parameters.noise_keys(logits, rows, ahead, shared), parameters.do_sample[owners], stream)
    temperature, thresholds = parameters.temperature, None
    if applied:
        temperature = None
    else:
        thresholds = _thresholds(flat, owners, parameters)
    return sampling_scores(flat, thresholds, owners, temperature, noise).view(logits.shape)


def choices(logits: torch.Tensor, parameters: RowParameters, ahead: int, rows: torch.Tensor | None) -> torch.Tensor:
    """See `sampling.choices`."""
    from ..verification.triton import target_choices

    flat, owners = logits.flatten(0, 1), owners_of(logits, rows)
    at = torch.arange(len(flat), device=flat.device)[:, None]
    chosen = target_choices(
        flat, at, at.new_zeros(len(flat), 0, dtype=torch.bool), None, parameters.seeds[owners],
        parameters.positions[owners] + ahead, parameters.do_sample[owners],
        None if parameters.temperature is None else parameters.temperature[owners],
        _thresholds(flat, owners, parameters),
    )  # fmt: skip
    return chosen.view(logits.shape[:2])


def _thresholds(
    flat: torch.Tensor, owners: torch.Tensor, parameters: RowParameters
) -> tuple[torch.Tensor, torch.Tensor] | None:
    given = (parameters.temperature, parameters.top_k, parameters.top_p, parameters.min_p)
    return sampling_thresholds(flat, owners, *given) if parameters.removes else None
