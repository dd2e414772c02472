"""Other weights for the bundled model, and the texts that they write."""

import torch
from oracle import load_bundled

EAGLE3 = {"method": "eagle3", "model": "tiny-eagle3", "top_k": 3, "total_tokens": 8, "num_speculative_tokens": 3}


def changed(share=0.2):
    """The bundled model with noise in all weights: it writes other texts."""
    other, random = load_bundled("tiny"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in other.parameters():
            weight += share * weight.std() * torch.randn(weight.shape, generator=random)
    return other


def plain(model, prompts, count=24):
    """What plain `generate()` writes after each prompt."""
    texts = []
    for ids in prompts:
        output = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=count, do_sample=False)
        texts.append(output[0, len(ids) :].tolist())
    return texts
