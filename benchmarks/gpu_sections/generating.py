"""Timing `model.generate()`: what a step and a token cost once decoding runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .context import Context
from .models import Models


@dataclass
class Way:
    """One way to decode.

    Attributes:
        kwargs: what `generate()` gets.
        ours: whether it is this package's.
        whole_calls: tokens per second of whole calls; else from the difference of a long and a short one, which leaves out
            the prompt, allocation and capturing.
    """

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    whole_calls: bool = False

    @property
    def ours(self) -> bool:
        """See above."""
        return "speculative_config" in self.kwargs


@dataclass
class Timing:
    """Of one way.

    Attributes:
        tokens_per_second: of all rows together.
        step_ms: per forward of the target; NaN where that is not known (ways of transformers).
        tau: tokens per row and forward.
        setup_seconds: what a call costs besides its steps.
        note: warnings that the runs gave.
    """

    tokens_per_second: float
    step_ms: float
    tau: float
    setup_seconds: float
    note: str = ""


def run(models: Models, batch: Any, way: Way, num_tokens: int) -> Any:
    """One greedy call."""
    return models.target.generate(
        **batch, **way.kwargs, max_new_tokens=num_tokens, do_sample=False, return_dict_in_generate=True
    )


def forwards(out: Any) -> int:
    """Of the target, in one call of ours: rows decode side by side until the last has ended."""
    return max(row["num_steps"] for row in out.speculation["rows"])


def measure(context: Context, models: Models, batch: Any, way: Way, lengths: tuple[int, int]) -> Timing:
    """Time a short and a long call, the better of two each, after a warm-up: of ours the long one, which captures all that it needs."""
    warned = len(context.warnings)
    rows = batch["input_ids"].shape[0]
    short, long = lengths
    if not context.toy or way.whole_calls:
        run(models, batch, way, long if way.ours or way.whole_calls else short)
    out: Any = None
    seconds, steps, tau = {}, {}, float("nan")
    for length in (long,) if way.whole_calls else lengths:
        times = []
        for _ in range(1 if context.toy else 2):

            def call(length=length):
                nonlocal out
                out = run(models, batch, way, length)

            times.append(context.seconds(call))
        seconds[length] = min(times)
        if way.ours:
            steps[length], tau = forwards(out), out.speculation["mean_accepted_length"]
    note = "; ".join(context.warnings[warned:])
    if way.whole_calls:
        return Timing(rows * long / seconds[long], float("nan"), tau, 0.0, note)
    count, began, taken = short, seconds[short], steps.get(short, 0)
    if seconds[long] <= began:  # a machine under load, and calls of a few tokens
        count, began, taken = 0, 0.0, 0
        note = "; ".join(filter(None, [note, "a long call took no longer than a short one: its whole time is shown"]))
    between = seconds[long] - began
    step = between / (steps[long] - taken) if way.ours else float("nan")
    setup = began - count * between / (long - count)
    return Timing(rows * (long - count) / between, 1e3 * step, tau, setup, note)
