"""What a release consists of agrees with itself: version, changelog, extras and their hints, workflows."""

import re
from pathlib import Path

import pytest
import yaml

import hf_specdec
from hf_specdec.cli import env

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def extras():
    """Names of the extras in pyproject.toml (Python 3.10 has no tomllib)."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    return set(re.findall(r"^(\w+) = \[", section, flags=re.M))


def test_the_version_is_one():
    version = hf_specdec.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == version
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert version in headings[:2]  # [Unreleased] may stand before it


def test_hints_name_extras_that_exist():
    files = [*ROOT.glob("hf_specdec/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    texts = [file.read_text(encoding="utf-8") for file in files]
    hints = {
        name for text in texts for names in re.findall(r"hf-specdec\[([\w,]+)\]", text) for name in names.split(",")
    }
    assert {"suffix", "serve", "train"} <= hints <= extras()


def test_the_installation_page_lists_every_extra():
    table = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8").split("| extra |")[1].split("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == extras()
    assert set(env.EXTRAS) <= extras()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_what_is_there(path):
    """Each parses, asks for no more than it needs, and its `make` targets and files exist."""
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    targets = {name for names in targets for name in names.split()}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    assert set(re.findall(r"\bmake (\w[\w-]*)", commands)) <= targets
    for script in re.findall(r"\b(?:bash|python) ([\w./-]+\.(?:sh|py))\b", commands):
        assert (ROOT / script).is_file(), script


def test_there_are_workflows_for_tests_lint_docs_and_publishing():
    assert {"tests.yml", "lint.yml", "docs.yml", "publish.yml"} <= {path.name for path in WORKFLOWS}
