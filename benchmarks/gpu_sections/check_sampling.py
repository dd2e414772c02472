"""Temperature, top-k, top-p, min-p and noise against float64 definitions; tokens on a boundary may fall to either side."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .context import Context
from .report import Row, at_most

MODULES = ("sampling",)
# temperature, top-k, top-p, min-p
PARAMETERS = (
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.8, 40, 0.95, 0.02),
    (2.0, 1, 0.5, 1.0),
    (1.0, 10**6, 0.999, 0.0),
    (1.0, 7, 0.3, 0.3),
)


def kept(
    scores: torch.Tensor, top_k: float, top_p: float, min_p: float, slack: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of scores [V]: which tokens stay, and which are within `slack` of a boundary, bool [V].

    Ascending and stable, as transformers' warpers: of equal tokens those with lower ids go first.
    """
    values, order = scores.double().sort(stable=True)
    removed = torch.zeros_like(values, dtype=torch.bool)
    near = torch.zeros_like(removed)
    if top_k:
        removed |= values < values[-int(min(top_k, len(values)))]
    if top_p < 1:
        mass = values.masked_fill(removed, float("-inf")).softmax(0).cumsum(0)
        near |= ~removed & ((mass - (1 - top_p)).abs() < slack)
        removed |= mass <= 1 - top_p
        removed[-1] = False
    if min_p > 0:
        probs = values.masked_fill(removed, float("-inf")).softmax(0)
        ratio = probs / probs[-1]
        near |= (ratio - min_p).abs() < slack
        removed |= ratio < min_p
        removed[-1] = False
    stays, doubtful = torch.empty_like(removed), torch.empty_like(near)
    stays[order], doubtful[order] = ~removed, near
    return stays, doubtful


def errors(context: Context, dtype: torch.dtype, vocab: int, ties: bool) -> tuple[int, int]:
    """Tokens kept or removed wrongly, and scores that are not logits over temperature."""
    from hf_specdec.kernels.sampling.triton import sampling_scores, sampling_thresholds

    rows, device = len(PARAMETERS), context.device
    logits = context.randn(rows, vocab) * 3
    logits = (logits.round() if ties else logits).to(dtype)
    temperature, top_k, top_p, min_p = (torch.tensor(column, device=device) for column in zip(*PARAMETERS, strict=True))
    poison = (
        torch.full((rows,), float("nan"), device=device),
        torch.full((rows,), -9, dtype=torch.int32, device=device),
    )
    thresholds = sampling_thresholds(logits, None, temperature, top_k.int(), top_p, min_p, out=poison)
    nowhere = torch.full(logits.shape, float("nan"), device=device)
    out = sampling_scores(logits, thresholds, None, temperature, out=nowhere)
    scores = logits.float() / temperature[:, None]
    wrong = 0
    for row, (_, *parameters) in enumerate(PARAMETERS):
        stays, near = kept(scores[row], *parameters, slack=3e-6 if vocab < 10**4 else 1e-5)
        wrong += int(((out[row] > float("-inf")) != stays)[~near].sum())
    there = out > float("-inf")
    return wrong, int((out[there] != scores[there]).sum() + out.isnan().sum())


def noise_error(context: Context, dtype: torch.dtype, vocab: int) -> float:
    """Largest difference of drawn scores from logits and noise in float64, where rows sample; inf if others changed."""
    from hf_specdec.kernels.random_bits import reference as random_bits
    from hf_specdec.kernels.sampling.triton import Noise, sampling_scores

    logits = (context.randn(6, vocab) * 3).to(dtype)
    ids = torch.arange(6, device=context.device)
    keys = ids * 2**40 + 1, 1000 + ids, 7 * ids
    drawn = ids != 4
    stream = random_bits.DRAFT_STREAM
    out = torch.full(logits.shape, float("nan"), device=context.device)
    sampling_scores(logits, noise=Noise(*keys, drawn, stream), out=out)
    groups = -(-vocab // random_bits.GROUP)
    u, which = random_bits.minima(*keys, stream, groups)
    uniform = random_bits.uniform(*keys, stream, groups * random_bits.GROUP).double()
    above = -torch.log1p(-uniform).view(-1, groups, random_bits.GROUP)
    above.scatter_(2, which[:, :, None], 0.0)
    exponential = above - torch.log1p(-u.double())[:, :, None] / random_bits.GROUP
    expected = logits.double() - exponential.flatten(1)[:, :vocab].log() * drawn[:, None]
    error = (out.double() - expected).abs()
    return float(error.nan_to_num(float("inf")).max())


def rows(context: Context, name: str, dtype: torch.dtype) -> Iterator[Row]:
    """Lines for distinct scores and for many equal ones, and one for noise."""
    vocab = 300 if context.toy else 128256
    error = noise_error(context, dtype, vocab)
    yield at_most("correctness", f"sampling scores {name}: noise", error, 1e-4, "largest difference")
    for what, ties in (("distinct scores", False), ("ties", True)):
        wrong, changed = errors(context, dtype, vocab, ties)
        yield at_most("correctness", f"sampling thresholds {name}: {what}", wrong, 0, "wrong tokens")
        yield at_most("correctness", f"sampling scores {name}: {what}", changed, 0, "wrong scores")
