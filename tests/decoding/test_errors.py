"""Every bad input gives one clear error before any work; after each, the next call works and nothing is left behind."""

import builtins
import contextlib
import copy

import pytest
import torch
from combinations import covering
from oracle import assert_clean, drafter_of, interposed, ragged, tiny_llama
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

import hf_specdec
from hf_specdec import refusals
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.core.names import CACHE
from hf_specdec.model.prepare import prepare

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
DRAFT = {"method": "draft_model"}
ONE = ragged([7])


class OtherCache(DynamicCache):
    """A user's own kind."""


def embeddings(model):
    return model.get_input_embeddings()(ONE["input_ids"])


# name → (arguments of generate(), made from the model; what the message must say)
BAD_CALLS = {
    "unknown method": (lambda m: {"speculative_config": {"method": "ngrm"}}, "did you mean 'ngram'"),
    "method of a wrong type": (lambda m: {"speculative_config": {"method": ["ngram"]}}, "Unknown speculative method"),
    "no method": (lambda m: {"speculative_config": {}}, "needs a 'method'"),
    "unknown key": (lambda m: {"speculative_config": {**NGRAM, "num_speculative_token": 3}}, "did you mean 'num_speculative_tokens'"),
    "key of another method": (lambda m: {"speculative_config": {**NGRAM, "early_exit": 2}}, "no key 'early_exit'"),
    "K = 0": (lambda m: {"speculative_config": {**NGRAM, "num_speculative_tokens": 0}}, "at least 1, not 0"),
    "K < 0": (lambda m: {"speculative_config": {**NGRAM, "num_speculative_tokens": -2}}, "at least 1, not -2"),
    "K of a wrong type": (lambda m: {"speculative_config": {**NGRAM, "num_speculative_tokens": "3"}}, "not '3'"),
    "n-gram sizes": (lambda m: {"speculative_config": {**NGRAM, "prompt_lookup_min": 4}}, "prompt_lookup_min"),
    "rule": (lambda m: {"speculative_config": {**NGRAM, "rejection_sample_method": "rejecton"}}, "did you mean 'rejection'"),
    "seed": (lambda m: {"speculative_config": {**NGRAM, "seed": -1}}, "seed"),
    "greedy rule and sampling": (
        lambda m: {"do_sample": True, "speculative_config": {**NGRAM, "rejection_sample_method": "greedy"}}, "do_sample=False",
    ),
    "configuration of a wrong type": (lambda m: {"speculative_config": [1]}, "must be a dict"),
    "bad JSON": (lambda m: {"speculative_config": '{"method": '}, "not valid JSON"),
    "no such file": (lambda m: {"speculative_config": "nowhere.json"}, "neither JSON text nor an existing file"),
    "no drafter": (lambda m: {"speculative_config": DRAFT}, "name a smaller model"),
    "missing drafter": (lambda m: {"speculative_config": {**DRAFT, "model": "./nowhere"}}, "could not be loaded from './nowhere'"),
    "drafter as an object": (lambda m: {"speculative_config": {**DRAFT, "model": m}}, "assistant_model="),
    "two drafters": (lambda m: {"speculative_config": {**DRAFT, "early_exit": 1}, "assistant_model": m}, "both name a drafter"),
    "drafter nobody uses": (lambda m: {"assistant_model": m}, "not used by method 'ngram'"),
    "too many layers": (lambda m: {"speculative_config": {**DRAFT, "early_exit": 3}}, "less than the target's 3 layers"),
    "other vocabulary": (
        lambda m: {"speculative_config": DRAFT, "assistant_model": tiny_llama(vocab_size=40)}, "their tokenizers are not known",
    ),
    "tree and its depth": (
        lambda m: {"speculative_config": {**DRAFT, "branching_factors": [2, 1], "num_speculative_tokens": 3}}, "has 2 depths",
    ),
    "prompt longer than the cache": (lambda m: {"speculative_config": {**NGRAM, "num_blocks": 1, "block_size": 4}}, "raise num_blocks"),
    "nothing to generate": (lambda m: {"max_new_tokens": 0}, "max_new_tokens"),
    "max_length reached": (lambda m: {"max_new_tokens": None, "max_length": 7}, "max_length"),
    "empty batch": (lambda m: {"input_ids": torch.zeros(0, 4, dtype=torch.long), "attention_mask": None}, "hold no prompt"),
    "empty prompt": (lambda m: {"input_ids": torch.zeros(1, 0, dtype=torch.long), "attention_mask": None}, "hold no prompt"),
    "mask of zeros": (lambda m: {"attention_mask": torch.zeros(1, 7, dtype=torch.long)}, "masks all of row 0"),
    "right padding": (lambda m: {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}, "pad on the left"),
    "mask of another length": (lambda m: {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}, "covers 5 tokens"),
    "other positions": (lambda m: {"position_ids": torch.arange(3, 10)[None]}, "position_ids"),
    "embeddings of another length": (lambda m: {"inputs_embeds": embeddings(m)[:, 1:]}, "inputs_embeds has 6"),
    "beam search": (lambda m: {"num_beams": 2}, "beam search"),
    "beam sampling": (lambda m: {"num_beams": 2, "do_sample": True}, "beam sample"),
    "group beam search": (lambda m: {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, "group beam search"),
    "contrastive search": (lambda m: {"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
    "DoLa": (lambda m: {"dola_layers": "low"}, "dola"),
    "constrained": (lambda m: {"force_words_ids": [[5]], "num_beams": 2}, "constrained beam search"),
    "prompt lookup": (lambda m: {"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "early exit of transformers": (lambda m: {"assistant_early_exit": 1}, "assistant_early_exit"),
    "MTP of transformers": (lambda m: {"use_mtp": True}, "use_mtp"),
    "guidance": (lambda m: {"guidance_scale": 1.5}, "guidance_scale=1.5 (an argument of generate() or a field"),
    "SynthID": (
        lambda m: {"do_sample": True, "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=2)},
        "watermarking_config (an argument",
    ),
    "static cache": (lambda m: {"cache_implementation": "static"}, "cache_implementation='static'"),
    "offloaded cache": (lambda m: {"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
    "continuous batching": (lambda m: {"cache_implementation": "paged"}, "continuous batching"),
    "static cache object": (lambda m: {CACHE: StaticCache(config=m.config, max_cache_len=64)}, "StaticCache"),
    "offloaded cache object": (lambda m: {CACHE: DynamicCache(offloading=True)}, "offloaded DynamicCache"),
    "another cache object": (lambda m: {CACHE: OtherCache()}, "OtherCache"),
    "cache of another batch": (lambda m: {CACHE: m(**ragged([5, 5])).past_key_values}, "5 tokens of 2 sequences"),
    "cache of a longer text": (lambda m: {CACHE: m(**ragged([9])).past_key_values}, "9 tokens of 1 sequences"),
    "attention weights": (lambda m: {"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
    "stop strings alone": (lambda m: {"stop_strings": ["a"]}, "tokenizer"),
}  # fmt: skip


@pytest.fixture
def next_call_works(model, configs):
    """Checks after the test that nothing is left behind and that every method gives plain output."""
    yield
    assert_clean(model)
    plain = model.generate(**ragged([6, 3]), max_new_tokens=6)
    for config in (configs["ngram"], configs["tree"]):
        assert torch.equal(model.generate(**ragged([6, 3]), max_new_tokens=6, speculative_config=config), plain)
    assert_clean(model)


@pytest.fixture(scope="module")
def checked(model):
    """The check on first use is done: its forwards are not those of a call."""
    prepare(model)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call(model, checked, name):
    make, message = BAD_CALLS[name]
    if name == "missing drafter":
        import huggingface_hub.constants as hub

        assert hub.HF_HUB_OFFLINE
    arguments = {**ONE, "max_new_tokens": 5, "speculative_config": NGRAM, **make(model)}
    forwards = []
    with interposed(model, lambda *_: forwards.append(1)), pytest.raises(ValueError) as caught:
        model.generate(**arguments)
    assert message.lower() in str(caught.value).lower()
    if name not in ("other vocabulary", "too many layers"):  # which need a look at the models
        assert not forwards, "the error must come before any work"
    assert_clean(model)


def test_missing_package(model, monkeypatch):
    real = builtins.__import__

    def without_arctic(name, *args, **kwargs):
        if name.split(".")[0] in ("arctic_inference",):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_arctic)
    with pytest.raises(ImportError, match=r"pip install"):
        model.generate(**ONE, max_new_tokens=3, speculative_config={"method": "suffix"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is not on the CPU")
def test_autocast(model, checked):
    """In another dtype than the weights' keys would not fit their pages; in the same nothing changes."""
    alike, call, params = copy.deepcopy(model).bfloat16(), {**ONE, "max_new_tokens": 3}, hf_specdec.SamplingParams()
    llm = hf_specdec.LLM(model, None, NGRAM)
    with torch.autocast("cpu", torch.bfloat16):
        for refused in (
            lambda: model.generate(**call, speculative_config=NGRAM),
            lambda: alike.generate(**call, speculative_config={"method": "draft_model"}, assistant_model=model),
            lambda: hf_specdec.LLM(model, None, NGRAM),
            lambda: llm.generate([{"prompt_token_ids": [1, 2]}], params, use_tqdm=False),
        ):
            with pytest.raises(UnsupportedModel, match="load the model in that dtype"):
                refused()
        assert alike.generate(**call, speculative_config=NGRAM).shape[1] == ONE["input_ids"].shape[1] + 3
    llm.close()


@pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
def test_tensors_of_whole_texts(checked, wanted):
    """Without a cache plain generate() returns them at every step."""
    model, call = (
        tiny_llama(attn_implementation="eager"),
        {**ONE, "max_new_tokens": 3, wanted: True, "use_cache": False},
    )
    with pytest.raises(ValueError, match=r"use_cache=False .* leave use_cache out"):
        model.generate(**call, return_dict_in_generate=True, speculative_config=NGRAM)
    assert torch.equal(model.generate(**call, speculative_config=NGRAM), model.generate(**call))


def test_nothing_is_streamed_of_a_refused_call(model):
    class Streamer:
        def put(self, value):
            raise AssertionError("streamed")

    for arguments in ({"speculative_config": {"method": "x"}}, {"num_beams": 2}, {"cache_implementation": "static"}):
        with pytest.raises(ValueError):
            model.generate(**ONE, max_new_tokens=3, streamer=Streamer(), **{"speculative_config": NGRAM, **arguments})


# ---- exceptions of the caller's own code, in the middle -------------------------------------------------------------


class Failure(Exception):
    """Thrown by a user's object."""


class FailsAt:
    """Raises at its n-th call."""

    def __init__(self, n, error):
        self.left, self.error = n, error

    def tick(self):
        self.left -= 1
        if self.left <= 0:
            raise self.error


class Processor(FailsAt, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.tick()
        return scores


class Criterion(FailsAt, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.tick()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Streamer(FailsAt):
    def put(self, value):
        self.tick()

    def end(self):
        self.tick()


class Hook(FailsAt):
    """Of a layer of the target: an error in the middle of a forward."""

    def __call__(self, *args):
        self.tick()


@pytest.mark.parametrize(
    ("method", "where", "call", "error"),
    covering(
        ["none", "ngram", "chain", "tree"], [Processor, Criterion, Streamer, Hook], [1, 2, 4],
        [Failure(), KeyboardInterrupt()], strength=2,
    ),
    ids=lambda value: getattr(value, "__name__", None) or (value if isinstance(value, str | int) else type(value).__name__),
)  # fmt: skip
def test_exception_in_the_middle(model, configs, next_call_works, method, where, error, call):
    failing = where(call, error)
    arguments = {
        Processor: lambda: {"logits_processor": LogitsProcessorList([failing])},
        Criterion: lambda: {"stopping_criteria": StoppingCriteriaList([failing])},
        Streamer: lambda: {"streamer": failing},
        Hook: dict,
    }[where]()
    inside = interposed(model.model.layers[1], failing) if where is Hook else contextlib.nullcontext()
    cache = DynamicCache()
    config = {**configs[method], "native": False} if where is Hook else configs[method]
    with inside, pytest.raises(type(error)):
        model.generate(**ragged([6, 3, 8]), max_new_tokens=20, speculative_config=config, **{CACHE: cache}, **arguments)
    assert cache.get_seq_length() == 0, "a failed call leaves the caller's cache alone"


def test_drafter_that_fails(model, configs, next_call_works):
    drafter = drafter_of(model)
    calls = FailsAt(3, Failure())
    inside = interposed(drafter.model.layers[0], lambda *_: calls.tick())
    with inside, pytest.raises(Failure):
        config = {**DRAFT, "native": False}
        model.generate(**ragged([6, 3]), max_new_tokens=20, speculative_config=config, assistant_model=drafter)
    assert drafter.config._attn_implementation != "hf_specdec"
    plain = model.generate(**ragged([6, 3]), max_new_tokens=9)
    assert torch.equal(
        model.generate(**ragged([6, 3]), max_new_tokens=9, speculative_config=DRAFT, assistant_model=drafter), plain
    )


def test_vocabulary_of_the_error_messages():
    """Every error is one of the documented types: a ValueError, with its own class for configurations."""
    with pytest.raises(hf_specdec.SpeculativeConfigError) as caught:
        hf_specdec.parse_config({"method": "ngram", "prompt_lookup_maxx": 3})
    assert isinstance(caught.value, ValueError) and "prompt_lookup_max" in str(caught.value)


@pytest.mark.parametrize(("newest", "says_so"), [((5, 16), True), ((99, 0), False)])
def test_an_input_that_a_newer_transformers_may_have_added(model, monkeypatch, newest, says_so):
    """A release of transformers that renames an argument would otherwise look like the caller's mistake."""
    monkeypatch.setattr(refusals, "NEWEST_TRANSFORMERS", newest)
    inputs, config = torch.arange(1, 6)[None], GenerationConfig(max_length=8)
    with pytest.raises(UnsupportedModel, match="not supported with it: remembered") as raised:
        refusals.check_inputs(model, inputs, config, {"remembered": object()})
    assert ("is newer than 5.16, the newest tested: update hf-specdec" in str(raised.value)) == says_so
