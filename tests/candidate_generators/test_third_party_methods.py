"""Methods from other packages: by entry point, by "package.module:Class", and what happens when they are broken."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from oracle import ragged
from paths import BUILDERS, ROOT

import hf_specdec
from hf_specdec import CandidateGenerator, DraftTrees, SpeculativeConfig, SpeculativeConfigError, parse_config
from hf_specdec.candidate_generators import registry

EXAMPLE, TRIAL = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.S)
# The same file outside the package: what it needs comes from `hf_specdec`. Its name is another one, for trees that have the example.
OUTSIDE = re.sub(r"from \.+[\w.]* import (\w+)", r"from hf_specdec import \1", EXAMPLE).replace(
    "copy_last", "copy_outside"
)
RUN = """
import hf_specdec, torch
from oracle import ragged, tiny_llama
model = tiny_llama()
inputs = ragged([9, 4, 6])
plain = model.generate(**inputs, max_new_tokens=12)
for method in {methods}:
    out = model.generate(
        **inputs, max_new_tokens=12, speculative_config={{"method": method}}, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, plain) and out.speculation.num_draft_tokens > 0
    print(method, hf_specdec.parse_config({{"method": method}}).to_dict())
"""
FAILS = """
try:
    hf_specdec.parse_config({"method": "fails"})
except hf_specdec.SpeculativeConfigError as error:
    print(error)
"""


def install(site: Path, package: str, files: dict[str, str], entry_points: str = "") -> None:
    """A package as pip leaves it in site-packages."""
    (site / package).mkdir(parents=True)
    for name, text in {"__init__.py": "", **files}.items():
        (site / package / name).write_text(text, encoding="utf-8")
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hf_specdec.methods]\n{entry_points}\n")


def run(site: Path, code: str) -> subprocess.CompletedProcess:
    paths = [str(site), str(BUILDERS), str(ROOT)]
    code = f"import sys; sys.path[:0] = {paths!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def test_an_installed_package_and_a_class_by_its_path(tmp_path):
    """The example of CONTRIBUTING.md, in a package of its own, used both ways; broken packages beside it change nothing."""
    install(tmp_path, "copying", {"method.py": OUTSIDE}, "copy_outside = copying.method:CopyLastGenerator")
    install(tmp_path, "failing", {"method.py": "raise RuntimeError('mine')"}, "fails = failing.method:Generator")
    install(tmp_path, "missing", {}, "is_missing = missing.nowhere:Generator")
    install(tmp_path, "empty", {"method.py": "class Generator: pass"}, "registers_nothing = empty.method:Generator")
    methods = ["copying.method:CopyLastGenerator", "copy_outside"]
    trial = TRIAL.replace("copy_last", "copy_outside")
    done = run(tmp_path, "\n".join([RUN.format(methods=methods), trial, FAILS]))
    assert done.stdout.count("{'method': 'copy_outside'}") == 2
    for package, problem in (
        ("failing", "RuntimeError: mine"),
        ("missing", "No module named 'missing.nowhere'"),
        ("empty", "registers no method 'registers_nothing'"),
    ):
        (line,) = [line for line in done.stderr.splitlines() if f"package {package!r}" in line]
        assert problem in line and "hf_specdec.methods" in line
    assert "mean_accepted_length" in done.stdout
    assert "package 'failing' cannot be used: RuntimeError: mine" in done.stdout


WRONG = {
    "raises": (lambda self, sequences, limits: {}["mine"], "raised KeyError: 'mine'"),
    "lists": (lambda self, sequences, limits: [[1] * limit for limit in limits], "returned list"),
    "too far": (lambda self, sequences, limits: chains(self, [limit + 2 for limit in limits]), "row 0, whose limit is"),
    "too few rows": (lambda self, sequences, limits: chains(self, limits[:1]), "returned 1 rows for 2 sequences"),
    "no such token": (
        lambda self, sequences, limits: chains(self, limits, 10**6),
        "ids that are not among the target's",
    ),
    "no integers": (
        lambda self, sequences, limits: DraftTrees(torch.ones(2, 1), [1, 1]),
        "torch.float32, on cpu, not int64",
    ),
}


def chains(generator, lengths, token=1):
    return DraftTrees.from_lists([[token] * length for length in lengths], device=generator.target.device)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_drafter_that_breaks_the_contract_is_named(model, wrong):
    """By its method and class, with the contract, and the next call works."""
    propose, says = WRONG[wrong]

    @dataclass
    class WrongConfig(SpeculativeConfig):
        name = f"wrong {wrong}"

    @hf_specdec.register(WrongConfig)
    class Wrong(CandidateGenerator):
        def propose(self, sequences, limits):
            return propose(self, sequences, limits)

    inputs = ragged([9, 4])
    try:
        with pytest.raises(
            RuntimeError, match=f"Method 'wrong {wrong}': {__name__}.*Wrong.propose .*{says}.*must return DraftTrees"
        ):
            model.generate(**inputs, max_new_tokens=9, speculative_config=f"wrong {wrong}")
    finally:
        registry._CONFIGS.pop(WrongConfig.name), registry._GENERATORS.pop(WrongConfig.name)
    plain = model.generate(**inputs, max_new_tokens=9)
    assert torch.equal(model.generate(**inputs, max_new_tokens=9, speculative_config="ngram"), plain)


@pytest.mark.slow
def test_a_class_by_its_path_in_a_process_without_the_package(tmp_path):
    """No installation: a module on sys.path is enough."""
    (tmp_path / "mine.py").write_text(OUTSIDE, encoding="utf-8")
    run(tmp_path, RUN.format(methods=["mine:CopyLastGenerator"]))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Generator", "'no_such_module' cannot be imported: ModuleNotFoundError"),
        (":Generator", "cannot be imported"),
        ("json:Generator", "json has no generator class 'Generator'"),
        ("json:JSONDecoder", "json has no generator class 'JSONDecoder'"),
        ("hf_specdec:SpeculativeConfig", "registered with @hf_specdec.register"),
        ("hf_specdec.candidate_generators.ngram:", "no generator class ''"),
    ],
)
def test_paths_that_name_no_method(path, message):
    with pytest.raises(SpeculativeConfigError, match=re.escape(message)):
        parse_config({"method": path})


def test_a_path_to_a_method_of_this_package():
    """Also in vLLM's spelling."""
    path = "hf_specdec.candidate_generators.ngram.NGramGenerator"
    for config in ({"method": ":".join(path.rsplit(".", 1))}, {"method": "custom_class", "model": path}):
        assert parse_config(config) == parse_config({"method": "ngram"})


@pytest.mark.parametrize("model", [None, "tiny-eagle3"])
def test_vllms_spelling_needs_a_path(model):
    with pytest.raises(SpeculativeConfigError, match="'custom_class'"):
        parse_config({"method": "custom_class", "model": model})


def test_a_proposer_of_vllm_is_not_a_method():
    with pytest.raises(
        SpeculativeConfigError, match=r"json\.decoder has no generator class 'JSONDecoder' that is registered"
    ):
        parse_config({"method": "custom_class", "model": "json.decoder.JSONDecoder"})
