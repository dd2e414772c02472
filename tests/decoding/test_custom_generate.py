"""The recipe that can be pushed to the Hub, used from its folder."""

import importlib.metadata
import shutil

import pytest
import torch
import transformers.generation.utils as generation_utils
from oracle import ragged, tiny_llama
from paths import ROOT
from transformers import LlamaForCausalLM

import hf_specdec

HUB = ROOT / "hub"


@pytest.fixture(autouse=True)
def requirements_met(monkeypatch):
    """The recipe requires the package by its distribution name, which a bare checkout does not have."""
    try:
        importlib.metadata.version("hf-specdec")
    except importlib.metadata.PackageNotFoundError:
        monkeypatch.setattr(generation_utils, "check_python_requirements", lambda *args, **kwargs: None)


@pytest.fixture(params=[True, False], ids=["installed", "not-installed"])
def plugin(request):
    """With and without the plugin installed; the recipe works either way."""
    if not request.param:
        hf_specdec.uninstall()
    yield
    hf_specdec.install()


def test_recipe_gives_plain_output(plugin):
    model, inputs = tiny_llama(), ragged([7, 4, 9])
    plain = model.generate(**inputs, max_new_tokens=12)
    for config in ({"method": "ngram", "prompt_lookup_min": 1}, '{"method": "none"}', None):
        output = model.generate(
            **inputs, max_new_tokens=12, return_dict_in_generate=True, speculative_config=config,
            custom_generate=str(HUB), trust_remote_code=True,
        )  # fmt: skip
        assert torch.equal(output.sequences, plain)
        assert output.speculation.num_new_tokens == 3 * 12


def test_recipe_keeps_the_streamer():
    class Recorder:
        tokens: list[int] = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.tokens.append(-1)

    model, inputs, streamer = tiny_llama(), ragged([7]), Recorder()
    output = model.generate(
        **inputs, max_new_tokens=6, streamer=streamer, custom_generate=str(HUB), trust_remote_code=True
    )
    assert streamer.tokens == [*output[0].tolist(), -1]


def test_recipe_needs_trust():
    with pytest.raises(ValueError, match="trust_remote_code"):
        tiny_llama().generate(**ragged([4]), max_new_tokens=2, custom_generate=str(HUB), trust_remote_code=False)


def test_model_repository_that_carries_the_recipe(tmp_path):
    """transformers then replaces the instance's `generate`, which must not make ours call itself."""
    model, inputs = tiny_llama(), ragged([7])
    model.save_pretrained(tmp_path)
    shutil.copytree(HUB / "custom_generate", tmp_path / "custom_generate")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert "generate" in vars(loaded)
    output = loaded.generate(**inputs, max_new_tokens=6, return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(**inputs, max_new_tokens=6))
    assert output.speculation.num_steps <= 6


def test_recipe_has_the_tag_the_hub_looks_for():
    text = (HUB / "README.md").read_text()
    assert text.startswith("---\n") and "- custom_generate" in text.split("---")[1]
    assert (HUB / "custom_generate" / "requirements.txt").read_text().split() == ["hf-specdec"]
