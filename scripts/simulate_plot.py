"""The plot of docs/distributed.md: python scripts/simulate_plot.py benchmarks/results/simulate-cpu.json docs/figures/simulate.svg"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt


def main(source: str, target: str) -> None:
    """Time per token and to the first token, by load, for several draft lengths."""
    found = json.loads(Path(source).read_text(encoding="utf-8"))["studies"]["by_length"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    names = {"tpot_ms": "ms per token", "ttft_ms_p95": "ms to the first token, 95 %"}
    for axis, (key, label) in zip(axes, names.items(), strict=True):
        for name, rows in found.items():
            axis.plot(
                [float(share) for share in rows], [row[key] for row in rows.values()], marker="o", label=f"K = {name}"
            )
        axis.set(xlabel="load, share of the capacity of one replica", ylabel=label, yscale="log")
        axis.legend()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
