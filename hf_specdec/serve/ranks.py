"""The processes of a sharded model's other ranks. Rank 0 is the caller's own process: it has the prompts, or the HTTP server, and sends
orders to the others (`follow`). Each process ends when its standard input closes, so none outlives rank 0.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ..core.ranks import RankError, Ranks
from ..integration import model_lock
from .ipc.worker import EngineWorker

logger = logging.getLogger(__name__)

TIMEOUT = datetime.timedelta(minutes=10)  # for starting, and for each collective operation of the model
_COMMAND = "from hf_specdec.serve.llm import LLM; from hf_specdec.serve.ranks import main; main(LLM)"
ENVIRONMENT = "HF_SPECDEC_RANK"  # holds the store's port, the rank and the number of ranks


class RankProcesses:
    """The processes of ranks 1 to `size` - 1 on this machine, each of which makes `LLM` with these arguments.

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
        store = meeting_point(0, size, is_master=True, wait_for_workers=False)
        self.processes: list[subprocess.Popen] = []
        try:
            pickled = pickle.dumps(arguments)
        except Exception as error:
            raise ValueError(
                f"tensor_parallel_size sends the arguments of LLM to other processes, and one cannot be sent: {error}"
            ) from error
        try:
            for rank in range(1, size):
                environment = {**os.environ, "LOCAL_RANK": str(rank), ENVIRONMENT: f"{store.port} {rank} {size}"}
                command = [sys.executable, "-c", _COMMAND]
                process = subprocess.Popen(  # a session of its own: Ctrl-C reaches rank 0 only, which ends the others
                    command, env=environment, stdin=subprocess.PIPE, start_new_session=True
                )
                self.processes.append(process)
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # the process has ended: joining the group will fail
                    process.stdin.write(pickled)
                    process.stdin.flush()
            join(store, 0, size)
        except BaseException:
            self.end()
            raise

    @classmethod
    def of(cls, given: dict[str, Any]) -> RankProcesses | None:
        """Those for arguments of `LLM`; None for one rank, or under torchrun. Raises ValueError: the arguments do not fit together."""
        size = given["tensor_parallel_size"]
        if type(size) is not int or size < 1:
            raise ValueError(f"tensor_parallel_size must be an integer of at least 1, not {size!r}.")
        if size == 1:
            return None
        if isinstance(given["model"], PreTrainedModel):
            raise ValueError(
                f"tensor_parallel_size={size} shards a model while it is loaded: pass a name or a folder; or a model that was loaded with "
                "distributed_config=DistributedConfig(tp_size=...) on every rank, without tensor_parallel_size."
            )
        if dist.is_initialized() or "WORLD_SIZE" in os.environ:
            return None
        return cls(size, {**given, "model": os.fspath(given["model"])})

    def end(self, ranks: Ranks | None = None) -> None:
        """End the processes and wait for them. `ranks` sends them the order to end; if it is None, they are killed at once."""
        if ranks is not None and all(process.poll() is None for process in self.processes):
            with contextlib.suppress(RankError):  # one of them has just ended
                ranks.same_object("end")
        for process in self.processes:
            try:
                process.wait(10 if ranks is not None else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        self.processes = []
        if dist.is_initialized():
            dist.destroy_process_group()


def meeting_point(port: int, size: int, **options: bool) -> Any:
    """The store on this machine at which `size` ranks meet; port 0: any that is free. `options`: those of torch's `TCPStore`."""
    return dist.TCPStore("127.0.0.1", port, size, timeout=TIMEOUT, **options)  # pyright: ignore[reportPrivateImportUsage]


def join(store: Any, rank: int, size: int) -> None:
    """Join the process group of this store as `rank`: NCCL on GPUs, else gloo."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def follow(llm: Any) -> None:
    """Carry out rank 0's orders with an `LLM`: requests to run, as `LLM.generate` does; "serve", by an `EngineWorker`; or "end". Raises
    RankError: rank 0 has ended."""
    ranks = llm.ranks
    assert ranks is not None
    while (order := ranks.same_object(None)) != "end":
        if order == "serve":
            EngineWorker(llm.engine, lambda updates: None, model_lock(llm.model), ranks).run()
            return
        try:
            llm.run_requests(order or [])
        except RankError as error:
            if error.is_final:
                raise
        except Exception as error:
            logger.debug("Rank 0 raises this error too, or has been told, and reports it to its caller: %s", error)


def _end_with_rank_0() -> None:
    """End this process when the pipe from rank 0 closes, whatever it waits for: rank 0 has ended, or has been killed."""
    sys.stdin.buffer.read()
    os._exit(1)


def main(make_llm: Callable[..., Any]) -> None:
    """A process of another rank: join the process group, load the model's shard by the class `LLM`, and follow rank 0."""
    port, rank, size = map(int, os.environ.pop(ENVIRONMENT).split())
    arguments = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_rank_0, name="hf-specdec-watch", daemon=True).start()
    sys.stdout = io.StringIO()  # only rank 0 prints
    join(meeting_point(port, size, is_master=False), rank, size)
    try:
        follow(make_llm(**arguments))
    except RankError as error:
        print(f"hf-specdec: rank {rank} ends: {error}", file=sys.stderr)
        os._exit(1)
    dist.destroy_process_group()
