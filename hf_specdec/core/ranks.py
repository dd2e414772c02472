"""Ranks: the processes that hold one model's shards, and what they agree on.

transformers shards a model (`from_pretrained(distributed_config=DistributedConfig(tp_size=N))`), and its forward adds up what the
ranks computed. Every rank runs the same steps. If two ranks fed different tokens of equal shape, the sums would mix two texts without
an error. So rank 0 decides, and every step sends its decision to all ranks.

The hosts agree through a gloo group of their own, beside the group of the model. One sum over all ranks carries three things: each
rank's status, a digest of what each rank assumes, and rank 0's numbers (the others add zeros).
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import pickle
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

logger = logging.getLogger(__name__)

_SLOTS = 128  # int64 numbers of one exchange; longer payloads take a second one
_IDLE = datetime.timedelta(days=14)
_POLL = 0.1  # seconds between two looks at the store, in a thread of its own
_TOLD = "_hf_specdec_told"  # attribute that marks exceptions which were reported to the other ranks
_GRACE = 5.0  # seconds after which a rank that has not heard of another's error must be stuck in a collective

_known = weakref.WeakKeyDictionary[nn.Module, "Ranks"]()
# members → (the default group when it was made, the gloo group)
_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}


class RankError(RuntimeError):
    """A rank has failed, or the ranks disagree: all of them have stopped. The message says which and why.

    Attributes:
        is_final: a process has ended, so nothing more can be computed.
    """

    def __init__(self, message: str, is_final: bool = False):
        super().__init__(message)
        self.is_final = is_final


class Ranks:
    """The ranks of one sharded model.

    Args:
        group: the model's own process group.

    Attributes:
        rank, size: the index of this process among them, and their number.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.members = dist.get_process_group_ranks(group)
        self.rank, self.size = self.members.index(dist.get_rank()), len(self.members)
        self.host_group = _host_group(tuple(self.members))
        self._store = dist.distributed_c10d._get_default_store()
        self._failures = 0  # number of failures that all ranks know of
        self._exchanging, self._is_watched = threading.Event(), False

    @property
    def leads(self) -> bool:
        """True on the rank whose decisions hold."""
        return self.rank == 0

    # ---- agreement on the host --------------------------------------------------------------------------------------

    def same(self, numbers: Sequence[int] = (), in_common: int = 0) -> list[int]:
        """Rank 0's numbers, on every rank. Every rank must call it.

        Args:
            numbers: int64; what the other ranks pass is ignored.
            in_common: a digest of what the ranks should have in common.

        Raises:
            RankError: another rank has failed, or has passed another digest.
        """
        result, digests = self._exchange(numbers, in_common)
        if len(set(digests)) > 1:
            raise RankError(
                f"The ranks disagree about what comes next (digests {digests}): their inputs or settings differ, or "
                "a rank has missed a step. Nothing more was computed. Give every rank the same arguments."
            )
        return result

    def settle(self) -> None:
        """Wait until every rank has come this far without an error. Raises RankError: one has failed."""
        self._exchange((), 0)

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        return min(self._exchange((), number)[1])

    def same_object(self, thing: Any) -> Any:
        """Rank 0's object, on every rank. It must be picklable. An empty object arrives as None, after one exchange."""
        data = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8) if self.leads and thing else None
        (size,) = self.same([0 if data is None else len(data)])
        if not size:
            return None
        data = torch.empty(size, dtype=torch.uint8) if data is None else data
        self._on_host(lambda: dist.broadcast(data, self.members[0], group=self.host_group))
        return thing if self.leads else pickle.loads(data.numpy().tobytes())

    def same_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's values of a tensor that has the same shape on every rank. On an accelerator it is one broadcast on the current
        stream, for which the host does not wait."""
        tensor = tensor.contiguous()
        if tensor.device.type != "cpu":
            dist.broadcast(tensor, self.members[0], group=self.group)
        elif tensor.dtype == torch.int64:
            return torch.tensor(self.same(tensor.flatten().tolist()), dtype=torch.int64).view(tensor.shape)
        else:
            self.settle()
            self._on_host(lambda: dist.broadcast(tensor, self.members[0], group=self.host_group))
        return tensor

    def _exchange(self, numbers: Sequence[int], number: int, failed: bool = False) -> tuple[list[int], list[int]]:
        """Rank 0's numbers, and each rank's `number`: the first collective of every call, so that ranks with different reasons meet."""
        room, numbers = _SLOTS - 2 - self.size, list(numbers) if self.leads and not failed else []
        head = numbers[:room]
        slots = [int(failed), len(numbers), *(number if rank == self.rank else 0 for rank in range(self.size)), *head]
        summed = torch.tensor(slots + [0] * (_SLOTS - len(slots)))
        self._on_host(lambda: dist.all_reduce(summed, group=self.host_group))
        sums = summed.tolist()
        if sums[0]:
            self._failures += 1
            if failed:
                return [], []
            raise RankError(f"Stopped, because {self._posted(self._failures - 1) or 'another rank failed'}")
        count, first = sums[1], 2 + self.size
        result = sums[first : first + min(count, room)]
        if count > room:
            rest = torch.tensor(numbers[room:]) if self.leads else torch.empty(count - room, dtype=torch.int64)
            self._on_host(lambda: dist.broadcast(rest, self.members[0], group=self.host_group))
            result += rest.tolist()
        return result, sums[2:first]

    def _on_host(self, collective: Callable[[], Any]) -> None:
        self._exchanging.set()
        try:
            collective()
        except RuntimeError as error:  # from gloo: another process has ended
            why = self._posted(self._failures) or error
            raise RankError(f"Rank {self.rank} has lost the others: {why}", is_final=True) from error
        finally:
            self._exchanging.clear()

    # ---- failure ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def agreed(self, *passing: type[BaseException]) -> Iterator[None]:
        """Inside the context, an exception on one rank ends the context on all: that rank raises its own exception, the others raise a
        RankError with its message.

        Args:
            passing: exceptions that follow from what the ranks agree on, so that every rank raises them itself.
        """
        try:
            yield
            self.settle()
        except RankError:
            raise
        except passing:
            raise
        except BaseException as error:
            if not hasattr(error, _TOLD):  # otherwise a nested context has reported it
                setattr(error, _TOLD, True)
                self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        key = self._key_of(self._failures, self.rank)
        self._store.set(key, f"rank {self.rank} raised {type(error).__name__}: {error}")
        self._store.check([key])  # `set` returns before the store has the message; this returns after
        try:
            self._exchange((), 0, failed=True)
        except RankError as lost:
            logger.error("%s", lost)

    def _key_of(self, failure: int, rank: int) -> str:
        return f"hf_specdec/{self.members}/{failure}/{rank}"

    def _posted(self, failure: int) -> str:
        """The messages of the other ranks that have failed."""
        keys = [self._key_of(failure, rank) for rank in range(self.size) if rank != self.rank]
        try:
            return "; ".join(self._store.get(key).decode() for key in keys if self._store.check([key]))
        except RuntimeError:  # the process that holds the store has ended, too
            return ""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside the context, end this process if another rank has failed while this one waits in a collective of the model. Such a wait
        cannot be cancelled, and without this the process would learn of the failure only at the time-out."""
        if self._is_watched:
            yield
            return
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done,), name="hf-specdec-ranks", daemon=True)
        self._is_watched = True
        watcher.start()
        try:
            yield
        finally:
            self._is_watched = False
            done.set()
            watcher.join()

    def _watch(self, done: threading.Event) -> None:
        since: float | None = None
        while not done.wait(_POLL):
            message = "" if self._exchanging.is_set() else self._posted(self._failures)
            since = (since or time.monotonic()) if message else None
            if since is not None and time.monotonic() - since > _GRACE:
                print(
                    f"hf-specdec: the process of rank {self.rank} ends, because {message}, in the middle of a forward pass of the "
                    "sharded model, which cannot be cancelled.", file=sys.stderr, flush=True,
                )  # fmt: skip
                os._exit(1)


def digest(*things: Any) -> int:
    """A 32-bit digest of numbers, texts and tensors, the same in every process."""
    value = 0
    for thing in things:
        is_tensor = isinstance(thing, torch.Tensor)
        data = thing.detach().cpu().contiguous().numpy().tobytes() if is_tensor else repr(thing).encode()
        value = zlib.crc32(data, value)
    return value


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks that hold a model's shards; None: this process holds all of it."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or not dist.is_available() or not dist.is_initialized():
        return None
    if "tp" not in (mesh.mesh_dim_names or ()) or mesh["tp"].size() == 1:
        return None
    ranks = _known.get(model)
    if ranks is None:
        ranks = _known[model] = Ranks(mesh["tp"].get_group())
    return ranks


def _host_group(members: tuple[int, ...]) -> dist.ProcessGroup:
    """A gloo group of these processes, made once."""
    world = dist.distributed_c10d._get_default_group()
    known = _groups.get(members)
    if known is None or known[0] is not world:
        # A server's ranks wait in this group for requests, however long that takes. A process that ends is noticed at once.
        made: Any = dist.new_group(list(members), timeout=_IDLE, backend="gloo", use_local_synchronization=True)
        known = _groups[members] = (world, made)
    return known[1]
