"""Rows of different LoRA adapters in one forward: every row is what `generate()` writes with its adapter alone."""

import logging

import peft
import pytest
import torch
import transformers
from families import deepseek_v4
from oracle import assert_clean, bundled_prompts, load_bundled, ragged, tiny_llama

import hf_specdec
from hf_specdec.config import SpeculativeConfigError
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.core.rows import RowInput
from hf_specdec.kernels.native import library
from hf_specdec.model.adapters import BASE
from hf_specdec.model.native import bind, program
from hf_specdec.model.prepare import ModelOptions, prepare

NAMES = ["first", "second", BASE, "first", "second"]
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def lora(seed, **options):
    torch.manual_seed(seed)
    options = {"target_modules": ["q_proj", "down_proj"], "r": 4, **options}
    return peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)


def with_adapters(model, first=lora, **second):
    adapted = peft.get_peft_model(model, first(1), "first").eval()
    adapted.add_adapter("second", lora(2, **{"target_modules": ["v_proj", "o_proj", "q_proj"], "r": 3, **second}))
    return adapted


def alone(adapted, names, inputs, **arguments):
    """What `generate()` writes for each row with the row's adapter active."""
    written = {}
    for name in dict.fromkeys(names):
        if name == BASE:
            with adapted.disable_adapter():
                written[name] = adapted.generate(**inputs, **arguments)
        else:
            adapted.set_adapter(name)
            written[name] = adapted.generate(**inputs, **arguments)
    return torch.stack([written[name][row] for row, name in enumerate(names)])


@pytest.fixture(scope="module")
def bundled(tiny_tokenizer):
    """The bundled target with two adapters that change its texts without spoiling them, prompts, and their texts."""
    adapted = with_adapters(load_bundled("tiny"))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            weight *= 0.3 if "lora_B" in name else 1
    texts = bundled_prompts(tiny_tokenizer, 5)
    inputs = dict(tiny_tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False))
    expected = alone(adapted, NAMES, inputs, max_new_tokens=24, do_sample=False)
    with adapted.disable_adapter():
        base = adapted.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert [torch.equal(*pair) for pair in zip(expected, base, strict=True)] == [name == BASE for name in NAMES]
    return adapted, inputs, expected


@pytest.mark.parametrize(
    "config",
    [
        {"method": "none"},
        {"method": "none", "native": False},
        {"method": "none", "deterministic": True},
        {**NGRAM, "block_size": 4, "num_blocks": 60},
        pytest.param({"method": "suffix"}, marks=pytest.mark.slow),
        {"method": "draft_model", "model": "tiny-draft", "branching_factors": [2, 2, 1]},
        pytest.param({"method": "draft_model", "early_exit": 2}, marks=pytest.mark.slow),
        {"method": "self_window", "draft_window": 6},
        {"method": "eagle3", "model": "tiny-eagle3", "branching_factors": [3, 2, 1]},
        pytest.param({"method": "medusa", "model": "tiny-medusa"}, marks=pytest.mark.slow),
        {"method": "mtp", "model": "tiny-mtp"},
    ],
    ids=lambda config: " ".join(map(str, config.values())),
)
def test_every_row_has_the_text_of_its_adapter(bundled, config):
    if config["method"] == "suffix":
        pytest.importorskip("arctic_inference")
    adapted, inputs, expected = bundled
    call = {"max_new_tokens": 24, "do_sample": False, "speculative_config": config}
    output = adapted.generate(**inputs, **call, adapter_names=NAMES, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert config["method"] == "none" or output.speculation["num_accepted_tokens"]
    single = {name: each[2:3, inputs["attention_mask"][2].argmax() :] for name, each in inputs.items()}
    assert torch.equal(adapted.generate(**single, **call, adapter_names=NAMES[2:3])[0, -24:], expected[2, -24:])
    assert_clean(adapted.get_base_model())


@pytest.mark.skipif(library() is None, reason="the native library is not compiled")
def test_one_program_serves_all_adapters(bundled, caplog):
    """Also one that is loaded later into the same layers, whose rank is another and whose weights are float64, which torch computes."""
    adapted, inputs, expected = bundled
    call, more = {"max_new_tokens": 24, "do_sample": False}, {"speculative_config": NGRAM}
    hf_specdec.release(adapted.get_base_model())
    bind._made.pop(adapted.get_base_model(), None)
    with caplog.at_level(logging.INFO, "hf_specdec.model.native"):
        for _ in range(2):
            assert torch.equal(adapted.generate(**inputs, **call, **more, adapter_names=NAMES), expected)
        for seed, options in enumerate([{"r": 7, "lora_bias": True, "use_rslora": True}, {"r": 2}]):
            adapted.add_adapter(name := f"later {seed}", lora(seed, **options))
            layer = adapted.get_submodule("base_model.model.model.layers.0.mlp.down_proj")
            if seed:
                layer.lora_A[name].double()
                layer.lora_B[name].double()
            names = [name, *NAMES[1:]]
            wanted = alone(adapted, names, inputs, **call)
            assert torch.equal(adapted.generate(**inputs, **call, **more, adapter_names=names), wanted)
            adapted.delete_adapter(name)
    lines = [line for line in caplog.messages if "native library" in line or "operator by operator" in line]
    assert len(lines) == 1 and lines[0].endswith("runs in the native library on the CPU."), lines


def logits_of(packed, names):
    """Logits of some tokens of four steps, of rows with these adapters; a row without a name is left out."""
    cache, found = packed.new_cache(num_blocks=40, block_size=4, share_prefixes=False), []
    random = torch.Generator().manual_seed(3)
    with torch.no_grad(), packed.active():
        for row, name in enumerate(names):
            if name is not None:
                cache.add(row, adapter=name)
                cache.reserve(row, 30)
        start = 0
        for most, logits in ((9, 2), (1, 1), (7, 3), (1, 1)):
            ids = torch.randint(1, packed.vocab_size, (len(names), most), generator=random).numpy()
            rows = [
                RowInput(row, ids[row], start, logits=logits, adapter=name)
                for row, name in enumerate(names)
                if name is not None
            ]
            found.append(packed.forward(rows, cache).logits.view(len(rows), logits, -1))
            start += most
    return torch.cat(found, 1)


@pytest.mark.skipif(library() is None, reason="the native library is not compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("instruction_set", ["baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16"])
def test_a_row_has_the_same_bits_whatever_adapters_others_have(instruction_set, dtype, monkeypatch):
    options = {"target_modules": ["lm_head", "up_proj", "q_proj"], "lora_bias": True}
    model = with_adapters(tiny_llama().to(dtype), lambda seed: lora(seed, r=37), **options)
    for name, weight in model.named_parameters():
        if ".second." in name:
            weight.data = weight.to(dtype)  # PEFT makes them of float32
    model = model.get_base_model()
    native, operators = prepare(model), prepare(model, ModelOptions(native=False))
    monkeypatch.setattr(program, "_BYTES_PER_THREAD", 1)
    names, loaded, threads = ["first", BASE, "second", "first", "second"], library(), torch.get_num_threads()
    best, wanted = loaded.specdec_instruction_set(), logits_of(operators, names)
    if not loaded.specdec_use(instruction_set.encode()):
        pytest.skip(f"this CPU or build has no {instruction_set}")
    try:
        found = logits_of(native, names)
        (made,) = bind._made[model].values()
        assert not made[2].calls
        for row, name in enumerate(names):
            alone = [name if i == row else None for i in range(5)]
            assert torch.equal(logits_of(native, alone)[0], found[row])
        assert torch.equal(logits_of(native, [BASE] * 5)[1], found[1])
        torch.set_num_threads(3)
        assert torch.equal(logits_of(native, names), found)
    finally:
        loaded.specdec_use(best)
        torch.set_num_threads(threads)
    bound = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 0.12}[dtype]
    assert (found - wanted).norm() < bound * wanted.norm()


def test_equal_prompts_share_nothing(bundled):
    """The adapters' keys differ, so that a shared block would change a text. Rows of one adapter do share blocks."""
    adapted, inputs, _ = bundled
    same = {name: each[:1].repeat(5, 1) for name, each in inputs.items()}
    expected = alone(adapted, NAMES, same, max_new_tokens=24, do_sample=False)
    assert len({tuple(row.tolist()) for row in expected}) == 3
    call = {"max_new_tokens": 24, "do_sample": False, "speculative_config": {**NGRAM, "block_size": 4}}
    assert torch.equal(adapted.generate(**same, **call, adapter_names=NAMES), expected)


@pytest.mark.parametrize("same", [False, True], ids=["five prompts", "one prompt"])
def test_a_seed_draws_the_text_of_the_row_alone(bundled, same):
    adapted, inputs, _ = bundled
    names = ["first", BASE, "second"]
    inputs = {name: (each[:1].repeat(3, 1) if same else each[:3]) for name, each in inputs.items()}
    call = {"max_new_tokens": 12, "do_sample": True}
    texts = []
    for config in ({"method": "none", "seed": 5}, {**NGRAM, "seed": 5}):
        call["speculative_config"] = config
        texts.append(adapted.generate(**inputs, **call, adapter_names=names))
        for row, name in enumerate(names):
            single = {key: each[row : row + 1] for key, each in inputs.items()}
            assert torch.equal(adapted.generate(**single, **call, adapter_names=[name])[0], texts[-1][row])
    assert torch.equal(*texts)


def test_embeddings_heads_and_returned_tensors():
    """LoRA of what reads ids, and of the head, which reads only some of the tokens."""
    adapted = with_adapters(tiny_llama(), target_modules=["embed_tokens", "lm_head", "k_proj"])
    inputs = ragged([6, 3, 9, 20, 5])
    call = {"max_new_tokens": 10, "do_sample": False}
    expected = alone(adapted, NAMES, inputs, **call)
    more = {"return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True}
    for config in (NGRAM, {**NGRAM, "native": False}, {**NGRAM, "prefill_chunk_size": 4}):
        assert torch.equal(adapted.generate(**inputs, **call, adapter_names=NAMES, speculative_config=config), expected)
    output = adapted.generate(**inputs, **call, **more, adapter_names=NAMES, speculative_config=NGRAM)
    assert torch.equal(output.sequences, expected)
    adapted.set_adapter("second")
    plain = adapted.generate(**inputs, **call, **more)
    for step in range(10):
        torch.testing.assert_close(output.logits[step][1], plain.logits[step][1], rtol=1e-3, atol=1e-3)
    found, wanted = (each.hidden_states[0][-1][4, -5:] for each in (output, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_recurrent_layers():
    adapted = with_adapters(load_bundled("tiny-hybrid"))
    inputs = ragged([6, 3, 9, 20, 5], adapted.config.vocab_size)
    call = {"max_new_tokens": 10, "do_sample": False}
    expected = alone(adapted, NAMES, inputs, **call)
    assert torch.equal(adapted.generate(**inputs, **call, adapter_names=NAMES, speculative_config=NGRAM), expected)
    adapted.add_adapter("third", lora(3, target_modules="all-linear"))
    with pytest.raises(UnsupportedModel, match=r"linear_attn\.\w+ does not read"):
        adapted.generate(**inputs, **call, adapter_names=NAMES, speculative_config=NGRAM)


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV4ForCausalLM"), reason="this transformers has no DeepSeek-V4")
def test_compressed_segments():
    adapted = with_adapters(deepseek_v4(), target_modules=["compressor.kv_proj", "kv_proj"])
    inputs = ragged([20, 20, 20, 20, 20], adapted.config.vocab_size)
    call = {"max_new_tokens": 10, "do_sample": False}
    expected = alone(adapted, NAMES, inputs, **call)
    assert torch.equal(adapted.generate(**inputs, **call, adapter_names=NAMES, speculative_config=NGRAM), expected)
    adapted.add_adapter("third", lora(3, target_modules=["weights_proj"]))
    with pytest.raises(UnsupportedModel, match=r"scorer\.weights_proj does not read the tokens in their order"):
        adapted.generate(**inputs, **call, adapter_names=NAMES, speculative_config=NGRAM)


def test_switched_off_adapters_are_not_used(bundled):
    adapted, inputs, expected = bundled
    call = {"max_new_tokens": 24, "do_sample": False, "adapter_names": NAMES}
    with adapted.disable_adapter():
        plain = adapted.generate(**inputs, **call)
        assert torch.equal(adapted.generate(**inputs, **call, speculative_config=NGRAM), plain)
    assert not torch.equal(plain, expected)


def test_names_for_all_returned_sequences():
    """As in PEFT, a name for each row of the batch as the layers see it."""
    adapted = with_adapters(tiny_llama())
    call = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 2, "speculative_config": NGRAM}
    adapted.generate(**ragged([6, 3]), **call, adapter_names=["first", "second", BASE, "first"])
    with pytest.raises(ValueError, match="adapter_names has 2 names for 4 rows"):
        adapted.generate(**ragged([6, 3]), **call, adapter_names=["first", "second"])
    with pytest.raises(ValueError, match="non-existing"):
        adapted.generate(**ragged([6, 3]), **call, adapter_names=["first", "third", BASE, "first"])
    assert not any(module._forward_pre_hooks for module in adapted.modules())


def test_a_refused_call_leaves_no_names_to_the_next():
    adapted, inputs = with_adapters(tiny_llama()), ragged([6, 3])
    call = {"max_new_tokens": 6, "do_sample": False}
    plain = adapted.generate(**inputs, **call)
    for wrong in ({"method": "nothing"}, {**NGRAM, "rejection_sample_method": "?"}):
        with pytest.raises(SpeculativeConfigError):
            adapted.generate(**inputs, **call, adapter_names=["second", "second"], speculative_config=wrong)
        assert not any(module._forward_pre_hooks for module in adapted.modules())
        assert torch.equal(adapted.generate(**inputs, **call, speculative_config=NGRAM), plain)
    with pytest.raises(ValueError, match="num_beams"):
        adapted.generate(**inputs, **call, adapter_names=["second"] * 2, num_beams=2, speculative_config=NGRAM)
    assert not any(module._forward_pre_hooks for module in adapted.modules())


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (lambda seed: lora(seed, use_dora=True), "DoraLinearVariant"),
        (lambda seed: lora(seed, modules_to_save=["lm_head"]), "modules_to_save"),
        (lambda seed: lora(seed, trainable_token_indices=[3, 4]), "trainable_token_indices"),
    ],
    ids=["DoRA", "modules_to_save", "trainable tokens"],
)
def test_adapters_that_cannot_be_mixed_are_named(config, why):
    adapted = with_adapters(tiny_llama(), config)
    call = {**ragged([6, 3]), "max_new_tokens": 4, "do_sample": False, "speculative_config": NGRAM}
    with pytest.raises(UnsupportedModel, match=why):
        adapted.generate(**call, adapter_names=["first", "second"])
    assert not any(module._forward_pre_hooks for module in adapted.modules())
    adapted.set_adapter("first")
    plain = adapted.generate(**{**call, "speculative_config": None})
    assert torch.equal(adapted.generate(**call), plain)


def test_what_cannot_be_combined_with_adapter_names():
    adapted = with_adapters(tiny_llama())
    call = {**ragged([6, 3]), "max_new_tokens": 4, "do_sample": False, "adapter_names": ["first", "second"]}
    with pytest.raises(SpeculativeConfigError, match=r"'compile'.* compiles .* adapter_names"):
        adapted.generate(**call, speculative_config={**NGRAM, "compile": True})
    embeds = adapted.get_input_embeddings()(call.pop("input_ids")) + 1
    with pytest.raises(UnsupportedModel, match="prompts of text"):
        adapted.generate(**call, inputs_embeds=embeds, speculative_config=NGRAM)
    adapted.merge_adapter(["first"])
    with pytest.raises(UnsupportedModel, match="merged adapters"):
        adapted.generate(**ragged([6, 3]), adapter_names=["first", "second"], speculative_config=NGRAM)
