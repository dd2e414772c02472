"""MLP speculators in IBM's format: the numbers they draft with, trees, losslessness, and checkpoints that do not fit."""

import json

import pytest
import torch
from combinations import covering
from families import make
from helpers_drafters import (
    RAGGED,
    assert_forced,
    assert_four_heads_bound_the_length,
    assert_lossless,
    assert_refused,
    forced,
    kept_proposals,
)
from helpers_speculators import HIDDEN, Stored, largest_error, mlp_checkpoint, recorded
from oracle import VOCAB, assert_clean, ragged, tiny_llama
from safetensors.torch import save_file

from hf_specdec import SpeculativeConfigError, integration
from hf_specdec.candidate_generators import parse_config

LAYOUTS = {
    "untied": {},
    "scaled": {"scale_input": True},
    "tied, stored once": {"tied": True},
    "tied, repeated, scaled": {"tied": True, "repeat": True, "scale_input": True, "n_predict": 4},
    "inner_dim 0": {"inner": 0},
    "no prefix": {"prefix": ""},
    "one step": {"n_predict": 1},
    "one step, tied": {"n_predict": 1, "tied": True},
    "seven steps": {"n_predict": 7, "inner": 16},
}


pytestmark = pytest.mark.usefixtures("forget_decoders")


def generator_of(model):
    return integration.kept_decoders(model)[-1].generator


# ---- numerics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_the_formula_s(tmp_path, model, layout):
    """Step by step, over rounds in which none, some and all drafts are accepted, against float64 from the whole text."""
    stored = mlp_checkpoint(tmp_path, **LAYOUTS[layout])
    steps = stored.config["n_predict"]
    config = {"method": "mlp_speculator", "model": str(tmp_path), **forced(steps)}
    recorder = recorded(model, config)
    output = model.generate(**RAGGED, max_new_tokens=16, speculative_config=config, return_dict_in_generate=True)
    assert_forced(output, recorder, steps)
    assert largest_error(recorder, stored, model) < 1e-4
    assert_clean(model)


def test_the_formula_is_not_another(tmp_path, model):
    """The check above sees a difference as small as another number of steps in the constants."""
    stored = mlp_checkpoint(tmp_path)
    config = {"method": "mlp_speculator", "model": str(tmp_path)}
    recorder = recorded(model, config)
    model.generate(**RAGGED, max_new_tokens=6, speculative_config=config)
    assert largest_error(recorder, stored, model) < 1e-4
    for wrong in ({"n_predict": 4}, {"scale_input": True}):
        assert largest_error(recorder, Stored(tmp_path, stored.config | wrong, stored.weights), model) > 1e-2


def test_fewer_drafts_than_steps_keep_the_constants(tmp_path, model):
    stored = mlp_checkpoint(tmp_path, n_predict=5)
    config = {"method": "mlp_speculator", "model": str(tmp_path), "num_speculative_tokens": 2}
    recorder = recorded(model, config)
    model.generate(**RAGGED, max_new_tokens=6, speculative_config=config)
    assert {len(path) for _, path, _ in recorder.seen} == {0, 1}
    assert largest_error(recorder, stored, model) < 1e-4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "shape",
    [{"top_k_tokens_per_head": [4, 3, 2]}, {"top_k": 3, "total_tokens": 9}, {"use_checkpoint_tree": True}],
    ids=["static", "dynamic", "checkpoint"],
)
def test_trees_carry_each_node_s_own_state(tmp_path, shape, tied):
    """A vocabulary small enough that nodes of all ranks are accepted."""
    model = tiny_llama(vocab_size=11)
    stored = mlp_checkpoint(tmp_path, vocab=11, tied=tied)
    config = {"method": "mlp_speculator", "model": str(tmp_path), **shape}
    recorder = recorded(model, config)
    inputs = ragged([6, 13, 2, 9], vocab_size=11)
    output = model.generate(**inputs, max_new_tokens=20, speculative_config=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(**inputs, max_new_tokens=20))
    assert output.speculation.num_accepted_tokens > 3
    assert {len(path) for _, path, _ in recorder.seen} == {0, 1, 2}
    assert largest_error(recorder, stored, model) < 1e-4
    assert_clean(model)


def test_bfloat16_target(tmp_path):
    """The drafter follows the target's dtype."""
    model = tiny_llama().to(torch.bfloat16)
    stored = mlp_checkpoint(tmp_path, tied=True, scale_input=True)
    config = {"method": "mlp_speculator", "model": str(tmp_path)}
    recorder = recorded(model, config)
    model.generate(**RAGGED, max_new_tokens=8, speculative_config=config)
    assert {weight.dtype for weight in generator_of(model).speculator.parameters()} == {torch.bfloat16}
    scale = max(float(logits.abs().max()) for _, _, logits in recorder.seen)
    assert largest_error(recorder, stored, model) < 0.1 * scale


def test_prepacked_weights_draft_the_same(tmp_path):
    """Heads large enough to be prepacked on a CPU."""
    model = tiny_llama(vocab_size=12000)
    stored = mlp_checkpoint(tmp_path, vocab=12000, inner=24)
    config = {"method": "mlp_speculator", "model": str(tmp_path), "prepack_weights": True}
    recorder = recorded(model, config)
    model.generate(**RAGGED, max_new_tokens=4, speculative_config=config)
    assert largest_error(recorder, stored, model) < 1e-4


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_tied_steps_share_their_storage(tmp_path, model):
    sizes = {}
    for tied in (False, True):
        mlp_checkpoint(tmp_path / str(tied), tied=tied, repeat=True)
        config = {"method": "mlp_speculator", "model": str(tmp_path / str(tied))}
        speculator = integration.get_decoder(model, parse_config(config)).generator.speculator
        sizes[tied] = len({weight.data_ptr() for weight in speculator.parameters()})
    assert sizes == {False: 15, True: 6}  # emb, head, two of ln; one proj each, or two


def test_configurations_share_the_loaded_weights(tmp_path, model):
    mlp_checkpoint(tmp_path)
    base = {"method": "mlp_speculator", "model": str(tmp_path)}
    one, other = (
        integration.get_decoder(model, parse_config(base | more)).generator
        for more in ({}, {"num_speculative_tokens": 1})
    )
    assert one is not other and one.speculator is other.speculator


# ---- losslessness ---------------------------------------------------------------------------------------------------

SHAPES = {"chain": {}, "tree": {"top_k_tokens_per_head": [12, 3, 2], "n_candidates": 12}}


@pytest.mark.parametrize(("family", "shape"), covering(["Llama", "Gemma2", "GPT-2", "DeepSeek-V3"], list(SHAPES)))
def test_lossless(tmp_path, family, shape):
    """Greedy: plain generate()'s text. Coupled sampling: the text the seed gives without speculation."""
    model = make(family)
    mlp_checkpoint(tmp_path, vocab=128, hidden=48)
    config = {"method": "mlp_speculator", "model": str(tmp_path), **SHAPES[shape]}
    accepted = assert_lossless(model, config, lengths=((7,), (6, 13, 2, 9)), temperature=0.9, top_p=0.95)
    assert accepted or shape == "chain"


@pytest.mark.parametrize("draft", ["greedy", "probabilistic"])
def test_rejection_knows_the_true_draft_probabilities(tmp_path, model, draft):
    """q of every node is the softmax of the drafter's own logits at the sampling temperature; greedy drafts are points."""
    mlp_checkpoint(tmp_path)
    config = {
        "method": "mlp_speculator",
        "model": str(tmp_path),
        "rejection_sample_method": "rejection",
        "draft_sample_method": draft,
    }
    recorder = recorded(model, config | {"seed": 1})
    generator = generator_of(model)
    drafts = kept_proposals(generator)
    model.generate(
        **RAGGED, max_new_tokens=6, do_sample=True, temperature=0.7, top_k=0, speculative_config=config | {"seed": 1}
    )
    drafted = [trees for trees in drafts if any(trees.lengths)]
    assert drafted
    if draft == "greedy":
        assert all(trees.probs is None for trees in drafted)
        return
    trees = drafted[0]
    for depth in range(3):
        logits = torch.stack([row for _, path, row in recorder.seen if len(path) == depth][:4])
        torch.testing.assert_close(trees.probs[:, depth], torch.softmax(logits / 0.7, -1))


# ---- configuration --------------------------------------------------------------------------------------------------


def test_draft_length(tmp_path, model):
    """All steps by default, fewer if asked for, more is an error that names both numbers."""
    mlp_checkpoint(tmp_path, n_predict=4)
    base = {"method": "mlp_speculator", "model": str(tmp_path)}
    assert_four_heads_bound_the_length(model, base, too_deep=[{"top_k_tokens_per_head": [2, 1, 1, 1, 1]}])
    per_row = parse_config(base | {"num_speculative_tokens": 4})
    assert parse_config(per_row.to_dict()) == per_row
    assert "num_speculative_tokens" not in parse_config(base).to_dict()


def test_checkpoint_tree(tmp_path, model):
    mlp_checkpoint(tmp_path, n_predict=4)
    base = {"method": "mlp_speculator", "model": str(tmp_path), "use_checkpoint_tree": True}
    for more, ends, kept in (({}, [4, 16, 40, 88], 3), ({"num_speculative_tokens": 2, "n_candidates": 7}, [4, 16], 7)):
        shape = integration.get_decoder(model, parse_config(base | more)).generator.shape
        assert shape.level_ends == ends and shape.keep_paths == kept
    keys = [parse_config(base | {"use_checkpoint_tree": wanted}).tree_key for wanted in (True, False)]
    assert keys == ["use_checkpoint_tree", None]
    mlp_checkpoint(tmp_path / "none", top_k_tokens_per_head=[3])
    with pytest.raises(SpeculativeConfigError, match=r"top_k_tokens_per_head = \[3\] for n_predict = 3"):
        integration.get_decoder(model, parse_config(base | {"model": str(tmp_path / "none")}))


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"n_candidates": 3}, "n_candidates.* is for trees"),
        ({"top_k_tokens_per_head": [2, 0]}, "list of integers of at least 1"),
        ({"top_k_tokens_per_head": 3}, "list of integers of at least 1"),
        ({"top_k_tokens_per_head": [2, 2], "num_speculative_tokens": 3}, "has 2 depths"),
        ({"top_k_tokens_per_head": [2], "branching_factors": [2]}, "cannot be combined with 'branching_factors'"),
        ({"use_checkpoint_tree": True, "top_k": 3}, "cannot be combined with 'top_k'"),
        ({"use_checkpoint_tree": True, "top_k_tokens_per_head": [3]}, "cannot be combined with 'use_checkpoint_tree'"),
        ({"use_checkpoint_tree": "yes"}, "true or false"),
        ({"top_k_tokens_per_head": [2], "n_candidates": 0}, "n_candidates"),
        ({"n_candidate": 3}, "did you mean 'n_candidates'"),
    ],
)
def test_bad_keys(keys, message):
    with pytest.raises(SpeculativeConfigError, match=message):
        parse_config({"method": "mlp_speculator", "model": "x", **keys})


def test_method_is_inferred(tmp_path):
    mlp_checkpoint(tmp_path, tied=True)
    assert parse_config({"model": str(tmp_path)}).method == "mlp_speculator"


# ---- bad checkpoints ------------------------------------------------------------------------------------------------


def fails(model, folder, message, **more):
    assert_refused(model, {"method": "mlp_speculator", "model": str(folder), **more}, message)


def test_tensors_that_do_not_fit(tmp_path, model):
    stored = mlp_checkpoint(tmp_path)
    cases = {
        "missing ln.1.bias": ("speculator.ln.1.bias", None),
        "unused speculator.head.3.weight": ("speculator.head.3.weight", torch.zeros(VOCAB, 24)),
        "unused speculator.extra": ("speculator.extra", torch.zeros(3)),
        r"speculator.proj.1.weight has shape \[24, 23\], the configuration says \[24, 24\]": (
            "speculator.proj.1.weight", torch.zeros(24, 23),
        ),
        "speculator.head.0.weight is quantized .float8_e4m3fn.": (
            "speculator.head.0.weight", stored.weights["speculator.head.0.weight"].to(torch.float8_e4m3fn),
        ),
    }  # fmt: skip
    for message, (name, tensor) in cases.items():
        weights = {k: v for k, v in (stored.weights | {name: tensor}).items() if v is not None}
        Stored(tmp_path, stored.config, weights).rewrite()
        fails(model, tmp_path, message)


def test_tied_copies_must_be_equal(tmp_path, model):
    stored = mlp_checkpoint(tmp_path, tied=True, repeat=True)
    for name in ("speculator.head.2.weight", "speculator.proj.2.weight", "speculator.ln.1.bias"):
        weights = stored.weights | {name: stored.weights[name] + 1e-3}
        Stored(tmp_path, stored.config, weights).rewrite()
        fails(model, tmp_path, f"ties its weights, but .* and {name} differ|ties its weights, but {name} and .* differ")


@pytest.mark.parametrize("key, value", [("n_predict", None), ("n_predict", 0), ("vocab_size", "61"), ("emb_dim", None),
                                        ("inner_dim", -4), ("tie_weights", "yes"), ("inner_dim", [24, 24])])  # fmt: skip
def test_configuration_that_does_not_fit(tmp_path, model, key, value):
    mlp_checkpoint(tmp_path).rewrite(**{key: value})
    fails(model, tmp_path, key)


def test_another_target_s(tmp_path, model):
    mlp_checkpoint(tmp_path, hidden=HIDDEN + 8)
    fails(model, tmp_path, "hidden states of width 40.* have 32")
    wide = tiny_llama(vocab_size=2000)
    mlp_checkpoint(tmp_path)
    fails(wide, tmp_path, "vocabulary of 61 tokens; the target has 2000")


def test_target_that_emits_padding_tokens(tmp_path):
    """Tokens beyond the drafter's vocabulary: it reads its last one in their place."""
    target = tiny_llama(vocab_size=VOCAB + 3)
    mlp_checkpoint(tmp_path)
    with torch.no_grad():
        target.lm_head.weight[VOCAB:] *= 3
    text = target.generate(**RAGGED, max_new_tokens=20)
    assert (text >= VOCAB).any()
    for shape in ({}, {"branching_factors": [VOCAB + 3, 1]}):
        config = {"method": "mlp_speculator", "model": str(tmp_path), **shape}
        assert torch.equal(target.generate(**RAGGED, max_new_tokens=20, speculative_config=config), text)


def test_larger_vocabulary_than_the_target_s(tmp_path, model):
    """Embeddings padded more widely: what the target does not have is never drafted."""
    stored = mlp_checkpoint(tmp_path, vocab=VOCAB + 3)
    stored.weights["speculator.head.0.weight"][VOCAB:] *= 100
    stored.rewrite()
    config = {"method": "mlp_speculator", "model": str(tmp_path)}
    assert torch.equal(
        model.generate(**RAGGED, max_new_tokens=8, speculative_config=config),
        model.generate(**RAGGED, max_new_tokens=8),
    )


def test_other_files(tmp_path, model):
    fails(model, tmp_path / "nothing", "neither a bundled name nor a folder")
    with pytest.raises(SpeculativeConfigError, match=r"'model'.* is missing"):
        model.generate(**RAGGED, max_new_tokens=3, speculative_config={"method": "mlp_speculator"})
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "mlp"}))
    save_file({"emb_layers.0.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    fails(model, tmp_path, "is of speculators type 'mlp', whose drafts no method here can make")
    mlp_checkpoint(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    fails(model, tmp_path, "damaged or incomplete")
