"""DFlash drafters: every layout they come in drafts what its formula says, keeps only true context, and loses nothing."""

import json
import os

import pytest
import torch
from cache_checks import check_blocks
from combinations import covering
from families import WINDOW, build
from families import make as make_family
from helpers_dflash import MASK, Reference, Watched, compare, make
from oracle import ragged, tiny_llama
from replayed_graphs import defined_attention, graphs_in_python  # noqa: F401
from safetensors.torch import load_file, save_file
from scheduling import make_decoder, run_scenario, small_llama

import hf_specdec
from hf_specdec.candidate_generators import parse_config
from hf_specdec.candidate_generators.checkpoints.files import CheckpointError
from hf_specdec.candidate_generators.dflash.checkpoint import default_target_layers
from hf_specdec.candidate_generators.dflash.head import sliding_visibility
from hf_specdec.config import SpeculativeConfigError
from hf_specdec.core.names import CACHE
from hf_specdec.core.sequence import Sequence
from hf_specdec.integration import get_decoder, kept_decoders

PROMPTS = [5, 17, 9, 3]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "window": 7}
GEMMA_TARGET = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "global_head_dim": 16, "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 0,
}  # fmt: skip
SHAPES = {
    "chain": {},
    "short chain": {"num_speculative_tokens": 3},
    "tree": {"branching_factors": [3, 2, 1]},
    "dynamic tree": {"top_k": 3, "total_tokens": 10, "depth": 4},
}
LAYOUTS = {
    "plain": {},
    "block inside, bias": {"block_inside": True, "bias": True},
    "causal block": {"causal": True},
    "sliding": SLIDING,
    "mha, three layers, taps in any order": {"layers": 3, "heads": (2, 2, 16), "taps": (2, 1, 2)},
    "default taps": {"name_taps": False, "layers": 1, "taps": (2,)},
    "own tables": {"own_embeddings": True, "own_head": True},
    "speculators": {"style": "speculators", "taps": (0, 2)},
    "speculators, draft vocabulary": {
        "style": "speculators",
        "draft_ids": [*range(0, 60, 2), 59],
        "own_embeddings": True,
    },
    "speculators, sliding": {"style": "speculators", **SLIDING},
    "speculators, sliding both ways": {"style": "speculators", "non_causal_window": True, **SLIDING},
    "speculators, from anchor": {"style": "speculators", "from_anchor": True},
    "a part of each head rotated, bias": {"rotated": 0.5, "bias": True},
    "MiMo's": {
        **SLIDING, "sinks": True, "value_scale": 0.7, "rotated": 0.334, "heads": (4, 2, 12),
        "extra": {"attention_value_scale": 0.7, "attention_sink_bias": True},
    },
    "DFlash2": {"head": "dflash2"},
    "DFlash2, three taps of a convolution, capped": {
        "head": "dflash2", "taps_of_conv": 3, "conv_group": 4, "top_k": 3, "multiplier": 0.3, "softcap": 5.0,
        "extra": {"output_multiplier": 0.3, "final_logit_softcapping": 5.0},
    },
    "DFlash2, sliding both ways": {
        "head": "dflash2", "layer_types": ["sliding_attention"] * 2, "window": 7, "non_causal_window": True, "extra": {"is_causal": False},
    },
    "DFlare": {"style": "speculators", "kind": "dflare", "taps": (0, 1, 2)},
    "DFlare, sliding, bias, shared keys, own tables": {
        "style": "speculators", "kind": "dflare", "target_keys": False, "bias": True, "own_embeddings": True, "own_head": True, **SLIDING,
    },
    "DFlare, a part of each head rotated, draft vocabulary": {
        "style": "speculators", "kind": "dflare", "rotated": 0.5, "draft_ids": [*range(0, 60, 2), 59],
    },
    "draft vocabulary, rows of the target's head": {"head": "dspark", "draft_ids": [*range(0, 60, 2), 59], "head_rows": True},
    "PARD-2 of speculators": {"style": "speculators", "kind": "pard2"},
    "DFlash2, speculators": {"head": "dflash2", "style": "speculators", "non_causal_window": True, **SLIDING},
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_and_cache_are_those_of_the_formula(target, tmp_path, layout):
    made = make(tmp_path, target, **LAYOUTS[layout])
    accepted = compare(target, made, {}, ragged([6, 12]), slots=6)
    assert 0 in accepted and max(accepted) >= 4 and len(set(accepted)) >= 4


GEMMA = {
    "gemma": True, "own_embeddings": True, "own_head": True, "softcap": 3.0, "from_anchor": True, "heads": (4, 1, 16), "taps": (0, 1, 2),
}  # fmt: skip
GEMMAS = {
    "DFlash": {},
    "values of their own": {"shared_values": False, "heads": (4, 2, 16), "extra": {"global_head_dim": 16}},
    "gated": {"head": "dspark", "markov": "gated"},
    "rnn": {"head": "dspark", "markov": "rnn"},
}


@pytest.mark.parametrize("case", GEMMAS)
def test_deepspec_drafters_of_gemma4(tmp_path, case):
    """Its layers, in a target that scales its embeddings: the drafter's rows are scaled too, and logits capped below a Markov bias."""
    target = build("gemma4_text", **GEMMA_TARGET)
    made = make(tmp_path, target, **GEMMA | GEMMAS[case])
    made.options["embedding_scale"] = 48**0.5
    accepted = compare(target, made, {}, ragged([6, 12], vocab_size=128), slots=6)
    assert 0 in accepted and max(accepted) >= 4


@pytest.mark.parametrize(
    "layout", ["plain", "causal block", "sliding", "speculators, sliding both ways", "DFlash2", "MiMo's", "DFlare"]
)
def test_captured_blocks_are_those_of_the_formula(target, tmp_path, graphs_in_python, defined_attention, layout):  # noqa: F811
    """Reading context and running the block over static buffers, a graph each for every bucket."""
    made = make(tmp_path, target, **LAYOUTS[layout])
    accepted = compare(target, made, {"cuda_graphs": True}, ragged([6, 12]), slots=6)
    assert 0 in accepted and max(accepted) >= 4
    _, blocks, reading = graphs_in_python  # the first is the target's
    assert not any(each.refused for each in graphs_in_python)
    assert 1 <= blocks.capture.count <= 3 and 1 <= reading.capture.count <= 4
    hf_specdec.release(target)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_on_a_ragged_batch(target, tmp_path, shape):
    """Cut blocks are run as short as they are drafted; the cache is that of the text alone in every round."""
    made = make(tmp_path, target, **SLIDING)
    slots = 6 if shape == "chain" else 5 if shape == "dynamic tree" else 4
    accepted = compare(target, made, SHAPES[shape], ragged(PROMPTS), slots, max_new_tokens=14)
    assert 0 in accepted and max(accepted) >= min(slots - 1, 3)


def test_chunks_and_own_limits(target, tmp_path):
    """Long prompts are read in chunks; a row's limit shortens its draft, not the block."""
    made = make(tmp_path, target)
    config = {"prefill_chunk_size": 4, "block_size": 4, "num_speculative_tokens_per_batch_size": {1: 5, 2: 3, 4: 1}}
    compare(target, made, config, ragged([40, 17, 3, 9]), slots=6, max_new_tokens=10)


def test_preempted_rows_are_read_again(target, tmp_path):
    """A row that was evicted and comes back has the cache of its text, like the row that stayed."""
    made = make(tmp_path, target)
    reference, checked = Reference(target, made), []
    decoder = make_decoder(target, {"method": "dflash", "model": made.folder, "block_size": 4})
    root = decoder.generator.root_logits

    def check(sequences, limits):
        logits = root(sequences, limits)
        for seq in sequences:
            context = reference.context(seq.tokens)
            for layer in range(2):
                got = decoder.generator.cache.read(seq.id)[layer]
                expected = reference.keys_values(context, layer, torch.arange(len(context)))
                for a, b in zip(got, expected, strict=True):
                    torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4)
            checked.append(seq.id)
        return logits

    decoder.generator.root_logits = check
    decoder.allocate(200, 2)
    rows = [Sequence([9, 8, 7, 6, 5, 9, 8], 40), Sequence([11, 12, 13], 40)]
    with decoder.active():
        for seq in rows:
            decoder.add(seq)
        for _ in range(4):
            decoder.step(rows)
        decoder.preempt(rows[0])
        for _ in range(3):
            decoder.step(rows[1:])
        before = checked.count(rows[0].id)
        chunks = [3, 1]  # it is read again in pieces, and drafts once it is complete
        while len(rows[0].tokens) < 25:
            decoder.step(rows, chunks)
            pending = len(rows[0].tokens) - decoder.cache.tables[rows[0].id].length
            chunks = [min(3, pending), 1]
        assert checked.count(rows[0].id) > before
        for seq in rows:
            decoder.remove(seq)
    assert decoder.generator.cache.pool.num_used == 0 and decoder.generator.unread == {}


@pytest.mark.slow  # test_scheduling_heads.py has a shorter one
def test_requests_that_come_and_go(tmp_path):
    """The scheduler's scenario: 100 requests with chunks, waits, preemption, own limits and cancellation."""
    model = small_llama(0)
    made = make(tmp_path, model, style="speculators", head="dspark", markov="rnn")
    config = {"method": "dflash", "model": made.folder, "draft_confidence_threshold": 0.1}
    run_scenario(model, None, config)


@pytest.mark.parametrize("window", [None, 7])
def test_logits_are_those_of_transformers_own_drafter(target, tmp_path, window):
    """transformers' DFlash drafter (5.23), which Muse Glimmer's assistant is, saved by its class and fed by hand."""
    modeling = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")
    from transformers import MuseGlimmerAssistantConfig
    from transformers.cache_utils import DFlashCache

    made = make(tmp_path / "other", target)
    config = MuseGlimmerAssistantConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 700.0}, block_size=6,
        sliding_window=window or 2048, layer_types=["sliding_attention" if window else "full_attention"] * 2,
        target_layer_ids=[0, 1], mask_token_id=MASK, hidden_act="silu",
    )  # fmt: skip
    drafter = modeling.MuseGlimmerAssistantModel(config).eval()
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    drafter.load_state_dict({renamed.get(k, k): v.float() for k, v in made.weights.items()})
    drafter.save_pretrained(tmp_path)
    watched = Watched(target, {"model": str(tmp_path)})
    watched.run(ragged([9]))
    cache, done = DFlashCache(config=config), 0
    cache.activate_past_recording()
    roots = [record for record in watched.records if not record[1]]
    assert len(roots) > 3
    for text, _, first_logits in roots:
        states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        new = len(text) - 1 - done
        if done:
            cache.crop(-6)
        cache.set_previous_accepted_tokens(new)
        block = torch.tensor([[text[-1]] + [MASK] * 5])
        with torch.no_grad():
            hidden = drafter(
                noise_embeds=target.get_input_embeddings()(block),
                context_hidden_states=torch.cat([states[1][:, done:], states[2][:, done:]], dim=-1),
                position_ids=torch.arange(done, len(text) + 5)[None],
                **{CACHE: cache},
            ).last_hidden_state
            expected = target.lm_head(hidden[0, 1:])
        drafted = [first_logits] + [r[2] for r in watched.records if r[0] == text and r[1]]
        torch.testing.assert_close(torch.stack(drafted), expected[: len(drafted)], atol=1e-4, rtol=1e-4)
        done = len(text) - 1


class NormedEmbedding(torch.nn.Embedding):
    """As Muse Glimmer's."""

    def __init__(self, weight):
        super().__init__(*weight.shape, _weight=weight.detach())
        self.embed_norm = torch.nn.RMSNorm(weight.shape[1], elementwise_affine=False)

    def forward(self, ids):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.embed_norm(super().forward(ids))


def test_rows_are_read_without_the_targets_norm(tmp_path):
    target = tiny_llama()
    target.set_input_embeddings(NormedEmbedding(target.get_input_embeddings().weight))
    accepted = compare(target, make(tmp_path, target), {}, ragged([6, 12]), slots=6)
    assert 0 in accepted and max(accepted) >= 4


@pytest.mark.parametrize(("family", "shape"), covering(["Llama", "Qwen3", "Gemma2"], ["chain", "tree"]))
def test_nothing_is_lost(tmp_path, family, shape):
    model = make_family(family)
    made = make(tmp_path, model, style="speculators")
    config = {"method": "dflash", "model": made.folder, **SHAPES[shape]}
    for lengths in ([11], PROMPTS):
        inputs = ragged(lengths, vocab_size=128)
        for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
            plain = {"method": "none", "seed": 7}
            expected = model.generate(**inputs, max_new_tokens=12, speculative_config=plain, **sampling)
            got = model.generate(**inputs, max_new_tokens=12, speculative_config=config | {"seed": 7}, **sampling)
            assert torch.equal(got, expected)
            if not sampling["do_sample"]:
                assert torch.equal(got, model.generate(**inputs, max_new_tokens=12, do_sample=False))


def test_draft_probabilities_are_those_drawn_from(target, tmp_path):
    """Under the rule "rejection", q of each drafted token is its softmax, zero outside the draft vocabulary."""
    ids = list(range(0, 60, 2))
    made = make(tmp_path, target, style="speculators", draft_ids=ids)
    config = {"method": "dflash", "model": made.folder, "rejection_sample_method": "rejection"}
    watched, seen = Watched(target, config), []
    watched._choose = lambda *args: None
    propose = watched.generator.propose

    def check(sequences, limits):
        before = len(watched.records)
        trees = propose(sequences, limits)
        if trees.num_nodes:
            for _, path, logits in watched.records[before:]:
                expected = torch.zeros(61).index_copy_(0, torch.tensor(ids), logits.softmax(0))
                torch.testing.assert_close(trees.probs[0, len(path)], expected)
                assert trees.tokens[0, len(path)].item() in ids
                seen.append(trees.tokens[0, len(path)].item() == ids[int(logits.argmax())])
        return trees

    watched.generator.propose = check
    target.generate(**ragged([9]), max_new_tokens=30, do_sample=True, speculative_config=config)
    assert 0 < sum(seen) < len(seen)


def test_bfloat16_and_release(tmp_path):
    model = tiny_llama().to(torch.bfloat16)
    made = make(tmp_path, model, bias=True)
    out = model.generate(
        **ragged(PROMPTS), max_new_tokens=8, speculative_config={"method": "dflash", "model": made.folder}
    )
    assert out.shape[1] == 17 + 8
    (decoder,) = kept_decoders(model)
    assert decoder.generator.head.dtype == torch.bfloat16
    assert decoder.generator.unread == {} and decoder.generator.cache.tables == {}
    check_blocks(decoder.generator.cache.pool)


def test_default_length_is_the_blocks(target, tmp_path):
    made = make(tmp_path, target)
    for config, depth in (
        ({}, 5),
        ({"num_speculative_tokens": 2}, 2),
        ({"draft_length": "auto"}, 5),
        ({"top_k": 4}, 5),
    ):
        generator = get_decoder(target, parse_config({"method": "dflash", "model": made.folder, **config})).generator
        (head,) = getattr(generator, "parts", [generator])  # with automatic length it may rest
        assert head.shape.depth == depth, config
    with pytest.raises(SpeculativeConfigError, match=r"asks for drafts of 6 tokens.* use at most 5"):
        get_decoder(target, parse_config({"method": "dflash", "model": made.folder, "num_speculative_tokens": 6}))


def test_method_is_inferred(target, tmp_path):
    for style in ("own", "speculators"):
        made = make(tmp_path / style, target, style)
        out = target.generate(
            **ragged([9]), max_new_tokens=8, do_sample=False, speculative_config={"model": made.folder}
        )
        assert torch.equal(out, target.generate(**ragged([9]), max_new_tokens=8, do_sample=False))


def test_default_target_layers_are_z_labs():
    assert default_target_layers(36, 5) == [1, 9, 17, 25, 33]  # Qwen3-8B-DFlash
    assert default_target_layers(32, 5) == [1, 8, 15, 22, 29]  # Qwen3.5-4B
    assert default_target_layers(36, 1) == [18]


def test_sliding_windows_by_hand():
    rows = sliding_visibility(4, 3, 3, causal=True, from_anchor=False).astype(int).tolist()
    assert rows == [[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1]]
    rows = sliding_visibility(4, 3, 3, causal=False, from_anchor=True).astype(int).tolist()
    assert rows == [[0, 1, 1, 1, 1, 1, 1]] * 3


# ---- what does not fit ----------------------------------------------------------------------------------------------


def _edit(made, config=None, weights=None):
    path = os.path.join(made.folder, "config.json")
    with open(path) as f:
        own = json.load(f)
    (config or (lambda c: None))(own)
    with open(path, "w") as f:
        json.dump(own, f)
    if weights:
        path = os.path.join(made.folder, "model.safetensors")
        tensors = load_file(path)
        weights(tensors)
        save_file(tensors, path)


BAD = {
    "missing": ({}, None, lambda w: w.pop("layers.1.self_attn.k_norm.weight"), "missing layers.1.self_attn.k_norm.weight"),
    "no norm": ({}, None, lambda w: w.pop("hidden_norm.weight"), "missing hidden_norm.weight"),
    "extra": ({}, None, lambda w: w.update({"layers.0.self_attn.g_proj.weight": torch.zeros(2)}), "unused layers.0.self_attn.g_proj"),
    "shape": ({}, None, lambda w: w.update({"norm.weight": torch.ones(31)}), r"norm.weight has shape \[31\]"),
    "layers of another target": ({}, lambda c: c.update(num_target_layers=36), None, "a target of 36 layers; this one has 3"),
    "taps of another target": ({}, lambda c: c["dflash_config"].update(target_layer_ids=[1, 9]), None, r"\[2, 10\], but the target has 3"),
    "width of another target": ({}, lambda c: c["dflash_config"].update(target_layer_ids=[1]), None, "fc.weight reads 64 numbers"),
    "vocabulary of another target": ({}, lambda c: c["dflash_config"].update(mask_token_id=151669), None, "mask_token_id 151669"),
    "no mask token": ({}, lambda c: c["dflash_config"].pop("mask_token_id"), None, "dflash_config.mask_token_id"),
    "no block size": ({}, lambda c: c.pop("block_size"), None, "block_size None, which leaves nothing to draft"),
    "block of one": ({}, lambda c: c.update(block_size=1), None, "nothing to draft"),
    "no window": ({}, lambda c: c.update(layer_types=["sliding_attention"] * 2), None, "sliding_window None"),
    "strange layers": ({}, lambda c: c.update(layer_types=["linear_attention"] * 2), None, "layer_types"),
    "no features": ({}, lambda c: c["dflash_config"].update(use_aux_hidden_state=False), None, "use_aux_hidden_state"),
    "no taps": ({"style": "speculators"}, lambda c: c.pop("aux_hidden_state_layer_ids"), None, "aux_hidden_state_layer_ids"),
    "no layers": ({"style": "speculators"}, lambda c: c.pop("transformer_layer_config"), None, "transformer_layer_config"),
    "taps of no kind": ({}, lambda c: c["dflash_config"].update(target_layer_ids="1,9"), None, "a list of layers"),
    "an odd rotation": ({}, lambda c: c.update(partial_rotary_factor=0.4), None, r"rotates 3 of a head's 8 dimensions \(partial_rotary"),
    "a scaled rotation": (
        {}, lambda c: c.update(partial_rotary_factor=0.5, rope_scaling={"rope_type": "yarn", "factor": 4.0}), None,
        "scale a part of each head",
    ),
    "no sinks": ({}, lambda c: c.update(attention_sink_bias=True), None, "attention_sink_bias = true, but the file has no layers.0"),
    "table lost": ({"style": "speculators", "draft_ids": [1, 2, 60]}, None, lambda w: [w.pop(k) for k in ("d2t", "t2d")],
                   "draft_vocab_size 3 and no table d2t"),
    "table out of range": (
        {"style": "speculators", "draft_ids": [1, 2, 60]}, None,
        lambda w: (w.pop("t2d"), w.update(d2t=w["d2t"] + 1)), "d2t names tokens 2 to 61",
    ),
    "tables differ": (
        {"style": "speculators", "draft_ids": [1, 2, 60]}, None, lambda w: w.update(d2t=w["d2t"] - 1), "t2d and d2t name different",
    ),
    "flat fc": ({}, None, lambda w: w.update({"fc.weight": torch.zeros(32)}), r"fc.weight has shape \[32\]; it must be a matrix"),
    "flat fc, DSpark": ({"head": "dspark"}, None, lambda w: w.update({"fc.weight": torch.zeros(32)}), r"fc.weight .* must be a matrix"),
    "flat fc, Domino": ({"head": "domino"}, None, lambda w: w.update({"fc.weight": torch.zeros(32)}), r"fc.weight .* must be a matrix"),
    "flat embeddings": ({"own_embeddings": True}, None, lambda w: w.update({"embed_tokens.weight": torch.zeros(61)}), "must be a matrix"),
    "huge state": ({"head": "domino"}, lambda c: c["dflash_config"].update(gru_hidden_dim=10**9), None,
                   "gru_hidden_dim = 1000000000, but its prefix_gru.weight_hh_l0 reads 10 numbers"),
    "no state": ({"head": "domino"}, lambda c: c["dflash_config"].update(gru_hidden_dim=0), None, "gru_hidden_dim = 0, but its"),
    "huge bottleneck": ({"head": "domino"}, lambda c: c["dflash_config"].update(emb_dim=10**18), None, "emb_dim = 10+, but its"),
    "pure length": ({"head": "domino"}, lambda c: c["dflash_config"].update(pure_draft_prefix_len="x"), None, "pure_draft_prefix_len"),
    "huge rank": ({"head": "dspark"}, lambda c: c["dflash_config"].update(markov_rank=10**18), None, "no drafter that can be built"),
    "rank of no kind": ({"head": "dspark"}, lambda c: c["dflash_config"].update(markov_rank="x"), None, "markov_rank = 'x'"),
    "confidence": ({"head": "dspark"}, lambda c: (c["dflash_config"].pop("enable_confidence_head"),
                   c["dflash_config"].update(confidence_head_alpha="x")), None, "confidence_head_alpha = 'x'; it must be a number"),
    "settings": ({}, lambda c: c.update(dflash_config=[1]), None, "dflash_config in its config.json is not an object"),
    "architectures": ({}, lambda c: c.update(architectures=3), None, "architectures = 3; it must be a list of names"),
    "activations": ({}, lambda c: c.update(hidden_act=["silu"]), None, "hidden_act = .*; it must be a name"),
    "draft vocabulary": ({"style": "speculators"}, lambda c: c.update(draft_vocab_size="x"), None, "draft_vocab_size = 'x'; it must be an"),
    "width": ({}, lambda c: c.update(intermediate_size="x"), None, "intermediate_size = 'x'; it must be an integer"),
    "epsilon": ({}, lambda c: c.update(rms_norm_eps="x"), None, "rms_norm_eps = 'x'; it must be a number"),
    "heads": ({}, lambda c: c.update(num_attention_heads=7), None, "num_attention_heads|attention heads|has shape"),
    "DFlash2 from the anchor": ({"head": "dflash2", "from_anchor": True, "style": "speculators"}, None, None, "the anchor's slot predicts"),
    "DFlash2, draft vocabulary": (
        {"head": "dflash2", "draft_ids": [*range(0, 60, 2), 59], "style": "speculators", "own_embeddings": True}, None, None,
        "there is a draft vocabulary",
    ),
    "Gemma 4, experts": (GEMMA, lambda c: c.update(enable_moe_block=True), None, "enable_moe_block = True; only False"),
    "Gemma 4, windows": (GEMMA, lambda c: c.update(layer_types=["sliding_attention"] * 2), None, "have full_attention alone"),
    "Gemma 4, rotary base": (GEMMA, lambda c: c.update(rope_theta=1e4), None, "rope_theta = 10000.0, which Gemma 4's layers do not have"),
    "Gemma 4, one rotation": (GEMMA, lambda c: c.update(rope_parameters={"rope_theta": 1e4}), None, "have none for full_attention"),
    "Gemma 4, no factor": (GEMMA, None, lambda w: w.pop("layers.1.layer_scalar"), "missing layers.1.layer_scalar"),
    "Gemma 4, values": (GEMMA, lambda c: c.update(attention_k_eq_v=False), None, "missing layers.0.self_attn.v_proj.weight"),
    "Gemma 4, activation": (GEMMA, lambda c: c.update(hidden_activation="gelu_pytorch_tan"), None, "did you mean 'gelu_pytorch_tanh'"),
    "another's key": ({}, lambda c: c.update(attention_k_eq_v=True), None, "attention_k_eq_v = True, which this format does not have"),
    "Muse Glimmer, no layers": (
        {}, lambda c: (c.pop("dflash_config"), c.pop("sliding_window"), c.update(model_type="muse_glimmer_assistant", pard_token=5)), None,
        "names no layers of the target to read",
    ),
    "latent attention": (
        {}, None, lambda w: w.update({"layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(4, 32)}), "unused .*kv_a_proj_with_mqa",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints(target, tmp_path, case):
    options, config, weights, message = BAD[case]
    made = make(tmp_path, target, **options)
    _edit(made, config, weights)
    before = kept_decoders(target)
    with pytest.raises(CheckpointError, match=message) as raised:
        target.generate(**ragged([5]), max_new_tokens=4, speculative_config={"method": "dflash", "model": made.folder})
    assert kept_decoders(target) == before and "\n" not in str(raised.value)


def test_a_drafter_of_another_kind(target, tmp_path):
    made = make(tmp_path, target, style="speculators")
    _edit(made, lambda c: c.update(speculators_model_type="dflash2"))
    with pytest.raises(
        CheckpointError, match=r"'dflash2' and speculators_config\.algorithm = 'dflash', which contradict"
    ):
        target.generate(**ragged([5]), max_new_tokens=4, speculative_config={"method": "dflash", "model": made.folder})


def test_a_model_is_needed(target):
    with pytest.raises(SpeculativeConfigError, match="model"):
        target.generate(**ragged([5]), max_new_tokens=4, speculative_config={"method": "dflash"})
