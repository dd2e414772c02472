"""Train the target: Muon on the hidden matrices, AdamW on the rest; warmup, constant rate, decay; resumable."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from .batches import MIX, TokenStore, packed_batch
from .checkpoint import append_log, load_checkpoint, save_checkpoint
from .evaluate import held_out_losses
from .tokenizer import CONTEXT, VOCABULARY

TARGET_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
DRAFT_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
FULL_RATE = 3e-3


def make_model(shape: dict, tokenizer, seed: int) -> LlamaForCausalLM:
    """A freshly initialised Llama of `shape` in float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")],
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
        dtype="float32",
        **shape,
    )
    return LlamaForCausalLM(config).float()


def make_optimizers(model: torch.nn.Module, kept_from_muon: tuple[str, ...] = ()) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices; AdamW for embeddings, norms and all else.

    Args:
        kept_from_muon: parts of the names of matrices that AdamW trains, too.
    """
    named = list(model.model.layers.named_parameters())
    hidden = [p for name, p in named if p.ndim == 2 and not any(part in name for part in kept_from_muon)]
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


def set_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's rate to `factor` of its full rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = FULL_RATE * factor


def learning_rate_factor(tokens: int, budget: int, decay: float, warmup: int = 400_000) -> float:
    """Warmup, constant, then linear to zero over the last `decay` share of `budget`; all counted in tokens."""
    return max(0.0, min(1.0, (tokens + 1) / warmup, (budget - tokens) / (decay * budget)))


def next_token_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy (nats per token) of a packed batch [rows, length + 1]."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def batch_shape(step: int, batch_tokens: int) -> tuple[int, int]:
    """(rows, length): 512 tokens a row, every fourth step whole contexts, so that late positions are learned too."""
    length = CONTEXT if step % 4 == 3 else CONTEXT // 2
    return batch_tokens // length, length


def train(
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    work: Path,
    log: Path,
    budget: int,
    decay: float,
    seed: int,
    shape_of: Callable[[int], tuple[int, int]],
    loss_of: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor],
) -> None:
    """Train to `budget` tokens in all and write the checkpoint to `work/target.pt`. Run again to go on after a stop.

    Args:
        decay: see `learning_rate_factor`.
        shape_of: (rows, length) of a step's batch.
        loss_of: loss of a batch [rows, length + 1]; called under autocast to bfloat16.
    """
    progress = load_checkpoint(work / "target.pt", model, optimizers)
    texts, held_out = TokenStore(work / "train.npz"), TokenStore(work / "held_out.npz")
    started = saved = time.monotonic()
    earlier, recent = progress["seconds"], []
    while progress["tokens"] < budget:
        factor = learning_rate_factor(progress["tokens"], budget, decay)
        set_rates(optimizers, factor)
        rows, length = shape_of(progress["step"])
        batch = packed_batch(texts, MIX, rows, length, seed, progress["step"])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent.append(loss.item())
        progress["step"] += 1
        progress["tokens"] += rows * length
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


def train_target(work: Path, log: Path, tokenizer, budget: int, decay: float, seed: int = 0, batch_tokens: int = 4096):
    """Train the target: see `train`."""
    model = make_model(TARGET_SHAPE, tokenizer, seed)
    loss_of = torch.compile(next_token_loss, dynamic=False)
    train(
        model, make_optimizers(model), work, log, budget, decay, seed, lambda step: batch_shape(step, batch_tokens), loss_of
    )  # fmt: skip
    return model
