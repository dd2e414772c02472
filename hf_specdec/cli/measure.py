"""Times `generate()` with several speculative configurations in turns, so that other load on the machine affects all alike."""

from __future__ import annotations

import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import hf_specdec

RECORDED_PACKAGES = ("transformers", "torch", "arctic-inference", "triton")


@dataclass(frozen=True)
class Variant:
    """A way to decode. `speculative_config`: for `generate()`; None: transformers' own loop."""

    name: str
    speculative_config: Any = None


@dataclass
class Measurement:
    """The results of a variant.

    Attributes:
        seconds, new_tokens: one entry for each repeat.
        outputs: the new tokens of each prompt, in the last repeat.
        row_steps, row_tokens, drafted, accepted: steps, new tokens, draft tokens and accepted draft tokens of all rows, over all repeats.
    """

    variant: Variant
    seconds: list[float] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    row_steps: int = 0
    row_tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Median over the repeats."""
        return statistics.median(n / s for n, s in zip(self.new_tokens, self.seconds, strict=True))

    @property
    def accepted_length(self) -> float | None:
        """τ: new tokens per row and forward pass of the target; None for transformers' own loop, which has no statistics."""
        return self.row_tokens / self.row_steps if self.row_steps else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    def count(self, speculation: Any) -> None:
        """Add the statistics of one `generate()` call."""
        for row in speculation["rows"]:
            self.row_steps += row["num_steps"]
            self.row_tokens += row["mean_accepted_length"] * row["num_steps"]
            self.drafted += row["num_draft_tokens"]
            self.accepted += row["num_accepted_tokens"]


def end_tokens(model: Any) -> set[int]:
    """The ids that end a text for this model."""
    ids = model.generation_config.eos_token_id
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def cut_at_end(rows: list[list[int]], ends: set[int]) -> list[list[int]]:
    """Each row up to and including its first end token, without padding."""
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in rows]


def timed_generate(
    model: Any, inputs: dict[str, torch.Tensor], variant: Variant, arguments: dict[str, Any], seed: int
) -> tuple[list[list[int]], float, Any]:
    """Call `generate()` once. Returns the new tokens of each row, the seconds, and the output's `speculation` (None without)."""
    if variant.speculative_config is not None:
        arguments = {**arguments, "speculative_config": variant.speculative_config}
    torch.manual_seed(seed)
    synchronize(model.device)
    start = time.perf_counter()
    output = model.generate(**inputs, **arguments, return_dict_in_generate=True)
    synchronize(model.device)
    seconds = time.perf_counter() - start
    rows = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return cut_at_end(rows, end_tokens(model)), seconds, output.get("speculation")


def warm_up(model: Any, inputs: dict[str, torch.Tensor], variant: Variant, arguments: dict[str, Any]) -> None:
    """Load a variant's drafter by generating a few tokens after the last token of each prompt, so that it cannot learn the answers."""
    last = {key: tensor[:, -1:] for key, tensor in inputs.items()}
    timed_generate(model, last, variant, {**arguments, "max_new_tokens": 4}, seed=0)


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    model: Any,
    batches: list[dict[str, torch.Tensor]],
    variants: list[Variant],
    arguments: dict[str, Any],
    repeats: int,
    seed: int,
    advance: Callable[[], None] = lambda: None,
    seconds: float | None = None,
) -> list[Measurement]:
    """Decode every batch with every variant in turn, `repeats` times.

    The order of the variants is reversed for every other batch, so that none is always first. Each repeat starts without what methods have
    learnt in earlier ones, because those that learn from outputs would know the answers.

    Args:
        arguments: for `generate()`.
        advance: called after each call of `generate()`.
        seconds: time limit of a repeat: further batches are skipped if they would exceed it. None: no limit.
    """
    results = [Measurement(variant) for variant in variants]
    for _ in range(repeats):
        hf_specdec.release(model)
        for variant in variants:
            warm_up(model, batches[0], variant, arguments)
        for result in results:
            result.seconds.append(0.0)
            result.new_tokens.append(0)
            result.outputs.clear()
        began = time.perf_counter()
        for done, inputs in enumerate(batches):
            if seconds is not None and done and (time.perf_counter() - began) * (done + 1) > seconds * done:
                break
            for result in results if done % 2 == 0 else reversed(results):
                rows, taken, speculation = timed_generate(model, inputs, result.variant, arguments, seed)
                result.seconds[-1] += taken
                result.new_tokens[-1] += sum(map(len, rows))
                result.outputs += rows
                if speculation is not None:
                    result.count(speculation)
                advance()
    return results


def measure_with_progress(
    title: str, model, batches, variants, arguments, repeats: int, seed: int, seconds: float | None = None
) -> list[Measurement]:
    """Call `measure`, and show its progress on stderr."""
    with progress(title, total=repeats * len(batches) * len(variants)) as advance:
        return measure(model, batches, variants, arguments, repeats, seed, advance, seconds)


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to be called after each of `total` runs. It advances a bar on a terminal; elsewhere it prints a line per quarter."""
    console = Console(stderr=True)
    if not console.is_terminal:
        counted = itertools.count(1)

        def advance() -> None:
            done = next(counted)
            if done * 4 // total > (done - 1) * 4 // total:
                print(f"{title}: {done} of {total} runs", file=sys.stderr, flush=True)

        yield advance
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def equal_rows(result: Measurement, baseline: Measurement) -> int:
    """The number of prompts with exactly the baseline's tokens."""
    return sum(ours == theirs for ours, theirs in zip(result.outputs, baseline.outputs, strict=True))


def results_table(results: list[Measurement], compare: bool) -> Table:
    """A table of results, of which the first is the baseline. `compare`: add the number of outputs that equal the baseline's."""
    baseline = results[0]
    table = Table()
    table.add_column("decoding")
    for title in ("tokens/s", "speed-up", "τ", "acceptance", *(["same output"] if compare else [])):
        table.add_column(title, justify="right")
    for result in results:
        cells = [
            result.variant.name,
            f"{result.tokens_per_second:.1f}",
            f"{result.tokens_per_second / baseline.tokens_per_second:.2f} ×",
            "1.00" if result.accepted_length is None else f"{result.accepted_length:.2f}",
            "–" if result.acceptance_rate is None else f"{result.acceptance_rate:.0%}",
        ]
        if compare:
            cells.append("–" if result is baseline else f"{equal_rows(result, baseline)}/{len(baseline.outputs)}")
        table.add_row(*cells)
    return table


def environment(model: Any) -> dict[str, Any]:
    """Versions, hardware and the model's size, as values for JSON."""
    versions = {"hf-specdec": hf_specdec.__version__}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "versions": versions,
        "device": device_name(model.device),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": model.num_parameters(),
    }


def setup_line(where: dict[str, Any]) -> str:
    """One line about the model's size and the hardware, from the result of `environment`."""
    size = where["parameters"] / 1e6
    return f"{size:.1f} M parameters in {where['dtype']} on {where['device']}, threads: {where['threads']}"


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
