"""Installs the built distributions into fresh environments, runs the quick suite there, and prints a table.

    python -m build && python -m build models -o dist
    python scripts/try_versions.py dist --python python3.10 python3.11 python3.12 python3.13 --transformers 5.17.0 newest

Every combination gets a virtual environment of its own with the two wheels, and the quick suite runs against the installed package.
The source distribution is installed once per Python, with the oldest transformers named; it compiles the native library there, and
decodes a text. The tests are those of this checkout, which must stay what the distributions were built from. Environments are made by
uv (`pip install uv`), which shares files between them; interpreters have to be there already.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Two minutes of CPU time: plugin, keys, cache, rules, trees, equality, the native library, methods of other packages, commands.
QUICK = (
    "integration", "config", "block_pool", "verification", "draft_tree", "ngram", "lossless", "native_program",
    "third_party_methods", "cli", "env",
)  # fmt: skip
TEST_TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.100", "peft>=0.18", "scipy>=1.13", "torchao>=0.18")
GENERATE = (
    "generate",
    "tiny",
    "--prompt",
    "Tell me a story about a dog.",
    "--max-new-tokens",
    "32",
    "--speculative-config",
)


@dataclass
class Row:
    """A line of the table."""

    python: str
    transformers: str
    torch: str
    source: str
    result: str


def run(command: list, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run outside the checkout, so that the installed package is what is imported. Never raises for an exit code."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(each) for each in command], cwd=cwd, env={**kept, **environment}, text=True, capture_output=True
    )


def must(command: list, cwd: Path) -> str:
    """`run`, whose failure ends the script with what it said."""
    done = run(command, cwd)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def environment(place: Path, python: str, needs: list[str], links: str | None) -> Path:
    """A fresh virtual environment with packages; returns its folder of commands."""
    uv = shutil.which("uv")
    if uv is None:
        raise SystemExit("uv is not there: pip install uv")
    must([uv, "venv", "-q", "--clear", "--python", python, place], place.parent)
    found = ["--find-links", links] if links else []
    must([uv, "pip", "install", "-q", "--python", place / "bin/python", *found, *needs], place.parent)
    return place / "bin"


def versions(commands: Path, place: Path) -> dict:
    """What `hf-specdec env` says; raises SystemExit if the package is not the installed one."""
    found = json.loads(must([commands / "hf-specdec", "env", "--json"], place))
    if not found["installed in"].startswith(str(place)):
        raise SystemExit(f"{found['installed in']} is not what was installed into {place}")
    return found


def quick_suite(commands: Path, place: Path) -> str:
    """pytest's last line without its time."""
    files = [next((ROOT / "tests").rglob(f"test_{name}.py")) for name in QUICK]
    done = run(
        [commands / "pytest", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", *files],
        place,
        OMP_NUM_THREADS="1",
    )
    (place / "pytest.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    last = (done.stdout.strip().splitlines() or ["nothing"])[-1]
    return re.sub(r" in [\d.]+s.*", "", last).strip("= ")


def decodes(commands: Path, place: Path, config: str) -> str:
    """Whether the command line decodes with a configuration: "yes", or its error."""
    done = run([commands / "hf-specdec", *GENERATE, config], place, HF_HUB_OFFLINE="1")
    return "yes" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    lines = ["| Python | transformers | torch | installed from | result |", "|---|---|---|---|---|"]
    lines += [f"| {row.python} | {row.transformers} | {row.torch} | {row.source} | {row.result} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Try every combination and print the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="the folder of the built distributions of both packages")
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="EXECUTABLE")
    parser.add_argument(
        "--transformers", nargs="+", default=["newest"], metavar="VERSION", help='such as 5.17.0, or "newest"'
    )
    parser.add_argument("--torch", default="2.13.0", metavar="VERSION", help="(default: %(default)s)")
    parser.add_argument("--find-links", metavar="FOLDER", help="wheels that are at hand")
    parser.add_argument("--no-sdist", action="store_true", help="wheels only")
    args = parser.parse_args()
    dist = args.dist.resolve()
    (wheel,), (source,) = dist.glob("hf_specdec-*.whl"), dist.glob("hf_specdec-*.tar.gz")
    (models,) = dist.glob("hf_specdec_models-*.whl")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="hf-specdec-versions-") as folder:
        for python in args.python:
            for wanted in args.transformers:
                began, place = time.monotonic(), Path(folder) / "environment"
                pinned = [f"torch=={args.torch}", "transformers" if wanted == "newest" else f"transformers=={wanted}"]
                commands = environment(place, python, [*pinned, str(wheel), str(models), *TEST_TOOLS], args.find_links)
                found = versions(commands, place)
                packages = found["packages"]
                shown = (found["python"].split()[0], packages["transformers"], packages["torch"])
                rows.append(Row(*shown, "wheels", quick_suite(commands, place)))
                print(table(rows[-1:]).splitlines()[-1], f"{time.monotonic() - began:.0f} s", flush=True)
                shutil.copy(place / "pytest.log", f"pytest-{shown[0]}-{shown[1]}.log")
                if wanted != args.transformers[0] or args.no_sdist:
                    continue
                commands = environment(place, python, [*pinned, str(source)], args.find_links)
                versions(commands, place)
                native = "compiled" if library(place) else "not compiled"
                result = (
                    f"decodes: {decodes(commands, place, json.dumps({'method': 'ngram'}))}; native library {native}"
                )
                rows.append(Row(*shown, "source distribution", result))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    print("\n" + table(rows))


def library(place: Path) -> bool:
    """Whether the native library is installed."""
    return any(place.glob("lib/python*/site-packages/hf_specdec/kernels/native/library.so"))


if __name__ == "__main__":
    main()
