"""`import hf_specdec` brings neither torch nor transformers, and patches transformers' generation code when that is imported.

Modules are counted: a stopwatch would measure the neighbours.
"""

import json
import subprocess
import sys

import pytest
from combinations import every_second

import hf_specdec

STAGES = """
import json, sys

def new(before):
    return sorted(set(sys.modules) - before)

before = set(sys.modules)
import hf_specdec
imported = [name for name in new(before) if name.split(".")[0] in ("hf_specdec", "torch", "transformers", "numpy")]

import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(config)
model.generate(torch.tensor([[1, 2]]), max_new_tokens=1)
plain = [name for name in new(before) if name.startswith("hf_specdec")]

model.generate(torch.tensor([[1, 2]]), max_new_tokens=1, speculative_config={"method": "none"})
speculative = [name for name in new(before) if name.startswith("hf_specdec")]
print(json.dumps([imported, plain, speculative]))
"""
ORDERS = {
    "before transformers": """
import hf_specdec
from transformers import GenerationConfig
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin
""",
    "after transformers": """
from transformers import GenerationConfig
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin
import hf_specdec
""",
    "between two modules of transformers": """
from transformers import GenerationConfig
import hf_specdec
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin
""",
    "uninstalled before transformers": """
import hf_specdec
hf_specdec.uninstall()
from transformers import GenerationConfig
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin
assert not hasattr(GenerationConfig, "speculative_config") and "specdec" not in GENERATION_MODES_MAPPING
hf_specdec.install()
""",
}
CHECKS = """
import sys
for _ in range(2):
    assert GenerationConfig(speculative_config={"method": "ngram"}).speculative_config == {"method": "ngram"}
    assert GENERATION_MODES_MAPPING["specdec"] == "_specdec_decoding" and hasattr(GenerationMixin, "_specdec_decoding")
    assert "generate_batch" in vars(GenerationMixin)
    hf_specdec.uninstall()
    assert not hasattr(GenerationConfig, "speculative_config") and not hasattr(GenerationMixin, "_specdec_decoding")
    assert "specdec" not in GENERATION_MODES_MAPPING and "generate_batch" not in vars(GenerationMixin)
    assert not any("hf_specdec" in type(finder).__module__ for finder in sys.meta_path)
    hf_specdec.install()
"""


def test_the_import_brings_the_plugin_only():
    """Plain calls bring nothing more; the first call that speculates brings the rest, so the count can tell."""
    run = subprocess.run([sys.executable, "-c", STAGES], capture_output=True, text=True, check=True)
    imported, plain, speculative = json.loads(run.stdout.splitlines()[-1])
    assert all(name.startswith("hf_specdec") for name in imported), imported
    assert len(imported) <= 6, imported
    assert plain == imported
    assert len(speculative) > 100


def test_help_and_typing_errors_need_no_torch():
    """Of every subcommand, and of every method of `train`."""
    code = """
import contextlib, io, sys
from hf_specdec.cli import build_parser, main
commands = build_parser()._subparsers._group_actions[0].choices
methods = commands["train"]._subparsers._group_actions[0].choices
lines = [["--version"], ["frobnicate"], [], *([name, "--help"] for name in commands), *(["train", name, "--help"] for name in methods)]
for line in lines:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        main(line)
print(len(lines), [name for name in ("torch", "transformers", "numpy", "huggingface_hub", "yaml") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, _, heavy = run.stdout.strip().partition(" ")
    assert int(count) > 20 and heavy == "[]", run.stdout


@pytest.mark.parametrize("order", every_second(ORDERS))
def test_transformers_is_patched_whenever_it_is_imported(order):
    run = subprocess.run([sys.executable, "-c", ORDERS[order] + CHECKS], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", hf_specdec.__all__)
def test_every_public_name_is_there(name):
    assert getattr(hf_specdec, name) is not None
    assert name in dir(hf_specdec)


@pytest.mark.parametrize(
    ("package", "module"), [("serve", "serve.llm"), ("candidate_generators", "candidate_generators.registry")]
)
def test_dir_shows_names_that_are_not_loaded_yet(package, module):
    code = f"import sys, hf_specdec.{package} as package; assert {{*package.__all__}} <= {{*dir(package)}}"
    run = [sys.executable, "-c", f"{code}; assert 'hf_specdec.{module}' not in sys.modules"]
    subprocess.run(run, check=True, timeout=60)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hf_specdec.nothing
