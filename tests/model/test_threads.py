"""Plain `generate()` in another thread, on the model that a decoder is running on: it sees the model as it is."""

import copy
import pickle
import threading

import pytest
import torch
from families import make
from oracle import ragged

import hf_specdec
from hf_specdec.model.threads import FalseInThisThread, FirstLayers, OwnParameters

NUM_CALLS = 6


def race(model, inputs, config, expected, **more):
    """Speculative calls here while another thread generates plainly. Returns how many of that thread's texts were wrong."""
    texts, errors, begun, done = [], [], threading.Event(), threading.Event()

    def plainly():
        try:
            while not done.is_set():
                texts.append(model.generate(**inputs, max_new_tokens=12, do_sample=False))
                begun.set()
        except Exception as error:
            errors.append(error)
            begun.set()

    thread = threading.Thread(target=plainly)
    thread.start()
    begun.wait(60)
    try:
        for _ in range(NUM_CALLS):
            found = model.generate(**inputs, max_new_tokens=12, do_sample=False, speculative_config=config)
            if not more.get("rounds"):
                assert torch.equal(found, expected)
    finally:
        done.set()
        thread.join(60)
    assert not errors and len(texts) > 1
    return sum(not torch.equal(text, expected) for text in texts)


CONFIGS = {
    "ngram": {"method": "ngram"},
    "early exit": {"method": "draft_model", "early_exit": 2},
    "taps": {"method": "eagle3", "model": "tiny-eagle3"},
    "quantized": {"method": "none", "target_quantization": "wint8"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_with_our_changes(tiny_model, tiny_tokenizer, name):
    if name == "quantized":
        pytest.importorskip("torchao")
    inputs = tiny_tokenizer(["Once upon a time there was a"], return_tensors="pt")
    expected = tiny_model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert race(tiny_model, inputs, CONFIGS[name], expected, rounds=name == "quantized") == 0
    hf_specdec.release(tiny_model)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))], ids=["copy", "pickle"]
)
def test_copies_are_of_what_others_see(copied):
    layers, weight = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3)), torch.nn.Parameter(torch.zeros(1))
    found = copied(FirstLayers(layers, 1))
    assert type(found) is torch.nn.ModuleList and len(found) == 3
    assert copied(FalseInThisThread()) is True
    found = copied(OwnParameters({"weight": weight}, {"weight": torch.nn.Parameter(torch.ones(1))}))
    assert type(found) is dict and not found["weight"].any()


@pytest.mark.parametrize("family", ["Gemma2", "gpt-oss", "BLOOM", "MPT", "Falcon ALiBi", "Llama4"])
def test_models_of_other_kinds(family):
    """Soft-capping and sinks, which sdpa leaves out; biases by position; recurrent states."""
    model = make(family, attn_implementation="eager")
    inputs = ragged([6, 3])
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert race(model, inputs, {"method": "ngram"}, expected) == 0
