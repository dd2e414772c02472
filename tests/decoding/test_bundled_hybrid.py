"""The bundled hybrid: a trained target with recurrent layers, whose own MTP layer drafts from its own file."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache

import hf_specdec

pytestmark = pytest.mark.skipif(
    not hasattr(Cache, "get_conv_state"), reason="needs transformers 5.23, as the model does"
)
MOST_BYTES = 4.3e6
CHAIN, TREE = {"num_speculative_tokens": 3}, {"branching_factors": [3, 2, 1]}


@pytest.fixture(scope="module")
def hybrid():
    model = AutoModelForCausalLM.from_pretrained(hf_specdec.bundled("tiny-hybrid"), dtype=torch.float32).eval()
    yield model
    hf_specdec.release(model)


@pytest.fixture(scope="module")
def inputs():
    """Chats of unlike lengths, padded on the left."""
    tokenizer = AutoTokenizer.from_pretrained(hf_specdec.bundled("tiny-hybrid"), padding_side="left")
    asked = (
        "Tell me a story about a dog named Max.",
        "Write a function to add two numbers.",
        "Ben has 5 apples and eats 2. What is left?",
    )
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": each}], add_generation_prompt=True, tokenize=False)
        for each in asked
    ]
    return tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)


@pytest.mark.parametrize("states", ["kept", "replayed"])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_its_own_layer_drafts(hybrid, inputs, shape, states):
    expected = hybrid.generate(**inputs, max_new_tokens=24, do_sample=False)
    config = {"method": "mtp", "recurrent_states": states, **shape}
    out = hybrid.generate(
        **inputs, max_new_tokens=24, do_sample=False, speculative_config=config, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, expected)
    assert out.speculation.mean_accepted_length > 1.2


def test_its_file():
    """Half precision and small, with the layer under Qwen3.5's names; the card names data and licence."""
    folder = Path(hf_specdec.bundled("tiny-hybrid"))
    assert (folder / "model.safetensors").stat().st_size <= MOST_BYTES
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert all(file.get_tensor(name).dtype == torch.float16 for name in names)
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= names
    card = (folder / "README.md").read_text(encoding="utf-8")
    for text in ("license: apache-2.0", "recipes/tiny_hybrid", "\n# tiny-hybrid\n", "| gsm8k |"):
        assert text in card, text
