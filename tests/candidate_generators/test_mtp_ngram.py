"""FastDeploy's mtp_strategy "with_ngram": MTP layers begin a draft, n-gram look-up over text and draft continues it."""

import numpy as np
import pytest
import torch
from helpers_eagle import recorded, scripted
from helpers_mtp import store
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import ragged
from scipy import stats

import hf_specdec
from hf_specdec.candidate_generators import parse_config
from hf_specdec.candidate_generators.hybrid import HybridGenerator
from hf_specdec.candidate_generators.mtp import MtpGenerator
from hf_specdec.candidate_generators.ngram import NGramGenerator, NGramIndex

CONFIG = {
    "method": "mtp",
    "mtp_strategy": "with_ngram",
    "num_speculative_tokens": 6,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


def rescan(text: list[int], draft: list[int], low: int, high: int, length: int) -> list[int]:
    """What follows the earliest occurrence in the text of the longest n-gram that ends text and draft."""
    both = text + draft
    for size in range(min(high, len(both) - 1), low - 1, -1):
        for end in range(size, len(text)):
            if text[end - size : end] == both[-size:]:
                return both[end : end + length]
    return []


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=14), st.lists(st.integers(0, 2), max_size=4),
    st.integers(1, 3), st.integers(0, 2), st.integers(1, 7),
)  # fmt: skip
def test_continuation_behind_a_draft_equals_rescan(text, draft, low, more, length):
    index = NGramIndex(low, low + more)
    index.extend(text)
    assert index.continuation(text, length, draft) == rescan(text, draft, low, low + more, length)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_drafts_are_mtps_own_continued(tmp_path, monkeypatch, steps):
    """The first tokens are the best by MTP's logits; the others what look-up finds; no draft is longer than its row's limit."""
    model = store(tmp_path, "GLM-4.5", 2).model
    inputs, script = ragged([9, 9, 9, 9], vocab_size=128), scripted()
    proposed, propose = [], HybridGenerator.propose

    def recording_propose(self, sequences, limits):
        proposed.append(([tuple(seq.tokens) for seq in sequences], propose(self, sequences, limits)))
        return proposed[-1][1]

    monkeypatch.setattr(HybridGenerator, "propose", recording_propose)
    with recorded(MtpGenerator) as recording:
        output = model.generate(
            **inputs,
            max_new_tokens=28,
            logits_processor=script,
            speculative_config={**CONFIG, "num_model_steps": steps},
        )
    assert torch.equal(output, model.generate(**inputs, max_new_tokens=28, logits_processor=script))
    logits = {(text, path): row for text, path, row in recording.logits}
    lengths, continued = set(), 0
    for texts, trees in proposed:
        assert trees.is_chain and trees.probs is None
        for i, text in enumerate(texts):
            drafted = trees.tokens[i, : trees.lengths[i]].tolist()
            num_made = steps if (text, ()) in logits else 0  # MTP had not read the prompt: look-up alone
            made, rest = drafted[:num_made], drafted[num_made:]
            for depth, token in enumerate(made):
                path = tuple(made[:depth])
                assert token == int(script(torch.tensor([text + path]), logits[text, path][None]).argmax())
            found = rescan(list(text), made, 1, 3, 6 - num_made)
            assert rest == found[: len(rest)]
            assert len(drafted) <= 6
            lengths.add(len(drafted))
            continued += len(rest) > 0
    assert continued > 5 and max(lengths) == 6 and min(lengths) <= steps


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_output_is_the_targets_own(tmp_path, rule):
    """Greedy tokens equal plain generate()'s; coupled samples equal those without speculation; n-grams alone for a row
    that MTP has not read yet."""
    model = store(tmp_path, "MiMo").model
    for lengths in ([7], [6, 13, 1, 9]):
        inputs = ragged(lengths, vocab_size=128)
        plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        assert torch.equal(
            model.generate(**inputs, max_new_tokens=12, do_sample=False, speculative_config=CONFIG), plain
        )
        sampled = [
            model.generate(
                **inputs, max_new_tokens=12, do_sample=True, temperature=0.5,
                speculative_config={**each, "seed": 5, "rejection_sample_method": rule},
            )
            for each in ({"method": "none"}, CONFIG)
        ]  # fmt: skip
        assert rule == "rejection" or torch.equal(*sampled)


ROWS, TOKENS = 2500, 3


def p_value(model, prompt) -> float:
    """Chi-square of the joint distribution of the first tokens of independent rows under speculative sampling."""
    inputs = prompt.expand(ROWS, -1)
    config = {
        **CONFIG,
        "rejection_sample_method": "rejection",
        "seed": 3,
        "num_speculative_tokens": 2,
        "num_model_steps": 1,
    }
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=TOKENS,
        do_sample=True,
        top_k=0,
        speculative_config=config,
    )
    vocab = model.config.vocab_size
    joint = torch.ones(1, dtype=torch.float64)
    texts = prompt
    for _ in range(TOKENS):
        with torch.no_grad():
            following = torch.softmax(model(texts).logits[:, -1].double(), dim=-1)
        joint = (joint[:, None] * following).flatten()
        texts = torch.cat([texts.repeat_interleave(vocab, 0), torch.arange(vocab).repeat(len(texts))[:, None]], dim=1)
    cells = output[:, -TOKENS:] @ torch.tensor([vocab**2, vocab, 1])
    seen, expected = np.bincount(cells, minlength=vocab**TOKENS), joint.numpy() * ROWS
    rare = expected < 5
    seen, expected = (np.append(each[~rare], each[rare].sum()) for each in (seen, expected))
    return stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue


@pytest.mark.slow
def test_distribution_under_speculative_sampling(tmp_path, monkeypatch):
    """Looked-up tokens are points of q. Were they taken for drawn at random, which is wrong, the same test, at
    the same number of rows, sees it."""
    model = store(tmp_path, "MiMo", vocab_size=4, initializer_range=0.15).model
    prompt = torch.tensor([[1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1]])
    assert p_value(model, prompt) > 1e-3
    continued = NGramGenerator.continued

    def wrong(self, trees, sequences, limits):
        out = continued(self, trees, sequences, limits)
        if out.probs is not None:
            out.probs[:, 1:] = 1 / out.probs.shape[2]
        return out

    monkeypatch.setattr(NGramGenerator, "continued", wrong)
    assert p_value(model, prompt) < 1e-6


# ---- configuration --------------------------------------------------------------------------------------------------


def test_it_is_a_hybrid_of_mtp_and_ngram():
    """FastDeploy's keys, also those it names otherwise; keys of the drafter go to it, common ones stay."""
    given = {
        "method": "mtp",
        "mtp_strategy": "with_ngram",
        "num_speculative_tokens": 7,
        "num_model_steps": 2,
        "seed": 3,
    }
    config = parse_config({**given, "model": "x", "recycle_normed": "true", "max_ngram_size": 4})
    assert config == parse_config({
        "method": "hybrid", "strategy": "extend", "num_speculative_tokens": 7, "seed": 3,
        "first": {"method": "mtp", "model": "x", "num_speculative_tokens": 2, "recycle_normed": True},
        "second": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    })  # fmt: skip
    assert parse_config(config.to_json()) == config
    assert parse_config({"method": "mtp", "mtp_strategy": "default"}).num_speculative_tokens == 1
    assert parse_config({"method": "mtp", "num_model_steps": 3}).num_speculative_tokens == 3
    tokens = {"num_speculative_tokens_per_batch_size": {1: 7, 4: 0}}
    assert parse_config({"method": "mtp", "mtp_strategy": "with_ngram", **tokens}).num_speculative_tokens == 7


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mtp_strategy": "ngram"}, r"mtp_strategy.*must be one of 'default', 'with_ngram'"),
        ({"num_model_steps": -1}, r"num_speculative_tokens.*at least"),
        ({"num_model_steps": "2", "mtp_strategy": "with_ngram"}, r"num_speculative_tokens"),
        (
            {"num_model_steps": 2, "num_speculative_tokens": 5},
            r"num_model_steps.*is 2, but num_speculative_tokens is 5.*with_ngram",
        ),
        (
            {"mtp_strategy": "with_ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            r"is 4, more than prompt_lookup_max = 3",
        ),
        ({"recycle_normed": "yes"}, r"recycle_normed.*true or false"),
        ({"num_modelsteps": 2, "mtp_strategy": "with_ngram"}, r"num_modelsteps"),
        ({"mtp_strategy": "with_ngram", "first": {"method": "suffix"}}, "'with_ngram' sets first: leave that out"),
    ],
)
def test_bad_configurations(config, message):
    with pytest.raises(hf_specdec.SpeculativeConfigError, match=message):
        parse_config({"method": "mtp", **config})


def test_trees_are_not_continued(tmp_path):
    model = store(tmp_path, "MiMo").model
    config = {"method": "mtp", "mtp_strategy": "with_ngram", "branching_factors": [2]}
    with pytest.raises(hf_specdec.SpeculativeConfigError, match="cannot be extended"):
        model.generate(**ragged([7], vocab_size=128), max_new_tokens=6, speculative_config=config)
