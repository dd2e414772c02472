"""The hybrid target: three layers of gated delta rule to one of attention, as in Qwen3.5, and how it is trained."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from ..tiny.batches import MIX, TokenStore, packed_batch
from ..tiny.checkpoint import append_log, load_checkpoint, save_checkpoint
from ..tiny.evaluate import held_out_losses
from ..tiny.tokenizer import CONTEXT, VOCABULARY
from ..tiny.train import FULL_RATE, learning_rate_factor, next_token_loss, set_rates

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


def make_optimizers(model: Qwen3_5ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices; AdamW for embeddings, convolutions, gates of the recurrence and norms."""
    named = list(model.model.layers.named_parameters())
    hidden = [p for name, p in named if p.ndim == 2 and "in_proj_a." not in name and "in_proj_b." not in name]
    known = {id(p) for p in hidden} | {id(model.model.embed_tokens.weight)}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(hidden, lr=FULL_RATE, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [
                {"params": [model.model.embed_tokens.weight], "weight_decay": 0.01},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=FULL_RATE,
            betas=(0.9, 0.98),
        ),
    ]


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


def train_target(work: Path, log: Path, tokenizer, budget: int, decay: float, seed: int = 0) -> None:
    """Train to `budget` tokens in all and write the checkpoint to `work/target.pt`. Run again to go on after a stop."""
    model = make_model(tokenizer, seed)
    optimizers = make_optimizers(model)
    progress = load_checkpoint(work / "target.pt", model, optimizers)
    train, held_out = TokenStore(work / "train.npz"), TokenStore(work / "held_out.npz")
    started = saved = time.monotonic()
    earlier, recent = progress["seconds"], []
    while progress["tokens"] < budget:
        factor = learning_rate_factor(progress["tokens"], budget, decay)
        set_rates(optimizers, factor)
        batch = packed_batch(train, MIX, ROWS, CONTEXT, seed, progress["step"])
        with float32_rule(), torch.autocast("cpu", dtype=torch.bfloat16):
            loss = next_token_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent.append(loss.item())
        progress["step"] += 1
        progress["tokens"] += ROWS * CONTEXT
        progress["seconds"] = earlier + time.monotonic() - started
        if progress["step"] % 50 == 0:
            append_log(log, {**progress, "loss": round(sum(recent) / len(recent), 4), "rate": round(factor, 4)})
            recent.clear()
        if progress["step"] % 500 == 0:
            append_log(log, {**progress, "held_out": held_out_losses(model, held_out)})
        if time.monotonic() - saved > 120:
            save_checkpoint(work / "target.pt", model, optimizers, progress)
            saved = time.monotonic()
    save_checkpoint(work / "target.pt", model, optimizers, progress)
