"""The process of a rank other than 0, which `Followers` starts."""

from __future__ import annotations

import io
import logging
import os
import pickle
import sys

import torch.distributed as dist

from ..core.ranks import RankError
from ..integration import model_lock
from .followers import ENVIRONMENT, TIMEOUT, End, RankedWorker, Serve, join
from .llm import LLM

logger = logging.getLogger(__name__)


def follow(llm: LLM) -> None:
    """What the process of another rank does, until it is told to end or rank 0 has gone."""
    ranks = llm.ranks
    assert ranks is not None
    while True:
        order = ranks.same_object(None)
        if isinstance(order, End):
            return
        if isinstance(order, Serve):
            RankedWorker(llm.engine, lambda updates: None, model_lock(llm.model), ranks).run()
            return
        try:
            llm.run_requests(order.requests)
        except RankError as error:
            if error.is_final:
                raise
        except Exception as error:
            logger.debug("Rank 0 has raised it too, or knows of it, and tells its caller: %s", error)


def main() -> None:
    """The process of another rank."""
    port, rank, size = map(int, os.environ.pop(ENVIRONMENT).split())
    given = sys.stdin.buffer.read()
    sys.stdout = io.StringIO()  # what is printed is rank 0's
    join(dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=TIMEOUT), rank, size)
    try:
        follow(LLM(**pickle.loads(given)))
    except RankError as error:
        print(f"hf-specdec: rank {rank} ends: {error}", file=sys.stderr)
        os._exit(1)
    dist.destroy_process_group()
