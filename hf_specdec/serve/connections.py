"""Connections of clients that take too long, or speak no HTTP."""

from __future__ import annotations

import asyncio
import json

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .errors import bad_request


def impatient(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which also closes connections whose request line and headers are not there after `seconds`."""

    class ImpatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            self._deadline = self.loop.call_later(seconds, self._close_if_waiting)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._is_waiting:
                self._forget_deadline()
            elif self._deadline is None:  # another request has begun on this connection
                self._deadline = self.loop.call_later(seconds, self._close_if_waiting)

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_deadline()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """What speaks no HTTP is told so in the shape of all errors."""
            body = json.dumps(bad_request(msg).body).encode()
            head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()

        @property
        def _is_waiting(self) -> bool:
            """True if no request is being answered."""
            return self.cycle is None or self.cycle.response_complete

        def _close_if_waiting(self) -> None:
            self._deadline = None
            if self._is_waiting:
                self.transport.close()

        def _forget_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return ImpatientProtocol
