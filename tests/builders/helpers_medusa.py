"""Medusa checkpoints with random weights, in the layouts that are on the Hub."""

import json

import torch
from oracle import VOCAB
from safetensors.torch import save_file

HIDDEN = 32


def random(*shape, seed):
    return 0.2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def original(heads=4, blocks=1, own=True, repeat=False, hidden=HIDDEN, vocab=VOCAB) -> dict[str, torch.Tensor]:
    """Tensors as FasterDecoding's trainer saves them. `repeat`: its blocks of one head are one module."""
    tensors = {}
    for i in range(heads):
        for j in range(blocks):
            seed = 100 * i + (0 if repeat else j)
            tensors[f"{i}.{j}.linear.weight"] = random(hidden, hidden, seed=seed)
            tensors[f"{i}.{j}.linear.bias"] = random(hidden, seed=seed + 50)
        if own:
            tensors[f"{i}.{blocks}.weight"] = random(vocab, hidden, seed=1000 + i)
    return tensors


def converted(heads=3, blocks=2, bias=False, vocab=VOCAB, one="") -> dict[str, torch.Tensor]:
    """Tensors as converted for vLLM; `one`: the names under which the only language-model head is stored."""
    tensors = {}
    for i in range(heads):
        for j in range(blocks):
            tensors[f"blocks.{i}.layers.{j}.weight"] = random(HIDDEN, HIDDEN, seed=100 * i + j)
            if bias:
                tensors[f"blocks.{i}.layers.{j}.bias"] = random(HIDDEN, seed=100 * i + j + 50)
        if not one:
            tensors[f"lm_heads.{i}.weight"] = random(vocab, HIDDEN, seed=1000 + i)
    return tensors | {name: random(vocab, HIDDEN, seed=1000) for name in one.split()}


def renamed(prefix, tensors):
    return {prefix + name: tensor for name, tensor in tensors.items()}


def write(folder, tensors, config=None, file="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    if file.endswith(".pt"):
        torch.save(tensors, folder / file)
    else:
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / file)
    return {"method": "medusa", "model": str(folder)}


ORIGINAL = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
CONVERTED = {
    "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": 3,
    "num_hidden_layers": 2, "max_paths": 64, "topk": 10, "truncated_vocab_size": VOCAB, "medusa_fc_bias": False,
}  # fmt: skip
SPECULATORS = {
    "model_type": "speculator_model", "speculators_model_type": "medusa", "speculators_version": "0.6.0",
    "architectures": ["MedusaModel"], "num_heads": 3,
    "num_hidden_layers": 2, "medusa_hidden_size": HIDDEN, "medusa_vocab_size": VOCAB, "truncated_vocab_size": 0,
    "original_lm_head": True, "medusa_fc_bias": False, "head_weight_decay": 0.8,
    "speculators_config": {
        "algorithm": "medusa", "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "default_proposal_method": "greedy", "verifier": {"name_or_path": "some/target", "architectures": []},
    },
}  # fmt: skip
