"""The main function of the processes that `RankProcesses` starts: the ranks other than 0 of a sharded model."""

from __future__ import annotations

import io
import logging
import os
import pickle
import sys
import threading

import torch.distributed as dist

from ...core.ranks import RankError
from ...integration import model_lock
from ..ipc.worker import EngineWorker
from ..llm import LLM
from .rank_processes import ENVIRONMENT, join, meeting_point

logger = logging.getLogger(__name__)


def follow(llm: LLM) -> None:
    """Carry out rank 0's orders: requests to run, as `LLM.generate` does; "serve", by an `EngineWorker`; or "end". Raises RankError: rank
    0 has ended."""
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


def main() -> None:
    """Join the process group, load the model's shard, and follow rank 0."""
    port, rank, size = map(int, os.environ.pop(ENVIRONMENT).split())
    arguments = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_rank_0, name="hf-specdec-watch", daemon=True).start()
    sys.stdout = io.StringIO()  # only rank 0 prints
    join(meeting_point(port, size, is_master=False), rank, size)
    try:
        follow(LLM(**arguments))
    except RankError as error:
        print(f"hf-specdec: rank {rank} ends: {error}", file=sys.stderr)
        os._exit(1)
    dist.destroy_process_group()
