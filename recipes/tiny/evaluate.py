"""What the trained pair can do: held-out loss by source, accepted length, samples, and the loss curve."""

import json
from pathlib import Path

import torch
from torch.nn import functional as F

from .batches import TokenStore, held_out_documents


@torch.no_grad()
def held_out_losses(model, store: TokenStore, limit: int = 40) -> dict[str, float]:
    """Nats per token on the first `limit` held-out documents of each source, each document read alone."""
    losses = {}
    for source in store.sources:
        total = count = 0
        for ids in held_out_documents(store, source, limit, model.config.max_position_embeddings):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
            total += F.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
            count += ids.shape[1] - 1
        losses[source] = round(total / count, 4)
    return losses


def render(tokenizer, prompt: str) -> torch.Tensor:
    """Chat-formatted prompt ids [1, n]."""
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


@torch.no_grad()
def greedy_continuation(model, tokenizer, prompt: str, max_new_tokens: int) -> tuple[torch.Tensor, int]:
    """(ids of prompt and greedy answer [n], length of the prompt)."""
    ids = render(tokenizer, prompt)
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens)[0], ids.shape[1]


def rounds_needed(matches: list[bool], draft_tokens: int) -> int:
    """Target forwards to emit `len(matches)` tokens when token i is drafted right iff `matches[i]`."""
    position = rounds = 0
    while position < len(matches):
        accepted = 0
        while accepted < draft_tokens and position + accepted < len(matches) and matches[position + accepted]:
            accepted += 1
        position += accepted + 1
        rounds += 1
    return rounds


@torch.no_grad()
def accepted_length(draft, ids: torch.Tensor, prompt_length: int, draft_tokens: int = 5) -> tuple[int, int]:
    """(emitted tokens, target forwards) of a greedy chain draft along the target's own greedy text `ids` [n].

    Accepted drafts equal the target's text, so the draft only ever reads that text: one forward gives every guess.
    """
    guesses = draft(input_ids=ids[None, :-1], use_cache=False).logits[0].argmax(-1)
    matches = (guesses == ids[1:])[prompt_length - 1 :].tolist()
    return len(matches), rounds_needed(matches, draft_tokens)


def measure_pair(
    target, draft, tokenizer, prompts: list[dict], draft_tokens: int = 5, max_new_tokens: int = 128
) -> dict:
    """Tokens per target forward by task and over all, and one greedy sample a task."""
    counts: dict[str, list[int]] = {}
    samples = {}
    for row in prompts:
        ids, prompt_length = greedy_continuation(target, tokenizer, row["prompt"], max_new_tokens)
        for name in (row["task"], "all"):
            emitted = counts.setdefault(name, [0, 0])
            for i, n in enumerate(accepted_length(draft, ids, prompt_length, draft_tokens)):
                emitted[i] += n
        samples[row["task"]] = {"prompt": row["prompt"], "output": tokenizer.decode(ids[prompt_length:])}
    return {"tau": {name: round(tokens / rounds, 3) for name, (tokens, rounds) in counts.items()}, "samples": samples}


def read_log(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def draw_loss_curves(folder: Path) -> None:
    """`loss.png` from `target.jsonl` and `draft.jsonl`: training loss and held-out loss against tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), dpi=90)
    for axis, name, label in zip(axes, ("target", "draft"), ("cross-entropy", "KL to the target"), strict=True):
        entries = read_log(folder / f"{name}.jsonl")
        steps = [e for e in entries if "loss" in e]
        axis.plot(
            [e["tokens"] / 1e6 for e in steps], [e["loss"] for e in steps], label=f"training, {label}", color="black"
        )
        checks = [e for e in entries if "held_out" in e]
        for source in checks[0]["held_out"] if checks else ():
            values = [e["held_out"][source] for e in checks]
            axis.plot([e["tokens"] / 1e6 for e in checks], values, marker=".", label=f"held out, {source}")
        axis.set(title=name, xlabel="million tokens", ylabel="nats per token", ylim=(0, 5))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "loss.png")
