"""Which drafters let equal prompts be computed once, and what is computed again for those that need every token's features."""

import pytest
import torch
from oracle import assert_clean, ragged, tiny_llama

from hf_specdec import integration, parse_config
from hf_specdec.candidate_generators.none import NoSpeculation
from hf_specdec.core.output import Taps
from hf_specdec.model.packed_model import PackedModel


@pytest.mark.parametrize(
    ("taps", "fed"),
    [
        (Taps(), 20 + 3 * 4),  # nothing tapped: three rows share the first's block of 16
        (Taps(last_hidden=True, newest_only=True), 20 + 3 * 4),
        (Taps(last_hidden=True), 4 * 20),
        (Taps(layers=(1,)), 4 * 20),
    ],
)
def test_equal_prompts(taps, fed, monkeypatch):
    model = tiny_llama()
    monkeypatch.setattr(NoSpeculation, "taps", taps)
    counted, forward = [], PackedModel.forward

    def counting(self, rows, *args, **kwargs):
        counted.append(sum(len(row.tokens) for row in rows))
        return forward(self, rows, *args, **kwargs)

    inputs = {name: value.repeat(4, 1) for name, value in ragged([20]).items()}
    plain = model.generate(**inputs, max_new_tokens=3)
    generator = integration.get_decoder(model, parse_config({"method": "none", "block_size": 16})).generator
    monkeypatch.setattr(PackedModel, "forward", counting)
    output = model.generate(**inputs, max_new_tokens=3, speculative_config={"method": "none", "block_size": 16})
    assert torch.equal(output, plain)
    assert counted == [fed, 4, 4]
    assert generator.taps.whole_text == (fed == 4 * 20)
    assert_clean(model)
