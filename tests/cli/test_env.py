"""`hf-specdec env`: what a bug report needs is there, and nothing that should stay secret."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
import transformers

import hf_specdec
from hf_specdec.cli import env, main, measure
from hf_specdec.kernels import native


def test_it_says_what_a_report_needs(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hf-specdec"] == hf_specdec.__version__
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"]["transformers"] == transformers.__version__
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert "tiny" in found["bundled models"] and "eagle3" in found["methods"]
    assert set(found["extras"]) == {"suffix", "gpu", "serve", "train", "ray", "pd"}


def test_the_build_of_torch_is_named_where_its_metadata_does_not(monkeypatch):
    monkeypatch.setattr(measure, "version", lambda name: "1.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    assert env.environment()["packages"]["torch"] == "2.13.0+cu130"


def test_lines_for_people_have_every_entry(capsys):
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    for name in env.environment():
        assert f"{name}:" in shown


def test_secrets_are_not_printed(capsys, monkeypatch):
    for name in env.SECRETS:
        monkeypatch.setenv(name, "do-not-tell")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for flags in ([], ["--json"]):
        assert main(["env", *flags]) == 0
        shown = capsys.readouterr().out
        assert "do-not-tell" not in shown
        assert "OMP_NUM_THREADS" in shown
    assert env.environment()["variables"]["HF_TOKEN"] == "set"


def test_it_knows_every_variable_of_the_package():
    package = Path(hf_specdec.__file__).parent
    used = {
        name for file in package.rglob("*.py") for name in re.findall(r"\"(HF_SPECDEC_\w+)\"", file.read_text("utf-8"))
    }
    assert used - {"HF_SPECDEC_RANK"} <= {
        *env.VARIABLES,
        *env.SECRETS,
    }  # FOLLOWER: set for processes that it starts


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's kernels are named")
def test_the_native_library_is_named_where_it_runs(monkeypatch):
    monkeypatch.delenv("HF_SPECDEC_KERNELS", raising=False)
    assert env.kernels() == ("native" if native.library() else "reference")
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "reference")
    assert env.kernels() == "reference"


def test_what_an_extra_lacks_is_named():
    assert env.missing_of(("json", "no_such_module_here")) == "without no_such_module_here"
    assert env.missing_of(("json",)) == "complete"


def test_a_wrong_setting_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "fast")
    assert main(["env"]) == 2
    assert "HF_SPECDEC_KERNELS" in capsys.readouterr().err


def test_the_package_runs_as_a_module(capsys, monkeypatch):
    """`python -m hf_specdec` is the command."""
    monkeypatch.setattr("sys.argv", ["hf-specdec", "env", "--json"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("hf_specdec", run_name="__main__")
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out)["hf-specdec"] == hf_specdec.__version__
