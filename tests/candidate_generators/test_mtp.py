"""MTP drafters: every layout against a plain float64 recursion, over rounds with none, some and all drafts accepted."""

import pytest
import torch
from combinations import covering, every_second
from helpers_drafters import (
    assert_lossless,
    assert_nothing_left,
    deepest_drafts,
    run_limited_and_preempted,
)
from helpers_eagle import recorded, scripted
from helpers_mtp import KINDS, PlainMtp, check_logits, gated_block, llama_block, store, target_states
from oracle import assert_clean, ragged
from scheduling import make_decoder
from transformers import AutoModelForCausalLM
from transformers.generation import candidate_generator as theirs

from hf_specdec import integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.candidate_generators.mtp import MtpGenerator
from hf_specdec.core.sequence import Sequence
from hf_specdec.model.prepare import prepare

SHAPES = {
    "chain": {"num_speculative_tokens": 4},
    "static": {"branching_factors": [3, 2, 1]},
    "dynamic": {"top_k": 3, "total_tokens": 10, "depth": 3},
}
# family, modules, shape: chains deeper than the modules, as deep, trees of both kinds; one module and several
CASES = [
    *every_second((name, 1, list(SHAPES)[i % 3]) for i, name in enumerate(KINDS)),
    ("DeepSeek-V3", 2, "static"), ("GLM-4.5", 3, "dynamic"), ("MiMo", 5, "chain"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("GLM-4.5", 2, "chain"), ("Qwen3.5", 2, "dynamic"), ("MiMo-V2", 3, "static"))
    ),
]  # fmt: skip


def drafted(model, config, lengths=(6, 11, 2, 5), tokens=14):
    """What the generator did on a ragged batch in which drafts are accepted up to places where the target is on its own."""
    script = scripted()
    with recorded(MtpGenerator) as recording:
        model.generate(
            **ragged(list(lengths), vocab_size=128), max_new_tokens=tokens, logits_processor=script,
            speculative_config={"method": "mtp", **config},
        )  # fmt: skip
    return recording


def check_caches(recording, model, config) -> None:
    """After every round each module's keys and values are those of a fresh drafter that read the text with true features."""
    config = parse_config({"method": "mtp", **config})
    packed = prepare(model)
    fresh = MtpGenerator(config, packed)
    states = target_states(model, {text for text, _ in recording.caches})
    with torch.no_grad():
        for text, layers in recording.caches:
            fresh.allocate(256, 1, 16)
            seq = Sequence(list(text), 256)
            fresh.start(seq)
            fresh.unread[seq.id] = [states[text][: len(text) - 1].float()]
            fresh.cache.reserve(seq.id, len(text))
            with fresh.active():
                fresh.read([seq], 256)
            assert fresh.cache.tables[seq.id].length == len(text) - 1
            for j, kept in enumerate(layers):
                if len(text) - 1 <= j:
                    continue  # this module begins later
                expected = fresh.cache.read(seq.id)[j]
                for found, each in zip(kept, expected, strict=True):
                    assert len(found) == len(text) - 1
                    torch.testing.assert_close(
                        found[: len(text) - 1 - j], each[: len(text) - 1 - j], atol=1e-4, rtol=1e-4
                    )
            fresh.stop(seq)


@pytest.mark.parametrize(("name", "modules", "shape"), CASES)
def test_numerics_and_cache(tmp_path, name, modules, shape):
    stored = store(tmp_path, name, modules)
    recording = drafted(stored.model, SHAPES[shape], tokens=24 if shape == "chain" else 14)
    check_logits(PlainMtp(stored), recording, stored.model)
    check_caches(recording, stored.model, SHAPES[shape])
    emitted, depth = recording.emitted(), parse_config({"method": "mtp", **SHAPES[shape]}).num_speculative_tokens
    assert {1, 1 + depth} < set(emitted), emitted
    assert_clean(stored.model)


@pytest.mark.parametrize(("name", "block"), [("MiMo", llama_block), ("Qwen3.5", gated_block)])
def test_numerics_by_formula(tmp_path, name, block):
    """The layers too from their formulas: a Llama block with biases (Qwen2), and gated attention with Gemma-style norms."""
    stored = store(tmp_path, name, head_dim=16 if name == "Qwen3.5" else 12)
    plain = PlainMtp(stored, layers=[block(stored.parts[0]["layer"], stored.model.config)])
    check_logits(plain, drafted(stored.model, SHAPES["static"]), stored.model)


@pytest.mark.parametrize(("name", "modules"), [("DeepSeek-V3", 1), ("DeepSeek-V3", 3), ("GLM-4.5", 2)])
def test_drafts_are_transformers_own(tmp_path, monkeypatch, name, modules):
    """Tokens and logits that transformers' MTP drafting computes behind the same texts, batch 1, some drafts accepted."""
    stored = store(tmp_path, name, modules)
    model = AutoModelForCausalLM.from_pretrained(stored.folder, dtype=torch.float32).eval()
    first, model.config.num_mtp_layers, model.generation_config.eos_token_id = (
        model.config.num_hidden_layers,
        modules,
        None,
    )
    # How transformers knows the tensors: by layer numbers of the published checkpoints.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{first + i}\.*" for i in range(modules)]
    found, candidates = {}, theirs.MTPCandidateGenerator.get_candidates

    def keep(self, input_ids, *args, **kwargs):
        ids, logits = candidates(self, input_ids, *args, **kwargs)
        if logits is not None:
            found[tuple(input_ids[0].tolist())] = (tuple(ids[0, input_ids.shape[1] :].tolist()), logits[0])
        return ids, logits

    monkeypatch.setattr(theirs.MTPCandidateGenerator, "get_candidates", keep)
    prompt = ragged([7], vocab_size=128)
    script = scripted()
    model.generate(**prompt, max_new_tokens=20, do_sample=False, logits_processor=script, use_mtp=True)
    config = {"method": "mtp", "num_speculative_tokens": modules}
    with recorded(MtpGenerator) as recording:
        model.generate(**prompt, max_new_tokens=20, do_sample=False, logits_processor=script, speculative_config=config)
    assert {1, modules + 1} <= set(recording.emitted())
    compared = 0
    for text, path, logits in recording.logits:
        if text in found:
            tokens, expected = found[text]
            assert path == tokens[: len(path)]
            ours = script(torch.tensor([text + path]), logits[None])[0]  # theirs are processed
            torch.testing.assert_close(ours, expected[len(path)], atol=2e-4, rtol=0)
            compared += 1
    assert compared >= 5 * modules


@pytest.mark.parametrize(
    ("name", "modules", "shape"), covering([("DeepSeek-V3", 1), ("GLM-4.5", 2), ("MiMo", 1)], list(SHAPES))
)
def test_output_is_the_targets_own(tmp_path, name, modules, shape):
    """Greedy tokens equal plain generate()'s; sampled ones equal those without speculation under the same seed."""
    target = store(tmp_path, name, modules).model
    config = {"method": "mtp", **SHAPES[shape]}
    assert_lossless(target, config, max_new_tokens=10, temperature=0.8)


@pytest.mark.parametrize(
    ("modules", "shape"), [(1, "dynamic"), pytest.param(3, "chain", marks=pytest.mark.slow), (3, "static")]
)
def test_rows_with_their_own_limits_that_are_preempted(tmp_path, modules, shape):
    """Rows limited to 0, 1, 2 and all drafts, small prompt chunks, each row preempted once."""
    stored = store(tmp_path, "GLM-4.5", modules)
    decoder = make_decoder(stored.model, {"method": "mtp", "prefill_chunk_size": 3, **SHAPES[shape]})
    with recorded(MtpGenerator) as recording:
        rows = run_limited_and_preempted(decoder, stored.model, ragged([6, 13, 3, 2], vocab_size=128), 12)
    deepest = deepest_drafts(rows, ((text, len(path) + 1) for text, path, _ in recording.logits))
    assert deepest == [0, 1, 2, decoder.config.num_speculative_tokens]
    check_logits(PlainMtp(stored), recording, stored.model)
    assert_nothing_left(decoder, rows)


def test_texts_shorter_than_the_chain_of_modules(tmp_path):
    """Five modules, prompts of one and two tokens: a module that begins later than the text ends has no turn."""
    stored = store(tmp_path, "MiMo", 5)
    config = {"method": "mtp", "num_speculative_tokens": 7}
    inputs = ragged([1, 2, 9], vocab_size=128)
    with recorded(MtpGenerator) as recording:
        output = stored.model.generate(**inputs, max_new_tokens=10, do_sample=False, speculative_config=config)
    assert torch.equal(output, stored.model.generate(**inputs, max_new_tokens=10, do_sample=False))
    check_logits(PlainMtp(stored), recording, stored.model)
    depths = {}
    for text, path, _ in recording.logits:
        depths[len(text)] = max(depths.get(len(text), 0), len(path) + 1)
    assert depths[2] == 2 and depths[3] == 3 and depths[10] == 7


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("name", ["DeepSeek-V3", "Ernie 4.5", "Qwen3.5"])
def test_what_is_handed_on_can_be_chosen(tmp_path, name, normed):
    stored = store(tmp_path, name)
    recording = drafted(stored.model, {"num_speculative_tokens": 3, "recycle_normed": normed}, lengths=(7, 4), tokens=8)
    check_logits(PlainMtp(stored, normed), recording, stored.model)


def test_sampling_with_independent_noise_and_a_target_in_bfloat16(tmp_path):
    stored = store(tmp_path, "GLM-4.5", 2)
    target = stored.model.to(torch.bfloat16)
    inputs = ragged([6, 13], vocab_size=128)
    for extra in ({}, {"rejection_sample_method": "rejection"}, {"rejection_sample_method": "block"}):
        output = target.generate(
            **inputs, max_new_tokens=8, do_sample=True, return_dict_in_generate=True,
            speculative_config={"method": "mtp", "num_speculative_tokens": 3, "seed": 1, **extra},
        )  # fmt: skip
        assert output.speculation.num_draft_tokens > 0 and output.sequences.shape == (2, 21)
    decoder = integration.kept_decoders(target)[0]
    weights = decoder.generator.heads[1].module.state_dict()
    assert decoder.generator.heads[1].dtype == torch.bfloat16
    assert weights["eh_proj.weight"].dtype == torch.bfloat16
    assert decoder.generator.cache.num_bytes == 0, "released"


def test_loading_leaves_the_target_as_it_was(tmp_path):
    """Shared embeddings and head stay the target's: trainable, in training mode, and not among the modules' parameters."""
    target = store(tmp_path, "MiMo").model
    target.get_input_embeddings().train()
    layers, attention = list(target.config.layer_types), target.config._attn_implementation
    generator = MtpGenerator(parse_config({"method": "mtp"}), prepare(target))
    assert target.get_input_embeddings().weight.requires_grad and target.get_input_embeddings().training
    own = {id(parameter) for parameter in generator.head.module.parameters()}
    assert not own & {id(parameter) for parameter in target.parameters()}
    assert target.config.layer_types == layers and target.config._attn_implementation == attention


def test_draft_length_is_the_number_of_modules_unless_given(tmp_path):
    target = store(tmp_path, "GLM-4.5", 3).model
    for config, expected in (
        ({}, 3),
        ({"num_speculative_tokens": 1}, 1),
        ({"num_model_steps": 2}, 2),
        ({"branching_factors": [2, 2]}, 2),
    ):
        recording = drafted(target, config, lengths=(5,), tokens=6)
        assert 1 + max(len(path) for _, path, _ in recording.logits) == expected
