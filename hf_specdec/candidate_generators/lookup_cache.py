"""Tables that look-ups learn from texts: a set for each space, and their files, which keep them from process to process."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..config import SpeculativeConfig, config_key
from ..core.folders import cache_folder, folder_of, write_private
from ..core.sequence import Sequence
from ..model.packed_model import PackedModel

logger = logging.getLogger(__name__)

FORMAT = 1  # of the files; raise it when a release cannot read what earlier ones wrote
EVERY = 30.0  # least seconds between two writes
SHARE = 0.005  # the share of the time that writing may take
Tables = TypeVar("Tables")
MOST_SPACES = 16  # per drafter; their tables outlive the texts
State = dict[str, dict[str, np.ndarray]]  # space → name → integers


@dataclass
class LookupCacheConfig(SpeculativeConfig):
    """Keys of methods that learn tables from texts, and of those that may have such a method as a part."""

    lookup_cache: str | None = config_key(
        None,
        "save what look-ups learn under this name, for later processes: "
        "a folder of $HF_SPECDEC_CACHE (else of the Hub's cache), or a path with a slash. The files hold users' text",
    )
    lookup_cache_mb: float = config_key(
        8.0, "most megabytes of a 'lookup_cache' file; the oldest texts are left out", minimum=0
    )


class Spaces(Generic[Tables]):
    """The tables of each space (`Sequence.space`). A text that is not shared gets tables of its own, which are dropped when it ends.

    At most MOST_SPACES spaces have tables. The least recently used are dropped, but never while one of their texts is running.

    Args:
        make: returns new tables; its argument says whether texts share them.
        drop: called with the tables that are dropped.

    Attributes:
        shared: tables by space, the least recently used first.
    """

    def __init__(self, make: Callable[[bool], Tables], drop: Callable[[Tables], None] = lambda tables: None):
        self.make, self.drop = make, drop
        self.shared: dict[str, Tables] = {"": make(True)}
        self._running: dict[int, tuple[str | None, Tables]] = {}  # sequence id → its space (None: its own) and tables

    def enter(self, seq: Sequence) -> Tables:
        """The tables of a sequence: its space's, or its own if it is not shared. They stay the same until `leave`."""
        if seq.id in self._running:
            return self._running[seq.id][1]
        if not seq.is_shared:
            space, tables = None, self.make(False)
        else:
            space = seq.space
            tables = self.shared.pop(space) if space in self.shared else self.make(True)
            self.shared[space] = tables
        self._running[seq.id] = space, tables
        self._bound()
        return tables

    def leave(self, seq: Sequence) -> None:
        """The sequence has ended: drop its tables if no other text shares them."""
        space, tables = self._running.pop(seq.id, ("", None))
        if space is None and tables is not None:
            self.drop(tables)
        self._bound()

    def _bound(self) -> None:
        if len(self.shared) <= MOST_SPACES:
            return
        used = {space for space, _ in self._running.values()}
        for space in [space for space in self.shared if space not in used][: len(self.shared) - MOST_SPACES]:
            self.drop(self.shared.pop(space))


class LookupCache:
    """A file of one method's tables. It holds token ids of users' prompts and answers, so only its owner may read it.

    A file that cannot be used is passed over with a warning, since it affects only speed. A file of another tokenizer or of a
    later release is left as it is; a broken file, or one of an earlier release, is replaced.

    Args:
        path: the file.
        owner: the vocabulary that the token ids belong to; a file of another owner is not read.
        most_bytes: size limit of all tables together.
        writes: whether this process writes the file.

    Attributes:
        changed: whether texts have ended since the tables were written.
    """

    def __init__(self, path: Path, owner: str, most_bytes: int, writes: bool = True):
        self.path, self.owner, self.most_bytes, self.writes = path, owner, most_bytes, writes
        self.changed = False
        self._state: Callable[[], State] = dict
        self._next = time.monotonic() + EVERY

    @classmethod
    def of(cls, config: LookupCacheConfig, target: PackedModel) -> LookupCache | None:
        """The file that a configuration asks for; None if it asks for none."""
        name = config.lookup_cache
        if name is None:
            return None
        is_name = Path(name).name == name and name != ".."
        folder = cache_folder() / "lookups" / name if is_name else Path(name).expanduser()
        writes = target.ranks is None or target.ranks.leads
        most = int(config.lookup_cache_mb * 1e6)
        return cls(folder / f"{config.method}.safetensors", _vocabulary_of(target), most, writes)

    def follow(self, drafter: object, load: Callable[[State], None], state: Callable[[], State]) -> None:
        """Give a drafter what the file holds. From now on its tables are written now and then, and when it is dropped or the process ends.

        Args:
            load: raises ValueError or KeyError, and changes nothing, if it cannot use what it is given.
            state: returns the tables; it must not refer to the drafter, which could then never be dropped.
        """
        self._restore(load)
        self._state = state
        weakref.finalize(drafter, self.save)

    def text_ended(self) -> None:
        """A text has ended, from which the tables have learnt: write them if it is time."""
        self.changed = True
        if time.monotonic() >= self._next:
            self.save()

    def _restore(self, load: Callable[[State], None]) -> None:
        try:
            with safe_open(self.path, framework="numpy") as file:
                about = file.metadata() or {}
                if not self._is_readable(about):
                    return
                state: State = {space: {} for space in json.loads(about["spaces"])}
                for key in file.keys():  # noqa: SIM118 - it is not a dict
                    index, _, name = key.partition("/")
                    state[list(state)[int(index)]][name] = file.get_tensor(key)
            load(state)
        except FileNotFoundError:
            return
        except (SafetensorError, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            logger.warning("lookup_cache: %s cannot be used (%r); learning starts anew.", self.path, error)

    def _is_readable(self, about: dict[str, str]) -> bool:
        """Whether the file can be loaded, by its metadata. If not, one line says why, and whether it will be replaced."""
        form = about.get("format", "")
        number = int(form) if form.isdecimal() else None
        if number is None or about.get("owner") != self.owner:
            whose = "another model"
        elif number > FORMAT:
            whose = "a later release"
        else:
            if number < FORMAT:
                logger.warning("lookup_cache: %s is of an earlier release: learning starts anew.", self.path)
            return number == FORMAT
        logger.warning("lookup_cache: %s is of %s: it is neither used nor changed.", self.path, whose)
        self.writes = False
        return False

    def save(self) -> None:
        """Write the tables if they have changed."""
        if not self.writes or not self.changed:
            return
        began, self.changed = time.monotonic(), False
        try:
            self._write(self._state())
        except OSError as error:
            logger.warning(
                "lookup_cache: %s cannot be written (%s); what is learnt is lost with this process.", self.path, error
            )
            self.writes = False
        ended = time.monotonic()
        self._next = ended + max(EVERY, (ended - began) / SHARE)

    def _write(self, state: State) -> None:
        spaces = list(state)
        tensors = {
            f"{index}/{name}": np.ascontiguousarray(values)
            for index, space in enumerate(spaces)
            for name, values in state[space].items()
        }
        content = save(tensors, {"format": str(FORMAT), "owner": self.owner, "spaces": json.dumps(spaces)})
        write_private(self.path, content)


def ids_within(ids: np.ndarray, bound: int) -> np.ndarray:
    """The ids as int32, after a check, since a file may hold anything. Raises ValueError: they are not all integers from 0 to `bound` -
    1."""
    if ids.dtype.kind != "i" or (ids.size and not 0 <= ids.min() <= ids.max() < bound):
        raise ValueError("it holds something other than token ids")
    return ids.astype(np.int32)


def _vocabulary_of(target: PackedModel) -> str:
    """What the token ids of a target mean: the tokenizer's file, or the model's name if there is none."""
    folder = folder_of(target.model)
    file = None if folder is None else folder / "tokenizer.json"
    content = file.read_bytes() if file is not None and file.is_file() else (target.model.name_or_path or "").encode()
    return f"{target.vocab_size} tokens, {hashlib.sha256(content).hexdigest()[:24]}"
