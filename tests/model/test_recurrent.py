"""Targets and drafters whose layers have a recurrent or convolutional state."""

import copy
import inspect
import logging
import random
import types

import pytest
import recurrent_families
import torch
from cache_checks import check_cache
from families import make as make_family
from oracle import assert_clean
from recurrent_families import FAMILIES, VOCAB, WrongAt, WrongAtInTrees, make, perturbed
from scheduling import Scheduler, make_decoder
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache

import hf_specdec
from hf_specdec import LLM, SamplingParams, integration
from hf_specdec.cache.state_pool import StatePool
from hf_specdec.candidate_generators import parse_config
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.core.names import CACHE
from hf_specdec.core.rows import RowInput
from hf_specdec.core.sequence import Sequence
from hf_specdec.decoding import SpeculativeDecoder
from hf_specdec.model import packed_model
from hf_specdec.model.prepare import ModelOptions, prepare
from hf_specdec.model.recurrent import families

pytestmark = pytest.mark.skipif(
    not hasattr(Cache, "get_conv_state"), reason="needs transformers 5.23, as the models do"
)
SHORT = ("Qwen3-Next", "Nemotron-H")  # a delta rule; a rule that differs between prompt and text
ALL = [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in FAMILIES]
STEPPED = [name for name, (kind, _) in FAMILIES.items() if families.FAMILIES[kind].steps]
WITH_STATES = [
    pytest.param(name, states, marks=() if name in SHORT else pytest.mark.slow)
    for name in FAMILIES for states in ("kept", "replayed") if name not in STEPPED or states == "kept"
]  # fmt: skip
FEW = [  # for long tests
    pytest.param(*case.values, marks=() if case.values in (("Qwen3-Next", "replayed"), ("Nemotron-H", "kept")) else pytest.mark.slow)
    for case in WITH_STATES
]  # fmt: skip
CHAIN = {"method": "draft_model", "num_speculative_tokens": 4}
REPLAYED = {"recurrent_states": "replayed"}
TREE = {"method": "draft_model", "branching_factors": [3, 2, 1]}
METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1}, "chain": CHAIN, "tree": TREE, "token_recycling": {"method": "token_recycling"},
    "replayed chain": {**CHAIN, **REPLAYED}, "replayed tree": {**TREE, **REPLAYED},
}  # fmt: skip
HYBRID = {"first": METHODS["ngram"], "second": METHODS["token_recycling"]}
LENGTHS = (14, 1, 2, 13, 4)
NEW = 24


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name):
        if name not in made:
            model = make(name)
            made[name] = model, perturbed(model)
        return made[name]

    yield get
    for model, _ in made.values():
        hf_specdec.release(model)


def batch(lengths=LENGTHS, seed=1):
    torch.manual_seed(seed)
    ids = torch.randint(5, 120, (len(lengths), max(lengths)))
    mask = torch.ones_like(ids)
    for i, length in enumerate(lengths):
        mask[i, : max(lengths) - length] = ids[i, : max(lengths) - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


def plain(model, inputs, new=NEW, **options):
    settings = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new}
    return model.generate(**inputs, **(settings | options))


def speculative(model, drafter, inputs, config, new=NEW, **options):
    if config["method"] == "draft_model":
        options["assistant_model"] = drafter
    return plain(model, inputs, new, speculative_config=config, **options)


def texts_of(model, inputs, new=NEW):
    """Each row's true text, alone and unpadded."""
    rows = [ids[kept.bool()] for ids, kept in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    return [plain(model, {"input_ids": row[None]}, new)[0].tolist() for row in rows]


# ---- greedy text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_greedy_text_is_plain_text(name, models):
    model, drafter = models(name)
    inputs = batch()
    expected = plain(model, inputs)
    assert len(set(expected[0, -NEW:].tolist())) > NEW // 2  # the text does not loop
    for method, config in METHODS.items():
        if name in STEPPED and "replayed" in method:
            continue
        out = speculative(model, drafter, inputs, config, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected), method
        assert method not in ("chain", "tree") or 1.2 < out.speculation.mean_accepted_length < 4
        if method in ("ngram", "chain", "tree"):
            one = {key: value[3:4, 1:] for key, value in inputs.items()}
            assert torch.equal(speculative(model, drafter, one, config)[0], expected[3, 1:])
    assert_clean(model)


@pytest.mark.parametrize(("name", "states"), WITH_STATES)
@pytest.mark.parametrize("drafter", [WrongAt, WrongAtInTrees])
def test_rejections_at_every_position(name, states, drafter, models, monkeypatch):
    model, _ = models(name)
    inputs = batch()
    WrongAt.texts = texts_of(model, inputs, NEW + 5)
    config = {"method": "ngram", "num_speculative_tokens": 3}
    packed = prepare(model, ModelOptions(recurrent_states=states))
    decoder = SpeculativeDecoder(drafter(parse_config(config), packed))
    monkeypatch.setattr(integration, "get_decoder", lambda *_: decoder)
    out = speculative(model, None, inputs, config, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain(model, inputs))
    depths = out.speculation.acceptance_per_position
    assert len(depths) == 3 and 0 < depths[2] < depths[0] < 1  # some rounds accept none, some all


@pytest.mark.parametrize(("name", "states"), WITH_STATES)
def test_only_written_states_are_read(name, states, models, monkeypatch):
    """Every slot that is not the beginning of a line holds NaN before the forward."""
    model, drafter = models(name)
    made, filled = packed_model.make_plan, []

    def poisoned(rows, starts, cache, chunks_continue):
        plan, pool = made(rows, starts, cache, chunks_continue), cache.states
        bases = [prompt.base for prompt in plan.prompts if prompt.base] + (
            [] if plan.lines is None else plan.lines.bases
        )
        in_this_forward = {prompt.slot for prompt in plan.prompts}, {prompt.state for prompt in plan.prompts}
        read_slots = {0} | {base.slot for base in bases} - in_this_forward[0]
        states = {0} | {base.state for base in bases} - in_this_forward[1]
        states |= {prompt.base.state for prompt in plan.prompts if prompt.base}
        replayed = {slot for base in bases for slot in base.replayed}
        inputs = {(layer, i): each for layer, pools in pool.inputs.items() for i, each in enumerate(pools)}
        for pools, read in ((pool.conv, read_slots), (pool.recurrent, states), (inputs, replayed)):
            for each in pools.values():
                others = [slot for slot in range(len(each)) if slot not in read]
                each[others] = float("nan")
                filled.append(len(others))
        return plan

    monkeypatch.setattr(packed_model, "make_plan", poisoned)
    inputs = batch()
    assert torch.equal(speculative(model, drafter, inputs, {**TREE, "recurrent_states": states}), plain(model, inputs))
    assert max(filled) > 5


@pytest.mark.long
@pytest.mark.parametrize(("name", "states"), FEW)
def test_prompts_in_parts_and_rows_that_are_read_again(name, states, models, monkeypatch):
    model, drafter = models(name)
    inputs = batch()
    expected = plain(model, inputs)
    for size in (5, 3, 1):  # the last two are shorter than a draft
        parts = {**CHAIN, "recurrent_states": states, "prefill_chunk_size": size, "block_size": 4}
        assert torch.equal(speculative(model, drafter, inputs, parts), expected)
    few_blocks = {**CHAIN, "recurrent_states": states, "num_blocks": 16, "block_size": 4}
    preempted, preempt = [], SpeculativeDecoder.preempt

    def watched(decoder, seq):
        preempted.append(seq.num_generated)
        preempt(decoder, seq)

    monkeypatch.setattr(SpeculativeDecoder, "preempt", watched)
    assert torch.equal(speculative(model, drafter, inputs, few_blocks), expected)
    assert max(preempted) > 0  # a row that had written text of its own


@pytest.mark.long
@pytest.mark.parametrize(("name", "states"), FEW)
def test_rows_join_and_leave(name, states, models):
    """A scheduler that preempts, cancels and reads prompts in parts beside decoding rows."""
    model, drafter = models(name)
    decoder = make_decoder(model, {**CHAIN, "num_blocks": 12, "block_size": 4}, drafter)
    decoder.target.replays_drafts, decoder.target.chooses_states = states == "replayed", False
    decoder.allocate(0, 4)
    assert decoder.cache.states.replays == (states == "replayed")
    rng = random.Random(0)
    scheduler = Scheduler(decoder, max_rows=4, chunk=6, rng=rng)
    prompts = [[rng.randrange(5, 120) for _ in range(n)] for n in (3, 17, 1, 9, 26, 2, 12)]
    rows = [Sequence(list(prompt), len(prompt) + 14) for prompt in prompts]
    cancelled = rows[3]
    with decoder.active():
        for seq in rows[:4]:
            scheduler.submit(seq)
        late = rows[4:]
        while scheduler.waiting or scheduler.running:
            scheduler.step()
            check_cache(decoder.cache)
            if late:
                scheduler.submit(late.pop(0))
            if cancelled in scheduler.running and cancelled.num_generated > 2:
                scheduler.cancel(cancelled)
    assert scheduler.preemptions
    for seq, prompt in zip(rows, prompts, strict=True):
        if seq is not cancelled:
            assert seq.tokens == plain(model, {"input_ids": torch.tensor([prompt])}, 14)[0].tolist()
    assert decoder.cache.states.num_used == 0 and decoder.generator.cache.states.num_used == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_methods_without_a_model(name, models):
    """Everything that drafts from tokens alone."""
    model, _ = models(name)
    inputs = batch((24, 1, 9))
    expected, accepted = plain(model, inputs), 0
    for method, more in (
        ("suffix", {}),
        ("lookahead", {}),
        ("token_recycling", {"use_tree": False}),
        ("hybrid", HYBRID),
        ("none", {}),
    ):
        config = {"method": method, **more}
        for _ in range(2):  # a suffix tree has learnt the text then
            out = plain(model, inputs, speculative_config=config, return_dict_in_generate=True)
            assert torch.equal(out.sequences, expected), method
            accepted += out.speculation.num_accepted_tokens
    assert accepted > NEW
    assert_clean(model)


@pytest.mark.long
@pytest.mark.parametrize(("name", "states"), FEW)
def test_parallel_drafts(name, states, models):
    """PARD reads mask tokens after the text, of which a drafter's own states must keep nothing; and a drafter without states."""
    model, drafter = models(name)
    inputs, accepted = batch(), 0
    expected = plain(model, inputs)
    config = {"method": "pard", "mask_token_id": 3, "recurrent_states": states}
    chain, tree = {"num_speculative_tokens": 4}, {"branching_factors": [3, 2, 1]}
    for assistant, shape in ((drafter, chain), (drafter, tree), (make_family("Llama"), chain)):
        more = {"assistant_model": assistant, "return_dict_in_generate": True}
        out = plain(model, inputs, speculative_config={**config, **shape}, **more)
        assert torch.equal(out.sequences, expected)
        accepted += out.speculation.num_accepted_tokens if assistant is drafter else 0
    assert accepted > NEW
    sampled = {"do_sample": True, "assistant_model": drafter, "speculative_config": {**config, **tree, "seed": 5}}
    without = {"do_sample": True, "speculative_config": {"method": "none", "seed": 5}}
    assert torch.equal(plain(model, inputs, 12, **sampled), plain(model, inputs, 12, **without))
    few_blocks = {**config, "num_speculative_tokens": 4, "num_blocks": 16, "block_size": 4, "prefill_chunk_size": 5}
    assert torch.equal(plain(model, inputs, speculative_config=few_blocks, assistant_model=drafter), expected)
    assert_clean(model)


def test_gathered_keys_have_windows_beside_states(monkeypatch):
    monkeypatch.setattr(packed_model.architectures, "reads_pages", lambda model: False)
    model, inputs = make("LaraMini"), batch((30, 17))
    expected = plain(model, inputs)
    assert torch.equal(plain(model, inputs, speculative_config=METHODS["token_recycling"]), expected)
    model.config.sliding_window = 60
    assert not torch.equal(plain(model, inputs), expected)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in STEPPED])
def test_what_modules_that_run_whole_cannot_do(name, models, caplog):
    """No cache comes back, and none is read; nor embeddings; no drafts are replayed. The engine serves them, with prefixes."""
    model, _ = models(name)
    inputs, ngram = {"input_ids": torch.arange(5, 65).view(2, 30)}, METHODS["ngram"]
    out = plain(model, inputs, 8, speculative_config=ngram, return_dict_in_generate=True)
    assert out.get(CACHE) is None and "form of our own" in caplog.text
    expected = plain(model, inputs, 8, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected.sequences)
    with pytest.raises(UnsupportedModel, match="only prompts of token ids"):
        plain(
            model, {"inputs_embeds": 2 * model.get_input_embeddings()(inputs["input_ids"])}, 8, speculative_config=ngram
        )
    with pytest.raises(UnsupportedModel, match="kept, not replayed"):
        plain(model, inputs, 8, speculative_config={**ngram, **REPLAYED})
    llm = LLM(
        model, speculative_config={"method": "token_recycling", "block_size": 8}, max_model_len=200, max_num_seqs=3
    )
    prompts = [[*range(5, 95)], [*range(5, 90)]]
    for _ in range(2):
        outputs = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
        for prompt, each in zip(prompts, outputs, strict=True):
            text = plain(model, {"input_ids": torch.tensor([prompt])}, 8)[0].tolist()
            assert list(each.outputs[0].token_ids) == text[len(prompt) :]
    assert outputs[0].num_cached_tokens > 0
    llm.close()


def test_caches_with_several_states_in_a_layer_are_not_read(monkeypatch):
    kind, settings = FAMILIES["Zaya"]
    monkeypatch.setitem(
        FAMILIES, "Zaya", (kind, {**settings, "layer_types": ["hybrid"] * 3})
    )  # nothing else would refuse it
    model, prompt = make("Zaya"), torch.arange(5, 35)[None]
    before = plain(model, {"input_ids": prompt}, 8, return_dict_in_generate=True)
    longer = {"input_ids": torch.cat([before.sequences, prompt], dim=1)}
    with pytest.raises(ValueError, match="their states have a form of their own: pass the whole text"):
        plain(model, longer, 8, speculative_config=METHODS["ngram"], **{CACHE: before[CACHE]})
    expected = plain(model, longer, 8)
    assert torch.equal(plain(model, longer, 8, speculative_config=METHODS["ngram"]), expected)


def test_models_without_keys(models, caplog):
    """Nothing about gathered keys is logged; the engine serves them; caches with states and embeddings are refused."""
    model, _ = models("Mamba-2")
    inputs, ngram = {"input_ids": torch.arange(5, 35).view(2, 15)}, METHODS["ngram"]
    out = plain(model, inputs, 8, speculative_config=ngram, return_dict_in_generate=True)
    expected = plain(model, inputs, 8)
    assert torch.equal(out.sequences, expected) and "gathered keys" not in caplog.text
    with pytest.raises(ValueError, match="pass the whole text without"):
        plain(model, {"input_ids": out.sequences}, 8, speculative_config=ngram, **{CACHE: out.past_key_values})
    with pytest.raises(UnsupportedModel, match="pass input_ids"):
        embeds = 2 * model.get_input_embeddings()(inputs["input_ids"])
        plain(model, {"inputs_embeds": embeds}, 8, speculative_config=ngram)
    llm = LLM(model, speculative_config={"method": "token_recycling"}, max_model_len=64, max_num_seqs=3)
    outputs = llm.generate(inputs["input_ids"].tolist(), SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
    assert [list(each.outputs[0].token_ids) for each in outputs] == expected[:, 15:].tolist()
    llm.close()


# ---- sampling, bfloat16 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_sampled_text_does_not_depend_on_the_method(name, models):
    model, drafter = models(name)
    inputs, texts = batch(), []
    for config in ({"method": "none"}, CHAIN, TREE):
        options = {"do_sample": True, "temperature": 0.7}
        texts.append(speculative(model, drafter, inputs, {**config, "seed": 5}, **options))
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


@pytest.mark.parametrize(
    "name", ["Granite-hybrid", *(pytest.param(n, marks=pytest.mark.slow) for n in ("Bamba", "Qwen3-Next"))]
)
def test_drafts_have_the_bits_of_single_tokens_in_bfloat16(name, models):
    """The chunk form of Mamba-2 is not the one-token rule in bfloat16: it changes one argmax in ten."""
    model = copy.deepcopy(models(name)[0]).to(torch.bfloat16)
    torch.manual_seed(3)
    prompt, text = torch.randint(5, 120, (1, 9)), torch.randint(5, 120, (6,))
    packed = prepare(model)
    with torch.no_grad():
        output = model(prompt, use_cache=True)
        expected = [output.logits[0, -1]]
        for i, token in enumerate(text):
            position = torch.tensor([[9 + i]])
            output = model(token[None, None], position_ids=position, **{CACHE: output.past_key_values}, use_cache=True)
            expected.append(output.logits[0, -1])
        cache = packed.new_cache(4, 16)
        cache.add(0)
        cache.reserve(0, 32)
        with packed.active():
            row = RowInput(0, torch.cat([prompt[0], text]).numpy(), 0, logits=7, prompt=9)
            found = packed.forward([row], cache).logits
    expected = torch.stack(expected).float()
    assert torch.equal(found.argmax(1), expected.argmax(1))
    assert (found - expected).norm() < 0.02 * expected.norm()


# ---- states -----------------------------------------------------------------------------------------------------------------


def test_a_state_that_was_not_kept_raises(models):
    packed = prepare(models("Qwen3-Next")[0])
    cache = packed.new_cache(4, 16)
    cache.add(0)
    cache.reserve(0, 32)
    tokens = torch.arange(5, 15).numpy()
    with packed.active():
        packed.forward([RowInput(0, tokens, 0, prompt=10)], cache)
        cache.tables[0].length = 10
        with pytest.raises(RuntimeError, match="after 7 tokens was not kept"):
            packed.forward([RowInput(0, tokens[:1], 7)], cache)
        packed.forward([RowInput(0, tokens[:1], 10)], cache)
    cache.truncate(0, 4)
    assert cache.tables[0].length == 0  # read from the beginning
    assert cache.num_bytes > cache.states.num_bytes >= packed.bytes_of_states(0) > 0
    cache.remove(0)
    check_cache(cache)


class AtStep(StoppingCriteria):
    """Stops every row at a length, wherever the rows have got to."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("name", [each for each in ALL if each.values[0] not in STEPPED])
@pytest.mark.parametrize("end", ["length", "criterion", "eos"])
def test_the_returned_cache_continues(name, end, models):
    model, drafter = models(name)
    inputs = batch((14, 11, 1))
    expected = plain(model, inputs, return_dict_in_generate=True)
    options = {"return_dict_in_generate": True}
    if end == "criterion":
        options["stopping_criteria"] = StoppingCriteriaList([AtStep(14 + 9)])
    if end == "eos":
        options["eos_token_id"] = int(expected.sequences[1, 14 + 6])
    expected = plain(model, inputs, **options)
    config = CHAIN if end != "criterion" else {**CHAIN, **REPLAYED}
    out = speculative(model, drafter, inputs, config, **options)
    assert torch.equal(out.sequences, expected.sequences)
    # transformers feeds padding to the others
    going_on = [i for i in range(3) if 0 not in expected.sequences[i, 14:].tolist()]
    compared = 0
    for own, layer in zip(out.past_key_values.layers, expected.past_key_values.layers, strict=True):
        if getattr(layer, "conv_states", None) is None or layer.conv_states[0] is None:
            continue
        assert own.has_previous_state[0]
        for states in ("conv_states", "recurrent_states"):
            theirs = getattr(layer, states)[0]
            if theirs is not None:
                torch.testing.assert_close(getattr(own, states)[0][going_on], theirs[going_on], rtol=1e-3, atol=2e-4)
                compared += 1
    assert compared
    if end != "length":
        return
    longer = {
        "input_ids": expected.sequences,
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, NEW), value=1),
    }
    again = plain(model, longer, 8, **{CACHE: copy.deepcopy(expected.past_key_values)})
    assert torch.equal(plain(model, longer, 8, **{CACHE: copy.deepcopy(out.past_key_values)}), again)
    if name in (
        "Nemotron-H",
        "Zamba2",
        "LaraMini",
        "LFM3",
        "Mamba",
        "Mamba-2",
        "FalconMamba",
    ):  # two rules, windows, no keys
        with pytest.raises(ValueError, match=r"[Pp]ass the whole text"):
            speculative(model, drafter, longer, CHAIN, 8, **{CACHE: out.past_key_values})
    else:
        for config in ({**CHAIN, **REPLAYED}, CHAIN):
            cache = copy.deepcopy(out.past_key_values)
            assert torch.equal(speculative(model, drafter, longer, config, 8, **{CACHE: cache}), again)


# ---- serving ----------------------------------------------------------------------------------------------------------------


def test_an_image_text_class_with_a_hybrid_text_model():
    """As Qwen3.5 is published: text alone, with the positions of its class."""
    _, settings = FAMILIES["Qwen3.5"]
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
    }
    config = AutoConfig.for_model(
        "qwen3_5", text_config={**recurrent_families.COMMON, **settings}, vision_config=vision
    )
    torch.manual_seed(0)
    model = recurrent_families.drawn(AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval())
    inputs = batch()
    expected = plain(model, inputs)
    for config in (CHAIN, TREE):
        assert torch.equal(speculative(model, perturbed(model), inputs, config), expected)
    assert len(set(expected[0, -NEW:].tolist())) > NEW // 2


def test_the_engine_serves_a_hybrid(models):
    model, _ = models("Qwen3-Next")
    rng = random.Random(1)
    prompts = [[rng.randrange(5, 120) for _ in range(n)] for n in (30, 1, 2, 9, 17, 6)]
    config = {"method": "token_recycling", "num_blocks": 18, "block_size": 4, **REPLAYED}
    llm = LLM(model, speculative_config=config, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=12)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = plain(model, {"input_ids": torch.tensor([prompt])}, 12)[0, len(prompt) :].tolist()
        assert list(output.outputs[0].token_ids) == expected
        assert output.num_cached_tokens == 0  # a block of another text holds no state
    check_cache(llm.engine.decoder.cache)
    assert llm.engine.decoder.cache.states.num_used == 0
    llm.close()


@pytest.mark.parametrize("states", ["kept", "replayed"])
def test_states_are_allocated_once(states, models, monkeypatch):
    """For as many rows as may run, in a static batch and in the engine; on a CPU unwritten ones take no memory."""
    model, _ = models("Qwen3-Next")
    prepare(model)  # its self-test has a pool of its own
    allocated, allocate = [], StatePool.allocate
    monkeypatch.setattr(
        StatePool,
        "allocate",
        lambda self, layer, *more: allocated.append((self, layer)) or allocate(self, layer, *more),
    )
    for config in (METHODS["ngram"], {**METHODS["token_recycling"], "num_blocks": 30, "block_size": 4}):
        speculative(model, None, batch(), {**config, "recurrent_states": states})
    llm = LLM(
        model, speculative_config={"method": "ngram", "recurrent_states": states}, max_model_len=64, max_num_seqs=3
    )
    llm.generate([[5, 6, 7]] * 5, SamplingParams(max_tokens=12, temperature=0), use_tqdm=False)
    pools = {id(pool): [layer for own, layer in allocated if own is pool] for pool, _ in allocated}
    assert len(pools) >= 3 and all(layers == [0, 2] for layers in pools.values())
    llm.close()


def test_states_leave_less_memory_for_blocks(models):
    model, _ = models("Qwen3-Next")
    packed = prepare(model)
    row, block = packed.bytes_of_states(3), packed.bytes_per_token() * 16
    cache = packed.new_cache(2, 16)
    cache.add(0)
    cache.reserve(0, 4)
    with packed.active():
        packed.forward([RowInput(0, torch.arange(4).numpy(), 0, prompt=4)], cache)
    pools = [*cache.states.conv.values(), *cache.states.recurrent.values()]
    assert sum(pool[0].nbytes for pool in pools) * 5 == row > 0
    config = {"method": "ngram", "num_speculative_tokens": 3, "block_size": 16, "recurrent_states": "kept"}
    llm = LLM(
        model,
        speculative_config=config,
        max_model_len=512,
        max_num_seqs=2,
        kv_cache_memory_bytes=int((2 * row + 9 * block + 2) / (1 - packed_model.PREFIX_STATES_SHARE)),
    )
    assert llm.engine.decoder.cache.most_blocks == 9
    llm.close()
    with pytest.raises(ValueError, match="recurrent states of 2 texts"):
        LLM(model, speculative_config=config, max_model_len=512, max_num_seqs=2, kv_cache_memory_bytes=2 * row)


def test_layers_that_compute_without_their_modules_functions_are_refused(models):
    """As kernels from the Hub do, which take the place of a whole layer."""
    model = copy.deepcopy(models("Qwen3-Next")[0])
    mixer = model.model.layers[0].linear_attn
    plain_forward = inspect.unwrap(type(mixer).forward)
    names = plain_forward.__globals__
    others = {**names, "torch_chunk_gated_delta_rule": inspect.unwrap(names["torch_chunk_gated_delta_rule"])}
    own = types.FunctionType(
        plain_forward.__code__, others, argdefs=plain_forward.__defaults__, closure=plain_forward.__closure__
    )
    mixer.forward = types.MethodType(own, mixer)
    with pytest.raises(UnsupportedModel, match="did not call its module's functions"):
        plain(model, batch(), speculative_config={"method": "ngram"})


def test_replayed_drafts_take_less_memory():
    kind, settings = FAMILIES["Qwen3.5"]
    wide = {**settings, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**recurrent_families.COMMON, **wide})).eval()
    kept, replayed = (
        prepare(model, ModelOptions(recurrent_states=each)).bytes_of_states(4) for each in ("kept", "replayed")
    )
    assert replayed < kept / 3


@pytest.mark.long
def test_drafts_are_replayed_where_kept_states_would_take_too_much(models, monkeypatch, caplog):
    """The choice follows the memory, is logged once, and does not change the text."""
    model, _ = models("Qwen3-Next")
    inputs, config = batch(), {"method": "token_recycling", "recurrent_states": "auto"}
    expected = plain(model, inputs)
    packed = prepare(model)
    kept, replayed = (packed.bytes_of_states(60, replays) * len(LENGTHS) for replays in (False, True))
    assert replayed < kept
    hf_specdec.release(model)
    for memory, words in ((10**12, "are kept"), (0, "are replayed"), (10**12, "are kept"), (None, None)):
        monkeypatch.setattr(packed_model, "free_bytes", lambda _, memory=memory: memory)
        caplog.clear()
        with caplog.at_level(logging.INFO, "hf_specdec.model.packed_model"):
            outputs = [speculative(model, None, inputs, config) for _ in range(2)]
        assert all(torch.equal(each, expected) for each in outputs)
        logged = [each.getMessage() for each in caplog.records if "Recurrent states" in each.getMessage()]
        assert len(logged) == (words is not None) and all(words in each for each in logged)


def test_a_server_chooses_states_by_its_own_memory(models):
    model, _ = models("Qwen3-Next")
    packed = prepare(model)
    row, block = packed.bytes_of_states(3, replays=False), packed.bytes_per_token() * 16
    config = {"method": "ngram", "num_speculative_tokens": 3, "block_size": 16}
    for memory, replays in ((8 * row + 20 * block, False), (2 * row + 20 * block, True)):
        llm = LLM(model, speculative_config=config, max_model_len=64, max_num_seqs=2, kv_cache_memory_bytes=memory)
        assert llm.engine.decoder.target.replays_drafts == llm.engine.decoder.cache.states.replays == replays
        llm.close()


# ---- refused ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "ngram", "compile": True}, "compile cannot"), ({"method": "ngram", "deterministic": True}, "deterministic cannot"),
        ({"method": "ngram", "cuda_graphs": True}, "cuda_graphs"), ({"method": "draft_model", "early_exit": 1}, "early_exit cannot"),
        ({"method": "ngram", "target_quantization": "wint8"}, "quantization cannot"),
    ],
)  # fmt: skip
def test_options_that_are_not_shown_to_be_right_are_refused(config, words, models):
    model, _ = models("Qwen3-Next")
    with pytest.raises(UnsupportedModel, match=words):
        speculative(model, None, batch(), config) if "early_exit" not in config else plain(
            model, batch(), speculative_config=config
        )


def test_the_key_for_states_needs_states(model):
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM has none"):
        plain(model, {"input_ids": torch.tensor([[5, 6, 7]])}, 3, speculative_config={"method": "ngram", **REPLAYED})


UNKNOWN = {
    "recurrent_gemma": {"lru_width": 48, "attention_window_size": 16},
    "minimax": {"layer_types": ["full_attention", "linear_attention", "full_attention"], "num_local_experts": 2},
}  # fmt: skip


@pytest.mark.parametrize("model_type", UNKNOWN)
def test_other_recurrences_are_refused_by_name(model_type):
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**sizes, **UNKNOWN[model_type]}))
    with pytest.raises(UnsupportedModel, match=f"{type(model).__name__} has .*without speculative_config"):
        plain(model, {"input_ids": torch.tensor([[5, 6, 7]])}, 3, speculative_config={"method": "ngram"})


def test_layers_that_are_not_transformers_own_are_refused(models):
    class Qwen3NextGatedDeltaNet(type(models("Qwen3-Next")[0].model.layers[0].linear_attn)):
        pass

    model = copy.deepcopy(models("Qwen3-Next")[0])
    model.model.layers[0].linear_attn.__class__ = Qwen3NextGatedDeltaNet
    with pytest.raises(UnsupportedModel, match="not transformers' own"):
        plain(model, batch(), speculative_config={"method": "ngram"})


def test_the_families_of_the_tests_are_those_that_are_served():
    assert {kind for kind, _ in recurrent_families.FAMILIES.values()} == set(families.FAMILIES)
    with pytest.raises(UnsupportedModel, match="compile"):
        prepare(make("LFM2"), ModelOptions(compile=True))


def test_an_older_transformers_is_refused(monkeypatch):
    """5.17 keeps states in another way."""
    monkeypatch.delattr(Cache, "get_conv_state")
    with pytest.raises(UnsupportedModel, match=r"install transformers 5\.23"):
        prepare(make("Qwen3-Next"))
