"""The checkpoint of a run: everything the next step depends on, written atomically."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

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
    write_whole(path, lambda file: torch.save(state, file))


def load_state(path: Path) -> dict[str, Any] | None:
    """Read a checkpoint into CPU memory; None if the file does not exist. Raises TrainingError: the file cannot be read."""
    if not path.is_file():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors for a damaged file
        raise TrainingError(f"{path} cannot be read ({error}). Remove it to start the run anew.") from error
