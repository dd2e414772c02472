"""The plugin: what it changes in transformers, how a configuration reaches it, what it works with."""

import copy
import gc
import inspect
import io
import json
import pickle
import pkgutil
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import accelerate
import peft
import pytest
import torch
import transformers.generation.utils as generation_utils
from oracle import assert_clean, drafter_of, ragged, tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline
from transformers.generation import GenerationMixin

import hf_specdec
from hf_specdec import integration
from hf_specdec.candidate_generators.draft_model import generator as drafter_loading
from hf_specdec.core.errors import UnsupportedModel

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture
def uninstalled():
    hf_specdec.uninstall()
    yield
    hf_specdec.install()


def attributes():
    """Everything the plugin touches, by identity."""
    config = {k: v for k, v in vars(GenerationConfig).items() if k != "__slotnames__"}  # which copy.copy leaves there
    return (
        dict(vars(GenerationMixin)), config, dict(generation_utils.GENERATION_MODES_MAPPING),
        inspect.getattr_static(GenerationMixin, "generate_batch"),
    )  # fmt: skip


def tokens_and_speculation(model, **kwargs):
    output = model.generate(**kwargs, return_dict_in_generate=True)
    return output.sequences, getattr(output, "speculation", None)


# ---- install and uninstall ------------------------------------------------------------------------------------------


def test_uninstall_restores_the_very_same_objects(uninstalled, model):
    before = attributes()
    hf_specdec.install()
    hf_specdec.install()
    assert attributes() != before
    model.generate(**ragged([5]), max_new_tokens=2, speculative_config=NGRAM)
    hf_specdec.uninstall()
    hf_specdec.uninstall()
    after = attributes()
    for old, new in zip(before[:3], after[:3], strict=True):
        assert old.keys() == new.keys() and all(old[key] is new[key] for key in old)
    assert before[3] is after[3]
    with pytest.raises(ValueError, match="speculative_config"):
        model.generate(**ragged([5]), max_new_tokens=2, speculative_config=NGRAM)


def test_import_alone_installs():
    code = (
        "import hf_specdec, transformers.generation.utils as u; from transformers import GenerationConfig;"
        "assert 'specdec' in u.GENERATION_MODES_MAPPING;"
        "assert GenerationConfig(speculative_config={'method': 'ngram'}).get_generation_mode() == 'specdec'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(hf_specdec.__file__).parents[1])


def test_explicit_call_leaves_transformers_unpatched(uninstalled, model):
    before = attributes()
    inputs = ragged([5, 8])
    plain = model.generate(**inputs, max_new_tokens=8)
    output = hf_specdec.generate(
        model, **inputs, max_new_tokens=8, speculative_config=NGRAM, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, plain) and output.speculation.num_new_tokens == 16
    assert torch.equal(
        hf_specdec.generate(model, inputs["input_ids"][1:], max_new_tokens=8, speculative_config=NGRAM), plain[1:]
    )
    with pytest.raises(hf_specdec.SpeculativeConfigError):
        hf_specdec.generate(model, **inputs, max_new_tokens=8, speculative_config={"method": "nrgam"})
    assert [list(each) for each in attributes()[:3]] == [list(each) for each in before[:3]]


def test_explicit_call_survives_an_install_meanwhile(uninstalled, model):
    class Installer:
        def put(self, value):
            hf_specdec.install()

        def end(self):
            pass

    hf_specdec.generate(model, **ragged([5]), max_new_tokens=3, speculative_config=NGRAM, streamer=Installer())
    model.generate(**ragged([5]), max_new_tokens=3, speculative_config=NGRAM)


@pytest.mark.parametrize(
    "arguments", [{}, {"do_sample": True}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=str
)
def test_calls_without_speculation_take_the_same_path(model, monkeypatch, arguments):
    """Same decoding method with the same arguments as without the plugin, same result, and none of our code."""
    name = (
        "_beam_search"
        if "num_beams" in arguments
        else "_assisted_decoding"
        if "prompt_lookup_num_tokens" in arguments
        else "_sample"
    )
    original, calls = getattr(GenerationMixin, name), []

    def spy(self, *args, **kwargs):
        calls.append((len(args), sorted(kwargs)))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, name, spy)
    monkeypatch.setattr(integration, "parse_config", None)

    def run():
        torch.manual_seed(5)
        return model.generate(**ragged([6]), max_new_tokens=8, **arguments)

    with_plugin = run()
    hf_specdec.uninstall()
    try:
        without = run()
    finally:
        hf_specdec.install()
    assert torch.equal(with_plugin, without)
    assert len(calls) == 2 and calls[0] == calls[1]


def test_signature_and_mode_of_other_configs_are_unchanged():
    assert GenerationConfig().get_generation_mode() == "greedy_search"
    assert "speculative_config" not in GenerationConfig().to_dict()
    assert "speculative_config" not in GenerationConfig().to_diff_dict()


# ---- how a configuration arrives ------------------------------------------------------------------------------------


def test_forms_of_a_configuration(model, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(NGRAM))
    inputs = ragged([6, 3])
    plain = model.generate(**inputs, max_new_tokens=6)
    for form in (NGRAM, json.dumps(NGRAM), str(path), path, hf_specdec.parse_config(NGRAM), "ngram", "naive"):
        sequences, speculation = tokens_and_speculation(model, **inputs, max_new_tokens=6, speculative_config=form)
        assert torch.equal(sequences, plain) and speculation.num_new_tokens == 12
        config = GenerationConfig(max_new_tokens=6, speculative_config=form)
        assert tokens_and_speculation(model, **inputs, generation_config=config)[1] is not None


def test_a_call_parses_its_configuration_once(model, monkeypatch):
    """And methods are discovered once per process."""
    parse_config, parsed = integration.parse_config, []
    monkeypatch.setattr(integration, "parse_config", lambda value: parsed.append(value) or parse_config(value))
    hf_specdec.available_methods()
    monkeypatch.setattr(pkgutil, "iter_modules", None)
    values, carrier = dict(NGRAM), GenerationConfig(max_new_tokens=4, speculative_config=NGRAM)
    model.generate(**ragged([6, 3]), max_new_tokens=4, speculative_config=values)
    assert parsed == [NGRAM] and values == NGRAM
    model.generate(**ragged([6, 3]), generation_config=carrier)
    assert parsed == [NGRAM, NGRAM] and carrier.speculative_config == NGRAM


def test_empty_configuration_is_an_error_and_none_is_plain(model):
    with pytest.raises(hf_specdec.SpeculativeConfigError, match="needs a 'method'"):
        model.generate(**ragged([5]), max_new_tokens=2, speculative_config={})
    assert tokens_and_speculation(model, **ragged([5]), max_new_tokens=2, speculative_config=None)[1] is None


def test_generation_config_carries_it(model, tmp_path):
    inputs = ragged([6, 3])
    carrier = GenerationConfig(max_new_tokens=6, speculative_config=NGRAM)
    carrier.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert loaded.speculative_config == NGRAM and hash(loaded) and repr(loaded)
    for config in (carrier, loaded, copy.deepcopy(loaded)):
        assert tokens_and_speculation(model, **inputs, generation_config=config)[1] is not None
    assert tokens_and_speculation(model, **inputs, generation_config=carrier, speculative_config=None)[1] is None
    assert carrier.speculative_config == NGRAM


@pytest.mark.parametrize("value", [NGRAM, json.dumps(NGRAM)], ids=["dict", "json"])
def test_model_carries_it_and_survives_save_and_load(tmp_path, value):
    """Also where the generation config was derived from the model's, which transformers derives again after loading."""
    model = tiny_llama()
    assert model.generation_config._from_model_config
    model.generation_config.speculative_config = value
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.speculative_config == value
    inputs = ragged([6, 3])
    for each in (model, loaded):
        assert tokens_and_speculation(each, **inputs, max_new_tokens=4)[1] is not None
        assert tokens_and_speculation(each, **inputs, max_new_tokens=4, speculative_config=None)[1] is None
        assert (
            tokens_and_speculation(each, **inputs, generation_config=GenerationConfig(max_new_tokens=4))[1] is not None
        )
    loaded.generation_config.speculative_config = None
    assert tokens_and_speculation(loaded, **inputs, max_new_tokens=4)[1] is None


def test_configuration_object_on_a_saved_generation_config(tmp_path):
    GenerationConfig(speculative_config=hf_specdec.parse_config(NGRAM)).save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path).speculative_config
    assert hf_specdec.parse_config(loaded) == hf_specdec.parse_config(NGRAM)


def test_assistant_of_transformers_own_loop_does_not_inherit_it(model):
    """The assistant gets a copy of the target's generation config; it must not speculate in turn."""
    target = copy.deepcopy(model)
    target.generation_config.speculative_config = NGRAM
    plain = model.generate(**ragged([6]), max_new_tokens=8)
    output = target.generate(
        **ragged([6]), max_new_tokens=8, assistant_model=drafter_of(model), speculative_config=None
    )
    assert torch.equal(output, plain)


# ---- pipelines ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(58))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def test_pipeline(model, tokenizer, monkeypatch):
    prompts = ["w1 w2 w3 w1 w2", "w7 w8", "w9 w10 w11 w9 w10 w11 w9"]
    settings = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer, **settings)(prompts)
    calls = []
    decode = integration.decode
    monkeypatch.setattr(
        integration, "decode", lambda *args, **kwargs: calls.append(args[1].shape[0]) or decode(*args, **kwargs)
    )
    constructed = pipeline("text-generation", model=model, tokenizer=tokenizer, speculative_config=NGRAM, **settings)
    called = pipeline("text-generation", model=model, tokenizer=tokenizer, **settings)
    assert constructed(prompts) == plain and calls == [1, 1, 1]
    assert called(prompts, speculative_config=NGRAM) == plain and calls == [1] * 6
    assert constructed(prompts, batch_size=3) == plain and calls[6:] == [3]
    assert called(prompts, batch_size=2, speculative_config=json.dumps(NGRAM)) == plain and calls[7:] == [2, 1]
    assert constructed(prompts[0], speculative_config=None) == plain[0] and len(calls) == 9


# ---- models that are not plain --------------------------------------------------------------------------------------


def assert_like_plain(model, configs, lengths=(6, 9, 4), plain=None, **kwargs):
    inputs = ragged(lengths)
    plain = model.generate(**inputs, max_new_tokens=10, **kwargs) if plain is None else plain(**inputs)
    for name, config in {**configs, "early exit": {"method": "draft_model", "early_exit": 2}}.items():
        assert torch.equal(model.generate(**inputs, max_new_tokens=10, speculative_config=config, **kwargs), plain), (
            name
        )
    return plain


def lora(**options):
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **options)


@pytest.mark.parametrize(
    "adapters",
    [
        [lora(target_modules=["q_proj", "v_proj", "down_proj"])],
        [lora(target_modules=["q_proj"], use_dora=True)],
        [lora(target_modules=["q_proj", "down_proj"]), lora(target_modules=["q_proj", "o_proj"])],
        [peft.IA3Config(task_type="CAUSAL_LM", init_ia3_weights=False)],
    ],
    ids=["LoRA", "DoRA", "two at once", "IA3"],
)
def test_peft_adapters(model, configs, adapters):
    plain = model.generate(**ragged([6, 9, 4]), max_new_tokens=10)
    adapted = peft.get_peft_model(copy.deepcopy(model), adapters[0], "0").eval()
    for number, config in enumerate(adapters[1:], start=1):
        adapted.add_adapter(str(number), config)
    adapted.base_model.set_adapter([str(number) for number in range(len(adapters))])
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.ndim == 2 and 1 in parameter.shape:  # of IA3, which begins close to 1
            torch.nn.init.uniform_(parameter, 0.2, 2)
    assert_like_plain(adapted, configs, [7])
    output = assert_like_plain(adapted, configs)
    assert not torch.equal(output, plain), "the adapter must matter"
    with adapted.disable_adapter():
        assert torch.equal(assert_like_plain(adapted, configs), plain)
    explicit = hf_specdec.generate(adapted, **ragged([6, 9, 4]), max_new_tokens=10, speculative_config=NGRAM)
    assert torch.equal(explicit, output)


@pytest.mark.parametrize(
    "config",
    [
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_peft_virtual_tokens(model, configs, config):
    """As PEFT's forward has them, also in padded rows, where positions after embeddings count the padding, and after keys do not.

    PEFT 0.21's `generate()` has them too on transformers 5.17; on 5.24 it repeats embeddings at every step, and forgets keys.
    """
    plain = model.generate(**ragged([6, 9, 4]), max_new_tokens=10)
    adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
    for parameter in adapted.prompt_encoder.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def by_forwards(input_ids, attention_mask):
        ids, mask = input_ids, attention_mask
        for _ in range(10):
            more = {"position_ids": mask.cumsum(1) - 1} if config.peft_type == "PREFIX_TUNING" else {}
            logits = adapted(input_ids=ids, attention_mask=mask, **more).logits
            ids, mask = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1), torch.cat([mask, mask[:, -1:]], dim=1)
        return ids

    for lengths in ([6, 9, 4, 7, 2], [6]):
        assert_like_plain(adapted, configs, lengths, by_forwards, eos_token_id=None)
    found = assert_like_plain(adapted, configs, plain=by_forwards, eos_token_id=None)
    assert not torch.equal(found, plain), "the virtual tokens must matter"
    call = {**ragged([6, 3]), "max_new_tokens": 6, "do_sample": True}
    found = [
        adapted.generate(**call, speculative_config={**each, "seed": 3}, return_dict_in_generate=True)
        for each in (NGRAM, {"method": "none"})
    ]
    assert torch.equal(*(each.sequences for each in found))
    assert found[0].past_key_values.get_seq_length() == 3 + 11
    for wrong in ({"past_key_values": DynamicCache()}, {"attention_mask": torch.tensor([[1] * 6, [1, 0, 0, 1, 1, 1]])}):
        with pytest.raises(UnsupportedModel, match="virtual tokens"):
            adapted.generate(**{**call, **wrong}, speculative_config=NGRAM)
    assert_like_plain(model, configs)


@pytest.mark.parametrize("how", ["device_map", "dispatch", "cpu_offload", "disk_offload"])
def test_accelerate(model, configs, tmp_path, how):
    placed = copy.deepcopy(model)
    if how == "device_map":
        model.save_pretrained(tmp_path)
        placed = LlamaForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    elif how == "dispatch":
        accelerate.dispatch_model(placed, device_map={"": "cpu"}, force_hooks=True)
    elif how == "cpu_offload":
        accelerate.cpu_offload(placed, execution_device="cpu")
    else:
        accelerate.disk_offload(placed, tmp_path, execution_device="cpu")
    assert torch.equal(assert_like_plain(placed, configs), model.generate(**ragged([6, 9, 4]), max_new_tokens=10))


@pytest.mark.parametrize("in_place", [pytest.param(True, marks=pytest.mark.slow), False])
def test_torch_compile(model, configs, in_place):
    compiled = copy.deepcopy(model)
    if in_place:
        compiled.compile(backend="eager")
    else:
        compiled = torch.compile(compiled, backend="eager")
    # In place also our own forward is traced, anew for every shape of a batch.
    assert_like_plain(compiled, {"ngram": NGRAM} if in_place else {"chain": configs["chain"], "ngram": NGRAM})


def test_copies_and_pickles(model):
    inputs = ragged([6])
    plain = model.generate(**inputs, max_new_tokens=6, speculative_config=NGRAM)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]
    for each in copies:
        assert not isinstance(
            vars(each).get("_hf_specdec"), type(vars(model)["_hf_specdec"])
        ) or not integration.kept_decoders(each)
        assert torch.equal(each.generate(**inputs, max_new_tokens=6, speculative_config=NGRAM), plain)
        assert integration.kept_decoders(each)[0].target.model is each


def test_models_are_freed_with_their_decoders(configs):
    model = tiny_llama(1)
    for config in (NGRAM, configs["chain"], {"method": "draft_model", "early_exit": 1}):
        model.generate(**ragged([5]), max_new_tokens=2, speculative_config=config)
    alive = [weakref.ref(model), *(weakref.ref(decoder) for decoder in integration.kept_decoders(model))]
    del model
    gc.collect()
    assert [each() for each in alive] == [None] * 4


def test_decoders_are_kept_between_calls(model, configs):
    inputs = ragged([5])
    hf_specdec.release(model)
    for config in (
        configs["chain"],
        {**configs["chain"], "seed": 3},
        {**configs["chain"], "num_speculative_tokens": 2},
    ):
        model.generate(**inputs, max_new_tokens=2, speculative_config=config)
    kept = integration.kept_decoders(model)
    assert len(kept) == 2, "a seed needs no decoder of its own"
    assert kept[0].generator.drafter.model is kept[1].generator.drafter.model, "the drafter is loaded once"
    hf_specdec.release()
    assert integration.kept_decoders(model) == []


# ---- calls at the same time -----------------------------------------------------------------------------------------


def test_threads_on_one_and_on_several_models(model, configs):
    drafter = drafter_of(model)
    others = [model, model, tiny_llama(1), tiny_llama(2)]
    inputs = [ragged([6, 3, 8], seed=seed) for seed in range(len(others))]
    plain = [each.generate(**given, max_new_tokens=16) for each, given in zip(others, inputs, strict=True)]
    failures = []

    def work(index):
        for config in (NGRAM, configs["tree"], {"method": "draft_model"}, {"method": "draft_model", "early_exit": 2}):
            extra = {"assistant_model": drafter} if config == {"method": "draft_model"} else {}
            output = others[index].generate(**inputs[index], max_new_tokens=16, speculative_config=config, **extra)
            if not torch.equal(output, plain[index]):
                failures.append((index, config))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(others))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads) and not failures
    for each in (*others, drafter):
        assert_clean(each)


def test_drafters_are_loaded_one_at_a_time(model, tmp_path, monkeypatch):
    """from_pretrained patches transformers' classes while it runs: two at once would leave `tie_weights` patched."""
    drafter_of(model).save_pretrained(tmp_path)
    load, loading, overlaps = drafter_loading.AutoModelForCausalLM.from_pretrained, threading.Lock(), []

    def slow_load(*args, **kwargs):
        overlaps.append(not loading.acquire(blocking=False))
        time.sleep(0.3)
        result = load(*args, **kwargs)
        if loading.locked():
            loading.release()
        return result

    monkeypatch.setattr(drafter_loading.AutoModelForCausalLM, "from_pretrained", slow_load)
    config = {"method": "draft_model", "model": str(tmp_path)}
    threads = [
        threading.Thread(
            target=each.generate, kwargs={**ragged([4]), "max_new_tokens": 4, "speculative_config": config}
        )
        for each in (tiny_llama(1), tiny_llama(2))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert overlaps == [False, False]


@pytest.mark.parametrize("inner", [NGRAM, {"method": "none"}, None], ids=["same", "other", "plain"])
def test_generate_inside_a_callback(model, inner):
    inputs, other = ragged([6, 3]), ragged([4], seed=9)
    plain, plain_inner = model.generate(**inputs, max_new_tokens=8), model.generate(**other, max_new_tokens=5)
    inside = []

    class Nested:
        def put(self, value):
            inside.append(model.generate(**other, max_new_tokens=5, speculative_config=inner))

        def end(self):
            pass

    assert torch.equal(model.generate(**inputs, max_new_tokens=8, speculative_config=NGRAM, streamer=Nested()), plain)
    assert len(inside) == 9 and all(torch.equal(each, plain_inner) for each in inside)
    assert_clean(model)
