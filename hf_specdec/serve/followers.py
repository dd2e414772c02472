"""Starts the processes for the other ranks of a sharded model, and keeps all ranks in step.

Each process ends when its standard input closes, so none outlives rank 0.

Rank 0 is the caller's own process: it has the prompts, or the HTTP server. It sends orders to the other ranks: `Run` these requests,
`Serve` (from then on rank 0 sends a list of messages before each step), or `End`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import queue
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..core.ranks import RankError, Ranks
from .worker import Cancel, EngineWorker, Submit

TIMEOUT = datetime.timedelta(minutes=10)  # for starting, and for each collective operation of the model
ENVIRONMENT = "HF_SPECDEC_FOLLOWER"  # holds the store's port, the rank and the number of ranks


@dataclass
class Run:
    """Order: run these requests to their end, as `LLM.generate` does."""

    requests: list[Submit] = field(default_factory=list)


@dataclass
class Serve:
    """Order: run a `RankedWorker` until it is stopped."""


@dataclass
class End:
    """Order: end the process."""


class Followers:
    """The processes of ranks 1 to `size` - 1 on this machine.

    Args:
        size: number of ranks, this process included.
        arguments: arguments of `LLM`, which each process makes for itself.

    Raises:
        RuntimeError: this process already belongs to a process group.
        ValueError: an argument cannot be sent to another process.
    """

    def __init__(self, size: int, arguments: dict[str, Any]):
        if dist.is_initialized():
            raise RuntimeError(
                "tensor_parallel_size starts processes of its own, but this one already belongs to a torch.distributed group: load the "
                "model with distributed_config=DistributedConfig(tp_size=...) on every rank and pass it as `model`."
            )
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        self.processes: list[subprocess.Popen] = []
        try:
            given = pickle.dumps(arguments)
        except Exception as error:
            raise ValueError(
                f"tensor_parallel_size sends the arguments of LLM to other processes, and one cannot be sent: {error}"
            ) from error
        try:
            for rank in range(1, size):
                environment = {**os.environ, "LOCAL_RANK": str(rank), ENVIRONMENT: f"{store.port} {rank} {size}"}
                command = [sys.executable, "-c", "from hf_specdec.serve.follower import main; main()"]
                process = subprocess.Popen(  # a session of its own: Ctrl-C reaches rank 0 only, which ends the others
                    command, env=environment, stdin=subprocess.PIPE, start_new_session=True
                )
                self.processes.append(process)
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # the process has ended: joining the group will fail
                    process.stdin.write(given)
                    process.stdin.flush()
            join(store, 0, size)
        except BaseException:
            self.end()
            raise

    @property
    def are_alive(self) -> bool:
        """True while all processes are running."""
        return all(process.poll() is None for process in self.processes)

    def end(self, ranks: Ranks | None = None) -> None:
        """End the processes and wait for them. `ranks` sends them the order to end; if it is None, they are killed at once."""
        if ranks is not None and self.are_alive:
            with contextlib.suppress(RankError):  # one of them has just ended
                ranks.same_object(End())
        for process in self.processes:
            try:
                process.wait(10 if ranks is not None else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        self.processes = []
        if dist.is_initialized():
            dist.destroy_process_group()


class RankedWorker(EngineWorker):
    """An EngineWorker that runs on every rank. Rank 0 passes its messages on to all ranks before each step, so that all do the same."""

    def __init__(self, engine, deliver, lock, ranks: Ranks):
        super().__init__(engine, deliver, lock)
        self.ranks = ranks

    def run(self) -> None:
        """See EngineWorker."""
        with self.ranks.watched():
            super().run()

    def _read(self, block: bool) -> bool:
        for message in self.ranks.same_object(self._waiting(block) if self.ranks.leads else None) or []:
            if message is None:
                return False
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Cancel):
                self._cancel(message)
        return True

    def _waiting(self, block: bool) -> list[Submit | Cancel | None]:
        """Remove and return the messages that rank 0 has received, up to an order to stop. `block`: wait for the first one."""
        found: list[Submit | Cancel | None] = []
        with contextlib.suppress(queue.Empty):
            while None not in found:
                found.append(self._inbox.get(block=block and not found))
        return found


def join(store: Any, rank: int, size: int) -> None:
    """Join the process group of this store as `rank`: NCCL on GPUs, else gloo."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
