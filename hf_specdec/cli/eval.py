"""`hf-specdec eval`: measure a draft head per task: τ, acceptance per position and speed-up, as a table, JSON and a plot."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import hf_specdec

from ..jsonl import json_object
from . import measure, options
from .measure import Measurement, Variant
from .options import Output

EPILOG = """\
examples:
  hf-specdec eval ./my-medusa --target tiny
  hf-specdec eval ./my-eagle3 --target ./my-model --prompts held-out.jsonl --json figures.json --plot figures.png --update-card
  hf-specdec eval ./my-eagle3 --target ./my-model --speculative-config '{"top_k": 8, "total_tokens": 60, "depth": 5}'

Prompts with a "task" are counted by task, and --limit is of each task. τ is the number of tokens per row and forward pass of the target.
Acceptance per position is the share of steps in which the draft's 1st, 2nd, .. token was accepted. Speed-ups are estimates from one pass
over the prompts on this machine; `hf-specdec bench` repeats the measurement.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("head", metavar="HEAD", help="a bundled name, a folder, or a Hub id")
    parser.add_argument("--target", required=True, metavar="MODEL", help="the model that it drafts for")
    options.add_loading_options(parser.add_argument_group("loading the target"), "its", "cpu, cuda, ...")
    group = parser.add_argument_group("measurement")
    options.add_prompts_options(group)
    options.add_config_option(group, "further keys, for example the draft length or a tree", default="{}")
    untimed = "do not time decoding without drafts; the speed-ups are left out"
    group.add_argument("--no-baseline", action="store_true", help=untimed)
    figures = "write the figures to this file; - prints them instead of the table"
    group.add_argument("--json", metavar="OUT", help=figures)
    group.add_argument("--plot", metavar="OUT", help="write a bar plot to this PNG file")
    card = "put the table into the head's model card (README.md)"
    group.add_argument("--update-card", action="store_true", help=card)
    options.add_decoding_options(parser, max_new_tokens=128)


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
    variants = [Variant("head", config)]
    if not args.no_baseline:
        variants += [measure.without_drafts(config), measure.PLAIN]
    measured = {task: [Measurement(variant) for variant in variants] for task in tasks}
    batches, parts = [], []
    for task, prompts in tasks.items():
        for result in measured[task]:
            result.repeat()
        encoded = options.encode_batches(tokenizer, prompts, args.batch_size, args.chat, model.device)
        batches += encoded
        parts += [measured[task]] * len(encoded)
    whole = measure.measure(model, batches, variants, arguments, 1, args.seed, parts=parts)
    figures = {task: summary(results) for task, results in measured.items()}
    report = {
        "head": args.head,
        "target": args.target,
        "method": method,
        "speculative_config": config,
        "environment": measure.environment(model),
        "settings": {**arguments, "batch_size": args.batch_size, "seed": args.seed, "prompts": args.prompts},
        "tasks": figures,
        "all": summary(whole),
    }
    rows = [cells(task, values) for task, values in {**figures, "all": report["all"]}.items()]
    if not options.write_report(report, args.json):
        console = Output()
        console.say(f"{args.head} ({method}) for {args.target}: {measure.setup_line(report['environment'])}")
        console.print(measure.figures_table(TITLES, rows, wrapped=(0, 3)))
        if not args.no_baseline:
            marked = any(measure.LOSES in cell for row in rows for cell in row)
            loop = report["all"]["none_tokens_per_second"] / report["all"]["plain_tokens_per_second"]
            console.say(measure.reading(loop, marked))
    if args.plot:
        plot(report, Path(args.plot))
    if args.update_card:
        from ..training.export import add_measurements

        print(
            f"wrote {add_measurements(Path(hf_specdec.resolve_model(args.head)), markdown(report, rows))}",
            file=sys.stderr,
        )
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


def summary(results: list[Measurement]) -> dict[str, Any]:
    """The figures of a head as values for JSON, from its results and, if they were measured, those without drafts and of plain decoding."""
    head, *others = results
    speed, (none, plain) = head.tokens_per_second, [other.tokens_per_second for other in others] or [None, None]
    return {
        "prompts": len(head.outputs),
        "tau": head.accepted_length,
        "acceptance_rate": head.acceptance_rate,
        "acceptance_per_position": [value / head.steps for _, value in sorted(head.accepted_at.items())],
        "tokens_per_second": speed,
        "none_tokens_per_second": none,
        "plain_tokens_per_second": plain,
        "speed_up_over_none": speed / none if none else None,
        "speed_up": speed / plain if plain else None,
    }


def cells(task: str, figures: dict[str, Any]) -> list[str]:
    """A task's row of the table; – for what was not measured."""

    def shown(name: str, form: str) -> str:
        return "–" if figures[name] is None else form.format(figures[name])

    over_none = figures["speed_up_over_none"]
    mark = "" if over_none is None or round(over_none, 2) >= 1 else f" {measure.LOSES}"
    rates = " ".join(f"{rate:.0%}" for rate in figures["acceptance_per_position"])
    speeds = shown("speed_up_over_none", "{:.2f} ×") + mark, shown("speed_up", "{:.2f} ×")
    return [task, str(figures["prompts"]), shown("tau", "{:.2f}"), rates, *speeds, shown("tokens_per_second", "{:.1f}")]


TITLES = ("task", "prompts", "τ", "accepted at 1, 2, ..", "× none", "× plain", "tokens/s")


def markdown(report: dict[str, Any], rows: list[list[str]]) -> str:
    """The table for a model card, with what was measured and where."""
    settings, shown = report["settings"], {k: v for k, v in report["speculative_config"].items() if k != "model"}
    lines = [
        f"Measured ({'sampled' if settings['do_sample'] else 'greedy'}, {settings['max_new_tokens']} new tokens, batch size "
        f"{settings['batch_size']}, `{json.dumps(shown)}`; {measure.setup_line(report['environment'])}):",
        "",
        "| " + " | ".join(TITLES) + " |",
        "|---" * len(TITLES) + "|",
    ]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw τ by task and acceptance by position into a PNG file."""
    from matplotlib.figure import Figure

    from ..training.state import write_whole

    tasks = {**report["tasks"], "all": report["all"]}
    figure = Figure(figsize=(11, 3.8), layout="constrained")
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
