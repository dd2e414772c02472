"""What `pip install hf-specdec` brings: a small wheel that works without the heads, and hf-specdec-models with these."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
from paths import ROOT

import hf_specdec
from hf_specdec.bundled import APART
from hf_specdec.cli import main

bundled_module = sys.modules["hf_specdec.bundled"]  # the package's attribute is the function
MODELS = ROOT / "hf_specdec" / "bundled_models"
LIBRARY = ROOT / "hf_specdec" / "kernels" / "native" / "library.so"
MOST_BYTES = 15_250_000  # another model would be 1 MB and more
NATIVE_LIBRARY = 660_000  # compressed, at most; the wheels built here are without


@pytest.fixture
def without_heads(tmp_path, monkeypatch):
    """An installation of hf-specdec alone."""
    for name in ("tiny", "tiny-draft"):
        (tmp_path / name).symlink_to(MODELS / name)
    (tmp_path / "prompts.jsonl").symlink_to(MODELS / "prompts.jsonl")
    monkeypatch.setattr(bundled_module, "_FOLDER", tmp_path)
    monkeypatch.setattr(bundled_module, "_other_folder", lambda: None)


def test_what_is_apart_is_left_out():
    """bundled.py, MANIFEST.in and the folders agree."""
    pruned = re.findall(
        r"^prune hf_specdec/bundled_models/(\S+)$", (ROOT / "MANIFEST.in").read_text(encoding="utf-8"), flags=re.M
    )
    assert sorted(pruned) == sorted(APART)
    assert {path.parent.name for path in MODELS.glob("*/config.json")} == {"tiny", "tiny-draft", *APART}


def test_both_packages_have_one_version():
    text = (ROOT / "models" / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^version = "(.*)"$', text, flags=re.M).group(1) == hf_specdec.__version__


def build(project, place):
    """Build a wheel from a copy of the checkout, without the native library; returns its archive."""
    setuptools = pytest.importorskip("setuptools", minversion="77", reason="pip install 'setuptools>=77'")
    assert setuptools
    copy = place / "checkout"
    if not copy.exists():
        ignored = shutil.ignore_patterns(
            ".*", "build", "dist", "site", "*.egg-info", "__pycache__", "tests", "docs", "library.so"
        )
        shutil.copytree(ROOT, copy, ignore=ignored)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(place)],
        cwd=copy / project, env={**os.environ, "HF_SPECDEC_NO_NATIVE": "1"}, check=True, capture_output=True,
    )  # fmt: skip
    name = "hf_specdec" if project == "." else "hf_specdec_models"
    return zipfile.ZipFile(next(place.glob(f"{name}-*.whl")))


def test_the_wheels_hold_every_model_once_and_are_small(tmp_path):
    with build(".", tmp_path) as wheel, build("models", tmp_path) as heads:
        names = {Path(name).parent.name for name in wheel.namelist() if name.endswith("/config.json")}
        assert names == {"tiny", "tiny-draft"}
        assert {Path(name).parent.name for name in heads.namelist() if name.endswith("/config.json")} == set(APART)
        assert Path(wheel.filename).stat().st_size + NATIVE_LIBRARY <= MOST_BYTES
        modules = {name for name in wheel.namelist() if name.endswith(".py")}
        assert modules == {str(path.relative_to(ROOT)) for path in (ROOT / "hf_specdec").rglob("*.py")}
        for name in APART:
            for file in (MODELS / name).iterdir():
                assert heads.read(f"hf_specdec_models/{name}/{file.name}") == file.read_bytes(), file


def test_the_native_library_takes_no_more_than_the_wheel_has_left_for_it():
    if not LIBRARY.is_file():
        pytest.skip("the native library is not built")
    assert len(zlib.compress(LIBRARY.read_bytes())) <= NATIVE_LIBRARY


def test_a_missing_head_says_how_to_install_it(without_heads, tiny_model, capsys):
    assert hf_specdec.bundled_names() == ["tiny", "tiny-draft"]
    with pytest.raises(ImportError, match=r"'tiny-eagle3' comes in a package .* 'hf-specdec\[models\]'"):
        hf_specdec.bundled("tiny-eagle3")
    with pytest.raises(ValueError, match=r"called 'nothing'. Bundled: tiny, tiny-draft\."):
        hf_specdec.bundled("nothing")
    with pytest.raises(ImportError, match=r"hf-specdec\[models\]"):
        tiny_model.generate(tiny_model.dummy_inputs["input_ids"], speculative_config={"model": "tiny-eagle"})
    code = main(["generate", "tiny", "--prompt", "x", "--speculative-config", '{"model": "tiny-medusa"}'])
    error = capsys.readouterr().err
    assert code != 0 and "pip install 'hf-specdec[models]'" in error and "Traceback" not in error


def test_heads_are_found_in_the_other_package(tmp_path, monkeypatch):
    package = tmp_path / "hf_specdec_models"
    (package / "tiny-eagle3").mkdir(parents=True)
    (package / "tiny-eagle3" / "config.json").write_text("{}", encoding="utf-8")
    (package / "__init__.py").touch()
    monkeypatch.setattr(bundled_module, "_FOLDER", tmp_path / "own")
    monkeypatch.syspath_prepend(tmp_path)
    assert hf_specdec.resolve_model("tiny-eagle3") == str(package / "tiny-eagle3")
    assert hf_specdec.bundled_names() == ["tiny-eagle3"]


@pytest.mark.slow
def test_the_demo_runs_without_heads(without_heads, capsys):
    assert main(["demo", "--size", "tiny", "--prompts", "1", "--max-new-tokens", "4", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "drafted by a draft model" in out and "pip install 'hf-specdec[models]'" in out and "eagle3" not in out
