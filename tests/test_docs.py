"""What the documentation shows is valid: every example configuration parses, every method has its section."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

from hf_specdec import available_methods, parse_config

DOCS = Path(__file__).resolve().parents[1] / "docs"


def examples():
    """Every dict literal assigned or passed as `speculative_config` in a Python block of the methods page."""
    text = (DOCS / "methods.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.S):
        for node in ast.walk(ast.parse(block)):
            named = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "speculative_config"
            if named or (isinstance(node, ast.keyword) and node.arg == "speculative_config"):
                yield ast.literal_eval(node.value)


@pytest.mark.parametrize("values", list(examples()), ids=str)
def test_example_parses(values):
    if "method" in values:
        assert parse_config(values).method == values["method"]
    else:
        assert set(values) >= {"model"}, "the method can only be inferred from a checkpoint"


def test_every_method_has_an_example():
    shown = {values.get("method") for values in examples()}
    assert set(available_methods()) <= shown


@pytest.mark.parametrize(("target", "file"), [("tiny", "acceptance"), ("tiny-hybrid", "acceptance-hybrid")])
def test_the_acceptance_tables_show_the_kept_figures(target, file):
    """docs/acceptance.md's tables are what benchmarks/acceptance.py makes of its kept results."""
    path = DOCS.parent / "benchmarks" / "acceptance.py"
    spec = importlib.util.spec_from_file_location("acceptance", path)
    acceptance = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(acceptance)
    report = json.loads((path.parent / "results" / f"{file}.json").read_text(encoding="utf-8"))
    text = (DOCS / "acceptance.md").read_text(encoding="utf-8")
    begin, end = acceptance.MARKERS[target]
    shown = text.split(begin)[1].split(end)[0]
    assert shown.strip() == acceptance.markdown(report)
    assert all(result["equal"] == result["prompts"] for result in report["results"])
