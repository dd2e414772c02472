"""On a GPU, every small family writes with drafts what plain `generate()` writes there."""

import families
import pytest
import recurrent_families
import torch
from families import perturbed
from transformers import CONFIG_MAPPING

import hf_specdec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NEW, LENGTHS = 24, (14, 3, 9)
DRAFT = {"method": "draft_model"}
CONFIGS = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
    "chain": {**DRAFT, "num_speculative_tokens": 3},
    "tree": {**DRAFT, "branching_factors": [3, 2, 1]},
    "replayed": {**DRAFT, "branching_factors": [2, 2], "recurrent_states": "replayed"},
}
FAMILIES = {**families.FAMILIES, **recurrent_families.FAMILIES}
PAGED = ["Llama", "Qwen3", "Gemma2", "GPT-2", "Cohere2", "OPT"]  # captured by default


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 120, (len(LENGTHS), max(LENGTHS)), generator=generator)
    places = torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]
    return {"input_ids": (ids * places).cuda(), "attention_mask": places.long().cuda()}


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_plain_text(family):
    recurrent = family in recurrent_families.FAMILIES
    if FAMILIES[family][0] not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know it")
    model = (recurrent_families if recurrent else families).make(family)
    drafter = recurrent_families.perturbed(model) if recurrent else perturbed(model, 0.03)
    model, drafter, inputs = model.cuda(), drafter.cuda(), batch()
    wanted = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    for name, config in CONFIGS.items():
        if name == "replayed" and not recurrent:
            continue
        draft = {"assistant_model": drafter} if config["method"] == "draft_model" else {}
        out = model.generate(
            **inputs,
            **draft,
            max_new_tokens=NEW,
            do_sample=False,
            speculative_config=config,
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, wanted), name
        assert (out.speculation["num_draft_tokens"] > 0) == (name != "none"), name
        entries = hf_specdec.integration._kept(model).entries
        assert all(entry.decoder.target.graphs is not None for entry in entries) or family not in PAGED
        hf_specdec.release(model)
