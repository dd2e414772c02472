"""Snowflake's Arctic speculators: LSTM, sum_rnn and MLP checkpoints, under both method names."""

import pytest
import torch
from combinations import covering
from families import make
from helpers_drafters import RAGGED, assert_forced, assert_lossless, assert_refused, forced
from helpers_speculators import (
    HIDDEN,
    Stored,
    largest_error,
    lstm_checkpoint,
    mlp_checkpoint,
    recorded,
    rnn_checkpoint,
)
from oracle import assert_clean, ragged, tiny_llama

from hf_specdec import SpeculativeConfigError, integration
from hf_specdec.candidate_generators import parse_config

LAYOUTS = {
    "lstm": (lstm_checkpoint, {}),
    "lstm, not scaled": (lstm_checkpoint, {"scale_input": False}),
    "lstm, repeated, prefix": (lstm_checkpoint, {"repeat": True, "prefix": "speculator."}),
    "lstm, an embedding per gate": (lstm_checkpoint, {"tie_embs": False}),
    "lstm, widths as numbers and lists": (lstm_checkpoint, {"inner_dim": [24], "emb_dim": 24, "proj_dim": "24"}),
    "lstm, one step": (lstm_checkpoint, {"n_predict": 1}),
    "rnn": (rnn_checkpoint, {}),
    "rnn, untied, scaled": (rnn_checkpoint, {"tied": False, "scale_input": True}),
    "rnn, two layers everywhere": (rnn_checkpoint, {"emb": (24, 24), "proj": (24, 24), "inner": (24, 20)}),
    "rnn, three norms, untied": (rnn_checkpoint, {"inner": (24, 20, 28), "tied": False}),
    "mlp": (
        mlp_checkpoint,
        {"architectures": ["ArcticMLPSpeculatorPreTrainedModel"], "tied": True, "base_model_archs": ["L"]},
    ),
}


pytestmark = pytest.mark.usefixtures("forget_decoders")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_the_formula_s(tmp_path, model, layout):
    """Step by step, over rounds in which none, some and all drafts are accepted, against float64 from the whole text."""
    build, options = LAYOUTS[layout]
    stored = build(tmp_path, **options)
    steps = stored.config["n_predict"]
    config = {"method": "arctic", "model": str(tmp_path), **forced(steps)}
    recorder = recorded(model, config)
    output = model.generate(**RAGGED, max_new_tokens=16, speculative_config=config, return_dict_in_generate=True)
    assert_forced(output, recorder, steps)
    assert largest_error(recorder, stored, model) < 1e-4
    assert_clean(model)


@pytest.mark.parametrize(
    "shape", [{"branching_factors": [4, 3, 2]}, {"top_k": 3, "total_tokens": 9}], ids=["static", "dynamic"]
)
@pytest.mark.parametrize("build", [lstm_checkpoint, rnn_checkpoint])
def test_trees_carry_each_node_s_own_state(tmp_path, build, shape):
    """An LSTM's nodes have a cell state too. A vocabulary small enough that nodes of all ranks are accepted."""
    model = tiny_llama(vocab_size=11)
    stored = build(tmp_path, vocab=11)
    config = {"method": "arctic", "model": str(tmp_path), **shape}
    recorder = recorded(model, config)
    inputs = ragged([6, 13, 2, 9], vocab_size=11)
    output = model.generate(**inputs, max_new_tokens=20, speculative_config=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(**inputs, max_new_tokens=20))
    assert output.speculation.num_accepted_tokens > 3
    assert {len(path) for _, path, _ in recorder.seen} == {0, 1, 2}
    assert largest_error(recorder, stored, model) < 1e-4
    assert_clean(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prepacked_weights(tmp_path, dtype):
    """On a CPU; the fused projections read one half of the carried state."""
    model = tiny_llama(vocab_size=12000).to(dtype)
    stored = lstm_checkpoint(tmp_path, vocab=12000)
    config = {"method": "arctic", "model": str(tmp_path), "prepack_weights": True}
    recorder = recorded(model, config)
    model.generate(**RAGGED, max_new_tokens=4, speculative_config=config)
    scale = max(float(logits.abs().max()) for _, _, logits in recorder.seen)
    assert largest_error(recorder, stored, model) < (1e-4 if dtype == torch.float32 else 0.1 * scale)


@pytest.mark.parametrize(
    ("family", "shape"), covering(["Llama", "Qwen3", "BLOOM"], [{}, {"branching_factors": [12, 3, 2]}]), ids=str
)
def test_lossless(tmp_path, family, shape):
    """Greedy: plain generate()'s text. Coupled sampling: the text the seed gives without speculation."""
    model = make(family)
    lstm_checkpoint(tmp_path, vocab=128, hidden=48 if family != "BLOOM" else model.config.hidden_size)
    config = {"method": "arctic", "model": str(tmp_path), **shape}
    assert_lossless(model, config, lengths=((7,), (6, 13, 2, 9)), temperature=0.9, top_p=0.95)


def test_both_names_read_every_checkpoint(tmp_path, model):
    """`mlp_speculator` and `arctic` are one method; files are inferred as what their vendor calls them."""
    for build, inferred in (
        (mlp_checkpoint, "mlp_speculator"),
        (lstm_checkpoint, "arctic"),
        (rnn_checkpoint, "arctic"),
    ):
        folder = str(tmp_path / build.__name__)
        build(tmp_path / build.__name__)
        assert parse_config({"model": folder}).method == inferred
        drafts = []
        for method in ("mlp_speculator", "arctic"):
            config = {"method": method, "model": folder}
            recorder = recorded(model, config)
            model.generate(**RAGGED, max_new_tokens=4, speculative_config=config)
            drafts.append(torch.stack([logits for _, _, logits in recorder.seen]))
        assert torch.equal(*drafts)


def test_projections_are_fused_and_embeddings_shared(tmp_path, model):
    lstm_checkpoint(tmp_path, repeat=True)
    config = parse_config({"method": "arctic", "model": str(tmp_path)})
    speculator = integration.get_decoder(model, config).generator.speculator
    shapes = sorted(tuple(weight.shape) for weight in speculator.parameters() if weight.dim() == 2)
    assert shapes == [(61, 24), (61, 24), (96, 24), (96, 32)]


# ---- bad checkpoints ------------------------------------------------------------------------------------------------


def fails(model, folder, message):
    assert_refused(model, {"method": "arctic", "model": str(folder)}, message)


@pytest.mark.parametrize(
    "build, key, value, message",
    [
        (lstm_checkpoint, "emb_dim", "20", r"emb_dim \[20\], proj_dim \[24\].* equally wide"),
        (lstm_checkpoint, "inner_dim", "24.24x", "inner_dim = '24.24x'"),
        (lstm_checkpoint, "proj_dim", None, "no input_hidden_dim and proj_dim"),
        (lstm_checkpoint, "inner_dim", [], r"inner_dim \[0\].*equally wide"),
        (lstm_checkpoint, "input_hidden_dim", None, "no input_hidden_dim and proj_dim"),
        (lstm_checkpoint, "input_hidden_dim", HIDDEN + 1, "width 33.* have 32"),
        (lstm_checkpoint, "tie_weights", False, "tie_weights"),
        (
            lstm_checkpoint,
            "tie_lstm_embs",
            False,
            "missing cell_emb.0.weight; missing input_emb.0.weight; missing output",
        ),
        (lstm_checkpoint, "method", "sum_rnn", "method = 'sum_rnn'.* those of 'sum_lstm'"),
        (rnn_checkpoint, "method", "sum_lstm", "method = 'sum_lstm'.* those of 'sum_rnn'"),
        (rnn_checkpoint, "emb_dim", "24.20", "equally wide"),
        (rnn_checkpoint, "inner_dim", "24.20", "missing ln.0.2.weight"),
    ],
)
def test_configuration_that_does_not_fit(tmp_path, model, build, key, value, message):
    build(tmp_path).rewrite(**{key: value})
    fails(model, tmp_path, message)


def test_tensors_that_do_not_fit(tmp_path, model):
    stored = lstm_checkpoint(tmp_path, repeat=True)
    emb, head = stored.weights["forget_emb.0.weight"], stored.weights["head.0.weight"]
    cases = {
        "missing forget_emb.0.weight": {f"{gate}_emb.0.weight": None for gate in ("forget", "input", "output", "cell")},
        "missing cell_ln.0.bias": {"cell_ln.0.bias": None},
        "unused head.3.weight": {"head.3.weight": head},
        "unused head.0.weight_scale": {"head.0.weight_scale": torch.ones(1)},
        r"forget_proj.1.weight has shape \[24, 23\]": {"forget_proj.1.weight": torch.zeros(24, 23)},
        "ties its weights, but .*_emb.0.weight and .*_emb.0.weight differ": {"cell_emb.0.weight": emb + 1e-3},
        r"ties its weights, but head.\d.weight and head.\d.weight differ": {"head.2.weight": head + 1e-3},
        "is quantized .float8_e4m3fn.": {f"head.{i}.weight": head.to(torch.float8_e4m3fn) for i in range(3)},
    }
    for message, changes in cases.items():
        weights = {k: v for k, v in (stored.weights | changes).items() if v is not None}
        Stored(tmp_path, stored.config, weights).rewrite()
        fails(model, tmp_path, message)


def test_more_drafts_than_steps(tmp_path, model):
    lstm_checkpoint(tmp_path)
    config = parse_config({"method": "arctic", "model": str(tmp_path), "num_speculative_tokens": 4})
    with pytest.raises(SpeculativeConfigError, match=r"drafts of 4 tokens.* drafts 3: use at most 3"):
        integration.get_decoder(model, config)
