"""The hybrid target: three layers of gated delta rule to one of attention, as in Qwen3.5, and how it is trained."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from ..tiny.tokenizer import CONTEXT, VOCABULARY
from ..tiny.train import make_optimizers, next_token_loss, train

SHAPE = {
    "hidden_size": 160,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
ROWS = 4  # a step reads ROWS whole contexts


def make_model(tokenizer, seed: int) -> Qwen3_5ForCausalLM:
    """A freshly initialised target in float32."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        bos_token_id=None,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")],
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **SHAPE,
    )
    config._attn_implementation = "sdpa"
    return Qwen3_5ForCausalLM(config).float()


@contextlib.contextmanager
def float32_rule() -> Iterator[None]:
    """Run the gated delta rule in float32 under autocast, as inference does: its chunk form solves triangular systems."""
    rule = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def in_float32(query, key, value, **others):
        with torch.autocast("cpu", enabled=False):
            return rule(query.float(), key.float(), value.float(), **others)

    modeling_qwen3_5.torch_chunk_gated_delta_rule = in_float32
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule = rule


def loss_in_float32(model: Qwen3_5ForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """`next_token_loss` with the rule of `float32_rule`."""
    with float32_rule():
        return next_token_loss(model, batch)


def train_target(work: Path, log: Path, tokenizer, budget: int, decay: float, seed: int = 0) -> None:
    """Train the target: see `train`. AdamW trains the gates of the recurrence, too."""
    model = make_model(tokenizer, seed)
    optimizers = make_optimizers(model, kept_from_muon=("in_proj_a.", "in_proj_b."))
    train(model, optimizers, work, log, budget, decay, seed, lambda step: (ROWS, CONTEXT), loss_in_float32)
