"""What a run keeps and shows: its checkpoint, everything the next step depends on, written atomically; its log, plot and progress bar."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, ProgressColumn, TimeElapsedColumn

from .options import TrainingError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace `path` atomically by a file that `write` writes. Raises TrainingError: the disk is full."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(unfinished, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if unfinished.is_file() and not unfinished.is_symlink():
            unfinished.unlink()
        if isinstance(cause, OSError) and cause.errno in _FULL:
            raise disk_full(path, cause) from error
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a text file, see `write_whole`."""
    write_whole(path, lambda file: file.write(text.encode("utf-8")))


def disk_full(path: Path, cause: OSError) -> TrainingError:
    """The error for a disk that cannot take `path`."""
    free = shutil.disk_usage(path.parent).free
    return TrainingError(
        f"Writing {path} failed: {os.strerror(cause.errno or 0)} ({free / 2**20:.1f} MiB free). Make room and start the same "
        "command again: it continues from the last checkpoint."
    )


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raise TrainingError early if `needed` bytes do not fit into `folder`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise TrainingError(
            f"{what} take {needed / 2**20:.1f} MiB; {folder} has {free / 2**20:.1f} MiB free. Make room or name another folder."
        )


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, see `write_whole`."""
    write_whole(path, lambda file: torch.save(state, file))


def load_state(path: Path) -> dict[str, Any] | None:
    """Read a checkpoint into CPU memory; None if the file does not exist. Raises TrainingError: the file cannot be read."""
    if not path.is_file():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors for a damaged file
        raise TrainingError(f"{path} cannot be read ({error}). Remove it to start the run anew.") from error


class Log:
    """`log.jsonl`: one object per line, each with its "step". A resumed run drops lines after its checkpoint."""

    def __init__(self, path: Path, step: int, write: bool):
        self.path, self.write = path, write
        self.entries = [entry for entry in read_log(path) if entry["step"] <= step]
        self.latest = {key: value for entry in self.entries for key, value in entry.items()}
        if write:
            write_text(path, "".join(json.dumps(entry) + "\n" for entry in self.entries))

    def add(self, entry: dict[str, Any]) -> None:
        """Append an entry."""
        self.entries.append(entry)
        self.latest |= entry
        if self.write:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without an incomplete last line."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def progress_bar(shown: bool, *columns: ProgressColumn, transient: bool = False) -> Progress:
    """A progress bar on stderr, with further columns before the times."""
    what, bar, _, left = Progress.get_default_columns()
    all_columns = (what, bar, MofNCompleteColumn(), *columns, TimeElapsedColumn(), left)
    return Progress(*all_columns, console=Console(stderr=True), disable=not shown, transient=transient)


def figures(entry: dict[str, Any]) -> str:
    """Loss, accuracies and τ as text, as far as they are known."""
    parts = [f"loss {entry['loss']:.3f}"] if "loss" in entry else []
    accuracies = [f"{value:.0%}" for key, value in entry.items() if key.startswith("accuracy_")]
    if accuracies:
        parts.append("accuracy " + " ".join(accuracies))
    if "tau" in entry:
        parts.append(f"τ {entry['tau']:.2f}")
    return " · ".join(parts)


def plot(entries: list[dict[str, Any]], path: Path, title: str) -> None:
    """Plot loss, accuracies and estimated τ over the steps into a PNG file."""
    from matplotlib.figure import Figure

    losses = [entry for entry in entries if "loss" in entry]
    estimates = [entry for entry in entries if "tau" in entry]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.plot([e["step"] for e in losses], [e["loss"] for e in losses])
    left.set(title="training loss", xlabel="step")
    for key in sorted({key for entry in losses for key in entry if key.startswith("accuracy_")}):
        known = [entry for entry in losses if key in entry]
        middle.plot([e["step"] for e in known], [e[key] for e in known], label=f"token {key.removeprefix('accuracy_')}")
    middle.set(title="accuracy in training", xlabel="step", ylim=(0, 1))
    if middle.lines:
        middle.legend()
    right.plot([e["step"] for e in estimates], [e["tau"] for e in estimates], marker="o")
    right.set(title="estimated τ, held-out text", xlabel="step")
    figure.suptitle(title)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=110))
