"""`hf-specdec eval`: measure a draft head per task: τ, acceptance per position and speed-up, as a table, JSON and a plot."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

import hf_specdec

from ..jsonl import json_object
from . import measure, options
from .measure import Variant
from .options import Output, positive_int

EPILOG = """\
examples:
  hf-specdec eval ./my-medusa --target tiny
  hf-specdec eval ./my-eagle3 --target ./my-model --prompts held-out.jsonl --json figures.json --plot figures.png --update-card
  hf-specdec eval ./my-eagle3 --target ./my-model --speculative-config '{"top_k": 8, "total_tokens": 60, "depth": 5}'

Prompts with a "task" are counted by task, and --limit is of each task. τ is the number of tokens per row and forward pass of the target.
Acceptance per position is the share of steps in which the draft's 1st, 2nd, .. token was accepted. "× none" compares with the same loop
without drafts, "× plain" with transformers' own generate(), on this machine; ▼ marks a task in which the head makes decoding slower. They
are estimates from one pass over the prompts; `hf-specdec bench` repeats the measurement.
"""


def add_command(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser("eval", help="measure a draft head", description=__doc__, epilog=EPILOG)
    parser.add_argument("head", metavar="HEAD", help="a bundled name, a folder, or a Hub id")
    parser.add_argument("--target", required=True, metavar="MODEL", help="the model that it drafts for")
    options.add_loading_options(parser.add_argument_group("loading the target"), "its", "cpu, cuda, ...")
    group = parser.add_argument_group("measurement")
    options.add_prompts_option(group)
    group.add_argument("--batch-size", type=positive_int, default=1, metavar="B", help="default: %(default)s")
    group.add_argument(
        "--speculative-config",
        default="{}",
        metavar="JSON",
        help="further keys, for example the draft length or a tree",
    )
    group.add_argument(
        "--no-baseline", action="store_true", help="do not time decoding without drafts; the speed-ups are left out"
    )
    group.add_argument(
        "--json", metavar="OUT", help="write the figures to this file; - prints them instead of the table"
    )
    group.add_argument("--plot", metavar="OUT", help="write a bar plot to this PNG file")
    group.add_argument(
        "--update-card", action="store_true", help="put the table into the head's model card (README.md)"
    )
    options.add_decoding_options(parser, max_new_tokens=128)
    return parser


@dataclass
class TaskFigures:
    """Sums over the prompts of a task.

    Attributes:
        steps: forward passes of the target, counted once for each row.
        new_tokens, seconds: with the head; `none_`: in the same loop without drafts; `plain_`: in transformers' own.
        drafted, accepted: draft tokens.
        accepted_at: for each position of a draft, the number of steps in which its token was accepted.
    """

    prompts: int = 0
    steps: int = 0
    new_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    none_tokens: int = 0
    none_seconds: float = 0.0
    plain_tokens: int = 0
    plain_seconds: float = 0.0
    accepted_at: Counter[int] = field(default_factory=Counter)

    def count(self, speculation: Any, seconds: float, tokens: int) -> None:
        """Add the statistics of one call of `generate()`."""
        self.steps += speculation["num_steps"]
        self.drafted += speculation["num_draft_tokens"]
        self.accepted += speculation["num_accepted_tokens"]
        self.seconds, self.new_tokens = self.seconds + seconds, self.new_tokens + tokens
        for position, rate in enumerate(speculation["acceptance_per_position"]):
            self.accepted_at[position] += rate * speculation["num_steps"]

    def add(self, other: TaskFigures) -> None:
        """Add another task's sums."""
        for name in vars(other):
            if name != "accepted_at":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.accepted_at.update(other.accepted_at)

    def summary(self) -> dict[str, Any]:
        """The figures, as values for JSON."""
        speed = self.new_tokens / self.seconds if self.seconds else None
        none = self.none_tokens / self.none_seconds if self.none_seconds else None
        plain = self.plain_tokens / self.plain_seconds if self.plain_seconds else None
        return {
            "prompts": self.prompts,
            "tau": self.new_tokens / self.steps if self.steps else None,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else None,
            "acceptance_per_position": [value / self.steps for _, value in sorted(self.accepted_at.items())],
            "tokens_per_second": speed,
            "none_tokens_per_second": none,
            "plain_tokens_per_second": plain,
            "speed_up_over_none": speed / none if speed and none else None,
            "speed_up": speed / plain if speed and plain else None,
        }


def run(args: argparse.Namespace) -> int:
    arguments = options.decoding_arguments(args)
    options.check_output_file(args.json, "--json")
    options.check_output_file(args.plot, "--plot")
    if args.update_card:
        check_card(args.head)
    config = {**json_object(args.speculative_config, "--speculative-config"), "model": args.head}
    method = hf_specdec.parse_config(config).method
    tasks: dict[str, list[str]] = {}
    for row in options.read_prompts(args.prompts):
        tasks.setdefault(row.get("task") or "prompts", []).append(row["prompt"])
    tasks = {task: prompts[: args.limit] for task, prompts in tasks.items()}
    args.model = args.target
    model, tokenizer = options.load_model_and_tokenizer(args)
    with options.progress_bar() as progress:
        bar = progress.add_task("measuring", total=sum(map(len, tasks.values())))
        figures = evaluate(model, tokenizer, tasks, config, arguments, args, lambda n: progress.advance(bar, n))
    whole = TaskFigures()
    for of_task in figures.values():
        whole.add(of_task)
    report = {
        "head": args.head,
        "target": args.target,
        "method": method,
        "speculative_config": config,
        "environment": measure.environment(model),
        "settings": {**arguments, "batch_size": args.batch_size, "seed": args.seed, "prompts": args.prompts},
        "tasks": {task: of_task.summary() for task, of_task in figures.items()},
        "all": whole.summary(),
    }
    present(report, args)
    return 0


def check_card(head: str) -> None:
    """Raise ValueError unless the head has a card of its own that --update-card may change."""
    from ..training.export import has_measurements

    folder = Path(hf_specdec.resolve_model(head)).resolve()
    if folder in (Path(hf_specdec.bundled(name)).resolve() for name in hf_specdec.bundled_names()):
        raise ValueError(
            f"--update-card: {head} is a bundled head, whose card has figures of its own: leave the option out, or copy {folder} and "
            "measure the copy."
        )
    if not has_measurements(folder):
        raise ValueError(f"--update-card: {head} has no model card written by hf-specdec train.")


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: dict[str, list[str]],
    config: dict[str, Any],
    arguments: dict[str, Any],
    args: argparse.Namespace,
    advance: Callable[[int], None],
) -> dict[str, TaskFigures]:
    """Decode each batch with and without the head. Returns the figures by task. Calls `advance` with the number of prompts done."""
    drafted, loop = Variant("head", config), measure.without_drafts(config)
    variants = [drafted] if args.no_baseline else [drafted, loop, measure.PLAIN]
    first = options.encode_prompts(tokenizer, next(iter(tasks.values()))[:1], args.chat, model.device)
    for variant in variants:
        measure.warm_up(model, first, variant, arguments)
    out = {}
    for task, prompts in tasks.items():
        out[task] = figures = TaskFigures(prompts=len(prompts))
        for i in range(0, len(prompts), args.batch_size):
            group = prompts[i : i + args.batch_size]
            inputs = options.encode_prompts(tokenizer, group, args.chat, model.device)
            for variant in variants if i // args.batch_size % 2 == 0 else reversed(variants):
                rows, seconds, speculation = measure.timed_generate(model, inputs, variant, arguments, args.seed)
                tokens = sum(map(len, rows))
                if variant is drafted:
                    figures.count(speculation, seconds, tokens)
                else:
                    name = "none" if variant is loop else "plain"
                    vars(figures)[f"{name}_tokens"] += tokens
                    vars(figures)[f"{name}_seconds"] += seconds
            advance(len(group))
    hf_specdec.release(model)
    return out


# ---- reports --------------------------------------------------------------------------------------------------------


def present(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Write what the options ask for: the table, JSON, the plot and the model card."""
    if not options.write_report(report, args.json):
        console = Output()
        setup = measure.setup_line(report["environment"])
        console.say(f"{args.head} ({report['method']}) for {args.target}: {setup}")
        console.print(table(report))
        if not args.no_baseline:
            marked = any(measure.LOSES in cell for row in all_cells(report) for cell in row)
            whole = report["all"]
            loop = whole["none_tokens_per_second"] / whole["plain_tokens_per_second"]
            console.say(measure.reading(loop, marked))
    if args.plot:
        plot(report, Path(args.plot))
    if args.update_card:
        from ..training.export import add_measurements

        print(f"wrote {add_measurements(Path(hf_specdec.resolve_model(args.head)), markdown(report))}", file=sys.stderr)


def cells(task: str, figures: dict[str, Any]) -> list[str]:
    """A task's row of the table."""
    shown = [task, str(figures["prompts"]), "–" if figures["tau"] is None else f"{figures['tau']:.2f}"]
    shown.append(" ".join(f"{rate:.0%}" for rate in figures["acceptance_per_position"]))
    over_none, over_plain = figures["speed_up_over_none"], figures["speed_up"]
    mark = "" if over_none is None or round(over_none, 2) >= 1 else f" {measure.LOSES}"
    shown.append("–" if over_none is None else f"{over_none:.2f} ×{mark}")
    shown.append("–" if over_plain is None else f"{over_plain:.2f} ×")
    shown.append("–" if figures["tokens_per_second"] is None else f"{figures['tokens_per_second']:.1f}")
    return shown


TITLES = ("task", "prompts", "τ", "accepted at 1, 2, ..", "× none", "× plain", "tokens/s")


def all_cells(report: dict[str, Any]) -> list[list[str]]:
    """The rows of all tasks, and of all together."""
    return [cells(task, figures) for task, figures in {**report["tasks"], "all": report["all"]}.items()]


def table(report: dict[str, Any]) -> Table:
    """The table for a terminal."""
    out = Table(box=SIMPLE_HEAD, padding=0)
    for i, title in enumerate(TITLES):
        out.add_column(title, justify="left" if i in (0, 3) else "right", no_wrap=i != 3)
    for row in all_cells(report):
        out.add_row(*row)
    return out


def markdown(report: dict[str, Any]) -> str:
    """The table for a model card."""
    settings, shown = report["settings"], {k: v for k, v in report["speculative_config"].items() if k != "model"}
    lines = [
        f"Measured ({'sampled' if settings['do_sample'] else 'greedy'}, {settings['max_new_tokens']} new tokens, batch size "
        f"{settings['batch_size']}, `{json.dumps(shown)}`; {measure.setup_line(report['environment'])}):",
        "",
        "| " + " | ".join(TITLES) + " |",
        "|---" * len(TITLES) + "|",
    ]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in all_cells(report))])


def plot(report: dict[str, Any], path: Path) -> None:
    """Plot τ per task and acceptance per position as bars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from ..training.state import write_whole

    tasks = {**report["tasks"], "all": report["all"]}
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    bars = left.bar(list(tasks), [figures["tau"] or 0.0 for figures in tasks.values()])
    left.bar_label(bars, fmt="%.2f")
    left.axhline(1.0, color="grey", linewidth=0.8)
    left.set(title="τ: tokens per forward of the target")
    width = 0.8 / len(tasks)
    for i, (task, figures) in enumerate(tasks.items()):
        rates = figures["acceptance_per_position"]
        right.bar([position + i * width for position in range(1, len(rates) + 1)], rates, width, label=task)
    right.set(title="accepted at position", ylim=(0, 1))
    right.legend()
    figure.suptitle(f"{report['head']} ({report['method']}) for {report['target']}")
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=110))
