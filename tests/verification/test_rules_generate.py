"""The rules through generate(): block is exact, typical is greedy at temperature 0, synthetic hits its rates."""

import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

import hf_specdec
from hf_specdec import SpeculativeConfigError
from hf_specdec.integration import kept_decoders

VOCAB = 6
PROMPT = torch.tensor([[1, 2, 3]])


def tiny_llama(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.5,
    )).eval()  # fmt: skip


@pytest.fixture(scope="module")
def models():
    target, draft = tiny_llama(0), tiny_llama(1)
    yield target, draft
    hf_specdec.release(target)


def speculate(models, new, rows=1, sample=True, inputs=PROMPT, **config):
    target, draft = models
    return target.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new, num_return_sequences=rows, assistant_model=draft,
        eos_token_id=None, return_dict_in_generate=True, speculative_config={"method": "draft_model", **config},
        **({"do_sample": True, "top_k": 0} if sample else {"do_sample": False}),
    )  # fmt: skip


def probabilities(model, prompts):
    with torch.no_grad():
        return model(torch.tensor(prompts)).logits[:, -1].double().softmax(-1)


@pytest.mark.parametrize("draft_sample_method", ["probabilistic", "greedy"])
def test_block_draws_from_the_target(models, draft_sample_method):
    """The joint of the first two tokens of 3000 rows, drafts and tests from one seed per row."""
    prompt = PROMPT[0].tolist()
    first = probabilities(models[0], [prompt])[0]
    second = probabilities(models[0], [[*prompt, v] for v in range(VOCAB)])
    expected = (first[:, None] * second).flatten().numpy()
    counts = torch.zeros(VOCAB**2)
    for seed in range(3):
        out = speculate(models, 4, rows=1000, seed=seed, num_speculative_tokens=2, rejection_sample_method="block",
                        draft_sample_method=draft_sample_method).sequences  # fmt: skip
        counts += torch.bincount(out[:, 3] * VOCAB + out[:, 4], minlength=VOCAB**2)
    expected = expected / expected.sum() * counts.sum().item()
    common, observed = expected >= 5, counts.double().numpy()
    cells = [[*v[common], v[~common].sum()] if (~common).any() else v for v in (observed, expected)]
    assert stats.chisquare(*cells).pvalue > 1e-3


@pytest.mark.parametrize("rule", ["block", "typical"])
def test_a_row_alone_is_as_in_a_batch(models, rule):
    prompts = torch.tensor([[1, 2, 3], [3, 4, 5], [5, 5, 1]])
    config = {"seed": 3, "num_speculative_tokens": 3, "rejection_sample_method": rule}
    together = speculate(models, 20, inputs=prompts, **config).sequences
    for i in range(3):
        assert torch.equal(speculate(models, 20, inputs=prompts[i : i + 1], **config).sequences[0], together[i])
    assert not torch.equal(speculate(models, 20, inputs=prompts, **{**config, "seed": 4}).sequences, together)


def test_block_with_trees_is_one_error_and_nothing_breaks(models):
    config = {"branching_factors": [2, 2], "seed": 1}
    with pytest.raises(
        SpeculativeConfigError, match=r"\['rejection_sample_method'\] of method 'draft_model' is 'block'"
    ):
        speculate(models, 8, rejection_sample_method="block", **config)
    plain = models[0].generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=8, do_sample=False)
    assert torch.equal(speculate(models, 8, sample=False, rejection_sample_method="block", **config).sequences, plain)


@pytest.mark.parametrize("shape", [{"num_speculative_tokens": 4}, {"branching_factors": [3, 2, 1]}], ids=str)
@pytest.mark.parametrize("rule", ["block", "typical"])
def test_greedy_output_is_plain_greedy_output(models, rule, shape):
    plain = models[0].generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=40, do_sample=False)
    assert torch.equal(speculate(models, 40, sample=False, rejection_sample_method=rule, **shape).sequences, plain)


def test_typical_accepts_more_the_lower_its_limit(models):
    for shape in ({"num_speculative_tokens": 3}, {"branching_factors": [2, 2, 1]}):
        lengths = [
            speculate(models, 40, rows=20, seed=1, rejection_sample_method="typical", **keys, **shape).speculation.mean_accepted_length
            for keys in ({"posterior_threshold": 1.0, "posterior_alpha": 2.0}, {}, {"posterior_alpha": 0})
        ]  # fmt: skip
        assert lengths[0] < lengths[1] < lengths[2] and lengths[2] > 3.6  # at alpha = 0 everything possible is typical


@pytest.mark.parametrize("sample", [False, True])
def test_synthetic_hits_its_rates(models, sample):
    """2000 rounds or more: a deviation of 5 % of the first rate would be seven standard deviations."""
    rates = [0.8, 0.5, 0.2]
    config = {"num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
    prompts = torch.cartesian_prod(*[torch.arange(4)] * 3)
    out = speculate(models, 80, sample=sample, inputs=prompts, seed=1, synthetic_acceptance_rates=rates, **config)
    assert out.speculation.num_steps > 1900
    for seen, rate in zip(out.speculation.acceptance_per_position, rates, strict=True):
        assert abs(seen - rate) < 0.04
    out = speculate(models, 80, sample=sample, inputs=prompts, seed=1, synthetic_acceptance_length=2.7, **config)
    assert abs(out.speculation.mean_accepted_length - 2.7) < 0.08  # a little less: the last rounds have no room
    again = speculate(models, 80, sample=sample, inputs=prompts, seed=1, synthetic_acceptance_length=2.7, **config)
    assert torch.equal(out.sequences, again.sequences)


def test_rules_share_a_decoder(models):
    """Rule and its keys are per call: the drafter stays loaded, and each call verifies as it was asked to."""
    hf_specdec.release(models[0])
    runs = [
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 5},
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1},
        {"rejection_sample_method": "typical", "posterior_alpha": 0},
        {"rejection_sample_method": "block"},
        {},
    ]
    lengths = [
        speculate(models, 41, num_speculative_tokens=4, seed=2, **keys).speculation.mean_accepted_length
        for keys in runs
    ]
    assert len(kept_decoders(models[0])) == 1
    assert lengths[0] > 4.5 and lengths[1] == 1 and lengths[2] > 4.5 and 1 < lengths[3] < 4
