"""What a release consists of agrees with itself: version, changelog, extras and their hints, workflows."""

import fnmatch
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from paths import ROOT

import hf_specdec
from hf_specdec.cli import env

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


# What needs an extra, in a process in which nothing of it can be imported.
WITHOUT_EXTRAS = """
import json, sys

class Without:
    gone = {"arctic_inference", "torchao", "triton", "fastapi", "uvicorn", "llguidance", "ray", "nixl", "matplotlib", "PIL"}

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, fullname, path=None, target=None):
        return None if fullname.split(".")[0] in self.gone else self.finder.find_spec(fullname, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import hf_specdec
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(hf_specdec.bundled("tiny"))
inputs = model.dummy_inputs["input_ids"]

def of(config):
    return lambda: model.generate(inputs, max_new_tokens=4, speculative_config=config)

def structured():
    from hf_specdec import LLM, SamplingParams, StructuredOutputsParams
    llm = LLM("tiny")
    try:
        llm.generate(["x"], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    finally:
        llm.close()

def nixl():
    from hf_specdec.serve.transfer.nixl_link import NixlLink
    NixlLink()

def ray():
    import hf_specdec.serve.ray

def serve():
    from hf_specdec.cli import build_parser, serve
    serve.run(build_parser().parse_args(["serve", "tiny"]))

def images():
    from hf_specdec.serve.engine.images import read_images
    read_images([b""])

def train():
    from hf_specdec.training.pipeline import check_installed
    check_installed()

cases = {
    "suffix": of({"method": "suffix"}), "gpu": of({"method": "none", "target_quantization": "wint8"}), "serve": serve,
    "serve, structured output": structured, "pd": nixl, "ray": ray, "train": train, "images": images,
}
said = {}
for name, case in cases.items():
    try:
        case()
        said[name] = "nothing"
    except (ImportError, ValueError) as error:
        said[name] = str(error)
print(json.dumps(said))
"""


def test_what_needs_an_extra_names_it():
    run = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout.splitlines()[-1])
    assert len(said) == 8
    for name, message in said.items():
        assert f"pip install 'hf-specdec[{name.split(',')[0]}]'" in message, (name, message)


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
    jobs = workflow["jobs"]
    steps = [step for job in jobs.values() for step in job.get("steps", [])]
    commands = "\n".join([step.get("run", "") for step in steps] + [str(step.get("env", "")) for step in steps])
    assert set(re.findall(r"\bmake (\w[\w-]*)", commands)) <= targets
    for file in re.findall(r"\b(?:(?:bash|python) |tests/)[\w./-]+\.(?:sh|py)\b", commands):
        assert (ROOT / file.split(" ")[-1]).is_file(), file
    for job in jobs.values():
        needs = job.get("needs", [])
        assert ({needs} if isinstance(needs, str) else set(needs)) <= set(jobs)
        assert "timeout-minutes" in job or "uses" in job
        assert (ROOT / job.get("uses", ".")).exists(), job
        matrix = job.get("strategy", {}).get("matrix", {})
        given = {*matrix, *(key for row in matrix.get("include", []) for key in row)}
        assert set(re.findall(r"matrix\.(\w+)", json.dumps(job))) <= given
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+@[\w./]+", step["uses"]) for step in steps if "uses" in step)


def test_what_the_image_is_built_from_reaches_the_build():
    """.dockerignore leaves out everything but what the build needs."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "**"
    kept = [line[1:] for line in lines if line.startswith("!")]
    needed = ["hf_specdec", "models", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "NOTICE"]
    for name in needed:
        assert (ROOT / name).exists() and any(fnmatch.fnmatch(name, pattern) for pattern in kept), name
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    for folder in re.findall(r"/src(/\w+)?\b", dockerfile):
        assert (ROOT / folder.lstrip("/")).is_dir()


def test_there_are_workflows_for_tests_lint_docs_and_publishing():
    assert {"tests.yml", "lint.yml", "docs.yml", "publish.yml"} <= {path.name for path in WORKFLOWS}


@pytest.mark.parametrize("name", hf_specdec.bundled_names())
def test_a_model_card_is_one_for_the_hub(name):
    """Metadata as the Hub reads it: a licence, a library, what it is for; a head names its target, a model its task."""
    data = ModelCard.load(Path(hf_specdec.bundled(name)) / "README.md").data
    assert data.license == "apache-2.0"
    if data.library_name == "transformers":
        assert data.pipeline_tag == "text-generation" and data.language == "en"
    else:
        assert data.library_name == "hf-specdec" and data.base_model == "tiny" and "speculative-decoding" in data.tags
