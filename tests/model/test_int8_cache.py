"""Keys and values in int8 (`kv_cache_dtype`): the text is the quantized target's, whatever drafts, batches, pools and prefixes do."""

import copy

import pytest
import torch
from encoders import of as encoder_decoder
from families import make, make_for_pages
from oracle import load_bundled, ragged

import hf_specdec
from hf_specdec.candidate_generators import parse_config
from hf_specdec.config import SpeculativeConfigError
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.core.rows import RowInput
from hf_specdec.integration import get_decoder
from hf_specdec.kernels.cache import reference
from hf_specdec.kernels.cache.reference import dequantized, quantized
from hf_specdec.kernels.native import library
from hf_specdec.model.prepare import ModelOptions, prepare
from hf_specdec.serve import LLM, SamplingParams

INT8 = {"kv_cache_dtype": "int8"}
NONE = {"method": "none", **INT8}
DRAFTED = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft model": {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3},
    "draft tree": {"method": "draft_model", "model": "tiny-draft", "branching_factors": [2, 2, 1]},
    "eagle3 tree": {"method": "eagle3", "model": "tiny-eagle3", "top_k": 3, "total_tokens": 8, "num_speculative_tokens": 3},
    "eagle3 in chunks": {"method": "eagle3", "model": "tiny-eagle3", "prefill_chunk_size": 3, "block_size": 4},
    "waiting rows": {"method": "ngram", "block_size": 4, "num_blocks": 24},
    "own window": {"method": "self_window", "draft_window": 6, "draft_sinks": 2},
    "combined": {"method": "hybrid", "first": {"method": "ngram"}, "second": {"method": "mtp", "model": "tiny-mtp"}},
}  # fmt: skip
WAYS = {"native": {}, "operators": {"native": False}}
TEXTS = [
    "Once upon a time", "Tom and Lily went to the park. Tom and Lily", "The dog was happy. The dog was", "One day, a",
    "Once upon a time there was a little girl. Once upon a time there was a",
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tiny_tokenizer):
    """Five prompts of unlike lengths."""
    return tiny_tokenizer(TEXTS, return_tensors="pt", padding=True)


def decode(model, inputs, config, **call):
    call = {"max_new_tokens": 24, "do_sample": False, **call}
    return model.generate(**inputs, **call, speculative_config=config, return_dict_in_generate=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DRAFTED)
def test_drafts_do_not_change_the_text(tiny_model, inputs, name, way):
    wanted = decode(tiny_model, inputs, NONE | WAYS[way]).sequences
    output = decode(tiny_model, inputs, DRAFTED[name] | INT8 | WAYS[way])
    assert torch.equal(output.sequences, wanted)
    assert output.speculation.num_accepted_tokens > 0
    hf_specdec.release(tiny_model)


@pytest.mark.parametrize("name", ["ngram", "draft tree"])
def test_tokens_of_one_forward_see_what_is_stored(tiny_model, inputs, monkeypatch, name):
    """With four magnitudes the text is another one, and drafts, which are read beside their parents, keep it."""

    def coarse(states):
        scales = states.abs().amax(dim=2, keepdim=True).clamp(min=1e-30) / 3
        return (states / scales).round().to(torch.int8), scales

    monkeypatch.setattr(reference, "quantized", coarse)
    auto = decode(tiny_model, inputs, {"method": "none"}).sequences
    wanted, found = (decode(tiny_model, inputs, each | INT8 | {"native": False}) for each in (NONE, DRAFTED[name]))
    assert torch.equal(found.sequences, wanted.sequences) and found.speculation.num_accepted_tokens > 0
    assert not torch.equal(wanted.sequences, auto)


def test_deterministic(tiny_model, inputs):
    """Attention by query reads what the same bits stand for, in bfloat16, too."""
    model, few = copy.deepcopy(tiny_model).bfloat16(), {name: rows[:3, -9:] for name, rows in inputs.items()}
    configs = [each | INT8 | {"deterministic": True} for each in (NONE, DRAFTED["draft tree"])]
    texts = [decode(model, few, config, max_new_tokens=8).sequences for config in configs]
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["ngram", "draft tree"])
def test_a_seed_gives_the_same_text(tiny_model, inputs, name):
    call = {"do_sample": True, "temperature": 0.9}
    texts = [decode(tiny_model, inputs, each | INT8 | {"seed": 3}, **call).sequences for each in (NONE, DRAFTED[name])]
    assert torch.equal(*texts)
    assert not torch.equal(texts[0], decode(tiny_model, inputs, NONE | {"seed": 4}, **call).sequences)


@pytest.mark.parametrize("name", ["ngram", "eagle3 tree"])
def test_requests_that_are_preempted_and_share_prefixes(tiny_model, tiny_tokenizer, name):
    """In `LLM`, which reads a preempted text again, and finds the pages of another's prefix."""
    params = SamplingParams(temperature=0, max_tokens=24)
    texts = {}
    for config, blocks in ((None, None), (None, 14), (DRAFTED[name], 14)):
        keys = {**(config or {"method": "none"}), "block_size": 4, "num_blocks": blocks}
        llm = LLM(tiny_model, tiny_tokenizer, keys, max_model_len=96, max_num_seqs=4, kv_cache_dtype="int8")
        outputs = [llm.generate(TEXTS, params, use_tqdm=False) for _ in range(2)]
        texts[config is None, blocks] = [[each.outputs[0].token_ids for each in output] for output in outputs]
        assert llm.engine.decoder.cache.is_quantized
        assert blocks is None or llm.engine.scheduler.num_preemptions > 0
        assert blocks is not None or sum(each.num_cached_tokens for each in outputs[1]) > 0
        llm.close()
    wanted = texts[True, None][0]
    assert all(run == wanted for runs in texts.values() for run in runs)


def test_memory_and_bits_of_pools(tiny_model):
    """A byte for each number, and four for each head; in the first layer exactly what the definition makes of unquantized pools."""
    heads, width = tiny_model.config.num_key_value_heads, tiny_model.config.head_dim
    layers, ids = tiny_model.config.num_hidden_layers, torch.arange(3, 40).numpy()
    ways = [{}, {"native": False}]
    for way in ways:
        pools = []
        for dtype, size in (("auto", 4 * width), ("int8", width + 4)):
            target = prepare(tiny_model, ModelOptions(kv_cache_dtype=dtype, **way))
            assert target.bytes_per_token() == 2 * layers * heads * size
            cache = target.new_cache(4, 16)
            cache.add(0)
            cache.reserve(0, len(ids))
            with target.active(), torch.no_grad():
                target.forward([RowInput(0, ids, 0)], cache)
            pools.append([state[: len(ids)] for state in cache.layers[0].states])
        for i, plain in enumerate(pools[0]):
            ints, scales = quantized(plain)
            assert torch.equal(pools[1][i], ints) and torch.equal(pools[1][2 + i], scales)
            error = dequantized(ints, scales, plain.dtype) - plain
            assert (error.abs() <= scales * 0.5001).all() and error.abs().max() > 0


@pytest.mark.parametrize("family", ["BLOOM", "CodeGen", "Falcon", "Gemma2", "gpt-oss", "Mistral"])
def test_families(family):
    """Gathered keys, one head, softcaps, sinks, windows; trees that are mostly rejected move pages."""
    model = make_for_pages(family)
    rows = ragged([7, 12, 3, 9, 5], vocab_size=model.config.vocab_size)
    plain = model.generate(**rows, max_new_tokens=20, do_sample=False)
    wanted = decode(model, rows, NONE, max_new_tokens=20).sequences
    tree = {"method": "token_recycling", "block_size": 4, "prefill_chunk_size": 5}
    for config in (DRAFTED["ngram"], tree):
        assert torch.equal(decode(model, rows, config | INT8, max_new_tokens=20).sequences, wanted)
    assert wanted.shape == plain.shape


def test_prompts_of_embeddings_give_way_with_their_bits(tiny_model, inputs, monkeypatch):
    """They cannot be read again: their int8 keys wait in host memory. What is returned is in the model's dtype."""
    given = {
        "inputs_embeds": tiny_model.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
    }
    decoders, preempt = hf_specdec.decoding.SpeculativeDecoder, hf_specdec.decoding.SpeculativeDecoder.preempt
    preempted = []
    monkeypatch.setattr(decoders, "preempt", lambda self, seq: preempted.append(seq.row) or preempt(self, seq))
    wanted = decode(tiny_model, given, NONE)
    tight = {"block_size": 4, "num_blocks": 20}
    for config in (NONE, DRAFTED["ngram"] | INT8):
        output = decode(tiny_model, given, config | tight)
        assert torch.equal(output.sequences, wanted.sequences) and preempted
        for ours, theirs in zip(output.past_key_values.layers, wanted.past_key_values.layers, strict=True):
            assert ours.keys.dtype == torch.float32
            torch.testing.assert_close(ours.keys[:, :, -20:], theirs.keys[:, :, -20:], atol=1e-2, rtol=1e-2)
        preempted.clear()


def test_one_line_says_which_path_runs(tiny_model):
    packed = get_decoder(tiny_model, parse_config(NONE)).target
    with packed.active():
        assert (packed.native is not None and packed.native.most_tokens > 0) == (library() is not None)
    assert packed.new_cache(1, 16).is_quantized and not packed.new_cache(1, 16, is_trial=True).is_quantized


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda: make("DeepSeek-V3"), "DeepseekV3ForCausalLM, which caches compressed keys"),
        (lambda: load_bundled("tiny-hybrid"), ", whose layers have a recurrent state"),
        (lambda: encoder_decoder("bart"), "BartForConditionalGeneration, an encoder-decoder model"),
    ],
    ids=["latent", "recurrent", "encoder-decoder"],
)
def test_refused(target, message):
    with pytest.raises(UnsupportedModel, match=f"kv_cache_dtype 'int8' cannot be used with .*{message}. Leave"):
        prepare(target(), ModelOptions(kv_cache_dtype="int8"))


def test_bad_values(tiny_model):
    with pytest.raises(SpeculativeConfigError, match=r"'kv_cache_dtype'.* must be one of 'auto', 'int8', not 'fp8'"):
        parse_config({"method": "none", "kv_cache_dtype": "fp8"})
    with pytest.raises(SpeculativeConfigError, match="must be one of 'auto', 'int8', not 'int4'"):
        LLM(tiny_model, kv_cache_dtype="int4")
