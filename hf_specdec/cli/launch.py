"""The option `--tensor-parallel-size`: the command restarts itself under torchrun, once for each rank."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .options import positive_int


def add_ranks_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensor-parallel-size",
        type=positive_int,
        default=1,
        metavar="N",
        help="shard the model over N ranks; the command starts them on this machine (default: %(default)s)",
    )


def start_ranks(size: int, argv: Sequence[str]) -> None:
    """Replace this process by torchrun with `size` ranks of the same command. Returns only in a rank, or if `size` is 1.

    Raises:
        ValueError: torchrun has started another number of ranks.
    """
    world = os.environ.get("WORLD_SIZE")
    if world is not None and int(world) != size:
        raise ValueError(
            f"--tensor-parallel-size is {size}, and torchrun has started {world} ranks: they must be equal."
        )
    if world is not None or size == 1:
        if int(os.environ.get("RANK", "0")) > 0:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (only rank 0 prints)
            sys.stderr = sys.stdout
        return
    sys.stdout.flush()
    # Without this variable torchrun sets it to 1, with a warning.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size), "-m", "hf_specdec",
    ]  # fmt: skip
    os.execv(sys.executable, [*command, *argv])


def leave_ranks() -> None:
    """Leave this process's group of ranks, if it has one: the group's threads must not outlive `main`."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
