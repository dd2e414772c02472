"""uvicorn's HTTP protocol, with a time limit for the headers of a request and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .errors import bad_request


def protocol_with_timeout(seconds: float) -> type[asyncio.Protocol]:
    """Make a protocol class for `uvicorn.Config(http=...)`.

    It closes a connection if the request line and the headers of its first request have not arrived `seconds` after it was
    opened, or those of a later request `seconds` after that request began. Between two requests uvicorn's own
    `timeout_keep_alive` applies. `Guard` limits the time for the body.

    Args:
        seconds: for the request line and the headers together.
    """

    class ProtocolWithTimeout(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """One connection. uvicorn calls these methods in the event loop's thread."""

        loop: asyncio.AbstractEventLoop
        transport: asyncio.Transport
        cycle: Any  # uvicorn's state of the latest request whose headers are complete
        _timer: asyncio.TimerHandle | None = None  # closes the connection; None while no request is being read

        def connection_made(self, transport) -> None:
            """The client has connected: its first request must arrive in time."""
            super().connection_made(transport)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            """Bytes have arrived: stop the timer once the headers are complete, start it when another request begins."""
            super().data_received(data)
            if not self._is_reading_headers:
                self._stop_timer()
            elif self._timer is None:
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            """The connection is closed, by either side."""
            self._stop_timer()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """Answer bytes that are not HTTP: an error in OpenAI's shape, where uvicorn would send plain text."""
            body = json.dumps(bad_request(msg).body).encode()
            head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()

        @property
        def _is_reading_headers(self) -> bool:
            """True if no request is being answered: uvicorn makes `cycle` once a request's headers are complete."""
            return self.cycle is None or self.cycle.response_complete

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(seconds, self._on_timeout)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _on_timeout(self) -> None:
            self._timer = None
            if self._is_reading_headers:
                self.transport.close()

    return ProtocolWithTimeout
