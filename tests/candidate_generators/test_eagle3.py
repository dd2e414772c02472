"""EAGLE-3 and P-EAGLE heads: every layout and flag against a plain float64 head, over rounds with forced acceptance."""

import math

import pytest
import torch
from combinations import covering, every_second
from families import make
from helpers_drafters import (
    assert_lossless,
    assert_nothing_left,
    deepest_drafts,
    run_limited_and_preempted,
)
from helpers_eagle import (
    EPS,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    check_against,
    hidden_states,
    layer_shapes,
    recorded,
    save_checkpoint,
    scripted,
    weights,
)
from helpers_eagle3 import (
    AUX,
    BASE,
    CONFIG,
    DRAFT_IDS,
    DRAFT_VOCAB,
    EMBEDDINGS,
    LAYOUTS,
    SCRIPT,
    Layout,
    PlainEagle3,
    table_tensors,
    write,
)
from oracle import VOCAB, assert_clean, ragged, tiny_llama
from replayed_graphs import defined_attention, graphs_in_python  # noqa: F401
from scheduling import make_decoder

import hf_specdec
from hf_specdec import integration
from hf_specdec.candidate_generators.eagle3 import Eagle3Generator

SHAPES = {
    "chain": {"num_speculative_tokens": 4},
    "static": {"branching_factors": [3, 2, 1, 1]},
    "dynamic": {"top_k": 3, "total_tokens": 14, "depth": 4},
}
CASES = [
    *every_second((name, list(SHAPES)[i % 3]) for i, name in enumerate(LAYOUTS)),
    ("yuhuili", "static"), ("yuhuili", "dynamic"), ("p-eagle", "chain"), ("p-eagle", "dynamic"),
]  # fmt: skip


@pytest.fixture(scope="module", params=["yuhuili", "p-eagle"])
def head(request, tmp_path_factory):
    return write(tmp_path_factory.mktemp("eagle3"), request.param)[1]


def check_numerics_and_cache(tmp_path, model, layout, config):
    """Draft logits of every node, and the cache after every round, batch 4 ragged; texts outgrow the head's 12 positions."""
    tensors, folder = write(tmp_path, layout)
    with recorded(Eagle3Generator) as recording:
        model.generate(
            **ragged([6, 13, 2, 9]), max_new_tokens=20, logits_processor=scripted(SCRIPT),
            speculative_config={"method": "eagle3", "model": folder, **config},
        )  # fmt: skip
    check_against(PlainEagle3(tensors, model, LAYOUTS[layout]), recording, model)
    emitted = recording.emitted()
    assert min(emitted) == 1 and max(emitted) == 5 and len(set(emitted)) > 2, emitted


@pytest.mark.parametrize(("layout", "shape"), CASES)
def test_numerics_and_cache(tmp_path, model, layout, shape):
    check_numerics_and_cache(tmp_path, model, layout, SHAPES[shape])
    assert_clean(model)


def test_a_mask_token_from_the_configuration(tmp_path, model):
    """For a P-EAGLE head whose file names none; what contradicts the file, or means nothing to the head, is an error."""
    tensors, folder = write(tmp_path / "none", "p-eagle", pard_token=None)
    config = {"method": "eagle3", "num_speculative_tokens": 3}
    with recorded(Eagle3Generator) as recording:
        model.generate(
            **ragged([6, 9]), max_new_tokens=8, speculative_config={**config, "model": folder, "mask_token_id": 7}
        )
    check_against(PlainEagle3(tensors, model, LAYOUTS["p-eagle"]), recording, model)
    _, named = write(tmp_path / "named", "p-eagle")
    _, stepwise = write(tmp_path / "stepwise", "yuhuili")
    for head, message in ((named, "mask token 7.* says mask_token_id 8"), (stepwise, "is for P-EAGLE heads")):
        with pytest.raises(hf_specdec.SpeculativeConfigError, match=message):
            model.generate(
                **ragged([6]), max_new_tokens=4, speculative_config={**config, "model": head, "mask_token_id": 8}
            )
    assert_clean(model)


@pytest.mark.parametrize("recycle_normed", [True, False])
def test_what_is_fed_back_can_be_said(tmp_path, model, recycle_normed):
    """Whatever the file's `norm_output`; two configurations of one file do not share a head."""
    for name in ("SpecForge, norm_output", "another's norm_output"):
        tensors, folder = write(tmp_path / name, name)
        shapes = {"num_speculative_tokens": 3, "recycle_normed": recycle_normed}
        model.generate(**ragged([6]), max_new_tokens=3, speculative_config={"method": "eagle3", "model": folder})
        with recorded(Eagle3Generator) as recording:
            model.generate(
                **ragged([6, 9]), max_new_tokens=8, speculative_config={"method": "eagle3", "model": folder, **shapes}
            )
        plain = PlainEagle3(tensors, model, LAYOUTS[name])
        plain.norm_output = recycle_normed
        check_against(plain, recording, model)
    assert_clean(model)


def test_captured_parallel_drafting(tmp_path, model, graphs_in_python, defined_attention):  # noqa: F811
    """A P-EAGLE head's one forward is a graph."""
    check_numerics_and_cache(tmp_path, model, "p-eagle", {**SHAPES["chain"], "cuda_graphs": True})
    counts = {each.name: each.capture.count for each in graphs_in_python if not each.refused}
    assert 1 <= counts["Eagle3Head"] <= 9 and 1 <= counts["LlamaForCausalLM"] <= 9
    hf_specdec.release(model)


def test_a_head_of_another_width_than_the_target(tmp_path):
    """`target_hidden_size`: a narrow head with its own embeddings beside a wider target."""
    target = tiny_llama(hidden_size=48)
    layout = Layout({**BASE, **EMBEDDINGS, "fc.weight": (HIDDEN, 3 * 48)}, {**CONFIG, "target_hidden_size": 48})
    tensors = weights(layout.shapes)
    folder = save_checkpoint(tmp_path, {**tensors, **table_tensors()}, layout.config)
    with recorded(Eagle3Generator) as recording:
        target.generate(**ragged([6, 9]), max_new_tokens=8, speculative_config={"method": "eagle3", "model": folder})
    check_against(PlainEagle3(tensors, target, layout), recording, target)
    assert len(recording.logits) > 20


@pytest.mark.parametrize(
    ("family", "shape", "parallel"),
    covering(["Llama", "Gemma2", "Qwen3"], [(shape, parallel) for shape in SHAPES for parallel in (False, True)]),
)
def test_output_is_the_targets_own(tmp_path, family, shape, parallel):
    """Greedy tokens equal plain generate()'s; sampled ones equal those without speculation under the same seed."""
    target = make(family)
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    shapes = {
        "fc.weight": (hidden, 3 * hidden), **layer_shapes("midlayer.", 2 * hidden, hidden=hidden, width=12),
        "lm_head.weight": (vocab, hidden), **({"mask_hidden": (3 * hidden,)} if parallel else {}),
    } | {f"{name}.weight": (hidden,) for name in ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm")}  # fmt: skip
    config = {**CONFIG, "hidden_size": hidden, "vocab_size": vocab, "draft_vocab_size": vocab, "mask_token_id": 1}
    config = {"method": "eagle3", "model": save_checkpoint(tmp_path, weights(shapes), config), **SHAPES[shape]}
    assert_lossless(target, config, max_new_tokens=10, temperature=0.8)


@pytest.mark.parametrize("shape", ["chain", "static"])
def test_draft_probabilities_are_those_drafts_are_drawn_from(tmp_path, model, shape):
    """For rejection sampling: q is the softmax of the head's logits at the row's temperature, zero outside its vocabulary."""
    tensors, folder = write(tmp_path, "yuhuili")
    config = {"method": "eagle3", "model": folder, "rejection_sample_method": "rejection", "seed": 1, **SHAPES[shape]}
    with recorded(Eagle3Generator) as recording:
        model.generate(
            **ragged([6, 9]), max_new_tokens=8, do_sample=True, temperature=0.7, top_k=0, speculative_config=config
        )
    plain = PlainEagle3(tensors, model, LAYOUTS["yuhuili"])
    states = hidden_states(model, {text for texts, _ in recording.trees for text in texts})
    checked = 0
    for texts, trees in recording.trees:
        for row, (text, count) in enumerate(zip(texts, trees.lengths, strict=True)):
            for node in range(count):
                above, path = int(trees.parent_index[row, node]), []
                while above >= 0:
                    path.insert(0, int(trees.tokens[row, above]))
                    above = int(trees.parent_index[row, above])
                index = node if trees.prob_index is None else trees.prob_index[row, node]
                expected = torch.zeros(VOCAB, dtype=torch.float64)
                expected[DRAFT_IDS] = torch.softmax(plain.draft_logits(text, path, states[text]) / 0.7, 0)
                torch.testing.assert_close(trees.probs[row, index].double(), expected, atol=1e-4, rtol=1e-3)
                outside = [token for token in range(VOCAB) if token not in DRAFT_IDS]
                assert not trees.probs[row, index, outside].any() and int(trees.tokens[row, node]) in DRAFT_IDS
                checked += 1
    assert checked > 20


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_with_their_own_limits_that_are_preempted(model, head, shape):
    """Rows limited to 0, 1, 2 and all drafts, small prompt chunks, each row preempted once: the text stays plain."""
    decoder = make_decoder(model, {"method": "eagle3", "model": head, "prefill_chunk_size": 3, **SHAPES[shape]})
    with recorded(type(decoder.generator)) as recording:
        rows = run_limited_and_preempted(decoder, model, ragged([6, 13, 2, 9]), 14)
    proposed = (
        (text, int(trees.depths[i, : trees.lengths[i]].max(initial=0)))
        for texts, trees in recording.trees
        for i, text in enumerate(texts)
    )
    *limited, free = deepest_drafts(rows, proposed)
    assert limited == [0, 1, 2] and free >= 3
    assert_nothing_left(decoder, rows)


def test_a_target_in_bfloat16(head):
    target = tiny_llama().to(torch.bfloat16)
    config = {"method": "eagle3", "model": head}
    output = target.generate(
        **ragged([6, 13]), max_new_tokens=8, speculative_config=config, return_dict_in_generate=True
    )
    assert output.speculation.num_draft_tokens > 0
    (decoder,) = integration.kept_decoders(target)
    assert decoder.generator.head.dtype == torch.bfloat16


def test_parallel_drafting_takes_one_forward(tmp_path, model, monkeypatch):
    """A P-EAGLE round of any depth runs the head once."""
    forwards = []
    for name in ("p-eagle", "yuhuili"):
        _, folder = write(tmp_path / name, name)
        config = {"method": "eagle3", "model": folder, "num_speculative_tokens": 6}
        model.generate(**ragged([6]), max_new_tokens=2, speculative_config=config)
        (decoder,) = [d for d in integration.kept_decoders(model) if d.config.model == folder]
        head, calls = decoder.generator.head, []
        forward = head.forward
        monkeypatch.setattr(head, "forward", lambda *a, f=forward, c=calls: c.append(1) or f(*a))
        with recorded(Eagle3Generator) as recording:
            model.generate(**ragged([6]), max_new_tokens=20, speculative_config=config)
        forwards.append(len(calls) / len(recording.caches))
    assert forwards[0] == 1 and forwards[1] > 4
    hf_specdec.release(model)


def test_draft_length_is_the_checkpoints_unless_given(tmp_path, model):
    for name in ("speculators", "speculators, p-eagle"):
        _, folder = write(tmp_path / name, name)
        for given, expected in ({}, 3), ({"num_speculative_tokens": 5}, 5), ({"num_speculative_tokens": 1}, 1):
            with recorded(Eagle3Generator) as recording:
                model.generate(**ragged([6]), max_new_tokens=9, speculative_config={"model": folder, **given})
            assert 1 + max(len(path) for _, path, _ in recording.logits) == expected


def test_contradicting_layer_ids_are_named(tmp_path, model):
    layout = {**CONFIG, AUX: [1, 2, 3], "eagle_config": {AUX: [1, 2, 3]}}
    tensors = {**weights(BASE), **table_tensors()}
    folder = save_checkpoint(tmp_path, tensors, layout)
    with pytest.raises(hf_specdec.SpeculativeConfigError, match="fc reads 96"):
        parse = {"method": "eagle3", "model": save_checkpoint(tmp_path / "two", tensors, {**CONFIG, AUX: [1, 2]})}
        model.generate(**ragged([5]), max_new_tokens=4, speculative_config=parse)
    with pytest.raises(
        hf_specdec.SpeculativeConfigError, match=rf"{AUX} = \[1, 2, 3\] and eagle_config.{AUX} = .* contradict"
    ):
        model.generate(**ragged([5]), max_new_tokens=4, speculative_config={"method": "eagle3", "model": folder})


# ---- the speculators library as the oracle --------------------------------------------------------------------------


def speculators_model(kind: str, flags: dict, folder):
    """A random head made and saved by the speculators library, and the folder."""
    pytest.importorskip("speculators", reason="the speculators library is not installed", exc_type=ImportError)
    from speculators import Eagle3DraftModel, Eagle3SpeculatorConfig, PEagleDraftModel, PEagleSpeculatorConfig
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    layers = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_attention_heads=HEADS, head_dim=16,
        num_key_value_heads=KV_HEADS, num_hidden_layers=2, rms_norm_eps=EPS, rope_theta=1e5, max_position_embeddings=64,
    )  # fmt: skip
    layers._attn_implementation = "eager"
    model_class, config_class = {
        "eagle3": (Eagle3DraftModel, Eagle3SpeculatorConfig), "peagle": (PEagleDraftModel, PEagleSpeculatorConfig),
    }[kind]  # fmt: skip
    config = config_class(
        transformer_layer_config=layers, draft_vocab_size=DRAFT_VOCAB, eagle_aux_hidden_state_layer_ids=[0, 1, 3], **flags,
        speculators_config=SpeculatorsConfig(
            algorithm=kind, default_proposal_method="greedy",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )  # fmt: skip
    oracle = model_class(config).float().eval()
    tables = table_tensors()
    oracle.load_vocab_mappings(tables["t2d"], tables["d2t"])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else noise * 0.8 / math.sqrt(parameter.shape[-1]))
        oracle.embed_tokens.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=generator))
    oracle.save_pretrained(folder)
    return oracle


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("eagle3", {}),
        ("eagle3", {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}),
        ("eagle3", {"fc_norm": True}),
        ("peagle", {"mask_token_id": 7, "norm_before_residual": True}),
    ],
    ids=["plain", "norms", "fc_norm", "p-eagle"],
)
def test_speculators_own_forward_agrees(tmp_path, model, monkeypatch, kind, flags):
    """A head the speculators library saved drafts as that library's own forward says, step by step."""
    oracle = speculators_model(kind, flags, tmp_path)
    with recorded(Eagle3Generator) as recording:
        output = model.generate(
            **ragged([9]), max_new_tokens=16, logits_processor=scripted(SCRIPT),
            speculative_config={"model": str(tmp_path)}, return_dict_in_generate=True,
        )  # fmt: skip
    text = tuple(output.sequences[0].tolist())
    states = hidden_states(model, [text])[text]
    features = torch.cat([states[i] for i in (0, 1, -1)], dim=-1)[None, :-1].float()
    found = []
    oracle.lm_head.register_forward_hook(lambda module, args, logits: found.append(logits[0].detach()))
    rows = len(text) - 1
    call = {"input_ids": torch.tensor([text[1:]]), "document_ids": torch.zeros(1, rows, dtype=torch.long)}
    if kind == "peagle":
        # Every position at every depth, in one forward: the sampling of depths for training, all kept.
        anchors = torch.cat([torch.arange(rows - depth) for depth in range(4)])
        depths = torch.cat([torch.full((rows - depth,), depth) for depth in range(4)])
        core = __import__("speculators.models.peagle.core", fromlist=["core"])
        monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: (anchors, depths))
        monkeypatch.setattr(core, "compute_metrics", lambda **_: (None, None))
        with torch.no_grad():
            oracle(features, **call, verifier_last_hidden_states=states[-2][None, 1:].float())
        expected = {(int(a), int(d)): row for a, d, row in zip(anchors, depths, found[0], strict=True)}
    else:
        with torch.no_grad():
            oracle(features, **call, ttt_steps=4)
        expected = {(row, step): found[step][row] for step in range(4) for row in range(rows - step)}
    compared = [0] * 4
    for known, path, logits in recording.logits:
        # The library follows the text itself, so only drafts that came true can be compared (P-EAGLE does not look at them).
        if len(known) + len(path) <= len(text) and (kind == "peagle" or known + path == text[: len(known + path)]):
            torch.testing.assert_close(logits, expected[len(known) - 2, len(path)], atol=1e-4, rtol=1e-4)
            compared[len(path)] += 1
    assert min(compared) >= 2, compared
