"""extract_hidden_states: files of features that equal transformers' own, one per request."""

import json

import pytest
import torch
from oracle import assert_clean, ragged
from safetensors import safe_open

from hf_specdec import SpeculativeConfigError
from hf_specdec.core.names import CACHE


def read(path):
    with safe_open(path, framework="pt") as f:
        return f.get_tensor("hidden_states"), f.get_tensor("token_ids"), f.metadata()


@pytest.mark.parametrize("chunk", [2048, 4], ids=["one chunk", "chunks of 4"])
def test_files_hold_what_transformers_computes(model, tmp_path, chunk):
    layers, lengths = [0, 1, 2, -1], [5, 17, 9]
    config = {
        "method": "extract_hidden_states", "output_dir": str(tmp_path / "new" / "folder"), "prefill_chunk_size": chunk,
        "eagle_aux_hidden_state_layer_ids": layers,
    }  # fmt: skip
    inputs = ragged(lengths)
    plain = model.generate(**inputs, max_new_tokens=6)
    output = model.generate(**inputs, max_new_tokens=6, speculative_config=config)
    assert torch.equal(output, plain)
    paths = sorted((tmp_path / "new" / "folder").iterdir())
    assert [path.name for path in paths] == ["00000000.safetensors", "00000001.safetensors", "00000002.safetensors"]
    texts = {tuple(row[-length - 6 : -1].tolist()): length for row, length in zip(output, lengths, strict=True)}
    for path in paths:
        hidden, tokens, metadata = read(path)
        assert texts.pop(tuple(tokens.tolist())) == int(metadata["prompt_length"])
        assert hidden.shape == (len(tokens), 4, 32) and json.loads(metadata["layer_ids"]) == [0, 1, 2, 3]
        with torch.no_grad():
            reference = model(tokens[None], output_hidden_states=True).hidden_states
        for i, layer in enumerate(layers):
            torch.testing.assert_close(hidden[:, i], reference[layer][0], atol=1e-4, rtol=1e-4)
    assert not texts
    assert_clean(model)


def test_files_of_earlier_calls_are_kept(model, tmp_path):
    config = {"method": "extract_hidden_states", "output_dir": str(tmp_path)}
    for count in (1, 2):
        model.generate(**ragged([7]), max_new_tokens=2, speculative_config=config)
        assert len(list(tmp_path.iterdir())) == count
        assert_clean(model)  # also forgets the writer: the next call makes another
    hidden, tokens, _ = read(tmp_path / "00000001.safetensors")
    assert hidden.shape == (8, 1, 32) and tokens.shape == (8,)


def test_equal_prompts_and_cached_prefixes_are_read_again(model, tmp_path):
    """Sharing would leave tokens without features."""
    config = {"method": "extract_hidden_states", "output_dir": str(tmp_path), "block_size": 4}
    inputs = ragged([20])
    first = model.generate(**inputs, max_new_tokens=3, return_dict_in_generate=True)
    both = {name: value.repeat(2, 1) for name, value in inputs.items()}
    model.generate(**both, max_new_tokens=3, speculative_config=config)
    longer = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    model.generate(**longer, **{CACHE: first.past_key_values}, max_new_tokens=2, speculative_config=config)
    assert [read(path)[0].shape[0] for path in sorted(tmp_path.iterdir())] == [22, 22, 24]
    assert_clean(model)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "'output_dir'.* is missing"),
        ({"output_dir": "x", "eagle_aux_hidden_state_layer_ids": [4]}, "names .4.; the target has 3 layers"),
        ({"output_dir": "x", "eagle_aux_hidden_state_layer_ids": []}, "must be a list"),
    ],
)
def test_bad_configurations(model, tmp_path, monkeypatch, values, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpeculativeConfigError, match=message):
        model.generate(
            **ragged([5]), max_new_tokens=2, speculative_config={"method": "extract_hidden_states", **values}
        )
    assert not list(tmp_path.iterdir())
    assert_clean(model)
