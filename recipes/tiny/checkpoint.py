"""Checkpoints that survive a kill at any moment, and the log."""

import json
import os
from pathlib import Path

import torch


def save_checkpoint(path: Path, model, optimizers, progress: dict) -> None:
    """Weights, optimizer states, torch's generator and the position, written whole or not at all."""
    state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    torch.save({**state, "rng": torch.get_rng_state(), "progress": progress}, path.with_suffix(".partial"))
    os.replace(path.with_suffix(".partial"), path)


def load_checkpoint(path: Path, model, optimizers) -> dict:
    """Restore what `save_checkpoint` wrote (weights only if `optimizers` is empty) and give the position.

    Without a checkpoint that is the start. The position is all the data order depends on (`batches.packed_batch`).
    """
    if not path.exists():
        return {"step": 0, "tokens": 0, "seconds": 0.0}
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=False):
        optimizer.load_state_dict(saved)
    torch.set_rng_state(state["rng"])
    return state["progress"]


def append_log(path: Path, entry: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({k: round(v, 1) if k == "seconds" else v for k, v in entry.items()}) + "\n")
