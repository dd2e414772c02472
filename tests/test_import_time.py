"""`import hf_specdec` brings little besides transformers' own generation code.

Modules are counted: a stopwatch would measure the neighbours.
"""

import json
import subprocess
import sys

import pytest

import hf_specdec

STAGES = """
import json, sys
import torch, transformers
from transformers.generation import GenerationMixin

def new(before):
    return sorted(set(sys.modules) - before)

before = set(sys.modules)
import hf_specdec
imported = new(before)

from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(config)
model.generate(torch.tensor([[1, 2]]), max_new_tokens=1)
plain = [name for name in new(before) if name.startswith("hf_specdec")]

model.generate(torch.tensor([[1, 2]]), max_new_tokens=1, speculative_config={"method": "none"})
speculative = [name for name in new(before) if name.startswith("hf_specdec")]
print(json.dumps([imported, plain, speculative]))
"""


def test_the_import_brings_the_plugin_only():
    """Plain calls bring nothing more; the first call that speculates brings the rest, so the count can tell."""
    run = subprocess.run([sys.executable, "-c", STAGES], capture_output=True, text=True, check=True)
    imported, plain, speculative = json.loads(run.stdout.splitlines()[-1])
    assert [name for name in imported if not name.startswith("hf_specdec")] == []
    assert len(imported) <= 6, imported
    assert plain == imported
    assert len(speculative) > 100


@pytest.mark.parametrize("name", hf_specdec.__all__)
def test_every_public_name_is_there(name):
    assert getattr(hf_specdec, name) is not None
    assert name in dir(hf_specdec)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hf_specdec.nothing
