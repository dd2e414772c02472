"""Gemma 4 assistants: the numbers they draft with, batches, trees, losslessness, and files that do not fit."""

import json

import pytest
import torch
from differences import largest_difference
from families import VOCAB, WINDOW, build
from helpers_drafters import (
    assert_forced,
    assert_lossless,
    assert_nothing_left,
    assert_refused,
    forced,
    run_limited_and_preempted,
)
from helpers_speculators import DraftRecorder
from oracle import assert_clean, ragged
from transformers import AutoConfig, AutoModelForCausalLM

import hf_specdec
from hf_specdec import SpeculativeConfigError, integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.core.errors import UnsupportedModel

pytestmark = pytest.mark.usefixtures("forget_decoders")

_PLAIN = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16, "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 0,
}  # fmt: skip
TARGETS = {
    "own keys": _PLAIN,
    "shared keys": _PLAIN
    | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
    "one key head, values are keys": _PLAIN | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
}
_LAYERS = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "global_head_dim": 16, "sliding_window": WINDOW, "vocab_size": VOCAB, "num_kv_shared_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    "max_position_embeddings": 256, "initializer_range": 0.5,
}  # fmt: skip
TREE, DYNAMIC = {"branching_factors": [3, 2, 1]}, {"top_k": 3, "total_tokens": 10}


def target_of(kind: str):
    return build("gemma4_text", **TARGETS[kind])


def assistant_of(folder, seed: int = 1, unified: bool = False, **changes):
    """A random assistant, saved; its norms and factors differ from 1, so that none can be left out unseen."""
    torch.manual_seed(seed)
    layers = {"model_type": "gemma4_text", **_LAYERS, **changes.pop("layers", {})}
    if unified:
        layers = {key: value for key, value in layers.items() if "per_layer_input" not in key} | {
            "model_type": "gemma4_unified_text"
        }
    kind = "gemma4_unified_assistant" if unified else "gemma4_assistant"
    config = AutoConfig.for_model(kind, **{"backbone_hidden_size": 48, "text_config": layers, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or "layer_scalar" in name:
            weight.data += 0.2 * torch.randn_like(weight)
        elif weight.dim() == 2:
            weight.data = 0.5 * torch.randn_like(weight)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    model.generation_config.num_assistant_tokens = 3
    model.save_pretrained(folder)
    return model, {"model": str(folder)}


def reference(assistant, target, text: list[int], path: list[int]) -> torch.Tensor:
    """transformers' own logits [V] after a path below a text: its classes, on the exact keys of the text, without our cache."""
    read = torch.tensor([text[:-1]])
    output = target(read, output_hidden_states=True, use_cache=True, return_shared_kv_states=True)
    hidden, embed = output.hidden_states[-1][:, -1:], target.get_input_embeddings()
    for token in [text[-1], *path]:
        inputs = torch.cat([embed(torch.tensor([[token]])), hidden], dim=-1)
        made = assistant(
            inputs_embeds=inputs, position_ids=torch.tensor([[len(text) - 1]]), shared_kv_states=output.shared_kv_states
        )
        hidden = made.last_hidden_state
    return made.logits[0, -1]


def recorded(model, config) -> DraftRecorder:
    return DraftRecorder(integration.get_decoder(model, parse_config(config)).generator)


@torch.no_grad()
def largest_error(recorder, assistant, target) -> float:
    """Of all recorded logits; those of tokens outside the scored clusters are minus infinity."""
    pairs = ((logits, reference(assistant, target, text, path)) for text, path, logits in recorder.seen)
    return largest_difference((logits[known], true[known]) for logits, true in pairs for known in [logits > -torch.inf])


@pytest.mark.long
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("ordered", [False, True], ids=["all tokens", "clusters"])
def test_logits_are_transformers_own(tmp_path, kind, ordered):
    """Over rounds in which none, some and all drafts are accepted, in a batch, for texts longer and shorter than the window."""
    target = target_of(kind)
    clusters = (
        {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 5} if ordered else {}
    )
    assistant, config = assistant_of(tmp_path, **clusters)
    config |= forced(4)
    inputs = ragged([6, 2 * WINDOW + 3, 2, 9], vocab_size=VOCAB)
    recorder = recorded(target, config)
    output = target.generate(**inputs, max_new_tokens=16, speculative_config=config, return_dict_in_generate=True)
    assert_forced(output, recorder, 4)
    assert largest_error(recorder, assistant, target) < 1e-3
    assert_clean(target)


@pytest.mark.long
@pytest.mark.parametrize("shape", [{}, TREE, DYNAMIC], ids=["chain", "static", "dynamic"])
def test_trees_and_texts(tmp_path, shape):
    """Nodes below one text do not see one another; greedy and sampled texts are those without drafts."""
    target = target_of("own keys")
    assistant, config = assistant_of(tmp_path)
    recorder = recorded(target, config | shape)
    assert_lossless(target, config | shape, [(6, 13, 1, 9)], temperature=1.5)
    assert {len(path) for _, path, _ in recorder.seen} == {0, 1, 2}
    assert largest_error(recorder, assistant, target) < 1e-3


@pytest.mark.parametrize("kind", TARGETS)
def test_keys_in_int8(tmp_path, kind):
    """It reads the target's pages, whatever they hold."""
    target, (_, config) = target_of(kind), assistant_of(tmp_path)
    texts = [
        target.generate(
            **ragged([9, 5, 12], vocab_size=VOCAB), max_new_tokens=20, do_sample=False,
            speculative_config=each | {"kv_cache_dtype": "int8"},
        )
        for each in ({"method": "none"}, config)
    ]  # fmt: skip
    assert torch.equal(*texts)


@pytest.mark.long
def test_rows_that_come_and_go(tmp_path):
    """Rows with limits of their own, prompts in chunks, preempted rows: they draft again from the keys that were read again."""
    target = target_of("shared keys")
    assistant, config = assistant_of(tmp_path, unified=True)
    decoder = integration.get_decoder(target, parse_config(config))
    recorder = recorded(target, config)
    rows = run_limited_and_preempted(decoder, target, ragged([6, 13, 2, 9], vocab_size=VOCAB), 12)
    assert_nothing_left(decoder, rows)
    assert largest_error(recorder, assistant, target) < 1e-3


def test_it_is_recognised(tmp_path, caplog):
    """By its file, and by vLLM's name; its generation_config.json gives the length, and tokens that are never drafted."""
    target = target_of("own keys")
    _, config = assistant_of(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"suppress_tokens": [5, 7]}))
    for given in (config, config | {"method": "gemma4_mtp"}):
        parsed = parse_config(given)
        assert parsed.method == "gemma4_assistant"
        assert integration.get_decoder(target, parsed).config.num_speculative_tokens == 3
    recorder = recorded(target, config)
    target.generate(**ragged([9], vocab_size=VOCAB), max_new_tokens=6, speculative_config=config)
    assert recorder.seen and all((logits[[5, 7]] == float("-inf")).all() for _, _, logits in recorder.seen)


def test_transformers_own_loop_has_no_pages(tmp_path):
    target = target_of("own keys")
    _, config = assistant_of(tmp_path)
    with hf_specdec.assisted_loop(target, config), pytest.raises(UnsupportedModel, match="in our pages"):
        target.generate(**ragged([9], vocab_size=VOCAB), max_new_tokens=6, prompt_lookup_num_tokens=1)


BAD = {
    "another width": ({}, {"backbone_hidden_size": 32}, "width 32; the target's have 48"),
    "another key width": ({"head_dim": 8}, {}, "4 heads of width 8 for sliding_attention; the target has 2 of width 12"),
    "softcap": ({}, {"text_config.final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0; only null"),
    "unknown key": ({}, {"draft_scale": 2.0}, "draft_scale = 2.0, which this format does not have"),
    "unknown key of its layers": ({}, {"text_config.logit_scale": 2.0}, "text_config.logit_scale = 2.0"),
    "another size": ({}, {"text_config.intermediate_size": 40}, "(?s)transformers cannot load it|does not fit"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_files_that_do_not_fit(tmp_path, case):
    layers, changes, message = BAD[case]
    assistant_of(tmp_path, layers=layers)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for path, value in changes.items():
        *section, name = path.split(".")
        (config[section[0]] if section else config)[name] = value
    file.write_text(json.dumps(config))
    assert_refused(target_of("own keys"), {"model": str(tmp_path)}, message)


def test_as_a_draft_model_it_is_refused(tmp_path):
    """By its folder, and as generate(assistant_model=): the error says how to use it."""
    target = target_of("own keys")
    assistant, config = assistant_of(tmp_path)
    for more in ({"assistant_model": assistant}, {}):
        with pytest.raises(
            SpeculativeConfigError, match="a Gemma 4 assistant: name its folder or Hub id as 'model', without"
        ):
            given = {"method": "draft_model"} | ({} if more else config)
            target.generate(**ragged([5], vocab_size=VOCAB), max_new_tokens=3, speculative_config=given, **more)


def test_another_family_is_refused(tmp_path):
    assistant_of(tmp_path)
    assert_refused(build("llama"), {"model": str(tmp_path)}, "no layer of the target has any. It is for another target")
