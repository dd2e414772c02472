"""Drafting heads of targets whose layers have a recurrent state: Qwen's own MTP layers, and EAGLE-3."""

import pytest
from cache_checks import check_cache
from families import build
from helpers_drafters import assert_lossless, assert_nothing_left, run_limited_and_preempted
from helpers_eagle import HIDDEN, recorded
from helpers_mtp import PlainMtp, check_logits, gated_block, nemotron_blocks, sparse, store
from oracle import VOCAB, assert_clean, ragged
from scheduling import make_decoder
from test_eagle3 import SHAPES as EAGLE_SHAPES
from test_eagle3 import check_numerics_and_cache, write
from test_mtp import SHAPES, check_caches, drafted
from transformers.cache_utils import Cache

from hf_specdec.candidate_generators import parse_config
from hf_specdec.candidate_generators.mtp import MtpGenerator

pytestmark = pytest.mark.skipif(
    not hasattr(Cache, "get_conv_state"), reason="needs transformers 5.23, as the models do"
)
STATES = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "head_dim": 16,
}  # fmt: skip
QWEN = ("Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE")
COMBINATIONS = [
    pytest.param(name, shape, marks=() if i == j else pytest.mark.slow)
    for i, name in enumerate(QWEN)
    for j, shape in enumerate(SHAPES)
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "shape"), COMBINATIONS)
def test_draft_logits_of_mtp_layers(tmp_path, name, shape):
    """Against the layer's formulas in float64 over rounds that accept none, some and all drafts; and the text is plain text."""
    stored = store(tmp_path, name, **STATES)
    layer, config = stored.parts[0]["layer"], stored.model.config
    assert sum(type(module).__name__.endswith("GatedDeltaNet") for module in stored.model.modules()) == 2
    recording = drafted(stored.model, SHAPES[shape], tokens=24 if shape == "chain" else 14)
    block = gated_block(layer, config, *([] if name == "Qwen3.5" else [sparse]))
    check_logits(PlainMtp(stored, layers=[block]), recording, stored.model)
    check_caches(recording, stored.model, SHAPES[shape])
    depth = parse_config({"method": "mtp", **SHAPES[shape]}).num_speculative_tokens
    emitted = set(recording.emitted())
    assert {1, 1 + depth} < emitted, emitted
    assert_lossless(stored.model, {"method": "mtp", **SHAPES[shape]}, max_new_tokens=10, temperature=0.8)


@pytest.mark.long
@pytest.mark.parametrize("shape", ["static", pytest.param("chain", marks=pytest.mark.slow)])
def test_draft_logits_of_nemotrons_mtp_blocks(tmp_path, shape):
    """The layer is one block with attention and one with experts; the target's own blocks have states too."""
    # transformers bounds the states' time steps from below in prompts, and not in single tokens
    states = {"layer_types": ["full_attention", "moe", "linear_attention", "mlp", "linear_attention"], "ssm_state_size": 8,
              "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 16, "time_step_min": 1e-6}  # fmt: skip
    stored = store(tmp_path, "Nemotron-H", **states)
    recording = drafted(stored.model, SHAPES[shape])
    block = nemotron_blocks(stored.parts[0]["layer"], stored.model.config)
    check_logits(PlainMtp(stored, layers=[block]), recording, stored.model)
    assert {1, 3} <= set(recording.emitted())
    assert_lossless(stored.model, {"method": "mtp", **SHAPES[shape]}, max_new_tokens=10, temperature=0.8)


def test_mtp_rows_with_their_own_limits_that_are_preempted(tmp_path):
    """Small prompt chunks, and each row read again once: its features come from states that were computed again."""
    stored = store(tmp_path, "Qwen3.5", **STATES)
    decoder = make_decoder(stored.model, {"method": "mtp", "prefill_chunk_size": 3, **SHAPES["static"]})
    with recorded(MtpGenerator) as recording:
        rows = run_limited_and_preempted(decoder, stored.model, ragged([6, 13, 3, 2], vocab_size=128), 12)
    check_logits(PlainMtp(stored), recording, stored.model)
    assert_nothing_left(decoder, rows)
    check_cache(decoder.cache)


@pytest.mark.parametrize(
    ("model_type", "options", "shape"),
    [
        ("qwen3_5_text", STATES, "static"),
        pytest.param("qwen3_5_text", STATES, "chain", marks=pytest.mark.slow),
        ("granitemoehybrid", {"layer_types": STATES["layer_types"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
                              "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 32}, "dynamic"),
    ],
)  # fmt: skip
def test_eagle3_heads(tmp_path, model_type, options, shape):
    """Features of three layers, two of them with a state, reach the head as a plain forward computes them."""
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB}
    model = build(model_type, **{**sizes, **options})
    check_numerics_and_cache(tmp_path, model, "yuhuili", EAGLE_SHAPES[shape])
    _, folder = write(tmp_path / "again", "yuhuili")
    assert_lossless(model, {"method": "eagle3", "model": folder, **EAGLE_SHAPES[shape]}, temperature=0.8)
    assert_clean(model)
