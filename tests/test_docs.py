"""What the documentation shows is valid: every example configuration parses, every method has its section."""

import ast
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
