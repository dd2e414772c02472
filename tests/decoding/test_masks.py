"""Masked tokens anywhere but at a row's end: left padding, holes in a chat, a batch whose rows ended early going on."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from hf_specdec.core.names import CACHE
from hf_specdec.core.rows import RowInput
from hf_specdec.model import packed_batch

VOCAB = 48
METHODS = [
    {"method": "none"},
    {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    {"method": "draft_model", "early_exit": 1, "branching_factors": [3, 2]},
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.5, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def holes():
    torch.manual_seed(1)
    ids = torch.randint(2, VOCAB, (3, 14))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[1, 4:9] = 0
    mask[2, [0, 1, 6, 8, 9]] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m["method"])
def test_holes_in_the_mask(model, holes, method):
    """Tokens, scores, hidden states and the cache are those of plain `generate()`."""
    arguments = {
        **holes, "max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_scores": True,
        "output_hidden_states": True, "logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)]),
    }  # fmt: skip
    expected = model.generate(**arguments)
    actual = model.generate(**arguments, speculative_config=method)
    assert torch.equal(actual.sequences, expected.sequences)
    for a, b in zip(actual.scores, expected.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    real = holes["attention_mask"].bool()
    for layer_a, layer_b in zip(actual.hidden_states[0], expected.hidden_states[0], strict=True):
        torch.testing.assert_close(layer_a[real], layer_b[real], atol=1e-4, rtol=0)
    for step_a, step_b in zip(actual.hidden_states[1:], expected.hidden_states[1:], strict=True):
        torch.testing.assert_close(step_a[-1], step_b[-1], atol=1e-4, rtol=0)
    new = torch.ones(3, 23, dtype=torch.bool)
    for a, b in zip(actual.past_key_values.layers, expected.past_key_values.layers, strict=True):
        seen = torch.cat([real, new], dim=1)
        torch.testing.assert_close(a.keys.transpose(1, 2)[seen], b.keys.transpose(1, 2)[seen], atol=1e-4, rtol=0)
        torch.testing.assert_close(a.values.transpose(1, 2)[seen], b.values.transpose(1, 2)[seen], atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m["method"])
def test_going_on_after_rows_ended_early(model, holes, method):
    """A second turn behind a ragged first one, with the first one's cache."""
    first = model.generate(
        **holes, max_new_tokens=10, do_sample=False, return_dict_in_generate=True, eos_token_id=[5, 9, 11, 17, 20, 33],
        speculative_config=method,
    )  # fmt: skip
    torch.manual_seed(2)
    turn = torch.randint(2, VOCAB, (3, 4))
    answered = first.sequences[:, 14:]
    mask = torch.cat([holes["attention_mask"], (answered != 0).long(), torch.ones_like(turn)], dim=1)
    assert (mask[:, 14:] == 0).any(), "some row must have ended early"
    ids = torch.cat([first.sequences, turn], dim=1)
    arguments = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**arguments)
    assert torch.equal(model.generate(**arguments, speculative_config=method), expected)
    resumed = model.generate(**arguments, speculative_config=method, **{CACHE: first.past_key_values})
    assert torch.equal(resumed, expected)


def test_pad_tokens_inside_a_prompt(model):
    """Without a mask transformers masks pad tokens wherever they stand; so it is here."""
    ids = torch.tensor([[7, 0, 8, 9, 0, 3]])
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    actual = model.generate(ids, max_new_tokens=12, do_sample=False, speculative_config=METHODS[1])
    assert torch.equal(actual, expected)


def test_ids_of_a_tensor_are_read_without_numpys_own_conversion(monkeypatch):
    """numpy 2.2 warns of that conversion in every step."""

    def converts(*args, **kwargs):
        raise AssertionError("numpy converts the tensor")

    monkeypatch.setattr(torch.Tensor, "__array__", converts)
    ids = np.zeros(3, dtype=np.int64)
    assert packed_batch.write_ids([RowInput(0, torch.tensor([4, 5]), 0, drafts=np.array([6]))], ids) == []
    assert ids.tolist() == [4, 5, 6]
