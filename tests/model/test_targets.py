"""Which targets: small random models of every family give plain `generate()`'s greedy tokens, or are refused clearly."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading

import numpy as np
import pytest
import torch
import transformers
from families import FAMILIES, VOCAB, WINDOW, build, make, perturbed
from near_ties import TIE
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM
from transformers.models.falcon import modeling_falcon
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, repeat_kv

import hf_specdec
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.core.names import ATTENTION_NAME, CACHE
from hf_specdec.core.output import Taps
from hf_specdec.core.rows import RowInput
from hf_specdec.model import architectures, self_test
from hf_specdec.model.prepare import prepare

NEW_TOKENS = 32
CHAIN, TREE = {"method": "draft_model"}, {"method": "draft_model", "branching_factors": [3, 2, 1]}
NGRAM, EARLY_EXIT = {"method": "ngram", "prompt_lookup_min": 1}, {"method": "draft_model", "early_exit": 1}
GATHERED = {"Falcon", "Falcon ALiBi", "MPT", "BLOOM", "StableLM", "Llama4", "GPT-Neo", "XGLM", "RoFormer", "Doge"}
SLIDING = {"Mistral", "Gemma2", "Gemma3 text", "Cohere2", "StarCoder2", "gpt-oss", "GPT-Neo"}

near_ties: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def report_near_ties():
    """Excused differences are shown, not hidden."""
    yield
    print(f"\n{len(near_ties)} near ties", *near_ties, sep="\n  ")


@pytest.fixture(scope="module")
def family_models():
    """family → (target, its imperfect drafter), made once."""
    models = {}

    def get(family):
        if family not in models:
            target = make(family)
            models[family] = target, perturbed(target, 0.05)
        return models[family]

    return get


def prompts(batch_size: int) -> dict:
    """Random ids; five rows are ragged and left-padded, the longest longer than the sliding windows."""
    ids = torch.randint(1, VOCAB, (batch_size, 17), generator=torch.Generator().manual_seed(5))
    if batch_size == 1:
        return {"input_ids": ids}
    mask = torch.zeros_like(ids)
    for row, length in enumerate([17, 3, 9, 14, 1]):
        mask[row, 17 - length :] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.fixture(scope="module")
def plain_once(family_models):
    """`plain` of a family and a batch size, computed once."""
    return functools.cache(lambda family, batch_size: plain(family_models(family)[0], prompts(batch_size)))


def plain(model, inputs):
    """What transformers writes on its own, with the logits of every step."""
    return model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True
    )


def speculative(model, inputs, config, **kwargs):
    """The same through us."""
    return model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        speculative_config=config,
        return_dict_in_generate=True,
        **kwargs,
    )


def assert_same_tokens(output, expected, what: str) -> None:
    """Rows are equal, or part at a near tie of the target's two best logits, which is counted."""
    start = expected.sequences.shape[1] - len(expected.logits)
    for row, (ours, theirs) in enumerate(zip(output.sequences, expected.sequences, strict=True)):
        if torch.equal(ours, theirs):
            continue
        step = int((ours != theirs).nonzero()[0]) - start  # where they part
        logits = expected.logits[step][row]
        gap = float(logits.max() - logits[ours[start + step]])
        assert gap <= TIE, (
            f"{what}: row {row} parts from plain generate() at step {step}, {gap:.2g} below the best logit"
        )
        near_ties.append(f"{what}: row {row}, step {step}, {gap:.1g}")


def is_gathered(model) -> bool:
    """Which path a model takes."""
    return prepare(model).gather


# ---- equal to plain generate() --------------------------------------------------------------------------------------


# By default trees of five rows in every family; `test_ngram_drafts` has chains.
EVERY_SHAPE = ("Llama", "Gemma2", "GPT-2", "DeepSeek-V3", "gpt-oss")
IMPERFECT = [
    pytest.param(
        family, batch_size, draft,
        marks=() if family in (EVERY_SHAPE if batch_size == 1 or draft == "chain" else FAMILIES) else pytest.mark.slow,
    )
    for family in FAMILIES
    for batch_size in (1, 5)
    for draft in ("chain", "tree")
]  # fmt: skip


@pytest.mark.parametrize(("family", "batch_size", "draft"), IMPERFECT)
def test_drafts_of_an_imperfect_model(family_models, plain_once, family, batch_size, draft):
    """Accepted and rejected drafts, KV compaction after trees, windows shorter than the text."""
    target, drafter = family_models(family)
    inputs = prompts(batch_size)
    expected = plain_once(family, batch_size)
    output = speculative(target, inputs, TREE if draft == "tree" else CHAIN, assistant_model=drafter)
    assert_same_tokens(output, expected, f"{family} {draft} batch {batch_size}")
    assert len(expected.sequences[0, -NEW_TOKENS:].unique()) > 5, "the text repeats itself: too easy"
    statistics = output.speculation
    assert 0 < statistics["num_accepted_tokens"] < statistics["num_draft_tokens"]
    assert is_gathered(target) == (family in GATHERED or uncapped_by_sdpa(target))


def uncapped_by_sdpa(model) -> bool:
    """Gemma 2 runs with sdpa in transformers 5.17, which leaves its soft-capping out."""
    return (
        getattr(model.config, "attn_logit_softcapping", None) is not None
        and model.config._attn_implementation == "sdpa"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_ngram_drafts(family_models, plain_once, family):
    """Drafts from the text itself; most are wrong here."""
    target, _ = family_models(family)
    inputs = prompts(5)
    output = speculative(target, inputs, NGRAM)
    assert_same_tokens(output, plain_once(family, 5), f"{family} ngram")
    assert output.speculation["num_draft_tokens"] > 0


EARLY_EXITS = [
    pytest.param(f, marks=() if f in ("Llama", "Gemma2", "GPT-2", "BLOOM") else pytest.mark.slow)
    for f in FAMILIES
    if f not in ("BART's decoder", "RoFormer")  # whose first layers never guess right
]


@pytest.mark.parametrize("family", EARLY_EXITS)
def test_own_first_layer_drafts(family_models, plain_once, family):
    """Early exit: the target's first layer, with the target's norm and head."""
    target, _ = family_models(family)
    inputs = prompts(5)
    output = speculative(target, inputs, EARLY_EXIT)
    assert_same_tokens(output, plain_once(family, 5), f"{family} early exit")
    assert 0 < output.speculation["num_accepted_tokens"] < output.speculation["num_draft_tokens"]


@pytest.mark.parametrize("family", sorted(SLIDING))
def test_windows_matter(plain_once, family):
    """The windows of these models are short enough to change their text: equality above says something about them."""
    wide = make(family, **{"window_size" if family == "GPT-Neo" else "sliding_window": 4 * WINDOW + 60})
    assert not torch.equal(plain_once(family, 1).sequences, plain(wide, prompts(1)).sequences)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "gpt-oss", "Cohere2"])
def test_gather_equals_paged(family, monkeypatch):
    """The path for models off the attention interface gives the same logits as the paged one."""
    inputs = prompts(5)
    target = make(family, attn_implementation="eager")
    drafter = perturbed(target, 0.05)
    paged = speculative(target, inputs, TREE, assistant_model=drafter, output_logits=True)
    assert not is_gathered(target)
    monkeypatch.setattr(architectures, "reads_pages", lambda model: False)
    hf_specdec.integration.release(target)
    gathered = speculative(target, inputs, TREE, assistant_model=drafter, output_logits=True)
    assert is_gathered(target)
    assert_same_tokens(gathered, paged, f"{family} gather against paged")
    torch.testing.assert_close(gathered.logits[:10], paged.logits[:10], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "BLOOM", "DeepSeek-V3"])
def test_shared_prefixes_and_prompt_chunks(family_models, family):
    """Equal prompts share small blocks, and are read a few tokens at a time beside rows that already decode."""
    target, drafter = family_models(family)
    one = prompts(1)["input_ids"]
    ragged = prompts(5)
    inputs = {
        "input_ids": torch.cat([one, ragged["input_ids"], one]),
        "attention_mask": torch.cat([torch.ones_like(one), ragged["attention_mask"], torch.ones_like(one)]),
    }
    config = {**TREE, "block_size": 4, "prefill_chunk_size": 5}
    assert_same_tokens(
        speculative(target, inputs, config, assistant_model=drafter), plain(target, inputs), f"{family} chunks"
    )


def check_subclass(kind, source):
    """A subclass with the source's weights writes the text of its own plain `generate()`."""
    target = kind(source.config).eval()
    target.load_state_dict(source.state_dict())
    target.generation_config = source.generation_config
    inputs = prompts(5)
    output = speculative(target, inputs, TREE, assistant_model=perturbed(source, 0.05))
    assert_same_tokens(output, plain(target, inputs), kind.__name__)


def test_model_without_optional_arguments():
    """A forward that knows neither logits_to_keep nor return_dict computes all logits; ours are picked from them."""

    class PlainForward(LlamaForCausalLM):
        def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
            kwargs.pop("logits_to_keep", None)
            return super().forward(input_ids, attention_mask, position_ids, use_cache=use_cache, **kwargs)

    # and biases, which most Llamas do not have
    check_subclass(PlainForward, make("Llama", attention_bias=True, mlp_bias=True))


def test_positions_are_passed_on():
    """A forward that does not name positions gives them to the decoder."""

    class NamesNoPositions(LlamaForCausalLM):
        def forward(self, input_ids, attention_mask=None, use_cache=None, **kwargs):
            return super().forward(input_ids, attention_mask, use_cache=use_cache, **kwargs)

    check_subclass(NamesNoPositions, make("Llama"))


def test_padding_that_is_counted(family_models):
    """BART's decoder counts padding: texts that begin alike at other places share no keys."""
    target, drafter = family_models("BART's decoder")
    one = prompts(1)["input_ids"]
    ids = torch.cat([torch.nn.functional.pad(one, (3, 0)), torch.cat([one, one[:, :3]], dim=1)])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    expected = plain(target, inputs)
    output = speculative(target, inputs, {**TREE, "block_size": 4, "prefill_chunk_size": 8}, assistant_model=drafter)
    assert_same_tokens(output, expected, "padding")
    with pytest.raises(UnsupportedModel, match="counts positions in padded prompts"):
        holes = inputs["attention_mask"].clone()
        holes[1, 5] = 0
        speculative(target, {**inputs, "attention_mask": holes}, NGRAM)


@pytest.mark.skipif(not hasattr(transformers, "DoryForCausalLM"), reason="needs transformers 5.24")
def test_layers_that_run_several_times(caplog):
    """Dory's loops keep keys in layers of their own, which its forward adds to the cache; a DynamicCache of ours would lack them."""
    kinds = ["sliding_attention", "full_attention"] * 2
    target = build(
        "dory", num_hidden_layers=4, n_input_layers=1, n_output_layers=1, layer_types=kinds, sliding_window=12
    )
    inputs = prompts(5)
    for config in (NGRAM, TREE):
        output = speculative(
            target, inputs, config, assistant_model=perturbed(target, 0.05) if config is TREE else None
        )
        assert_same_tokens(output, plain(target, inputs), "Dory")
    arguments = {"max_new_tokens": 8, "do_sample": False, "speculative_config": NGRAM}
    assert target.generate(**inputs, **arguments, return_dict_in_generate=True).past_key_values is None
    assert "The output has no cache: DoryForCausalLM" in caplog.text
    with pytest.raises(UnsupportedModel, match="DoryForCausalLM keeps keys in more layers"):
        target.generate(**inputs, **arguments, **{CACHE: DynamicCache(config=target.config)})


# ---- refused --------------------------------------------------------------------------------------------------------

REFUSED = {
    "recurrent_gemma": ({"lru_width": 48, "attention_window_size": 16}, "linear_attention|recurrent"),
    "openai-gpt": ({}, "takes no key-value cache"),
}  # fmt: skip


def count_forwards(model) -> list[int]:
    """Lengths of the inputs of every forward from now on."""
    calls = []

    def counting(call):
        def counted(*args, **kwargs):
            calls.append(kwargs["input_ids"].numel())
            return call(*args, **kwargs)

        return counted

    model._call_impl = counting(model._call_impl)  # not a hook: models with hooks are tested otherwise
    return calls


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_before_any_work(model_type, family_models):
    """What cannot be exact says so at once, and the next call on another model works."""
    options, reason = REFUSED[model_type]
    model = build(model_type, **options)
    calls = count_forwards(model)
    with pytest.raises(UnsupportedModel, match=reason) as error:
        model.generate(input_ids=torch.arange(1, 6)[None], max_new_tokens=4, do_sample=False, speculative_config=NGRAM)
    assert type(model).__name__ in str(error.value) and "without speculative_config" in str(error.value)
    assert not calls
    llama, _ = family_models("Llama")
    assert_same_tokens(speculative(llama, prompts(1), NGRAM), plain(llama, prompts(1)), "after a refusal")


def test_texts_that_a_target_would_read_in_another_way():
    """Llama 4 scales queries by their place from `floor_scale` tokens on; MPT has biases for so many tokens; Doge chooses keys among
    more; some rotary frequencies change beyond a length. Shorter texts run; the last token does not count, because it is never read."""
    longer = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 24}
    longrope = {**longer, "rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    for family, changes, message in (
        ("Llama4", {"attn_temperature_tuning": True, "floor_scale": 25}, "at most 25 tokens, not 26"),
        ("MPT", {"max_seq_len": 24}, "26 tokens .* has 24 positions"),
        ("Doge", {"keep_window_size": 24}, "may have at most 25 tokens, not 26"),
        (
            "Llama",
            {"rope_parameters": longrope},
            "longrope rotary frequencies beyond 24 tokens.* at most 25 tokens, not 26",
        ),
        (
            "Llama",
            {"rope_parameters": {**longer, "rope_type": "dynamic"}},
            "dynamic rotary .* at most 25 tokens, not 26",
        ),
    ):
        model = make(family, **changes)
        ids = torch.arange(1, 6)[None].repeat(1, 3)
        assert torch.equal(
            model.generate(ids, max_new_tokens=10, do_sample=False, speculative_config=NGRAM),
            model.generate(ids, max_new_tokens=10, do_sample=False),
        )
        with pytest.raises(ValueError, match=message):
            model.generate(ids, max_new_tokens=11, do_sample=False, speculative_config=NGRAM)


def test_falcon_has_its_own_biases():
    """A function of its module is replaced while packed rows run, for this thread's rows only."""
    original, seen = inspect.unwrap(modeling_falcon.build_alibi_tensor), []
    model = make("Falcon ALiBi")
    mask = torch.ones(1, 5, dtype=torch.long)

    def from_another_thread(*_):
        thread = threading.Thread(
            target=lambda: seen.append(modeling_falcon.build_alibi_tensor(mask, 4, torch.float32))
        )
        thread.start()
        thread.join()

    prepare(model)
    hook = model.transformer.h[0].register_forward_pre_hook(from_another_thread)
    model.generate(torch.arange(1, 6)[None], max_new_tokens=2, do_sample=False, speculative_config=NGRAM)
    hook.remove()
    seen.append(modeling_falcon.build_alibi_tensor(mask, 4, torch.float32))
    assert len(seen) > 1 and all(torch.equal(each, original(mask, 4, torch.float32)) for each in seen)


def test_recurrent_drafter_is_refused(family_models):
    """The same holds for what drafts."""
    llama, _ = family_models("Llama")
    drafter = build("recurrent_gemma", **REFUSED["recurrent_gemma"][0])
    with pytest.raises(UnsupportedModel, match="RecurrentGemmaForCausalLM has"):
        speculative(llama, prompts(1), CHAIN, assistant_model=drafter)


# ---- the self-test --------------------------------------------------------------------------------------------------


class MemoryOrderAttention(LlamaAttention):
    """Off the attention interface, with a causal mask of its own over the keys as they lie in memory."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            proj(hidden_states).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if kwargs.get(CACHE) is not None:
            key, value = kwargs[CACHE].update(key, value, self.layer_idx)
        groups = self.num_key_value_groups
        causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        out = nn.functional.scaled_dot_product_attention(
            query, repeat_kv(key, groups), repeat_kv(value, groups), causal
        )
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class MemoryOrderLlama(LlamaForCausalLM):
    """Right alone, wrong in a packed batch."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.__class__ = MemoryOrderAttention


class WholeList(nn.ModuleList):
    """Layers that cannot be cut short."""

    def __getitem__(self, index):
        return self if isinstance(index, slice) else super().__getitem__(index)


class NoEarlyExitLlama(LlamaForCausalLM):
    """Ignores early exit."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers = WholeList(self.model.layers)


def with_weights_of(source, kind):
    """A model of class `kind` with another's configuration and weights."""
    model = kind(source.config).eval()
    model.load_state_dict(source.state_dict())
    model.generation_config = source.generation_config
    return model


@pytest.fixture()
def no_verdicts(monkeypatch):
    """As in a fresh process."""
    monkeypatch.setattr(self_test, "_verdicts", {})


def test_self_test_catches_masks_made_from_memory_order(family_models, no_verdicts):
    """Neither path can serve such a model: refused with the numbers, and left as it was."""
    llama, _ = family_models("Llama")
    broken = with_weights_of(llama, MemoryOrderLlama).train()
    attention = broken.config._attn_implementation
    assert torch.equal(plain(broken.eval(), prompts(1)).sequences, plain(llama, prompts(1)).sequences)
    broken.train()
    for _ in range(2):
        with pytest.raises(
            UnsupportedModel, match=r"MemoryOrderLlama does not compute.* differ by [0-9.]+ of their spread"
        ):
            speculative(broken, prompts(1), NGRAM)
    assert broken.config._attn_implementation == attention and all(module.training for module in broken.modules())
    assert_same_tokens(speculative(llama, prompts(1), NGRAM), plain(llama, prompts(1)), "after a refusal")


@pytest.mark.parametrize(
    ("model_type", "options", "problem"),
    [
        ("diffllama", {}, "differ by"),  # calls the attention function twice and puts the halves together
        ("jetmoe", {"kv_channels": 12, "num_local_experts": 4}, "raised RuntimeError"),  # heads are per expert
    ],
)
def test_self_test_falls_back_to_gather(model_type, options, problem, caplog, no_verdicts):
    """Real families on the interface whose attention is more than one call: one warning, then the right output."""
    model = build(model_type, **options)
    inputs = prompts(5)
    with caplog.at_level(logging.WARNING, "hf_specdec"):
        for config in (NGRAM, EARLY_EXIT):
            assert_same_tokens(speculative(model, inputs, config), plain(model, inputs), model_type)
    warnings = [record.getMessage() for record in caplog.records if "gathered keys" in record.getMessage()]
    assert len(warnings) == 1 and type(model).__name__ in warnings[0] and problem in warnings[0]
    assert is_gathered(model)


def test_self_test_catches_ignored_early_exit(family_models, no_verdicts):
    """The whole model works; as its own drafter it does not."""
    broken = with_weights_of(family_models("Llama")[0], NoEarlyExitLlama)
    assert_same_tokens(speculative(broken, prompts(1), NGRAM), plain(broken, prompts(1)), "no early exit")
    with pytest.raises(UnsupportedModel, match="NoEarlyExitLlama with its first 1 layers does not compute"):
        speculative(broken, prompts(1), EARLY_EXIT)


def test_self_test_waits_inside_active(no_verdicts):
    """While our attention is in place there is nothing to compare with: no verdict, and the attention stays."""
    model = make("gpt-oss")
    outer = prepare(model)
    self_test._verdicts.clear()
    stock = model.config._attn_implementation
    with outer.active():
        prepare(model, num_layers=1)
        assert model.config._attn_implementation == ATTENTION_NAME
    assert model.config._attn_implementation == stock and not self_test._verdicts
    prepare(model, num_layers=1)
    assert len(self_test._verdicts) == 1


def test_self_test_is_short_and_runs_once(no_verdicts):
    """Three forwards over 25 tokens in all at a model's first use, none later, also for another model of the kind."""
    model = make("Llama")
    calls = count_forwards(model)
    prepare(model)
    assert len(calls) == 3 and sum(calls) <= 25
    prepare(model)
    other = make("Llama", seed=1)
    calls_of_other = count_forwards(other)
    prepare(other)
    assert len(calls) == 3 and not calls_of_other


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT-2", "BLOOM", "Qwen3-MoE", "gpt-oss", "DeepSeek-V3"])
def test_self_test_allows_for_rounding(family, dtype, no_verdicts):
    """Half precision is no reason to refuse a model or to slow it down."""
    model = make(family, attn_implementation="eager").to(dtype)
    assert is_gathered(model) == (family in GATHERED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_self_test_catches_mistakes_in_half_precision(family_models, dtype, no_verdicts):
    """Rounding does not hide a wrong mask."""
    broken = with_weights_of(family_models("Llama")[0], MemoryOrderLlama).to(dtype)
    with pytest.raises(UnsupportedModel, match="differ by"):
        prepare(broken)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("roberta", {}), ("camembert", {}), ("data2vec-text", {}), ("roberta-prelayernorm", {}), ("xlm-roberta", {}),
        ("xlm-roberta-xl", {}), ("xmod", {"languages": ["en_XX"], "default_language": "en_XX", "seed": 4}),
    ],
)  # fmt: skip
def test_positions_that_are_counted_otherwise_without_position_ids(model_type, options, no_verdicts):
    """RoBERTa's relatives count from `pad_token_id + 1`, but generate() gives them `position_ids` from 0."""
    model = build(model_type, **{"seed": 1, "is_decoder": True, "pad_token_id": 1, **options})
    (table,) = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    with torch.no_grad():
        table.weight *= 4  # so that the text varies, and depends on positions
    inputs, drafter = prompts(5), perturbed(model, 0.05)
    expected = plain(model, inputs)
    for config in (CHAIN, TREE):
        output = speculative(model, inputs, config, assistant_model=drafter)
        assert_same_tokens(output, expected, model_type)
    assert len(expected.sequences[0, -NEW_TOKENS:].unique()) > 4, "the text repeats itself: too easy"
    assert 0 < output.speculation["num_accepted_tokens"] < output.speculation["num_draft_tokens"]
    assert not is_gathered(model)
    with torch.no_grad():
        table.weight[:-2] = table.weight[2:].clone()
    assert not torch.equal(plain(model, inputs).sequences, expected.sequences)


class ShiftedLlama(LlamaForCausalLM):
    """generate() gives it no positions, and it counts from 3."""

    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        del inputs["position_ids"]
        return inputs

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        if position_ids is None:
            cache = kwargs.get(CACHE)
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(past, past + input_ids.shape[1])[None] * 2 + 3
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


def test_self_test_reads_positions_as_generate_gives_them(family_models, no_verdicts):
    """Positions that generate() leaves to the model are the model's."""
    broken = with_weights_of(family_models("Llama")[0], ShiftedLlama)
    with pytest.raises(UnsupportedModel, match="ShiftedLlama does not compute"):
        speculative(broken, prompts(1), NGRAM)


class FailingLlama(LlamaForCausalLM):
    """As layers whose kernels need a GPU fail on a CPU (fla's)."""

    def forward(self, *args, **kwargs):
        raise RuntimeError("0 active drivers")


def test_self_test_says_that_the_models_own_forward_fails(family_models, no_verdicts):
    broken = with_weights_of(family_models("Llama")[0], FailingLlama)
    with pytest.raises(
        UnsupportedModel,
        match=r"cannot run on token ids alone: its own forward raised RuntimeError \(0 active drivers\)",
    ):
        speculative(broken, prompts(1), NGRAM)


@pytest.mark.parametrize("name", ["BigBird", "Bert"])
def test_self_test_catches_attention_to_later_tokens(name, no_verdicts):
    """Encoders with a language-model head, not told to be decoders: their own batched forward is as wrong as ours."""
    kind, model_class = {
        "BigBird": (transformers.BigBirdConfig, transformers.BigBirdForCausalLM),
        "Bert": (transformers.BertConfig, transformers.BertLMHeadModel),
    }[name]
    options = {"attention_type": "original_full"} if name == "BigBird" else {}
    torch.manual_seed(0)
    settings = dict(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.3, **options,
    )  # fmt: skip
    model = model_class(kind(is_decoder=False, **settings)).eval()
    with pytest.raises(UnsupportedModel, match="attends to later tokens"):
        model.generate(torch.arange(4, 12)[None], max_new_tokens=3, speculative_config=NGRAM)
    decoder = model_class(kind(is_decoder=True, **settings)).eval()
    ids, other = torch.arange(4, 12)[None], torch.tensor([[4, 5, 6, 7, 8, 9, 10, 50]])
    if torch.allclose(decoder(ids).logits[:, :-1], decoder(other).logits[:, :-1], atol=1e-4):
        prepare(decoder)
    else:  # BigBird in transformers 5.17
        with pytest.raises(UnsupportedModel, match="attends to later tokens"):
            prepare(decoder)


ENCODERS = {
    "BigBird": (transformers.BigBirdConfig, transformers.BigBirdForCausalLM, {"attention_type": "original_full"}),
    "Bert": (transformers.BertConfig, transformers.BertLMHeadModel, {}),
    "Electra": (transformers.ElectraConfig, transformers.ElectraForCausalLM, {}),
    "RemBert": (transformers.RemBertConfig, transformers.RemBertForCausalLM, {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ENCODERS)
def test_self_test_tells_attention_to_later_tokens_from_rounding(name, dtype, no_verdicts):
    """With small weights, later tokens change logits by less than half precision's tolerance, and text is wrong all the same."""
    kind, model_class, options = ENCODERS[name]
    torch.manual_seed(0)
    settings = dict(
        vocab_size=100, hidden_size=32, embedding_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.02, **options,
    )  # fmt: skip
    model = model_class(kind(is_decoder=False, **settings)).to(dtype).eval()
    with pytest.raises(UnsupportedModel, match="attends to later tokens"):
        prepare(model)
    assert not model.get_input_embeddings()._forward_hooks


def rounds_with_later_tokens(model: transformers.PreTrainedModel) -> None:
    """The last layer's output changes in its last bits when a later token does, as where experts share a product."""
    slope = torch.linspace(0, 1e-6, model.config.hidden_size)
    model.model.layers[-1].register_forward_hook(
        lambda module, args, output: output + slope * torch.sin(1e3 * output.detach()[:, -1:].sum(-1, keepdim=True))
    )


@pytest.mark.parametrize("inside", [contextlib.nullcontext, torch.inference_mode])
def test_self_test_allows_for_rounding_that_depends_on_later_tokens(inside, monkeypatch, no_verdicts):
    """Other bits before a change are no proof of attention to it."""
    model = make("Llama", hidden_size=64)
    rounds_with_later_tokens(model)
    monkeypatch.setattr(self_test, "interventions", lambda model: [])  # what rounds is the model's own
    answers = []
    ask = self_test._Expected._has_gradient_from_later
    monkeypatch.setattr(
        self_test._Expected, "_has_gradient_from_later", lambda *args: answers.append(ask(*args)) or answers[-1]
    )
    with inside():
        prepare(model)
    assert answers == [False]


def test_self_test_of_a_model_that_does_not_call_its_embeddings(monkeypatch, no_verdicts):
    """Nothing can be asked of gradients then: the tolerance decides, as before."""
    model = make("Llama", hidden_size=64)
    rounds_with_later_tokens(model)
    monkeypatch.setattr(self_test, "interventions", lambda model: [])  # what rounds is the model's own
    monkeypatch.setattr(model, "get_input_embeddings", lambda: nn.Embedding(2, 2))
    prepare(model)


# ---- taps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "Gemma2"])
def test_taps_are_the_models_hidden_states(family_models, family):
    """Tapped layers and the last hidden states, for packed rows, equal those of a plain forward of each row."""
    model, _ = family_models(family)
    num_layers = model.config.num_hidden_layers
    packed = prepare(model, taps=Taps(last_hidden=True, layers=tuple(range(num_layers + 1))))
    texts = [np.arange(1, 8), np.arange(20, 25)]
    cache = packed.new_cache(4, 16)
    for row, text in enumerate(texts):
        cache.add(row)
        cache.reserve(row, len(text))
    with torch.no_grad(), packed.active():
        output = packed.forward([RowInput(row, text, 0) for row, text in enumerate(texts)], cache)
    start = 0
    for text in texts:
        with torch.no_grad():
            expected = model(torch.from_numpy(text)[None], output_hidden_states=True).hidden_states
        end = start + len(text)
        torch.testing.assert_close(output.last_hidden[start:end], expected[-1][0], atol=1e-4, rtol=1e-4)
        for index in range(num_layers):
            torch.testing.assert_close(output.layers[index][start:end], expected[index][0], atol=1e-4, rtol=1e-4)
        # transformers puts the final norm on its last hidden state; the tap is the residual stream before it.
        normed = final_norm(model)(output.layers[num_layers][start:end])
        torch.testing.assert_close(normed, expected[-1][0], atol=1e-4, rtol=1e-4)
        start = end


def final_norm(model) -> nn.Module:
    """The norm in front of the head."""
    decoder = architectures.decoder_of(model)
    return decoder.ln_f if hasattr(decoder, "ln_f") else decoder.norm
