"""`hf_specdec.inflation.inflate_eagle3`: a bigger EAGLE-3 head drafts for the bigger target what the small one drafts for the small."""

import json

import pytest
import torch
from transformers import LlamaConfig

import hf_specdec
from hf_specdec.inflation import inflate, inflate_eagle3
from hf_specdec.inflation.tensors import LAYER_IDS, tapped

HEAD = hf_specdec.bundled("tiny-eagle3")
SIZES = {"hidden_size": 320, "num_hidden_layers": 9, "intermediate_size": 800, "num_attention_heads": 16}
SIZES |= {"num_key_value_heads": 8, "head_dim": 64}


def decode(model, head, ids, **more):
    config = {"model": str(head), "num_speculative_tokens": 4, **more}
    return model.generate(
        ids, max_new_tokens=24, do_sample=False, speculative_config=config, return_dict_in_generate=True
    )


@pytest.mark.parametrize("vocab_size", [None, 4200])
def test_drafts_are_the_same(tiny_model, tiny_tokenizer, tmp_path, vocab_size):
    big = inflate(tiny_model, **SIZES, vocab_size=vocab_size)
    inflate_eagle3(HEAD, tiny_model.config, big.config, tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert {name: config[name] for name in SIZES if name != "num_hidden_layers"}.items() <= SIZES.items()
    text = tiny_tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 12 + 35?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tiny_tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    small, grown = decode(tiny_model, HEAD, ids), decode(big, tmp_path, ids)
    hf_specdec.release(tiny_model)
    assert torch.equal(grown.sequences, small.sequences)
    for key in ("num_steps", "num_draft_tokens", "num_accepted_tokens"):
        assert grown.speculation[key] == small.speculation[key]
    assert small.speculation["num_accepted_tokens"] > 5


def test_layers_read_stay_where_they_were():
    """Behind 2, 4 and 7 of 7 layers is behind layers 1, 3 and 6, which are now 4, 13 and 27 of 32."""
    assert tapped([2, 4, 7], 7, 32)[LAYER_IDS] == [5, 14, 28]
    assert tapped([0, 1], 7, 7)[LAYER_IDS] == [0, 1]


def test_what_does_not_fit(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="is not an EAGLE-3 head"):
        inflate_eagle3(hf_specdec.bundled("tiny-eagle"), tiny_model.config, tiny_model.config, tmp_path)
    small = LlamaConfig(**{**tiny_model.config.to_dict(), "intermediate_size": 100})
    with pytest.raises(ValueError, match="intermediate_size=100 is smaller than the head's 768"):
        inflate_eagle3(HEAD, tiny_model.config, small, tmp_path)
    with pytest.raises(ValueError, match="give the head's own target"):
        inflate_eagle3(HEAD, LlamaConfig(hidden_size=64), tiny_model.config, tmp_path)
