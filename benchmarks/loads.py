"""What benchmarks of the loop, the engine and the server run: the bundled model at the cost of a larger one, and the bundled prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZES = {  # of the bundled model inflated: hidden size, layers, heads, KV heads, intermediate size
    "bundled": None,
    "50m": dict(hidden_size=512, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=4, intermediate_size=1536),
    "100m": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=24, num_key_value_heads=6, intermediate_size=2304),
    "300m": dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=8, intermediate_size=2816),
    # Llama-3.1-8B's, for a GPU
    "8b": dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
               head_dim=128, vocab_size=128256),
}  # fmt: skip


def larger(size: str, dtype: str = "float32", device: str = "cpu") -> tuple[Any, Any]:
    """(the bundled model at the cost of `size`, its tokenizer). Texts and acceptance are the bundled model's."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_specdec
    from hf_specdec.inflation import inflate

    folder = hf_specdec.bundled("tiny")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = model.to(device)
    own = SIZES[size]
    if own is not None:
        model = inflate(model, **own).eval()
    return model.to(getattr(torch, dtype)), AutoTokenizer.from_pretrained(folder)


def prompts(*tasks: str) -> list[str]:
    """The bundled prompts of these tasks ("math", "edit", "story"); of all of them if none is named."""
    import hf_specdec

    path = Path(hf_specdec.bundled("tiny")).parent / "prompts.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row["prompt"] for row in rows if not tasks or row["task"] in tasks]
