"""Holds back two log messages of torchao that do not concern the user, until the user asks for them.

transformers imports torchao wherever it is installed, needed or not. With a torch without CUDA, torchao then reports that
its CUDA libraries did not load; and with any torch, that it uses a deprecated function of torch.
"""

from __future__ import annotations

import logging
import re

_CUDA_LIBRARY = re.compile(r"Failed to load .*torchao.*\.so: Could not load this library")
_OLD_FUNCTION = re.compile(r"<enum '\w+'> is an Enum subclass .* Calling register_constant\(\)")

kept: list[logging.LogRecord] = []


def _is_irrelevant(record: logging.LogRecord) -> bool:
    import torch  # whoever logs these has imported it

    message = record.getMessage()
    has_cuda = torch.version.cuda is not None or torch.version.hip is not None
    return bool(_OLD_FUNCTION.match(message) or (not has_cuda and _CUDA_LIBRARY.match(message)))


def _keep(record: logging.LogRecord) -> bool:
    """Logging filter: False, and the record goes to `kept`, if it is irrelevant here."""
    if not _is_irrelevant(record):
        return True
    kept.append(record)
    return False


def hold_back() -> None:
    """From now on irrelevant messages go to `kept` instead of their handlers; all others are logged as usual. Idempotent."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(_keep)


def are_held_back() -> bool:
    """True between `hold_back` and `show`."""
    return _keep in logging.getLogger("torchao").filters


def show() -> None:
    """Log the messages in `kept` after all, and no longer hold any back."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).removeFilter(_keep)
    for record in kept:
        logging.getLogger(record.name).handle(record)
    kept.clear()
