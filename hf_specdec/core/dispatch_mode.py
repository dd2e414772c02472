"""ExclusiveMode: a torch dispatch mode that is safe beside other threads."""

from __future__ import annotations

import threading
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_lock = threading.RLock()


class ExclusiveMode(TorchDispatchMode):
    """A dispatch mode that one thread of the process at a time is in; others wait.

    torch notes in global variables whether a thread is in any mode, and restores on exit what it found on entry. If the modes of two
    threads overlap, the notes stay set for good, and torch.compile then compiles every function again at every call.
    """

    def __enter__(self) -> Any:
        _lock.acquire()
        try:
            return super().__enter__()
        except BaseException:
            _lock.release()
            raise

    def __exit__(self, *args: Any) -> Any:
        try:
            return super().__exit__(*args)
        finally:
            _lock.release()
