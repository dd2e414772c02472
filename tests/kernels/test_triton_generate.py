"""generate() with every Triton kernel in place of its definition, in the interpreter: the same tokens."""

import copy

import encoders
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from triton_interpreter import DEVICE, needs_triton

import hf_specdec
from hf_specdec.model import captures
from hf_specdec.model.options import compiled

VOCAB, NEW_TOKENS = 61, 6
CONFIGS = {
    "none": {"method": "none"},
    "chain": {"method": "draft_model", "num_speculative_tokens": 3},
    "tree": {"method": "draft_model", "branching_factors": [2, 2]},
    "dynamic tree": {"method": "draft_model", "top_k": 2, "total_tokens": 6, "depth": 3},
}


@pytest.fixture(scope="module")
def pair():
    """A target, and a perturbed copy of it that drafts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCAB, max_position_embeddings=128, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    drafter = LlamaForCausalLM(config).eval()
    drafter.load_state_dict(target.state_dict())
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.003)
    return target.to(DEVICE), drafter.to(DEVICE)


@pytest.fixture
def use(monkeypatch, pair):
    """Choose the kernels; drafters and caches made with others are forgotten."""

    def choose(kernels: str) -> None:
        monkeypatch.setenv("HF_SPECDEC_KERNELS", kernels)
        hf_specdec.release(pair[0])

    yield choose
    hf_specdec.release(pair[0])


def decode(pair, config, **arguments):
    """Two ragged rows; drafts by the perturbed copy."""
    target, drafter = pair
    torch.manual_seed(1)
    ids = torch.randint(1, VOCAB, (2, 7)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    if config is not None and config["method"] == "draft_model":
        arguments["assistant_model"] = drafter
    if config is not None:
        arguments["speculative_config"] = config
    return target.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, **arguments
    )


@needs_triton
def test_keys_in_int8(pair, use):
    texts = []
    for kernels, name in (("reference", "none"), ("triton", "dynamic tree")):
        use(kernels)
        out = decode(pair, CONFIGS[name] | {"kv_cache_dtype": "int8"}, do_sample=False)
        texts.append(out.sequences)
    assert torch.equal(*texts) and out.speculation["num_accepted_tokens"] > 0


@needs_triton
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ("none", "tree") else n for n in CONFIGS]
)
def test_greedy(pair, use, name):
    plain = decode(pair, None, do_sample=False)
    use("triton")
    out = decode(pair, CONFIGS[name], do_sample=False)
    assert torch.equal(out.sequences, plain.sequences)
    assert name == "none" or out.speculation["num_accepted_tokens"] > 0


@needs_triton
@pytest.mark.parametrize("family", ["t5", pytest.param("umt5", marks=pytest.mark.slow)])
def test_biases_by_distance(family, monkeypatch):
    """T5 reads pages; trees' keys count by their positions."""
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    model, inputs = encoders.build(family).to(DEVICE), encoders.inputs_for(family, rows=2)
    given = {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
    given |= {"max_new_tokens": 10, "do_sample": False}
    config = {**encoders.TREE, "block_size": 4}
    assert torch.equal(model.generate(**given, speculative_config=config), model.generate(**given))
    assert not any(entry.target.gather for entry in hf_specdec.integration.kept_decoders(model))


@needs_triton
@pytest.mark.parametrize("rule", ["coupled", pytest.param("rejection", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param("chain", marks=pytest.mark.slow), "tree"])
def test_sampling_gives_what_the_definitions_give(pair, use, name, rule):
    config = {**CONFIGS[name], "rejection_sample_method": rule, "seed": 3}
    arguments = {"do_sample": True, "temperature": 0.8, "top_k": 0}
    use("reference")
    expected = decode(pair, config, **arguments)
    use("triton")
    out = decode(pair, config, **arguments)
    assert torch.equal(out.sequences, expected.sequences)
    assert out.speculation["num_accepted_tokens"] == expected.speculation["num_accepted_tokens"] > 0


@needs_triton
@pytest.mark.parametrize(
    ("name", "rule"),
    [("chain", "rejection")]
    + [
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            ("none", "coupled"),
            ("chain", "coupled"),
            ("dynamic tree", "coupled"),
            ("dynamic tree", "rejection"),
        )
    ],
)
def test_sampling_parameters_are_applied_by_the_kernels(pair, use, monkeypatch, name, rule):
    """Temperature, top-k, top-p and min-p in the kernels: the tokens and the scores of transformers' processors."""
    from hf_specdec.kernels.sampling import triton as sampling

    config = {**CONFIGS[name], "rejection_sample_method": rule, "seed": 5}
    arguments = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.85, "min_p": 0.02, "output_scores": True}
    arguments["repetition_penalty"] = 1.1
    use("reference")
    expected = decode(pair, config, **arguments)
    use("triton")
    left = []
    original = sampling.sampling_thresholds
    monkeypatch.setattr(sampling, "sampling_thresholds", lambda *a: (left.append(1), original(*a))[1])
    out = decode(pair, config, **arguments)
    assert left
    assert torch.equal(out.sequences, expected.sequences)
    for ours, theirs in zip(out.scores, expected.scores, strict=True):
        assert torch.equal(ours.isinf(), theirs.isinf()) and ours.isinf().any()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@needs_triton
def test_the_kernels_are_what_runs(pair, use, monkeypatch):
    """Without them in place the tests above would compare the definitions with themselves."""
    from hf_specdec.kernels.attention import triton as attention
    from hf_specdec.kernels.cache import triton as cache_ops
    from hf_specdec.kernels.verification import triton as verification

    called = set()
    for module, name in ((attention, "paged_attention"), (cache_ops, "write_keys_values"), (cache_ops, "move_slots"),
                         (verification, "verify_choices")):  # fmt: skip
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, _of=original, _name=name, **k: (called.add(_name), _of(*a, **k))[1]
        )
    use("triton")
    decode(pair, CONFIGS["tree"], do_sample=False)
    assert called == {"paged_attention", "write_keys_values", "move_slots", "verify_choices"}
    called.clear()
    use("reference")
    decode(pair, CONFIGS["tree"], do_sample=False)
    assert not called


class CaptureDirectly:
    """In place of CUDA graphs: replaying runs the same again, and leaves what the first run returned up to date."""

    def forget(self):
        """There is nothing to give back."""

    def __call__(self, function):
        out = function()
        return out, lambda: out.logits.copy_(function().logits)


@needs_triton
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.float16, torch.float32))],
    ids=str,
)
def test_layers_of_captured_steps(pair, use, monkeypatch, dtype):
    """Traced, rewritten and run by the kernels, they differ from the layers by a part of what roundings may do."""
    from hf_specdec.kernels.linear import triton as linear

    use("triton")
    if DEVICE == "cpu":
        monkeypatch.setattr(captures, "CudaGraphCapture", CaptureDirectly)
        monkeypatch.setattr(captures, "capture_obstacle", lambda model: None)
    errors, products, makers = [], [], []
    deviation, linears, made = compiled.deviation, linear.linears, compiled.RewrittenLayers.__init__
    monkeypatch.setattr(compiled, "deviation", lambda *each: errors.append(deviation(*each)) or errors[-1])
    monkeypatch.setattr(linear, "linears", lambda *each: products.append(1) or linears(*each))
    monkeypatch.setattr(
        compiled.RewrittenLayers, "__init__", lambda self, *each: made(self, *each) or makers.append(self)
    )
    target = copy.deepcopy(pair[0]).to(dtype)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(3)  # so that layers add something to the stream
    config = {"method": "ngram", "num_speculative_tokens": 3, "cuda_graphs": True}
    target.generate(torch.arange(5, 12)[None].to(DEVICE), max_new_tokens=4, do_sample=False, speculative_config=config)
    hf_specdec.release(target)
    assert errors and max(errors) <= 0.5 and [each.refused for each in makers] == [{}]
    assert bool(products) == (dtype != torch.float32)


def test_a_bad_choice_is_one_clear_error(monkeypatch):
    from hf_specdec.kernels.dispatch import uses_triton

    monkeypatch.setenv("HF_SPECDEC_KERNELS", "tritn")
    with pytest.raises(ValueError, match="HF_SPECDEC_KERNELS must be one of reference, triton, native, not 'tritn'"):
        uses_triton(torch.device("cpu"))
    monkeypatch.delenv("HF_SPECDEC_KERNELS")
    assert not uses_triton(torch.device("cpu"))
