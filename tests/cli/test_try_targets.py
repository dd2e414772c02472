"""scripts/try_targets.py: it tries the classes it should, and says what became of them."""

import importlib.util
import re
import sys

import pytest
import torch
import transformers
from paths import ROOT
from transformers import LlamaForCausalLM, Mamba2ForCausalLM, ReformerModelWithLMHead

from hf_specdec.decoding import step


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("try_targets", ROOT / "scripts" / "try_targets.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_becomes_of_classes(script):
    assert script.attempt("llama", LlamaForCausalLM) == script.Trial("llama", "LlamaForCausalLM", "paged")
    trial = script.attempt("reformer", ReformerModelWithLMHead)
    assert trial.way == "refused" and "takes no key-value cache" in trial.why
    assert script.attempt("mamba2", Mamba2ForCausalLM).way in ("refused", "state")


def test_wrong_texts_and_errors_are_found(script, monkeypatch):
    """A model that reads other positions than it should, and an exception that is no refusal."""
    real = step.RowInput
    monkeypatch.setattr(
        step, "RowInput", lambda *args, **kwargs: real(*args, **(kwargs | {"offset": 3 * (args[2] > 13)}))
    )
    trial = script.attempt("llama", LlamaForCausalLM)
    assert trial.way == "WRONG" and "ngram" in trial.why
    monkeypatch.setattr(step, "RowInput", lambda *args, **kwargs: torch.zeros(2).view(3))
    trial = script.attempt("llama", LlamaForCausalLM)
    assert trial.way == "ERROR" and trial.why.startswith("RuntimeError")


def test_the_page_has_every_class(script):
    page = (ROOT / "docs" / "targets.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row[2])]
    tried = [name for row in rows if row[0] != "| not tried" for name in re.findall(r"`(\w+)`", row[2])]
    assert len(tried) >= 150 and not {"| WRONG", "| ERROR"} & {row[0] for row in rows}
    if f"transformers {transformers.__version__}:" in page:
        assert {cls.__name__ for _, cls in script.classes()} == set(listed)


def test_classes_of_one_reason_share_a_row(script):
    why = "does not compute the same logits over packed rows as alone: its logits differ by"
    trials = [script.Trial("a", "A", "refused", f"A {why} 1."), script.Trial("b", "B", "refused", f"B {why} 2.")]
    page = script.markdown([script.Trial("c", "C", "paged"), *trials])
    assert page.endswith(
        "| paged |  | `C` |\n| refused | does not compute the same logits over packed rows as alone | `A`, `B` |\n"
    )
