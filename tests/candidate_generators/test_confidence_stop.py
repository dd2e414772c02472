"""Ending drafts where the drafter is unsure changes how much is drafted, never what comes out."""

import pytest
import torch
from oracle import assert_clean, drafter_of, ragged, tiny_llama
from scipy import stats

DRAWS = 4000  # a draft that ends before a drawn token because of that token fails here with p below 1e-20


@pytest.mark.long
@pytest.mark.parametrize(
    "rule", ["rejection", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("block", "coupled"))]
)
def test_distribution(rule):
    model = tiny_llama(vocab_size=7, initializer_range=0.2, pad_token_id=None, bos_token_id=None)
    ids = torch.tensor([[5, 6, 5, 6, 5]]).expand(DRAWS, -1)
    config = {
        "method": "draft_model", "num_speculative_tokens": 2, "draft_confidence_threshold": 0.25, "seed": 3,
        "rejection_sample_method": rule,
    }  # fmt: skip
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=True, top_k=0,
        assistant_model=drafter_of(model, 0.5), speculative_config=config,
    )  # fmt: skip
    counts = torch.bincount(output[:, 5] * 7 + output[:, 6], minlength=49).numpy()
    with torch.no_grad():
        first = model(ids[:1]).logits[0, -1].softmax(0)
        after = [model(torch.cat([ids[:1], torch.tensor([[t]])], 1)).logits[0, -1].softmax(0) for t in range(7)]
    expected = torch.stack([p * q for p, q in zip(first, after, strict=True)]).double().flatten().numpy()
    assert stats.chisquare(counts, expected / expected.sum() * DRAWS).pvalue > 1e-3
    assert_clean(model)


@pytest.mark.parametrize("threshold", [0.05, 0.4, 1.0])
def test_greedy_and_fewer_drafts(threshold):
    model, inputs = tiny_llama(), ragged([5, 17, 9])
    plain = model.generate(**inputs, max_new_tokens=30)
    drafts = []
    for value in (None, threshold):
        output = model.generate(
            **inputs, max_new_tokens=30, assistant_model=drafter_of(model), return_dict_in_generate=True,
            speculative_config={"method": "draft_model", "draft_confidence_threshold": value},
        )  # fmt: skip
        assert torch.equal(output.sequences, plain)
        drafts.append(output.speculation)
    assert drafts[1].num_draft_tokens < drafts[0].num_draft_tokens
    if threshold < 1:
        assert drafts[1].acceptance_rate > drafts[0].acceptance_rate
