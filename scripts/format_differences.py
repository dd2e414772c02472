"""Compares draft logits with those of the heads' authors, and writes benchmarks/results/formats.json for docs/formats.md:

    python scripts/format_differences.py --references FOLDER

The folder gets the authors' repositories, at the commits named here, and what they import (about 300 MB). Repositories that are there are
used as they are. The tests named here then run; of all logits that a test compares, the largest difference counts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "formats.json"
TESTS = "tests/candidate_generators"
REPOSITORIES = {
    "EAGLE": ("SafeAILab/EAGLE", "cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b"),
    "SpecForge": ("sgl-project/SpecForge", "a6b6b0230009d15ec2a97a57384e6f53f0f96946"),
    "DeepSpec": ("deepseek-ai/DeepSpec", "afdfa7c9382a3341a3e6f17756dd816da79f132c"),
    "dflash": ("z-lab/dflash", "44947fbf71114e241c96de194f4b382b5dd330d0"),
    "fms-extras": ("foundation-model-stack/fms-extras", "16339f7c82255983d20dabf4807d124133be1d1c"),
}
# Their packages that can be installed, and what these import; versions that go together. Without what those need for training.
PACKAGES = [
    "speculators==0.9.0",
    "hs-connectors==0.9.0",
    "ibm-fms==0.0.6",
    "datasets",
    "multiprocess",
    "dill",
    "xxhash",
    "pyarrow",
    "pandas",
]
SPECULATORS, FORMULA, TRANSFORMERS = (
    "speculators 0.9.0",
    "formula in the test",
    f"transformers {transformers.__version__}",
)
# Format, reference, tests (a file, and words that select among its tests).
ROWS = [
    ("EAGLE-1, EAGLE-2", "EAGLE", "test_authors_code.py", "eagle_of_safeailab"),
    ("EAGLE-3", "EAGLE", "test_authors_code.py", "eagle3_of_safeailab"),
    ("EAGLE-3", "SpecForge", "test_authors_code.py", "eagle3_of_specforge"),
    ("EAGLE-3, P-EAGLE", SPECULATORS, "test_eagle3.py", "speculators_own_forward"),
    ("EAGLE-3 of Qwen3, Gemma 4", "DeepSpec", "test_authors_code.py", "eagle3_of_deepspec"),
    ("EAGLE-3, all layouts", FORMULA, "test_eagle3.py", "numerics_and_cache"),
    ("DFlash", "dflash", "test_authors_code.py", "relatives and z-lab"),
    ("DFlash, DSpark, Domino", "SpecForge", "test_authors_code.py", "relatives and SpecForge"),
    ("DFlash, DFlash2, DSpark", SPECULATORS, "test_authors_code.py", "dflash_of_speculators"),
    ("DSpark, DFlash of Qwen3, Gemma 4", "DeepSpec", "test_authors_code.py", "dspark_of_deepspec"),
    ("DFlash of Muse Glimmer", TRANSFORMERS, "test_dflash.py", "transformers_own_drafter"),
    ("DFlash, DFlare, PARD-2, all layouts", FORMULA, "test_dflash.py", "those_of_the_formula or of_gemma4"),
    ("DSpark, Domino, all layouts", FORMULA, "test_dspark.py", "formula_says or of_speculators"),
    ("DSpark of DeepSeek-V4", FORMULA, "test_deepseek_v4.py", "formula_says"),
    ("MTP of DeepSeek-V3, GLM-4.5", TRANSFORMERS, "test_mtp.py", "transformers_own"),
    ("MTP of Qwen3, Qwen3.5", SPECULATORS, "test_authors_code.py", "mtp_of_speculators"),
    ("MTP, all layouts", FORMULA, "test_mtp.py", "numerics"),
    ("Gemma 4 assistant", TRANSFORMERS, "test_gemma4_assistant.py", "transformers_own"),
    ("MLP speculator", "fms-extras", "test_authors_code.py", "of_fms"),
    ("Arctic's speculators", FORMULA, "test_arctic_speculator.py", "formula_s"),
    ("Medusa (speculators' too)", FORMULA, "test_medusa.py", "logits_are_the_formula_s"),
    ("Hydra", FORMULA, "test_hydra.py", "logits_are_the_formula_s or prefix_layer_and"),
    ("PARD", FORMULA, "test_pard.py", "plain_forward"),
]  # fmt: skip


def fetch(folder: Path) -> None:
    """The repositories at their commits, and the packages under `site`."""
    for name, (repository, commit) in REPOSITORIES.items():
        if not (folder / name).is_dir():
            url = f"https://github.com/{repository}"
            subprocess.run(["git", "clone", "--filter=blob:none", url, str(folder / name)], check=True)
            subprocess.run(["git", "-C", str(folder / name), "checkout", "--quiet", commit], check=True)
    if not (folder / "site").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder / "site"), *PACKAGES]
        subprocess.run(pip, check=True)


class Differences:
    """A pytest plugin: the largest difference of what the tests compare, and how many tests passed."""

    def __init__(self, differences: Any):
        self.differences, self.passed, self.assert_close = differences, 0, torch.testing.assert_close

    def compare(self, found: Any, expected: Any, **kwargs: Any) -> None:
        """In place of `torch.testing.assert_close`."""
        self.assert_close(found, expected, **kwargs)
        self.differences.measure(found, expected)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed


def run(file: str, words: str) -> tuple[int, float]:
    """How many tests passed, and the largest difference they measured, as a share of the largest logit."""
    differences: Any = importlib.import_module("differences")
    differences.measured.clear()
    plugin = Differences(differences)
    torch.testing.assert_close = plugin.compare
    try:
        status = pytest.main(["-q", "-p", "no:cacheprovider", f"{ROOT / TESTS / file}", "-k", words], plugins=[plugin])
    finally:
        torch.testing.assert_close = plugin.assert_close
    if status or not plugin.passed:
        raise SystemExit(f"{file} -k {words!r}: {plugin.passed} tests passed, exit status {status}")
    return plugin.passed, max(differences.measured)


def main() -> None:
    """Fetch, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--references", type=Path, required=True, help="a folder for the authors' repositories")
    folder: Path = parser.parse_args().references.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    fetch(folder)
    os.environ["HF_SPECDEC_REFERENCES"] = str(folder)
    sys.path[:0] = [str(ROOT / "tests" / "builders"), str(folder / "site")]
    rows = []
    for title, reference, file, words in ROWS:
        passed, largest = run(file, words)
        name, commit = REPOSITORIES.get(reference, (reference, ""))
        rows.append(
            {"format": title, "reference": f"{name} {commit[:7]}".strip(), "tests": passed, "difference": largest}
        )
        RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
        print(f"{title}: {largest:.1e} over {passed} tests", flush=True)


if __name__ == "__main__":
    main()
