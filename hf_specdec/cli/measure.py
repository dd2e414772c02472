"""Times `generate()` with several speculative configurations in turns, so that other load on the machine affects all alike."""

from __future__ import annotations

import dataclasses
import itertools
import json
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import TimeRemainingColumn
from rich.table import Table

import hf_specdec

from ..core.sequence import cut_at_end, end_ids
from .options import progress_bar

if TYPE_CHECKING:
    import torch

RECORDED_PACKAGES = ("transformers", "torch", "arctic-inference", "triton")


@dataclass(frozen=True)
class Variant:
    """A way to decode. `speculative_config`: for `generate()`; None: transformers' own loop."""

    name: str
    speculative_config: Any = None


PLAIN = Variant("plain generate()")
# Keys of the loop and of the target's forward pass: a configuration is compared with "none" under the same ones.
LOOP_KEYS = (
    "target_quantization", "native", "compile", "cuda_graphs", "prepack_weights", "deterministic", "recurrent_states", "block_size",
    "kv_cache_dtype", "num_blocks", "prefill_chunk_size", "async_scheduling",
)  # fmt: skip
LOSES = "▼"
COLUMNS = (
    "× none: speed over this package's loop without drafts (method \"none\"), which is what drafting brings. × plain: over transformers' "
    "generate(). τ: tokens per row and forward of the model. Where τ is 1.00, drafts added nothing: a gain over none is noise there."
)
FASTER_LOOP = (
    "The loop alone is faster than generate(), because it runs a step with less work around the model: on a CPU as one call of the "
    "compiled library, on a GPU as one CUDA graph."
)
SLOWER_LOOP = (
    "The loop alone is slower than generate() here: this model's steps run operator by operator, with more around them."
)
LOSED = f"{LOSES} Slower than without drafts: do not draft in this way here."


def without_drafts(config: Any) -> Variant:
    """The loop of a configuration without its drafts: method "none", with the configuration's `LOOP_KEYS`. "none" is its own loop."""
    keys = hf_specdec.parse_config(config).to_dict()
    is_none = keys.pop("method") == "none"
    kept = {key: value for key, value in keys.items() if is_none or key in LOOP_KEYS}
    return Variant(json.dumps({"method": "none", **kept}) if kept else "none", {"method": "none", **kept})


def with_baselines(variants: list[Variant]) -> list[Variant]:
    """`PLAIN`, the loops of the variants without drafts, and the variants, of which those that never draft are among the loops."""
    loops = [without_drafts({"method": "none"}), *(without_drafts(variant.speculative_config) for variant in variants)]
    drafting = [v for v in variants if hf_specdec.parse_config(v.speculative_config).method != "none"]
    return [PLAIN, *(loop for i, loop in enumerate(loops) if loop not in loops[:i]), *drafting]


@dataclass
class Measurement:
    """The results of a variant.

    Attributes:
        seconds, new_tokens: one entry for each repeat.
        outputs: the new tokens of each prompt, in the last repeat.
        steps, step_tokens, drafted, accepted: steps, new tokens, draft tokens and accepted draft tokens of all rows, over all repeats.
        accepted_at: for each position of a draft, the number of steps in which its token was accepted.
    """

    variant: Variant
    seconds: list[float] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    steps: int = 0
    step_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_second(self) -> float:
        """Median over the repeats."""
        return statistics.median(n / s for n, s in zip(self.new_tokens, self.seconds, strict=True))

    @property
    def accepted_length(self) -> float | None:
        """τ: new tokens per row and forward pass of the target; None for transformers' own loop, which has no statistics."""
        return self.step_tokens / self.steps if self.steps else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    def repeat(self) -> None:
        """Begin another repeat."""
        self.seconds.append(0.0)
        self.new_tokens.append(0)
        self.outputs.clear()

    def add(self, rows: list[list[int]], seconds: float, speculation: Any) -> None:
        """Add what one call of `timed_generate` has returned."""
        self.seconds[-1] += seconds
        self.new_tokens[-1] += sum(map(len, rows))
        self.outputs += rows
        if speculation is not None:
            self.steps += speculation["num_steps"]
            self.step_tokens += speculation["num_new_tokens"]
            self.drafted += speculation["num_draft_tokens"]
            self.accepted += speculation["num_accepted_tokens"]
            for position, rate in enumerate(speculation["acceptance_per_position"]):
                self.accepted_at[position] += rate * speculation["num_steps"]


def timed_generate(
    model: Any, inputs: dict[str, torch.Tensor], variant: Variant, arguments: dict[str, Any], seed: int
) -> tuple[list[list[int]], float, Any]:
    """Call `generate()` once. Returns the new tokens of each row, the seconds (see `clock_for`), and the output's `speculation`
    (None without)."""
    import torch

    from ..core.clock import clock_for

    clock = clock_for(model.device)
    if variant.speculative_config is not None:
        arguments = {**arguments, "speculative_config": variant.speculative_config}
    wait = torch.cuda.synchronize if model.device.type == "cuda" else lambda device: None  # until the device is idle
    torch.manual_seed(seed)
    wait(model.device)
    start = clock()
    output = model.generate(**inputs, **arguments, return_dict_in_generate=True)
    wait(model.device)
    seconds = clock() - start
    rows = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    ends = end_ids(model.generation_config.eos_token_id)
    return cut_at_end(rows, ends), seconds, output.get("speculation")


def warm_up(model: Any, inputs: dict[str, torch.Tensor], variant: Variant, arguments: dict[str, Any]) -> None:
    """Load a variant's drafter by generating a few tokens after the last token of each prompt, so that it cannot learn the answers."""
    last = {key: tensor[:, -1:] for key, tensor in inputs.items()}
    timed_generate(model, last, variant, {**arguments, "max_new_tokens": 4}, seed=0)


def traced(model: Any, inputs: dict[str, torch.Tensor], variant: Variant, arguments: dict[str, Any], seed: int) -> Any:
    """The `Trace` of one call of `generate()` by a drafter that has learnt nothing from earlier calls."""
    hf_specdec.release(model)
    warm_up(model, inputs, variant, arguments)
    config = dataclasses.replace(hf_specdec.parse_config(variant.speculative_config), trace=True)
    return timed_generate(model, inputs, Variant(variant.name, config), arguments, seed)[2].trace


def measure(
    model: Any,
    batches: list[dict[str, torch.Tensor]],
    variants: list[Variant],
    arguments: dict[str, Any],
    repeats: int,
    seed: int,
    seconds: float | None = None,
    title: str = "measuring",
    parts: Sequence[list[Measurement]] | None = None,
) -> list[Measurement]:
    """Decode every batch with every variant in turn, `repeats` times, and show the progress on stderr under a title.

    The order of the variants is reversed for every other batch, so that none is always first. Each repeat starts without what methods have
    learnt in earlier ones, because those that learn from outputs would know the answers.

    Args:
        seconds: time limit of a repeat: further batches are skipped if they would exceed it. None: no limit.
        parts: for each batch, measurements of the variants in which it counts too.
    """
    results = [Measurement(variant) for variant in variants]
    with progress(title, total=repeats * len(batches) * len(variants)) as advance:
        for _ in range(repeats):
            hf_specdec.release(model)
            for result in results:
                warm_up(model, batches[0], result.variant, arguments)
                result.repeat()
            began = time.perf_counter()
            for done, inputs in enumerate(batches):
                if seconds is not None and done and (time.perf_counter() - began) * (done + 1) > seconds * done:
                    break
                for i in range(len(variants)) if done % 2 == 0 else reversed(range(len(variants))):
                    called = timed_generate(model, inputs, variants[i], arguments, seed)
                    for result in (results[i], *(parts[done][i : i + 1] if parts else ())):
                        result.add(*called)
                    advance()
    return results


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to be called after each of `total` runs. It advances a bar on a terminal; elsewhere it prints a line per quarter."""
    if not Console(stderr=True).is_terminal:
        counted = itertools.count(1)

        def advance() -> None:
            done = next(counted)
            if done * 4 // total > (done - 1) * 4 // total:
                print(f"{title}: {done} of {total} runs", file=sys.stderr, flush=True)

        yield advance
        return
    with progress_bar(TimeRemainingColumn()) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def equal_rows(result: Measurement, baseline: Measurement) -> int:
    """The number of prompts with exactly the baseline's tokens."""
    return sum(ours == theirs for ours, theirs in zip(result.outputs, baseline.outputs, strict=True))


def speed_up(result: Measurement, baseline: Measurement) -> float:
    """How many times as fast as the baseline."""
    return result.tokens_per_second / baseline.tokens_per_second


def loop_of(result: Measurement, results: list[Measurement]) -> Measurement:
    """The measurement of the result's loop without drafts (of `plain generate()`: the loop with default keys)."""
    loop = without_drafts(result.variant.speculative_config or {"method": "none"})
    return next(other for other in results if other.variant == loop)


def times_none(result: Measurement, results: list[Measurement]) -> str:
    """How many times as fast as the loop without drafts, with `LOSES` if drafts made it slower."""
    ratio = speed_up(result, loop := loop_of(result, results))
    slower = result is not loop and result.variant != PLAIN and round(ratio, 2) < 1
    return f"{ratio:.2f} ×{' ' + LOSES if slower else ''}"


def results_table(results: list[Measurement], compare: bool) -> Table:
    """A table of results, of which the first is `PLAIN`. `compare`: add the number of outputs that equal its outputs."""
    rows, fastest = [], max(result.tokens_per_second for result in results)
    for result in results:
        cells = [
            result.variant.name,
            times_none(result, results),
            f"{speed_up(result, results[0]):.2f} ×",
            f"{result.tokens_per_second:.1f}",
            Bar(fastest, 0, result.tokens_per_second, width=8),
            "1.00" if result.accepted_length is None else f"{result.accepted_length:.2f}",
            "–" if result.acceptance_rate is None else f"{result.acceptance_rate:.0%}",
        ]
        if compare:
            same = f"{equal_rows(result, results[0])}/{len(results[0].outputs)}"
            cells.append("–" if result is results[0] else same)
        rows.append(cells)
    titles = ("decoding", "× none", "× plain", "tokens/s", "", "τ", "accepted", *(["same text"] if compare else []))
    return figures_table(titles, rows, wrapped=(0,))


def figures_table(titles: Sequence[str], rows: Sequence[Sequence[Any]], wrapped: tuple[int, ...]) -> Table:
    """A table of figures, and bars of them, that fits 80 columns. `wrapped`: the columns of text."""
    table = Table(box=SIMPLE_HEAD, padding=0)
    for i, title in enumerate(titles):
        is_text = i in wrapped
        table.add_column(title, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def remarks(*tables: list[Measurement]) -> str:
    """How to read tables of results, of which the first two rows are plain `generate()` and the loop without drafts."""
    marked = any(LOSES in times_none(result, results) for results in tables for result in results)
    plain, none = tables[0][:2]
    return reading(speed_up(none, plain), marked)


def reading(loop: float, marked: bool) -> str:
    """What the columns of a table say, and the mark if it is there. `loop`: how many times as fast as `generate()` the loop alone is."""
    return "\n".join([f"{COLUMNS} {FASTER_LOOP if loop >= 1 else SLOWER_LOOP}", *([LOSED] if marked else [])])


def environment(model: Any) -> dict[str, Any]:
    """Versions, hardware and the model's size, as values for JSON."""
    import torch

    return {
        "python": platform.python_version(),
        "versions": {"hf-specdec": hf_specdec.__version__, **versions_of(RECORDED_PACKAGES)},
        "device": device_name(model.device),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": model.num_parameters(),
    }


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def setup_line(where: dict[str, Any]) -> str:
    """One line about the model's size and the hardware, from the result of `environment`."""
    size = where["parameters"] / 1e6
    return f"{size:.1f} M parameters in {where['dtype']} on {where['device']}, threads: {where['threads']}"


def device_name(device: torch.device) -> str:
    """The name of a GPU's model, or of the processor."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return cpuinfo("model name") or platform.processor() or platform.machine()


def cpuinfo(*keys: str) -> str:
    """The first value in /proc/cpuinfo under a key that begins with one of `keys`; "" if there is none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(keys)), "")
