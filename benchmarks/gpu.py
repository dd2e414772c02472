"""The GPU path, checked and timed in one run: kernels, decoding, equality with the CPU, training.

    python benchmarks/gpu.py                                    # everything, at most 9 minutes
    python benchmarks/gpu.py --sections correctness kernels --minutes 3 --json out.json

Prints one table and writes JSON (default: benchmarks/results/gpu-<device>.json), after every section, so that a run that is
killed loses little. Needs no network. Without a GPU it runs through on toy sizes in Triton's interpreter: correctness only,
times mean nothing. Exit status 1 if a section failed or a kernel is wrong; missed speeds are shown, not failed.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "recipes" / "tiny")]

import torch  # noqa: E402

if not torch.cuda.is_available():
    if "triton" in sys.modules:
        raise SystemExit("triton has been imported already: it can no longer be told to interpret.")
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["HF_SPECDEC_KERNELS"] = "triton"

from gpu_sections.budget import Budget, OutOfTime, share  # noqa: E402
from gpu_sections.context import Context  # noqa: E402
from gpu_sections.report import Report, Row, SectionResult, condensed, summary, table  # noqa: E402

# The module of each section in gpu_sections/, and its share of the time, in the order in which they run.
MODULES = {
    "correctness": "correctness",
    "kernels": "kernel_times",
    "decoding": "decoding",
    "equality": "equality",
    "training": "training",
}
WEIGHTS = {"correctness": 4.0, "kernels": 1.0, "decoding": 8.0, "equality": 3.0, "training": 0.6}
NOT_A_GPU = "interpreter: correctness only, times mean nothing"


def environment(device: torch.device) -> dict[str, Any]:
    """Where this runs, and with what."""
    import triton
    from decode import machine

    found = {"device": "none" if device.type == "cpu" else torch.cuda.get_device_name(device), **machine()}
    found |= {"python": sys.version.split()[0], "triton": triton.__version__, "cuda": torch.version.cuda}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
    else:
        found["note"] = NOT_A_GPU
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    found["commit"] = done.stdout.strip() or None
    return found


def default_path(device: torch.device) -> Path:
    """benchmarks/results/gpu-<device>.json."""
    name = "interpreter" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return ROOT / "benchmarks" / "results" / f"gpu-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


class Warnings(logging.Handler):
    """Collects the package's warnings, each once, and which layers are captured as they are."""

    def __init__(self, found: list[str]):
        super().__init__()
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        text = record.getMessage()
        if text not in self.found:
            self.found.append(text)


def run_section(name: str, context: Context, report: Report) -> SectionResult:
    """Run one section to its end, its budget's end or its error; what it found by then is in the report."""
    result = SectionResult(name)
    print(f"{name}: up to {context.budget.seconds:.0f} s", flush=True)
    try:
        with context.budget.alarm():
            section: Iterator[Row] = importlib.import_module(f"gpu_sections.{MODULES[name]}").rows(context)
            for row in section:
                report.rows.append(row)
                print("  " + table([row]).splitlines()[1], flush=True)
                context.budget.check()
    except OutOfTime:
        result.status = "out of time"
        report.rows.append(Row(name, "out of time", note=f"after {context.budget.spent:.0f} s; what is above was done"))
    except Exception as error:
        result.status, result.error = "failed", traceback.format_exc()
        report.rows.append(Row(name, "failed", ok=False, aim="runs", note=f"{type(error).__name__}: {error}"[:300]))
        print(result.error, file=sys.stderr, flush=True)
    result.seconds = round(context.budget.spent, 1)
    return result


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=list(MODULES), default=list(MODULES))
    parser.add_argument("--minutes", type=float, default=9.0, help="for all sections together (default: 9)")
    parser.add_argument("--toy", action="store_true", help="toy sizes on a GPU, too")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--seed", type=int, help="of the random inputs (default: another one in each run)")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes must be above 0, not {options.minutes}.")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; the exit status."""
    began = time.monotonic()
    options = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
        print(NOT_A_GPU, flush=True)
    seed = time.time_ns() % 2**31 if options.seed is None else options.seed
    path = options.json or default_path(device)
    command = " ".join(
        ["python", *([sys.argv[0]] if arguments is None else ["benchmarks/gpu.py"]), *(arguments or sys.argv[1:])]
    )
    report = Report(command, {**environment(device), "seed": seed})
    logging.getLogger("hf_specdec").addHandler(Warnings(report.warnings))
    logging.getLogger("hf_specdec.model.options.compiled").setLevel(logging.INFO)
    toy = options.toy or device.type == "cpu"
    context = Context(device, toy, Budget(60 * options.minutes), seed, warnings=report.warnings)
    waiting = [name for name in MODULES if name in options.sections]
    while waiting:
        name = waiting.pop(0)
        left = 60 * options.minutes - (time.monotonic() - began)
        context.budget = Budget(max(share(name, waiting, WEIGHTS, left), 1.0))
        report.sections.append(run_section(name, context, report))
        report.write(path)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print("\n" + table(condensed(report.rows)) + "\n\n" + summary(report))
    print(f"\n{path} holds all {len(report.rows)} rows.")
    if device.type == "cpu":
        print(NOT_A_GPU)
    wrong = any(row.ok is False and row.section in ("correctness", "equality") for row in report.rows)
    return int(bool(report.failed) or wrong)


if __name__ == "__main__":
    sys.exit(main())
