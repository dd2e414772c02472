"""Distil the draft from the target: KL of their next-token distributions, on training text and on the target's own."""

import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from .batches import CHAT_SOURCES, MIX, TokenStore, packed_batch, write_rows
from .checkpoint import append_log, load_checkpoint, save_checkpoint
from .evaluate import held_out_losses
from .tokenizer import END_OF_TEXT, PAD
from .train import DRAFT_SHAPE, learning_rate_factor, make_model, make_optimizers, set_rates


@torch.no_grad()
def sample_target_text(
    target, tokenizer, train: TokenStore, path: Path, rounds: int, rows: int = 64, seed: int = 0
) -> None:
    """Let the target answer training prompts, every other batch greedily; keep prompt + answer as a `TokenStore`."""
    if path.exists():
        return
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    assistant, pad, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", PAD, END_OF_TEXT])
    kept = []
    for i in range(rounds):
        source = CHAT_SOURCES[i // 2 % len(CHAT_SOURCES)]
        picked = rng.integers(len(train.offsets[source]) - 1, size=rows)
        prompts = [
            document[: list(document).index(assistant) + 1] for document in (train.document(source, j) for j in picked)
        ]
        prompts = [p for p in prompts if len(p) < 400]
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            sampling = {"do_sample": True, "top_k": 0} if i % 2 else {"do_sample": False}
            out = target.generate(ids, attention_mask=(ids != pad).long(), max_new_tokens=200, **sampling)
        kept += [[*row[row != pad].tolist(), end] for row in out]
    write_rows(path, {"sampled": kept})


def distillation_loss(draft, teacher_logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean KL(target || draft) in nats per token; `teacher_logits` [rows, length, V], `ids` [rows, length]."""
    own = F.log_softmax(draft(input_ids=ids, use_cache=False).logits.float(), -1)
    wanted = F.log_softmax(teacher_logits.float(), -1)
    return (wanted.exp() * (wanted - own)).sum(-1).mean()


def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits


@torch.no_grad()
def start_from_target(draft, target) -> None:
    """Begin with the target's token embeddings [V, H], projected on their main directions [H, H_draft]."""
    embeddings = target.model.embed_tokens.weight
    directions = torch.linalg.svd(embeddings, full_matrices=False).Vh[: draft.config.hidden_size]
    draft.model.embed_tokens.weight.copy_(embeddings @ directions.T)


def distill_draft(target, work: Path, log: Path, tokenizer, budget: int, decay: float, seed: int = 1):
    """Train the draft to `budget` tokens, resuming `work/draft.pt`; every other batch is the target's own text."""
    draft = make_model(DRAFT_SHAPE, tokenizer, seed)
    start_from_target(draft, target)
    optimizers = make_optimizers(draft)
    progress = load_checkpoint(work / "draft.pt", draft, optimizers)
    train, sampled = TokenStore(work / "train.npz"), TokenStore(work / "sampled.npz")
    held_out = TokenStore(work / "held_out.npz")
    compiled_loss = torch.compile(distillation_loss, dynamic=False)
    compiled_teacher = torch.compile(logits_of, dynamic=False)
    started = saved = time.monotonic()
    earlier, recent = progress["seconds"], []
    while progress["tokens"] < budget:
        set_rates(optimizers, learning_rate_factor(progress["tokens"], budget, decay, warmup=100_000))
        store, mix = (sampled, {"sampled": 1.0}) if progress["step"] % 2 else (train, MIX)
        ids = packed_batch(store, mix, 4, 512, seed, progress["step"])[:, :-1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                wanted = compiled_teacher(target, ids)
            loss = compiled_loss(draft, wanted, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent.append(loss.item())
        progress["step"] += 1
        progress["tokens"] += ids.numel()
        progress["seconds"] = earlier + time.monotonic() - started
        if progress["step"] % 50 == 0:
            append_log(log, {**progress, "loss": round(sum(recent) / len(recent), 4)})
            recent.clear()
        if progress["step"] % 1000 == 0:
            append_log(log, {**progress, "held_out": held_out_losses(draft, held_out)})
        if time.monotonic() - saved > 120:
            save_checkpoint(work / "draft.pt", draft, optimizers, progress)
            saved = time.monotonic()
    save_checkpoint(work / "draft.pt", draft, optimizers, progress)
    return draft
