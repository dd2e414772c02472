"""What moves bytes and short messages between processes: NIXL, over whatever transport UCX chooses (shared memory, TCP, RDMA)."""

from __future__ import annotations

import base64
import logging
import uuid
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)


@dataclass
class Piece:
    """A run of bytes: its address in this process, its address in the peer, and its size."""

    here: int
    there: int
    size: int


class NixlLink:
    """A NIXL agent of this process. NIXL's errors have no base class of their own. Raises ImportError: NIXL is not installed."""

    def __init__(self) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("kv_transfer_config needs nixl: pip install 'hf-specdec[pd]'") from error
        self.agent = nixl_agent(f"hf-specdec-{uuid.uuid4().hex}", nixl_agent_config(backends=["UCX"]))
        self.kind = "DRAM"
        self._registered: Any = None
        self._peers: dict[str, str] = {}  # NIXL's names of peers, by their addresses

    def register(self, pools: list[torch.Tensor]) -> str:
        """Let peers read these pools. Returns this process's address, as text: the `peer` of the other methods."""
        if self._registered is not None:
            self.agent.deregister_memory(self._registered)
        self.kind = "VRAM" if pools[0].is_cuda else "DRAM"
        self._registered = self.agent.register_memory(pools)
        return base64.b64encode(self.agent.get_agent_metadata()).decode()

    def start(self, peer: str, pieces: list[Piece], message: str) -> Any:
        """Begin to read from a peer's memory; the peer gets `message`, unless it is empty, once all is read. Returns a handle. Raises
        ConnectionError: the peer cannot be reached.
        """
        handle = None
        try:
            name = self._name_of(peer)
            here = self.agent.get_xfer_descs([(piece.here, piece.size, 0) for piece in pieces], self.kind)
            there = self.agent.get_xfer_descs([(piece.there, piece.size, 0) for piece in pieces], self.kind)
            handle = self.agent.initialize_xfer("READ", here, there, name, message.encode())
            if self.agent.transfer(handle) == "ERR":
                raise ConnectionError("NIXL could not begin the transfer")
            return handle
        except Exception as error:
            self._peers.pop(peer, None)
            if handle is not None:
                self.agent.release_xfer_handle(handle)
            if isinstance(error, ConnectionError):
                raise
            raise ConnectionError(f"the prefill server cannot be reached ({type(error).__name__}: {error})") from error

    def is_done(self, handle: Any) -> bool:
        """True once all bytes have arrived. Raises ConnectionError: the transfer has failed; no more bytes arrive."""
        try:
            state = self.agent.check_xfer_state(handle)
        except Exception as error:
            raise ConnectionError(f"the prefill server has ended ({type(error).__name__}: {error})") from error
        if state == "ERR":
            raise ConnectionError("the transfer has failed")
        return state == "DONE"

    def drop(self, handle: Any) -> bool:
        """Release a handle whose transfer has ended or failed. False: it is kept, because UCX still writes bytes and cannot be stopped."""
        try:
            if self.agent.check_xfer_state(handle) not in ("DONE", "ERR"):
                return False
        except Exception as error:
            logger.debug("A transfer has failed: %s", error)
        self.agent.release_xfer_handle(handle)
        return True

    def tell(self, peer: str, message: str) -> bool:
        """Send a message to a peer. False if it cannot be reached."""
        try:
            self.agent.send_notif(self._name_of(peer), message.encode())
        except Exception as error:
            self._peers.pop(peer, None)
            logger.debug("A peer cannot be notified: %s", error)
            return False
        return True

    def messages(self) -> list[str]:
        """The messages that peers have sent since the last call."""
        return [message.decode(errors="replace") for sent in self.agent.get_new_notifs().values() for message in sent]

    def _name_of(self, peer: str) -> str:
        """NIXL's name of a peer; the first call for an address connects to it."""
        if peer not in self._peers:
            name = self.agent.add_remote_agent(base64.b64decode(peer))
            self._peers[peer] = name.decode() if isinstance(name, bytes) else name
        return self._peers[peer]
