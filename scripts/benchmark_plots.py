"""Draws docs/figures/bench-*.svg, the plots of docs/performance.md, from the files in benchmarks/results.

python scripts/benchmark_plots.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
TASKS = ("math", "code", "story", "edit")
COLOURS = {
    "transformers": "#9e9e9e",
    "ours": "#4051b5",
    "vLLM": "#ef6c00",
    "llama.cpp": "#8d6e63",
}  # ours: the site's indigo
LINES = ["#4051b5", "#ef6c00", "#2e7d32", "#8e24aa", "#00838f", "#c62828", "#8d6e63", "#546e7a"]
CHAINS = ("ngram", "draft_model", "eagle", "eagle3", "mtp", "medusa", "hydra", "dflash")
mpl.rcParams.update({"svg.hashsalt": "hf-specdec", "svg.fonttype": "none", "font.size": 10})
mpl.rcParams.update({"axes.prop_cycle": mpl.cycler(color=LINES)})
mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})


def read(name: str) -> dict[str, Any]:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def save(figure: Any, name: str) -> None:
    """Write a figure on white, so that it can be read on a dark page, and the same bytes each time."""
    figure.savefig(FIGURES / f"bench-{name}.svg", facecolor="white", metadata={"Date": None})
    plt.close(figure)


def tau_by_task() -> None:
    """τ of every method with the bundled heads, a mark per kind of text."""
    results = sorted(read("acceptance")["results"], key=lambda each: each["tasks"]["all"]["tau"])
    names = [f"{each['method']}, {each['shape']}" for each in results]
    figure, axis = plt.subplots(figsize=(8, 5.6), layout="constrained")
    axis.barh(names, [each["tasks"]["all"]["tau"] for each in results], color="#c5cae9", label="all")
    for task, marker in zip(TASKS, "os^D", strict=True):
        axis.plot([each["tasks"][task]["tau"] for each in results], names, marker, label=task, markersize=5)
    axis.set(xlabel="τ: tokens per forward pass of the model", xlim=(1, None))
    axis.legend(loc="lower right")
    save(figure, "tau")


def acceptance_per_position() -> None:
    """How deep chains are accepted."""
    figure, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
    for each in read("acceptance")["results"]:
        rates = each["tasks"]["all"]["acceptance_per_position"]
        if each["shape"] == "chain" and each["method"] in CHAINS:
            axis.plot(range(1, len(rates) + 1), rates, marker="o", markersize=4, label=each["method"])
    axis.set(
        xlabel="position in the draft",
        ylabel="share of drafts this deep",
        ylim=(0, 1),
        xticks=range(1, 6),
        xlim=(0.8, 5.2),
    )
    axis.legend(ncols=2)
    save(figure, "positions")


def speed_against_engines(results: str, name: str) -> None:
    """Speed over transformers' plain generate() beside other engines, at batch size 1."""
    rows = [row for row in read(results)["rows"] if row["batch_size"] == 1]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(1, len(tasks), figsize=(10, 3), sharey=True, layout="constrained")
    ways = [row["name"] for row in rows if row["task"] == tasks[0]]
    for axis, task in zip(axes, tasks, strict=True):
        values = {row["name"]: row["over_plain"] for row in rows if row["task"] == task}
        bars = axis.barh(ways, [values[way] for way in ways], color=[COLOURS[way.split()[0]] for way in ways])
        axis.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        axis.set(title=task, xlabel="× transformers' generate()")
        axis.margins(x=0.12)
    axes[0].invert_yaxis()
    save(figure, name)


def speed_by_method() -> None:
    """Speed of methods over ours without drafts, by task: greedy, batch size 1, after two texts to learn from."""
    cells = [each for each in read("auto-cpu-f32-85M")["cells"] if (each["temperature"], each["batch_size"]) == (0, 1)]
    figure, axes = plt.subplots(2, 3, figsize=(10, 4.4), sharey=True, sharex=True, layout="constrained")
    for axis, cell in zip(axes.flat, cells, strict=True):
        speeds = {name: value for name, value in cell["warm"]["speed_up"].items() if name != "auto, kept"}
        colours = ["#2e7d32" if name == "auto" else COLOURS["ours"] for name in speeds]
        axis.bar_label(axis.barh(list(speeds), list(speeds.values()), color=colours), fmt="%.2f", padding=2, fontsize=8)
        axis.axvline(1, color="#8c8c8c", linewidth=1, linestyle=":")
        axis.set_title(cell["task"], fontsize=10)
        axis.margins(x=0.15)
    axes[0, 0].invert_yaxis()
    figure.supxlabel("× ours without drafts", fontsize=10)
    save(figure, "methods")


def speed_by_draft_length() -> None:
    """Speed over the draft length; at 0 ours without drafts."""
    rows = read("draft-lengths-cpu-f32-85M")["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(1, len(tasks), figsize=(10, 3.2), sharey=True, layout="constrained")
    for axis, task in zip(axes, tasks, strict=True):
        of = {row["name"]: row["over_plain"] for row in rows if row["task"] == task}
        for method in dict.fromkeys(name.split(", K=")[0] for name in of if ", K=" in name):
            lengths = [int(name.split("K=")[1]) for name in of if name.startswith(f"{method}, K=")]
            speeds = [of[f"{method}, K={length}"] for length in lengths]
            axis.plot([0, *lengths], [of["ours plain"], *speeds], marker="o", markersize=4, label=method)
        axis.axhline(of["ours plain"], color="#b0b0b0", linewidth=1, linestyle=":")
        axis.set(title=task, xlabel="draft length K", xticks=[0, *lengths])
    axes[0].set(ylabel="× transformers' generate()", ylim=(0, None))
    axes[0].legend(fontsize=8)
    save(figure, "lengths")


def speed_by_batch_on_an_h200() -> None:
    """Tokens per second over the batch size, of a model with the sizes of an 8B Llama."""
    series: dict[str, dict[int, float]] = {}
    for row in read("gpu-h200-decoding")["rows"]:
        found = re.fullmatch(r"(transformers|ours), ([\w\-=, ]+?)(?:, graphs)?, batch (\d+)", row["name"])
        if found and row["unit"] == "tokens/s":
            series.setdefault(f"{found[1]}, {found[2]}", {})[int(found[3])] = row["value"]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for name, values in series.items():
        if len(values) > 1:
            line, colour = ("--", COLOURS["transformers"]) if name.startswith("transformers") else ("-", None)
            over = [value / series["transformers, plain"][size] for size, value in values.items()]
            for axis, heights in zip(axes, (list(values.values()), over), strict=True):
                axis.plot(list(values), heights, line, color=colour, marker="o", markersize=5, label=name)
    for axis in axes:
        axis.set(xscale="log", xlabel="batch size", xticks=[1, 8, 32, 128], xticklabels=["1", "8", "32", "128"])
    axes[0].set(yscale="log", ylabel="tokens per second", yticks=[100, 1000], yticklabels=["100", "1000"])
    axes[1].set(ylabel="× transformers' generate()", ylim=(0, None))
    for axis in axes:
        axis.minorticks_off()
    axes[0].legend(fontsize=8)
    save(figure, "h200")


def main() -> None:
    """Draw all."""
    speed_against_engines("decode-cpu-bf16-250M", "cpu")
    speed_against_engines("decode-cpu-amx-bf16-250M", "cpu-amx")
    speed_by_method()
    speed_by_draft_length()
    speed_by_batch_on_an_h200()
    tau_by_task()
    acceptance_per_position()


if __name__ == "__main__":
    main()
