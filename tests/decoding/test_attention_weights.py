"""`output_attentions`: the weights that plain generate() returns, from two forwards at the end."""

import pytest
import torch
import transformers
from encoders import NGRAM, build, inputs_for
from oracle import VOCAB, ragged, tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM

ALL = {"output_attentions": True, "return_dict_in_generate": True, "do_sample": False, "num_beams": 1}
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
DECODERS = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6, "head_dim": 8},
    "bloom": {"n_head": 4, "n_layer": 2},
}


def assert_same_weights(model, inputs, names, **options):
    plain, ours = (model.generate(**inputs, **ALL, **options, speculative_config=config) for config in (None, NGRAM))
    assert torch.equal(ours.sequences, plain.sequences)
    for name in names:
        theirs = [plain[name]] if name == "encoder_attentions" else plain[name]
        mine = [ours[name]] if name == "encoder_attentions" else ours[name]
        assert len(theirs[0]) and [len(step) for step in mine] == [len(step) for step in theirs], name
        for step, expected in zip(mine, theirs, strict=True):
            for a, b in zip(step, expected, strict=True):
                assert a.shape == b.shape and torch.allclose(a, b, atol=1e-4), name


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("num_new", [1, 9])
def test_decoders(kind, num_new):
    """Ragged rows, of which one ends early, and layers whose cache forgets."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **DECODERS[kind]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    inputs = ragged([8, 5, 7])
    ends = model.generate(**inputs, max_new_tokens=9, do_sample=False)[1, 11].item() if num_new > 1 else None
    assert_same_weights(model, inputs, ["attentions"], max_new_tokens=num_new, eos_token_id=ends, pad_token_id=0)


@pytest.mark.parametrize("family", ["bart", "t5", "whisper"])
def test_encoder_decoders(family):
    if family == "t5" and transformers.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 returns none of T5's")
    model = build(family, seed=1)
    model.set_attn_implementation("eager")
    names = ["decoder_attentions", "cross_attentions", "encoder_attentions"]
    assert_same_weights(model, inputs_for(family), names, max_new_tokens=9)


def test_bad_calls():
    inputs, calls = ragged([8, 5]), {**ALL, "max_new_tokens": 4, "speculative_config": NGRAM}
    with pytest.raises(ValueError, match="attn_implementation='eager' only"):
        tiny_llama(attn_implementation="sdpa").generate(**inputs, **calls)
    model = tiny_llama(attn_implementation="eager")
    with pytest.raises(ValueError, match="'int8' rounds the keys"):
        model.generate(**inputs, **{**calls, "speculative_config": {**NGRAM, "kv_cache_dtype": "int8"}})
    embeds = torch.randn(2, 8, 32)
    with pytest.raises(ValueError, match="must be token ids without a cache"):
        model.generate(inputs_embeds=embeds, attention_mask=inputs["attention_mask"], **calls)
    assert "attentions" not in model.generate(**inputs, **{**calls, "output_attentions": False})
