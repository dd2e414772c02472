"""Coupled sampling: the tokens of stock transformers with the same noise, for every method, draft length and batch."""

import importlib.util

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

import hf_specdec
from hf_specdec.core.sequence import stream_seeds
from hf_specdec.sampling import CoupledNoiseLogitsWarper

SEED, NEW = 11, 16


def tiny_llama(seed, layers=2):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def models():
    """A target, and a drafter that agrees with it often: the same weights, shaken a little."""
    target, draft = tiny_llama(3), tiny_llama(3)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.03 * torch.randn_like(weight)
    yield target, draft
    hf_specdec.release(target)


@pytest.fixture(scope="module")
def expected(models):
    """What stock transformers draws for PROMPTS."""
    return stock(models[0], PROMPTS)


PROMPTS = [[7, 8, 9, 7, 8], [3, 4], [20, 21, 22, 20, 21, 22, 20, 21], [3, 4], [40, 5, 6]]  # two rows are equal


def batch_of(prompts, pad=0):
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}, width


def stock(model, prompts, new=NEW, seeds=None):
    """Plain transformers, one row at a time, greedy under the noise."""
    seeds = seeds or stream_seeds(SEED, prompts)
    rows = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        warpers = [TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.9), CoupledNoiseLogitsWarper([seed])]
        out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
                             max_new_tokens=new, logits_processor=warpers, eos_token_id=None)  # fmt: skip
        rows.append(out[0, len(prompt) :].tolist())
    return rows


def ours(model, prompts, config, new=NEW, **kwargs):
    inputs, width = batch_of(prompts)
    out = model.generate(**inputs, do_sample=True, temperature=0.8, top_p=0.9, top_k=0, max_new_tokens=new, eos_token_id=None,
                         speculative_config={"seed": SEED, **config}, return_dict_in_generate=True, **kwargs)  # fmt: skip
    return out.sequences[:, width:].tolist(), out.speculation


needs_suffix = pytest.mark.skipif(
    importlib.util.find_spec("arctic_inference") is None, reason="arctic-inference is not installed"
)
METHODS = [
    {"method": "none"},
    *({"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": k} for k in (1, 6)),
    *(
        pytest.param({"method": "suffix", "suffix_decoding_min_token_prob": 0.0, "suffix_decoding_use_tree": t}, marks=needs_suffix)
        for t in (False, True)
    ),
    *({"method": "draft_model", "num_speculative_tokens": k, "draft_sample_method": how}
      for k, how in ((1, "probabilistic"), (3, "greedy"), (7, "probabilistic"))),
    {"method": "draft_model", "branching_factors": [3, 2, 1]},
    {"method": "draft_model", "branching_factors": [2, 2], "draft_sample_method": "greedy"},
    {"method": "draft_model", "early_exit": 1, "num_speculative_tokens": 3},
]  # fmt: skip


@pytest.mark.parametrize("config", METHODS, ids=str)
def test_same_tokens_as_stock_transformers(models, expected, config):
    target, draft = models
    extra = {"assistant_model": draft} if config["method"] == "draft_model" and "early_exit" not in config else {}
    got, speculation = ours(target, PROMPTS, config, **extra)
    assert got == expected
    assert (speculation.mean_accepted_length > 1) == (config["method"] != "none")
    order = [3, 0, 4, 2]  # shuffled, one of the equal rows left out
    assert ours(target, [PROMPTS[i] for i in order], config, **extra)[0] == [expected[{3: 1}.get(i, i)] for i in order]
    assert ours(target, [PROMPTS[2]], config, **extra)[0] == [expected[2]]  # alone


def test_equal_prompts_get_different_streams(models):
    """Also copies made by num_return_sequences."""
    target, _ = models
    expected = stock(target, [PROMPTS[0]] * 4)
    assert len({tuple(row) for row in expected}) == 4
    inputs, width = batch_of([PROMPTS[0]])
    out = target.generate(**inputs, do_sample=True, temperature=0.8, top_p=0.9, top_k=0, max_new_tokens=NEW, num_return_sequences=4,
                          eos_token_id=None, speculative_config={"method": "ngram", "seed": SEED})  # fmt: skip
    assert out[:, width:].tolist() == expected


def test_padding_counts_from_the_first_token(models, expected):
    """The warper on a left-padded batch of stock transformers gives the rows' own tokens, too."""
    target, _ = models
    inputs, width = batch_of(PROMPTS)
    padding = (inputs["attention_mask"] == 0).sum(1).tolist()
    warpers = [
        TemperatureLogitsWarper(0.8),
        TopPLogitsWarper(0.9),
        CoupledNoiseLogitsWarper(stream_seeds(SEED, PROMPTS), padding),
    ]
    out = target.generate(**inputs, do_sample=False, max_new_tokens=NEW, logits_processor=warpers, eos_token_id=None)
    assert out[:, width:].tolist() == expected


def test_the_seed_decides(models):
    target, _ = models
    config = {"method": "ngram", "prompt_lookup_min": 1}
    a, b = (ours(target, PROMPTS, {**config, "seed": s})[0] for s in (1, 2))
    assert a == ours(target, PROMPTS, {**config, "seed": 1})[0] and all(x != y for x, y in zip(a, b, strict=True))
    runs = []
    for torch_seed in (5, 5, 6):  # without a seed of its own, torch's generator gives one
        torch.manual_seed(torch_seed)
        runs.append(ours(target, PROMPTS, {**config, "seed": None})[0])
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("config", [
    {"method": "none"}, {"method": "ngram", "prompt_lookup_min": 1},
    {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 4},
    {"method": "draft_model", "model": "tiny-draft", "branching_factors": [3, 2, 1]},
], ids=str)  # fmt: skip
def test_on_a_trained_model(tiny_model, config):
    model = tiny_model
    prompts = [[1, 403, 407, 261, 378], [1, 410, 295], [1, 403, 407]]
    expected = stock(model, prompts, new=30)
    assert ours(model, prompts, config, new=30)[0] == expected
    assert ours(model, prompts[1:2], config, new=30)[0] == expected[1:2]
    hf_specdec.release(model)


def next_token_distribution(model, prompts):
    with torch.no_grad():
        return model(torch.tensor(prompts)).logits[:, -1].double().softmax(-1)


@pytest.mark.parametrize("rows", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("config", [{"num_speculative_tokens": 2}, {"branching_factors": [3, 2]}], ids=str)
def test_distribution_of_the_whole_loop(config, rule, rows):
    """generate() itself, drafts drawn from a drafter with the loop's own noise: the joint of the first two tokens.

    The drafter's, the tests' and the residual's numbers come from one seed per row; were they not independent, this
    would show it. (`test_distribution.py` has the power; this one sees the loop.)
    """
    from scipy import stats

    vocab, made = 6, []
    for seed in (0, 1):
        torch.manual_seed(seed)
        made.append(LlamaForCausalLM(LlamaConfig(
            vocab_size=vocab, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.5,
        )).eval())  # fmt: skip
    target, draft = made
    prompt = [1, 2, 3]
    first = next_token_distribution(target, [prompt])[0]
    second = next_token_distribution(target, [[*prompt, v] for v in range(vocab)])
    expected = (first[:, None] * second).flatten()
    counts = torch.zeros(vocab**2)
    for seed in range(-(-rows // 1000)):
        out = target.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, 3), do_sample=True, top_k=0, max_new_tokens=4,
            num_return_sequences=1000, assistant_model=draft, eos_token_id=None,
            speculative_config={"method": "draft_model", "rejection_sample_method": rule, "seed": seed, **config},
        )  # fmt: skip
        counts += torch.bincount(out[:, 3] * vocab + out[:, 4], minlength=vocab**2)
    hf_specdec.release(target)
    expected = (expected / expected.sum()).numpy()
    common = expected * counts.sum().item() >= 5
    observed, expected = counts.double().numpy(), expected * counts.sum().item()
    cells = [[*values[common], values[~common].sum()] if (~common).any() else values for values in (observed, expected)]
    assert stats.chisquare(*cells).pvalue > 1e-3
