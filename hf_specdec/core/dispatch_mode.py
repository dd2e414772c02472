"""ExclusiveMode: a torch dispatch mode that is safe beside other threads."""

from __future__ import annotations

import threading
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_lock = threading.RLock()


class ExclusiveMode(TorchDispatchMode):
    """A dispatch mode that only one thread of the process can enter at a time; other threads wait.

    torch records in global variables that some mode is active, and on exit restores the values it found on entry. If the modes of two
    threads overlap, the record stays set for good, and torch.compile then compiles every function again at every call.
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
