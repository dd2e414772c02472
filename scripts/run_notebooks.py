"""Runs notebooks from top to bottom and saves them with their outputs.

python scripts/run_notebooks.py [notebooks/1-quickstart.ipynb ..]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"


def run(path: Path, save: bool = True) -> float:
    """Execute a notebook in its folder. Returns the seconds it took; raises nbclient's error of the first cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False, resources=where)
    client.execute()
    if save:
        nbformat.write(notebook, path)
    return time.perf_counter() - start


def main() -> None:
    """Run the notebooks named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path)
    for path in parser.parse_args().notebooks or sorted(FOLDER.glob("*.ipynb")):
        print(f"{path.name}: {run(path):.0f} s", flush=True)


if __name__ == "__main__":
    main()
