"""Link: what moves bytes and short messages between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass
class Piece:
    """A run of bytes: its address in this process, its address in the peer, and its size."""

    here: int
    there: int
    size: int


class Link(Protocol):
    """Moves bytes between processes. `NixlLink` is the implementation in use."""

    def register(self, pools: list[torch.Tensor]) -> str:
        """Let peers read these pools. Returns this process's address, as text: the `peer` of the other methods."""
        ...

    def start(self, peer: str, pieces: list[Piece], message: str) -> Any:
        """Begin to read from a peer's memory; the peer gets `message`, unless it is empty, once all is read. Returns a handle.

        Raises:
            ConnectionError: the peer cannot be reached.
        """
        ...

    def is_done(self, handle: Any) -> bool:
        """True once all bytes have arrived.

        Raises:
            ConnectionError: the transfer has failed; no more bytes arrive.
        """
        ...

    def drop(self, handle: Any) -> bool:
        """Release a handle whose transfer has ended or failed. False: bytes may still arrive, and the handle is kept."""
        ...

    def tell(self, peer: str, message: str) -> bool:
        """Send a message to a peer. False if it cannot be reached."""
        ...

    def messages(self) -> list[str]:
        """The messages from peers since the last call."""
        ...
