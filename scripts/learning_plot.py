"""The plot of docs/learning.md: python scripts/learning_plot.py benchmarks/results/learning-cpu.json docs/figures/learning.svg"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

WINDOW = 25  # requests that a point of the plot sums


def main(source: str, target: str) -> None:
    """Tokens per step over the requests, with the change of domain and the kill."""
    found = json.loads(Path(source).read_text(encoding="utf-8"))
    count, domains = found["options"]["requests"], found["options"]["domains"]
    figure, axis = plt.subplots(figsize=(9, 3.6), constrained_layout=True)
    for name, rows in found["series"].items():
        ends = range(WINDOW, len(rows["steps"]) + 1)
        taus = [sum(rows["tokens"][end - WINDOW : end]) / sum(rows["steps"][end - WINDOW : end]) for end in ends]
        axis.plot(ends, taus, label=name)
    axis.axvline(count // 4, color="grey", linestyle=":", label="killed, and begun again")
    axis.axvline(count // 2, color="grey", linestyle="--", label=f"from {domains[0]} to {domains[1]}")
    axis.set(xlabel="requests", ylabel=f"tokens per step, {WINDOW} requests")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
