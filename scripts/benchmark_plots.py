"""Draws docs/figures/bench-*.svg, the plots of docs/benchmarks.md, from the files in benchmarks/results.

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
COLOURS = {"transformers": "#8c8c8c", "ours": "#4c72b0", "vLLM": "#dd8452"}
CHAINS = ("ngram", "draft_model", "eagle", "eagle3", "mtp", "medusa", "hydra", "dflash")
mpl.rcParams.update({"svg.hashsalt": "hf-specdec", "svg.fonttype": "none", "font.size": 10})
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
    axis.barh(names, [each["tasks"]["all"]["tau"] for each in results], color="#c9d5e8", label="all")
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


def speed_on_a_cpu() -> None:
    """Speed over transformers' plain generate(), against peers, at batch size 1."""
    rows = [row for row in read("decode-cpu-bf16-319M")["rows"] if row["batch_size"] == 1]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(1, len(tasks), figsize=(3.3 * len(tasks), 4), sharey=True, layout="constrained")
    names = [row["name"] for row in rows if row["task"] == tasks[0]]
    for axis, task in zip(axes, tasks, strict=True):
        values = {row["name"]: row["over_plain"] for row in rows if row["task"] == task}
        bars = axis.barh(names, [values[name] for name in names], color=[COLOURS[name.split()[0]] for name in names])
        axis.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        axis.set(title=task, xlabel="× transformers' generate()")
        axis.margins(x=0.12)
    axes[0].invert_yaxis()
    save(figure, "cpu")


def speed_by_batch_on_an_h100() -> None:
    """Tokens per second over the batch size, of a model with the sizes of an 8B Llama."""
    series: dict[str, dict[int, float]] = {}
    for row in read("gpu-h100-decoding")["rows"]:
        found = re.fullmatch(r"(transformers|ours), ([\w\- ]+?)(?:, graphs)?, batch (\d+)", row["name"])
        if found and row["unit"] == "tokens/s":
            series.setdefault(f"{found[1]}, {found[2]}", {})[int(found[3])] = row["value"]
    figure, axis = plt.subplots(figsize=(8, 3.8), layout="constrained")
    for name, values in series.items():
        line = "--" if name.startswith("transformers") else "-"
        axis.plot(list(values), list(values.values()), line, marker="o", markersize=5, label=name)
    axis.set(xscale="log", yscale="log", xlabel="batch size", ylabel="tokens per second")
    axis.set(xticks=[1, 8, 32, 128], xticklabels=["1", "8", "32", "128"])
    axis.minorticks_off()
    axis.legend(fontsize=8)
    save(figure, "h100")


def main() -> None:
    """Draw all."""
    for draw in (tau_by_task, acceptance_per_position, speed_on_a_cpu, speed_by_batch_on_an_h100):
        draw()


if __name__ == "__main__":
    main()
