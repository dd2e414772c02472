"""Prompts with images and embeddings: the model reads them itself, and what follows equals plain generate() token for token."""

import copy

import pytest
import torch
from families import VOCAB, drawn_vectors, make, perturbed
from multimodal import (
    GREEDY,
    IMAGE,
    METHODS,
    MULTIMODAL,
    NGRAM,
    TREE,
    build_multimodal,
    eagle_head,
    image_prompts,
    token_types,
)
from oracle import assert_clean, ragged
from PIL import Image
from replayed_graphs import defined_attention, graphs_in_python  # noqa: F401
from safetensors import safe_open
from transformers import (
    DynamicCache,
    LlavaProcessor,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    pipeline,
)
from transformers.generation import GenerationMixin
from transformers.models.clip import CLIPImageProcessorPil

import hf_specdec
from hf_specdec import CandidateGenerator, DraftTrees, integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.core.names import CACHE
from hf_specdec.decoding import SpeculativeDecoder
from hf_specdec.model import prompt as prompt_module
from hf_specdec.model.prepare import prepare

QUICK = ("gemma3", "qwen3_vl", "paligemma2")
# newer transformers run the tower before a mode begins
ENCODES_FIRST = hasattr(GenerationMixin, "_expand_multimodal_outputs")
MROPE = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v"}


def families(quick=QUICK):
    return [pytest.param(each, marks=() if each in quick else pytest.mark.slow) for each in MULTIMODAL]


@pytest.fixture(scope="module")
def llava():
    return build_multimodal("llava")


@pytest.fixture(scope="module")
def qwen():
    return build_multimodal("qwen2_5_vl")


@pytest.fixture(params=["llava", "qwen"])
def either(request):
    return request.getfixturevalue(request.param)


def new_tokens(output, inputs):
    return output[:, inputs["input_ids"].shape[1] :]


# ---- every family ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families())
def test_images(family):
    """Two, no and one image in a batch, five rows, and one row alone; n-grams, trees, what remembers tokens, and a model that is a
    little different. Other images of the same sizes give another text, so the images are seen."""
    model = build_multimodal(family)
    inputs = image_prompts(model, [2, 0, 1], [9, 7, 12])
    plain = model.generate(**inputs, **GREEDY)
    other = model.generate(**image_prompts(model, [2, 0, 1], [9, 7, 12], seed=3), **GREEDY)
    changed = (new_tokens(other, inputs) != new_tokens(plain, inputs)).any(1).tolist()
    assert changed == [True, False, True]
    assert min(len(set(row.tolist())) for row in new_tokens(plain, inputs)) > 2
    accepted = 0
    for name in ("ngram", "tree", "token_recycling"):
        output = model.generate(**inputs, **GREEDY, speculative_config=METHODS[name], return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain), name
        accepted += output.speculation.num_accepted_tokens
    assert accepted > 0
    five, drafter = image_prompts(model, [2, 0, 1, 1, 0], [9, 7, 12, 4, 13]), perturbed(model, 0.05)
    plain, accepted = model.generate(**five, **GREEDY), 0
    for config in ({"num_speculative_tokens": 3}, {"branching_factors": [3, 2, 1]}):
        config, call = {"method": "draft_model", **config}, {**GREEDY, "return_dict_in_generate": True}
        output = model.generate(**five, **call, assistant_model=drafter, speculative_config=config)
        assert torch.equal(output.sequences, plain), config
        accepted += output.speculation.num_accepted_tokens
    assert accepted > 0
    alone = image_prompts(model, [1], [11], seed=1)
    assert torch.equal(model.generate(**alone, **GREEDY, speculative_config=NGRAM), model.generate(**alone, **GREEDY))
    assert_clean(model)


def ending_in_images(model, seed=0):
    """A row that ends in an image, one that ends in two, and one with an image before its last token."""
    inputs = image_prompts(model, [1, 2], [9, 4], end=True, seed=seed)
    other = image_prompts(model, [1], [3], seed=seed + 7)
    width = max(each["input_ids"].shape[1] for each in (inputs, other))
    for each in (inputs, other):
        for name in {"input_ids", "attention_mask", token_types(model)} - {None}:
            each[name] = torch.nn.functional.pad(each[name], (width - each[name].shape[1], 0))
    if inputs["pixel_values"].dim() == 5 and inputs["pixel_values"].shape[:2] == (2, 2):  # Idefics: images by row
        other["pixel_values"] = torch.nn.functional.pad(other["pixel_values"], (0, 0, 0, 0, 0, 0, 0, 1))
    return {name: torch.cat([inputs[name], other[name]]) for name in inputs}


@pytest.mark.long
@pytest.mark.parametrize("family", families(quick=("gemma3", "qwen2_vl", "qwen3_vl")))
def test_prompts_that_end_in_an_image(family):
    """M-RoPE then gives the text after it other positions on each axis."""
    model = build_multimodal(family)
    inputs = ending_in_images(model)
    plain = model.generate(**inputs, **GREEDY)
    assert inputs["input_ids"][:2, -1].tolist() == [IMAGE, IMAGE] != inputs["input_ids"][2:, -1].tolist()
    assert not torch.equal(model.generate(**ending_in_images(model, seed=3), **GREEDY), plain)
    accepted = 0
    for name in ("ngram", "tree", "token_recycling", "lookahead"):
        output = model.generate(**inputs, **GREEDY, speculative_config=METHODS[name], return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain), name
        accepted += output.speculation.num_accepted_tokens
    assert accepted > 0
    sampled = [
        model.generate(**inputs, max_new_tokens=12, do_sample=True, speculative_config={**METHODS[name], "seed": 3})
        for name in ("none", "ngram", "tree")
    ]
    assert torch.equal(sampled[0], sampled[1]) and torch.equal(sampled[0], sampled[2])
    assert_clean(model)


def test_axes_of_positions_that_differ(qwen, monkeypatch):
    """A prompt that ends in an image: without the difference of its axes the check of the next step finds another text. A check
    of prompts that end in text says nothing of it."""
    hf_specdec.release(qwen)
    inputs = image_prompts(qwen, [1, 1], [9, 4], end=True)
    offsets, read = [], prompt_module._offsets
    monkeypatch.setattr(prompt_module, "_offsets", lambda *args: offsets.append(read(*args)) or offsets[-1])
    plain = qwen.generate(**inputs, **GREEDY)
    config = {**NGRAM, "block_size": 4, "num_blocks": -(-(inputs["input_ids"].shape[1] + 16) // 4) + 2}
    for each in (config, {"method": "none", "async_scheduling": True}):  # rows wait and give way; steps overlap
        assert torch.equal(qwen.generate(**inputs, **GREEDY, speculative_config=each), plain)
    assert all(len(set(offset)) > 1 for offset in offsets[0])
    hf_specdec.release(qwen)
    checks, check = [], prompt_module._check_next_step
    monkeypatch.setattr(prompt_module, "_check_next_step", lambda *args: checks.append(1) or check(*args))
    for each in (image_prompts(qwen, [1, 1], [9, 4]), inputs, inputs):
        qwen.generate(**each, **GREEDY, speculative_config=NGRAM)
    assert len(checks) == 2
    hf_specdec.release(qwen)
    monkeypatch.setattr(
        prompt_module, "_offsets", lambda *args: [each if isinstance(each, int) else each[0] for each in read(*args)]
    )
    with pytest.raises(UnsupportedModel, match="does not continue this prompt from token ids"):
        qwen.generate(**inputs, **GREEDY, speculative_config=NGRAM)
    assert_clean(qwen)


@pytest.mark.parametrize("family", families(quick=("qwen2_5_vl",)))
def test_a_turn_after_a_prompt_that_ended_in_an_image(family):
    """And after a text alone."""
    model = build_multimodal(family)
    inputs, turns = image_prompts(model, [1, 1], [9, 4], end=True), []
    for config in (None, NGRAM):
        more, cache = {} if config is None else {"speculative_config": config}, DynamicCache()
        first = model.generate(**inputs, **GREEDY, **more, **{CACHE: cache})
        ids = torch.cat([first, ragged([7, 7], 100)["input_ids"]], dim=1)
        second = {
            "input_ids": ids,
            "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 23), value=1),
        }
        name = token_types(model)
        if name is not None:
            second[name] = (ids == IMAGE).long() if model.config.model_type != "paligemma" else torch.zeros_like(ids)
        turns.append(model.generate(**second, **GREEDY, **more, **{CACHE: cache}))
    assert torch.equal(*turns)
    assert_clean(model)


@pytest.mark.parametrize("family", families(quick=("qwen3_vl",)))
def test_two_turns(family):
    """The second turn goes on from the cache of the first: with text alone, and with another image in it (M-RoPE models of
    transformers count positions of all images or of none, so that there is no such turn)."""
    model = build_multimodal(family)
    inputs = image_prompts(model, [1, 1], [9, 6])
    for images in (0, 1)[: 1 if model.config.model_type in MROPE else 2]:
        turns = []
        for config in (None, NGRAM):
            more = {} if config is None else {"speculative_config": config}
            cache = DynamicCache()
            first = model.generate(**inputs, **GREEDY, **more, **{CACHE: cache})
            assert cache.get_seq_length() == first.shape[1] - 1
            question = (
                image_prompts(model, [images] * 2, [7, 7], seed=5, text_seed=4) if images else ragged([7, 7], 100)
            )
            ids = torch.cat([first, question["input_ids"]], dim=1)
            ones = torch.ones(2, ids.shape[1] - inputs["attention_mask"].shape[1], dtype=torch.long)
            second = {"input_ids": ids, "attention_mask": torch.cat([inputs["attention_mask"], ones], dim=1)}
            name = token_types(model)
            if name is not None:
                second[name] = (
                    (ids == IMAGE).long() if model.config.model_type != "paligemma" else torch.zeros_like(ids)
                )
            if images:
                second |= {key: value for key, value in question.items() if key not in second}
            turns.append(model.generate(**second, **GREEDY, **more, **{CACHE: cache}))
        assert torch.equal(*turns)
    assert_clean(model)


# ---- positions ------------------------------------------------------------------------------------------------------


def test_positions_that_do_not_count_tokens(qwen, monkeypatch):
    """M-RoPE gives an image fewer positions than tokens. Without the difference the check of the next step finds another text."""
    inputs = image_prompts(qwen, [2, 0, 1], [9, 7, 12])
    offsets, read = [], prompt_module._offsets
    monkeypatch.setattr(prompt_module, "_offsets", lambda *args: offsets.append(read(*args)) or offsets[-1])
    plain = qwen.generate(**inputs, **GREEDY)
    assert torch.equal(qwen.generate(**inputs, **GREEDY, speculative_config=NGRAM), plain)
    assert offsets[0][1] == 0 and offsets[0][0] < offsets[0][2] < 0
    hf_specdec.release(qwen)
    monkeypatch.setattr(prompt_module, "_offsets", lambda packed, positions, columns: [0] * len(columns))
    with pytest.raises(UnsupportedModel, match="does not continue this prompt from token ids"):
        qwen.generate(**inputs, **GREEDY, speculative_config=NGRAM)
    assert_clean(qwen)


def test_the_model_keeps_what_it_noted_of_positions(qwen):
    """`rope_deltas` is what plain generate() leaves, and a text after an image, or an image after a text, is read anew."""
    image, text = image_prompts(qwen, [2, 1], [9, 7]), ragged([9, 4, 6], vocab_size=100)
    expected = []
    for inputs in (image, text):
        output = qwen.generate(**inputs, **GREEDY)
        expected.append((output, qwen.model.rope_deltas.clone()))
    for i in (0, 1, 0):
        inputs = (image, text)[i]
        for config in (NGRAM, TREE):
            output = qwen.generate(**inputs, **GREEDY, speculative_config=config)
            assert torch.equal(output, expected[i][0]) and torch.equal(qwen.model.rope_deltas, expected[i][1])
            assert torch.equal(qwen.generate(**inputs, **GREEDY), output)
    hf_specdec.release(qwen)


# ---- what is shared, preempted and remembered -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ngram", "token_recycling", "suffix", "lookahead"])
def test_equal_ids_and_different_images(either, method):
    """In one batch, with blocks that could be shared, and in calls that follow each other."""
    if method == "suffix":
        pytest.importorskip("arctic_inference")
    config = {**METHODS[method], "block_size": 4}
    inputs, other = (image_prompts(either, [1], [12], seed=seed) for seed in (0, 3))
    inputs = {key: torch.cat([value, other[key]]) for key, value in inputs.items()}
    assert torch.equal(*inputs["input_ids"])
    plain = either.generate(**inputs, **GREEDY)
    assert not torch.equal(*new_tokens(plain, inputs))
    for _ in range(2):
        assert torch.equal(either.generate(**inputs, **GREEDY, speculative_config=config), plain)
    swapped = dict(inputs)
    swapped["pixel_values"] = torch.cat(inputs["pixel_values"].chunk(2)[::-1])
    again = either.generate(**swapped, **GREEDY, speculative_config=config)
    assert torch.equal(new_tokens(again, inputs), new_tokens(plain, inputs).flip(0))
    assert_clean(either)


@pytest.mark.parametrize("method", ["ngram", "tree", "token_recycling"])
def test_rows_that_do_not_fit_together(either, method, monkeypatch):
    """They wait, and give way, with their keys: nothing of an image is read again as ids."""
    inputs = image_prompts(either, [2, 1, 0], [9, 12, 14])
    call = {"max_new_tokens": 24, "do_sample": False}
    plain = either.generate(**inputs, **call)
    blocks = -(-(inputs["input_ids"].shape[1] + 24) // 4) + 2
    preempt, preempted = hf_specdec.decoding.SpeculativeDecoder.preempt, []
    monkeypatch.setattr(
        hf_specdec.decoding.SpeculativeDecoder,
        "preempt",
        lambda self, seq: preempted.append(seq.row) or preempt(self, seq),
    )
    config = {**METHODS[method], "block_size": 4, "num_blocks": blocks}
    output = either.generate(**inputs, **call, speculative_config=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert preempted
    assert_clean(either)


def test_rows_that_end_together_in_a_full_pool(either):
    """With a cache to be returned: one gives way, with its keys, so that the others' last tokens find blocks."""
    inputs = image_prompts(either, [1, 1, 1], [9, 9, 9])
    call = GREEDY | {"max_new_tokens": 4, "return_dict_in_generate": True}
    plain, length = either.generate(**inputs, **call), inputs["input_ids"].shape[1]
    for blocks in (2 * (length + 3), 2 * (length + 3) + 1):
        config = {"method": "none", "block_size": 1, "num_blocks": blocks}
        output = either.generate(**inputs, **call, speculative_config=config)
        assert torch.equal(output.sequences, plain.sequences)
        real = torch.nn.functional.pad(inputs["attention_mask"].bool(), (0, 3), value=True)
        for ours, theirs in zip(output.past_key_values.layers, plain.past_key_values.layers, strict=True):
            keys = (each.keys.transpose(1, 2)[real] for each in (ours, theirs))
            torch.testing.assert_close(*keys, atol=1e-4, rtol=1e-4)
    assert_clean(either)


def test_small_pools_give_way_in_the_overlapping_loop(llava):
    inputs = image_prompts(llava, [2, 1, 1], [9, 12, 14])
    plain = llava.generate(**inputs, **GREEDY)
    blocks = -(-(inputs["input_ids"].shape[1] + 16) // 4) + 2
    for config in ({"method": "none"}, NGRAM):
        config = {**config, "block_size": 4, "num_blocks": blocks, "async_scheduling": True}
        assert torch.equal(llava.generate(**inputs, **GREEDY, speculative_config=config), plain)
    config = {**NGRAM, "async_scheduling": True}
    assert torch.equal(llava.generate(**inputs, **GREEDY, speculative_config=config), plain)
    assert_clean(llava)


def test_a_prompt_larger_than_the_pool(llava):
    inputs = image_prompts(llava, [1], [9])
    with pytest.raises(ValueError, match="does not fit the KV pool"):
        llava.generate(**inputs, **GREEDY, speculative_config={**NGRAM, "block_size": 4, "num_blocks": 2})
    assert_clean(llava)


def test_a_draft_model_of_text(llava):
    """It reads placeholders as ids, at positions of its own."""
    drafter = perturbed(make("Llama"), 0.02)
    inputs = image_prompts(llava, [2, 0, 1], [9, 7, 12])
    config = {"method": "draft_model", "num_speculative_tokens": 3}
    output = llava.generate(**inputs, **GREEDY, assistant_model=drafter, speculative_config=config)
    assert torch.equal(output, llava.generate(**inputs, **GREEDY))
    hf_specdec.release(llava)


@pytest.mark.parametrize("method", ["ngram", "tree", "token_recycling", "suffix"])
def test_image_ids_beyond_the_vocabulary(method):
    if method == "suffix":
        pytest.importorskip("arctic_inference")
    model = build_multimodal("gemma3", image_token_index=VOCAB + 5)
    inputs = image_prompts(model, [1, 0], [9, 12])
    inputs["input_ids"][inputs["input_ids"] == IMAGE] = VOCAB + 5
    plain = model.generate(**inputs, **GREEDY)
    output = model.generate(**inputs, **GREEDY, speculative_config=METHODS[method])
    assert torch.equal(output, plain)


class ImageTokens(CandidateGenerator):
    """Drafts the image's token, then another one, then the image's again."""

    def propose(self, sequences, limits):
        drafts = [[IMAGE, 9, IMAGE][:limit] for limit in limits]
        return DraftTrees.from_lists(drafts, device=self.target.device)


@pytest.mark.parametrize("family", families(quick=("gemma3", "qwen2_5_vl")))
def test_image_tokens_in_drafts(family, monkeypatch):
    """They are read as ids, never as places for features, also in the first step after a prompt with images."""
    model = build_multimodal(family)
    inputs = image_prompts(model, [2, 0, 1], [9, 7, 12])
    packed, config = prepare(model), parse_config(NGRAM)
    decoder = SpeculativeDecoder(ImageTokens(config, packed))
    monkeypatch.setattr(integration, "get_decoder", lambda *_: decoder)
    output = model.generate(**inputs, **GREEDY, speculative_config=NGRAM, return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(**inputs, **GREEDY))
    assert output.speculation.num_draft_tokens > 30


# ---- drafters that read features ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families(quick=("llava", "qwen3_vl")))
def test_features_are_those_of_the_prompt(family, tmp_path):
    """Files of hidden states, of a prompt with images: those of the model's own forward."""
    model = build_multimodal(family)
    config = {
        "method": "extract_hidden_states", "output_dir": str(tmp_path), "eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3],
    }  # fmt: skip
    inputs = image_prompts(model, [2, 1], [9, 12])
    call = GREEDY | {"return_dict_in_generate": True, "output_hidden_states": True}
    plain = model.generate(**inputs, **call)
    assert torch.equal(model.generate(**inputs, **GREEDY, speculative_config=config), plain.sequences)
    hf_specdec.release(model)
    if len(plain.hidden_states[0]) < 4:
        pytest.skip("this version of transformers does not return them")
    for row, path in enumerate(sorted(tmp_path.iterdir())):
        with safe_open(path, framework="pt") as file:
            hidden = file.get_tensor("hidden_states")
        real = inputs["attention_mask"][row].bool()
        for i in range(4):
            expected = torch.cat(
                [plain.hidden_states[0][i][row, real], *(step[i][row] for step in plain.hidden_states[1:])]
            )
            torch.testing.assert_close(hidden[:, i], expected, atol=1e-4, rtol=1e-4)


def test_heads(either, tmp_path):
    """EAGLE reads features of the whole prompt; a small pool does not make it read an image as ids."""
    config = {"method": "eagle", "model": eagle_head(tmp_path), "num_speculative_tokens": 3}
    inputs = image_prompts(either, [2, 0, 1], [9, 7, 12])
    plain = either.generate(**inputs, **GREEDY)
    output = either.generate(**inputs, **GREEDY, speculative_config=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain) and output.speculation.num_draft_tokens > 0
    blocks = -(-(inputs["input_ids"].shape[1] + 16) // 4) + 2
    small = {**config, "block_size": 4, "num_blocks": blocks}
    assert torch.equal(either.generate(**inputs, **GREEDY, speculative_config=small), plain)
    cache = DynamicCache()
    first = either.generate(**inputs, **GREEDY, **{CACHE: cache})
    longer = torch.cat([first, first[:, :4]], dim=1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 20), value=1)
    with pytest.raises(ValueError, match=f"{CACHE} may hold an image"):
        either.generate(longer, attention_mask=mask, **GREEDY, **{CACHE: cache}, speculative_config=config)
    assert_clean(either)


# ---- embeddings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "Gemma2"])
@pytest.mark.parametrize("with_ids", [False, True], ids=["alone", "beside ids"])
def test_embeddings(family, with_ids):
    """Embeddings that no ids have, padded on the left."""
    model = make(family)
    inputs = ragged([9, 5, 7], vocab_size=VOCAB)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    inputs["inputs_embeds"] = embeds + 0.2 * torch.randn(embeds.shape)
    if not with_ids:
        del inputs["input_ids"]
    plain = model.generate(**inputs, **GREEDY)
    for config in (NGRAM, TREE):
        assert torch.equal(model.generate(**inputs, **GREEDY, speculative_config=config), plain)
    sampled = [
        model.generate(**inputs, max_new_tokens=12, do_sample=True, speculative_config={**config, "seed": 3})
        for config in ({"method": "none"}, NGRAM)
    ]
    assert torch.equal(*sampled)
    assert_clean(model)


def test_embeddings_of_an_image(llava):
    """Merged by the caller."""
    inputs = image_prompts(llava, [1, 1], [9, 12])
    ids = inputs["input_ids"]
    embeds = llava.get_input_embeddings()(ids)
    features = llava.model.get_image_features(inputs["pixel_values"], return_dict=True).pooler_output
    embeds = embeds.masked_scatter((ids == IMAGE)[..., None], torch.cat(list(features)))
    given = {"input_ids": ids, "inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    plain = llava.generate(**inputs, **GREEDY)
    assert torch.equal(llava.generate(**given, **GREEDY), plain)
    assert torch.equal(llava.generate(**given, **GREEDY, speculative_config=NGRAM), plain)


# ---- what a call returns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [NGRAM, TREE, {"method": "none"}], ids=["ngram", "tree", "none"])
def test_scores_hidden_states_and_caches(either, config):
    inputs = image_prompts(either, [2, 0, 1], [9, 7, 12])
    call = GREEDY | {
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True,
        "repetition_penalty": 1.3,
    }  # fmt: skip
    plain, ours = either.generate(**inputs, **call), either.generate(**inputs, **call, speculative_config=config)
    assert torch.equal(ours.sequences, plain.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(ours[name], plain[name], strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    real = inputs["attention_mask"].bool()
    for a, b in zip(ours.hidden_states[0], plain.hidden_states[0], strict=True):
        torch.testing.assert_close(a[real], b[real], atol=1e-4, rtol=1e-4)
    for step, expected in zip(ours.hidden_states[1:], plain.hidden_states[1:], strict=True):
        for a, b in zip(step, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    real = torch.nn.functional.pad(real, (0, 15), value=True)
    for a, b in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(a.keys.transpose(1, 2)[real], b.keys.transpose(1, 2)[real], atol=1e-4, rtol=1e-4)
    # rows that leave before they had blocks
    one = either.generate(**inputs, **(call | {"max_new_tokens": 1}), speculative_config=config)
    assert torch.equal(one.sequences, plain.sequences[:, : inputs["input_ids"].shape[1] + 1])
    assert one.past_key_values.get_seq_length() == inputs["input_ids"].shape[1]
    assert_clean(either)


def test_rows_that_end_early(llava):
    """At once, and later, with a cache to be filled."""
    inputs = image_prompts(llava, [2, 0, 1], [9, 7, 12])
    plain = new_tokens(llava.generate(**inputs, **GREEDY), inputs)
    for eos in (int(plain[0, 0]), int(plain[2, 5])):
        call = GREEDY | {"eos_token_id": eos, "return_dict_in_generate": True}
        expected = llava.generate(**inputs, **call)
        ours = llava.generate(**inputs, **call, speculative_config=NGRAM)
        assert torch.equal(ours.sequences, expected.sequences)
        assert ours.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    assert_clean(llava)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.8}, {"top_k": 5, "num_return_sequences": 2}], ids=["plain", "copies"]
)
def test_sampling_does_not_depend_on_drafts(either, sampling):
    inputs = image_prompts(either, [1, 2], [9, 12])
    if "image_grid_thw" in inputs and "num_return_sequences" in sampling and not ENCODES_FIRST:
        pytest.skip("transformers' own copies of these prompts fail in this version")
    texts = [
        either.generate(
            **inputs, max_new_tokens=16, do_sample=True, **sampling, speculative_config={**config, "seed": 7}
        )
        for config in ({"method": "none"}, NGRAM, TREE)
    ]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    assert len({tuple(row.tolist()) for row in new_tokens(texts[0], {"input_ids": texts[0][:, :-16]})}) == len(texts[0])


def test_prompts_in_chunks(either):
    """transformers' own chunks, which cut an image in two."""
    inputs = image_prompts(either, [2, 1], [9, 12])
    plain = either.generate(**inputs, **GREEDY)
    output = either.generate(**inputs, **GREEDY, prefill_chunk_size=5, speculative_config=NGRAM)
    assert torch.equal(output, plain)
    assert torch.equal(
        either.generate(**inputs, **GREEDY, speculative_config={**NGRAM, "prefill_chunk_size": 4}), plain
    )


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_prompts_that_only_generate_can_read():
    """A scheduler would read PaliGemma's text from left to right."""
    model = build_multimodal("paligemma")
    with pytest.raises(UnsupportedModel, match=r"attends to its prompts bidirectionally"):
        hf_specdec.integration.make_decoder(model, hf_specdec.parse_config(NGRAM))


def test_determinism_is_not_promised(llava):
    inputs = image_prompts(llava, [1], [9])
    with pytest.raises(ValueError, match="'deterministic' does not cover prompts with images"):
        llava.generate(**inputs, **GREEDY, speculative_config={**NGRAM, "deterministic": True})
    hf_specdec.release(llava)


def test_inputs_that_are_needed_after_the_prompt(llava):
    inputs = image_prompts(llava, [1], [9])
    with pytest.raises(ValueError, match="image_pixel_values"):
        llava.generate(**inputs, image_pixel_values=torch.zeros(1), **GREEDY, speculative_config=NGRAM)


def test_a_cache_that_holds_the_whole_prompt(llava):
    inputs = image_prompts(llava, [1], [9], end=True)
    cache = DynamicCache()
    llava.generate(**inputs, max_new_tokens=1, **{CACHE: cache})
    inputs = {key: value for key, value in inputs.items() if key != "pixel_values"}
    with pytest.raises(ValueError, match="holds all 13 tokens"):
        llava.generate(**inputs, **GREEDY, **{CACHE: cache}, speculative_config=NGRAM)


def test_embeddings_of_another_length():
    model = make("Llama")
    inputs = ragged([7])
    inputs["inputs_embeds"] = torch.randn(1, 5, 48)
    with pytest.raises(ValueError, match="inputs_embeds has 5 and input_ids has 7"):
        model.generate(**inputs, **GREEDY, speculative_config=NGRAM)


# ---- other ways in --------------------------------------------------------------------------------------------------


def test_a_video(qwen):
    """Two videos and an image: features of another kind, and positions that count time."""
    generator = torch.Generator().manual_seed(0)
    grids = torch.tensor([[2, 4, 4], [1, 4, 6]])
    counts = (grids.prod(1) // 4).tolist()
    rows = [[7, 8, *[121] * counts[0], 9, 10, 11, 9, 10], [7, 8, *[IMAGE] * 4, 9, *[121] * counts[1], 9, 10]]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    inputs = {
        "input_ids": ids, "attention_mask": (ids != 0).long(), "mm_token_type_ids": (ids == IMAGE).long() + 2 * (ids == 121).long(),
        "pixel_values_videos": torch.randn(int(grids.prod(1).sum()), 384, generator=generator), "video_grid_thw": grids,
        "pixel_values": torch.randn(16, 384, generator=generator), "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "second_per_grid_ts": [1.0, 1.0],
    }  # fmt: skip
    plain = qwen.generate(**inputs, **GREEDY)
    other = qwen.generate(**{**inputs, "pixel_values_videos": -inputs["pixel_values_videos"]}, **GREEDY)
    assert not torch.equal(new_tokens(other, inputs), new_tokens(plain, inputs))
    for config in (NGRAM, TREE):
        assert torch.equal(qwen.generate(**inputs, **GREEDY, speculative_config=config), plain)
    hf_specdec.release(qwen)


def test_audio():
    """Qwen2-Audio: rows with and without sound, of two lengths."""
    tower = {"num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16,
             "max_source_positions": 16}  # fmt: skip
    text = make("Qwen2").config.to_dict()
    config = Qwen2AudioConfig(audio_config=tower, text_config=text, audio_token_index=IMAGE)
    torch.manual_seed(0)
    model = drawn_vectors(Qwen2AudioForConditionalGeneration(config).eval())
    for weight in (w for n, w in model.named_parameters() if "audio_tower" in n or "multi_modal" in n):
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0, 0.3)
    ids = torch.randint(4, 100, (3, 20))
    ids[0, 3:11], ids[2, 8:13] = IMAGE, IMAGE  # of 32 frames, and of 20
    mask = torch.ones_like(ids)
    mask[2, :4] = 0
    heard = torch.zeros(2, 32, dtype=torch.long)
    heard[0], heard[1, :20] = 1, 1
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "input_features": torch.randn(2, 8, 32),
        "feature_attention_mask": heard,
    }
    options = {**GREEDY, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(**inputs, **options)
    for method in ("ngram", "token_recycling"):
        assert torch.equal(model.generate(**inputs, **options, speculative_config=METHODS[method]), expected), method
    inputs["input_features"] = inputs["input_features"].flip(-1)
    assert not torch.equal(model.generate(**inputs, **options), expected)


@pytest.fixture(scope="module")
def describe(tiny_tokenizer):
    """A pipeline over a small LLaVA, with a processor and a chat template."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    model = build_multimodal("llava", image_token_index=image_id, vocab_size=len(tokenizer))
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer=tokenizer, patch_size=8, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1,
    )  # fmt: skip
    processor.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}{% if part['type'] == 'image' %}<image> "
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    )
    return pipeline("image-text-to-text", model=model, processor=processor)


def test_the_pipeline(describe):
    """Images as a user passes them, through a processor, alone and in a batch."""
    pixels = torch.randint(0, 256, (2, 20, 24, 3), dtype=torch.uint8).numpy()
    call = {
        "images": [Image.fromarray(each) for each in pixels],
        "text": ["<image> Once there was", "Look at <image> and"],
    }
    for batch_size in (1, 2):
        plain, ours = (
            describe(**call, batch_size=batch_size, generate_kwargs=GREEDY | more)
            for more in ({}, {"speculative_config": NGRAM})
        )
        assert ours == plain
    assert hf_specdec.integration.kept_decoders(describe.model)


@pytest.mark.parametrize("method", ["ngram", "token_recycling"])
def test_a_chat_of_several_turns(describe, method):
    """Four turns, two of them with another image: each goes on from all answers before it."""
    pixels = torch.randint(
        0, 256, (2, 20, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    ).numpy()
    first, second = ({"type": "image", "image": Image.fromarray(each)} for each in pixels)
    turns = [
        [first, "What is it?"],
        ["Is it big?"],
        [second, "And that? Which is which?"],
        ["Tell me a story of both."],
    ]
    histories = []
    for more in ({}, {"speculative_config": METHODS[method]}):
        messages = []
        for turn in turns:
            content = [{"type": "text", "text": each} if isinstance(each, str) else each for each in turn]
            messages.append({"role": "user", "content": content})
            (answer,) = describe(text=[messages], generate_kwargs=GREEDY | more, return_full_text=False)
            answer = answer[0] if isinstance(answer, list) else answer
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answer["generated_text"]}]})
        histories.append([message["content"][-1]["text"] for message in messages])
    assert histories[0] == histories[1]
    assert len(set(histories[0])) == len(histories[0])  # each answer is another


@pytest.mark.long
def test_shifted_positions_in_captured_steps(qwen, graphs_in_python, defined_attention):  # noqa: F811
    """Steps in which the axes of a position differ are not captured."""
    for inputs in (image_prompts(qwen, [2, 0, 1], [9, 7, 12]), ending_in_images(qwen)):
        plain = qwen.generate(**inputs, **GREEDY)
        for config in (NGRAM, TREE):
            config = {**config, "cuda_graphs": True}
            assert torch.equal(qwen.generate(**inputs, **GREEDY, speculative_config=config), plain)
    assert any(len(each) for each in graphs_in_python) and not any(each.refused for each in graphs_in_python)
    hf_specdec.release(qwen)
