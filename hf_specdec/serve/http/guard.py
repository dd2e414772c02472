"""At the door: a time limit for the headers of a request; then its API key, and the size and the transfer time of its body."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Collection
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .errors import ApiError, bad_request
from .server import Limits
from .spans import PARENT

SPACE = "hf_specdec.space"  # key of the scope under which the application finds `space_of` the request's API key
_WRONG_KEY = "The API key is missing or wrong: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
_BYTES_PER_EXTRA_SECOND = 10_000  # a large body gets one more second for each of these


def space_of(key: bytes) -> str:
    """The name of the look-up tables of an API key. The hash is slow on purpose: the name is in files and must not reveal the key."""
    return hashlib.pbkdf2_hmac("sha256", key, b"hf-specdec space", 20_000, 16).hex()


class Guard:
    """Rejects a request with a wrong key, or with a body that is too large or too slow, before the application sees it. Chooses the
    look-up tables of a request by its key.

    Args:
        keys: any of them is accepted; an empty list accepts every request.
        open_paths: paths that need no key.
    """

    def __init__(self, app: Callable, keys: list[bytes], limits: Limits, open_paths: Collection[str] = ()):
        self.app, self.keys, self.limits, self.open_paths = app, keys, limits, open_paths
        self.spaces = [space_of(key) for key in keys]

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        PARENT.set(headers.get(b"traceparent", b""))
        try:
            if self.keys and scope["path"] not in self.open_paths:
                key = self._key(headers)
                if key is None:  # for the page, a browser then prompts for the key
                    scheme = "Basic realm=API-key-as-password" if scope["path"] == "/" else "Bearer"
                    raise ApiError(401, _WRONG_KEY, code="invalid_api_key", headers={"WWW-Authenticate": scheme})
                scope[SPACE] = self.spaces[key]
            body = await self._read_body(headers, receive)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        if body is None:  # the client has disconnected
            return
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again():
            return unread.pop() if unread else await receive()

        await self.app(scope, receive_again, send)

    def _key(self, headers: dict[bytes, bytes]) -> int | None:
        """The index of the key in the header Authorization (a bearer token or a browser's password), without one in x-api-key; None if
        no valid key is in it."""
        kind, _, given = headers.get(b"authorization", b"Bearer " + headers.get(b"x-api-key", b"")).partition(b" ")
        if kind.lower() == b"basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
        # Compare with every key, so that the time taken does not depend on which one matches.
        matches = [hmac.compare_digest(given, key) for key in self.keys]
        return matches.index(True) if sum(matches) else None

    async def _read_body(self, headers: dict[bytes, bytes], receive) -> bytes | None:
        """The whole body; None if the client disconnects before its end. Raises ApiError: 413, it is too large; 408, too slow."""
        close = {"Connection": "close"}  # what is still sent of the body is not read
        length = headers.get(b"content-length", b"0")
        promised = int(length) if length.isdigit() else 0
        pieces, num_bytes, began, more = [], 0, time.monotonic(), True
        while True:
            if max(promised, num_bytes) > self.limits.max_body_bytes:
                raise ApiError(413, f"The body has more than {self.limits.max_body_bytes} bytes.", headers=close)
            if not more:
                return b"".join(pieces)
            deadline = began + self.limits.read_seconds + num_bytes / _BYTES_PER_EXTRA_SECOND
            try:
                message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0))
            except asyncio.TimeoutError:
                raise ApiError(408, "The body did not arrive in time.", headers=close) from None
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            num_bytes += len(pieces[-1])
            more = message.get("more_body", False)


def protocol_with_timeout(seconds: float) -> type[asyncio.Protocol]:
    """Make a protocol class for `uvicorn.Config(http=...)`.

    It closes a connection if the request line and the headers of its first request have not arrived `seconds` after it was
    opened, or those of a later request `seconds` after that request began. Between two requests uvicorn's own
    `timeout_keep_alive` applies. `Guard` limits the time for the body.
    """

    class ProtocolWithTimeout(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """One connection. uvicorn calls these methods in the event loop's thread."""

        loop: asyncio.AbstractEventLoop
        transport: asyncio.Transport
        cycle: Any  # uvicorn's state of the latest request whose headers are complete
        _timer: asyncio.TimerHandle | None = None  # closes the connection; None while no request is being read

        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            self._timer = self.loop.call_later(seconds, self._on_timeout)

        def data_received(self, data: bytes) -> None:
            """Bytes have arrived: stop the timer once the headers are complete, start it when another request begins."""
            super().data_received(data)
            if not self._is_reading_headers:
                self._stop_timer()
            elif self._timer is None:
                self._timer = self.loop.call_later(seconds, self._on_timeout)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """Answer bytes that are not HTTP: an error in OpenAI's shape, where uvicorn would send plain text."""
            body = json.dumps(bad_request(msg).body).encode()
            head = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            self.transport.write(head % len(body) + body)
            self.transport.close()

        @property
        def _is_reading_headers(self) -> bool:
            """True if no request is being answered: uvicorn makes `cycle` once a request's headers are complete."""
            return self.cycle is None or self.cycle.response_complete

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _on_timeout(self) -> None:
            self._timer = None
            if self._is_reading_headers:
                self.transport.close()

    return ProtocolWithTimeout
