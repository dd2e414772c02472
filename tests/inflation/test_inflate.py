"""`hf_specdec.inflation`, and its script in `recipes/tiny`: a bigger model with the same logits and greedy text, whatever grows."""

import runpy
import sys

import pytest
import torch
from combinations import covering
from paths import ROOT
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import Cache

import hf_specdec
from hf_specdec import inflation

SCRIPT = ROOT / "recipes" / "tiny" / "inflate.py"
sys.path.insert(0, str(SCRIPT.parent))

from inflate_states import HybridInflation  # noqa: E402

SMALL = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,  # large, so that a wrong eps shows
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SOURCES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama-tied-biased": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE)
    ),
    "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=6)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen2-mixed-windows": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=6, max_window_layers=2)
    ),
    "qwen3-tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True)),
}
SIZES = {
    "hidden_size": {"hidden_size": 56},
    "num_hidden_layers": {"num_hidden_layers": 8},
    "intermediate_size": {"intermediate_size": 72},
    "num_attention_heads": {"num_attention_heads": 6},
    "num_key_value_heads": {"num_key_value_heads": 4},
    "both heads": {"num_attention_heads": 12, "num_key_value_heads": 3},
    "head_dim": {"head_dim": 24},
    "all": {
        "hidden_size": 64,
        "num_hidden_layers": 7,
        "intermediate_size": 88,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 16,
    },
}


HYBRID_STATES = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
STATE_SIZES = {
    "linear_num_value_heads": {"linear_num_value_heads": 6},
    "linear_num_key_heads": {"linear_num_key_heads": 4},
    "both recurrent heads": {"linear_num_key_heads": 5, "linear_num_value_heads": 15},
    "linear_key_head_dim": {"linear_key_head_dim": 12},
    "linear_value_head_dim": {"linear_value_head_dim": 16},
    "all": {**SIZES["all"], "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16,
            "linear_value_head_dim": 24},
}  # fmt: skip
needs_states = pytest.mark.skipif(not hasattr(Cache, "get_conv_state"), reason="needs transformers 5.23")


def make_hybrid(**options):
    """A small hybrid of Qwen3.5's architecture whose recurrence matters."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**SMALL, **HYBRID_STATES, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_attn.norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "norm" in name:
                parameter.uniform_(-0.5, 0.5)
            elif "A_log" in name or "dt_bias" in name:
                parameter.uniform_(-2, 0)
            else:
                parameter.normal_(std=0.2)
    return model


def make_source(name):
    """A small random model whose norms and biases are not trivial, and whose logits are far apart."""
    torch.manual_seed(0)
    model = SOURCES[name]().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif "bias" in parameter_name:
                parameter.normal_(std=0.3)
            else:
                parameter.normal_(std=0.2)
    return model


def left_padded_batch():
    """Ids and mask [3, 11], rows of 11, 7 and 3 tokens."""
    ids = torch.randint(1, 97, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 4, 8)):
        ids[row, :padding] = mask[row, :padding] = 0
    return ids, mask


@torch.no_grad()
def assert_same_function(small, big):
    ids, mask = left_padded_batch()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    wanted = small(input_ids=ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    given = big(input_ids=ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    assert wanted.std() > 0.1
    torch.testing.assert_close(given, wanted, atol=1e-4, rtol=1e-4)
    settings = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(big.generate(ids, **settings), small.generate(ids, **settings))


@pytest.mark.parametrize(("source", "size"), covering(list(SOURCES), list(SIZES)))
def test_same_function(source, size):
    small = make_source(source)
    big = inflation.inflate(small, **SIZES[size])
    assert type(big) is type(small)
    assert {name: getattr(big.config, name) for name in SIZES[size]} == SIZES[size]
    assert big.num_parameters() > small.num_parameters()
    assert_same_function(small, big)


@needs_states
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", {**{name: size for name, size in SIZES.items() if name != "all"}, **STATE_SIZES})
def test_hybrids_keep_their_function(size, tied, tmp_path):
    """Recurrent layers grow too; and the text is that of the small model through states that are kept or replayed."""
    sizes = STATE_SIZES.get(size) or SIZES[size]
    small = make_hybrid(tie_word_embeddings=tied)
    big = inflation.inflate(small, **sizes, kind=HybridInflation)
    assert {name: getattr(big.config, name) for name in sizes} == sizes
    assert big.num_parameters() > small.num_parameters()
    assert_same_function(small, big)
    if size != "all":
        return
    big.save_pretrained(tmp_path)
    assert_same_function(small, AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    ids, mask = left_padded_batch()
    settings = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    for states in ("kept", "replayed"):
        config = {"method": "token_recycling", "recurrent_states": states}
        assert torch.equal(big.generate(ids, **settings, speculative_config=config), small.generate(ids, **settings))
    hf_specdec.release(big)


@needs_states
def test_states_of_identity_layers_cost_real_work():
    big = inflation.inflate(make_hybrid(), num_hidden_layers=7, linear_num_value_heads=8, kind=HybridInflation)
    assert big.config.layer_types == [*["linear_attention"] * 2, *["full_attention"] * 2, *["linear_attention"] * 3]
    for layer in big.model.layers:
        if hasattr(layer, "linear_attn"):
            assert all(
                (each.weight != 0).any() for each in (layer.linear_attn.in_proj_qkv, layer.linear_attn.in_proj_z)
            )
    outputs = [layer.linear_attn.out_proj.weight for layer in big.model.layers if hasattr(layer, "linear_attn")]
    assert sum(bool((each != 0).any()) for each in outputs) == 2


@pytest.mark.parametrize("source", SOURCES)
def test_survives_saving(source, tmp_path):
    small = make_source(source)
    inflation.inflate(small, **SIZES["all"]).save_pretrained(tmp_path)
    assert_same_function(small, AutoModelForCausalLM.from_pretrained(tmp_path).eval())


def test_new_layers_cost_real_work():
    """Identity layers are zero in their output projections only, and lie between the old layers."""
    big = inflation.inflate(make_source("llama"), num_hidden_layers=8)
    identity = [bool((layer.mlp.down_proj.weight == 0).all()) for layer in big.model.layers]
    assert identity.count(False) == 3
    assert identity != sorted(identity)
    for layer, empty in zip(big.model.layers, identity, strict=True):
        assert bool((layer.self_attn.o_proj.weight == 0).all()) == empty
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.gate_proj):
            assert (linear.weight != 0).any()


def test_nothing_asked_gives_an_equal_model():
    small = make_source("qwen3-tied")
    assert_same_function(small, inflation.inflate(small))


def test_seed_and_dtype():
    small = make_source("llama")
    first, second = (inflation.inflate(small, **SIZES["all"], dtype=torch.bfloat16, seed=3) for _ in range(2))
    assert first.dtype == torch.bfloat16
    assert first.config.dtype == torch.bfloat16
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "source", ["llama", "llama-tied-biased", "qwen3-tied", pytest.param("hybrid-tied", marks=needs_states)]
)
def test_new_tokens_are_never_likely(source, tmp_path):
    """Old tokens keep their probabilities, new ones have none; so texts stay."""
    is_hybrid = source == "hybrid-tied"
    small = make_hybrid(tie_word_embeddings=True) if is_hybrid else make_source(source)
    kind = HybridInflation if is_hybrid else inflation.tensors.Inflation
    big = inflation.inflate(small, **SIZES["all"], vocab_size=150, kind=kind)
    assert big.config.vocab_size == 150 and big.get_input_embeddings().weight.shape[0] == 150
    assert (big.lm_head.weight is big.model.embed_tokens.weight) == ("tied" in source)
    ids, mask = left_padded_batch()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    arguments = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        wanted, given = (model(**arguments).logits[mask.bool()] for model in (small, big))
    torch.testing.assert_close(given.log_softmax(-1)[:, :97], wanted.log_softmax(-1), atol=2e-4, rtol=2e-4)
    assert (given[:, 97:].max(-1).values < wanted.min(-1).values - 10).all()
    settings = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    expected = small.generate(ids, **settings)
    assert torch.equal(big.generate(ids, **settings), expected)
    big.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval().generate(ids, **settings), expected)


def test_vocabularies_that_cannot_grow():
    with pytest.raises(ValueError, match="vocab_size=50 is smaller than the source's 97"):
        inflation.inflate(make_source("llama"), vocab_size=50)
    with pytest.raises(ValueError, match="can only grow with hidden_size: give more than 24"):
        inflation.inflate(make_source("llama"), vocab_size=150)


def test_presets_have_the_sizes_they_name():
    for name, least in (("300m", 300e6), ("1b", 0.95e9), ("8b", 6.9e9)):
        sizes = dict(zip(inflation.DIMENSIONS, inflation.PRESETS[name], strict=True))
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, tie_word_embeddings=True, **sizes))
        assert model.num_parameters() >= least


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 16}, "smaller than the source's 24: give at least 24"),
        ({"num_hidden_layers": 2}, "smaller than the source's 3"),
        ({"intermediate_size": 8}, "smaller than the source's 40"),
        ({"head_dim": 20}, "must be a multiple of the source's 8"),
        ({"num_attention_heads": 7}, "must be a multiple of num_key_value_heads=2"),
    ],
)
def test_bad_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        inflation.inflate(make_source("llama"), **sizes)


def test_too_few_key_value_heads():
    """Groups of 4 query heads do not fit groups of 3, and there are not 2 new key-value heads for each old one."""
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_attention_heads": 8}))
    with pytest.raises(ValueError, match="give num_key_value_heads >= 4 or more num_attention_heads"):
        inflation.inflate(model, num_attention_heads=9, num_key_value_heads=3)


@pytest.mark.parametrize("name", ["linear_key_head_dim", "hiden_size"])
def test_sizes_that_the_source_does_not_have(name):
    with pytest.raises(ValueError, match=f"LlamaForCausalLM has no {name}: leave it out. Its sizes are hidden_size, "):
        inflation.inflate(make_source("llama"), **{name: 64})


@needs_states
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"linear_key_head_dim": 4}, "linear_key_head_dim=4 is smaller than the source's 8"),
        ({"linear_num_value_heads": 5}, "must be a multiple of linear_num_key_heads=2"),
        ({"linear_key_head_dim": 16, "head_dim": 12}, "must be a multiple of the source's 8"),
    ],
)
def test_bad_sizes_of_hybrids(sizes, message):
    with pytest.raises(ValueError, match=message):
        inflation.inflate(make_hybrid(), **sizes, kind=HybridInflation)


@needs_states
def test_too_few_recurrent_key_heads():
    """Groups of 4 value heads do not fit groups of 3, and there are not 2 new key heads for each old one."""
    small = make_hybrid(linear_num_value_heads=8)
    with pytest.raises(ValueError, match="give linear_num_key_heads >= 4 or more linear_num_value_heads"):
        inflation.inflate(small, linear_num_key_heads=3, linear_num_value_heads=9, kind=HybridInflation)


def test_rope_that_depends_on_the_head_size_is_refused():
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    model = LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=yarn))
    with pytest.raises(ValueError, match="leave head_dim out"):
        inflation.inflate(model, head_dim=16)


def test_other_architectures_are_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=31))
    with pytest.raises(ValueError, match="not GPT2LMHeadModel: give one of these"):
        inflation.inflate(model)


def test_command_line_reports_bad_sizes(tmp_path, monkeypatch, capsys):
    make_source("llama").save_pretrained(tmp_path / "small")
    command = [str(SCRIPT), str(tmp_path / "small"), str(tmp_path / "big"), "--hidden-size", "8"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    assert "smaller than the source's 24" in capsys.readouterr().err
