"""ASGI middleware that checks API keys, and limits the size and the transfer time of request bodies."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Callable

from fastapi.responses import JSONResponse

from .errors import ApiError
from .server import Limits

SPACE = "hf_specdec.space"  # key of the scope under which the application finds `space_of` the request's API key
_BYTES_PER_EXTRA_SECOND = 10_000  # a large body gets one more second for each of these


def space_of(key: bytes) -> str:
    """The name of the look-up tables of an API key. The hash is slow on purpose: the name is in files and must not reveal the key."""
    return hashlib.pbkdf2_hmac("sha256", key, b"hf-specdec space", 20_000, 16).hex()


class Guard:
    """Rejects a request with a wrong key, or with a body that is too large or too slow, before the application sees it. Chooses the
    look-up tables of a request by its key.

    Args:
        keys: API keys, any of which is accepted; an empty list accepts every request.
        limits: sizes in bytes, times in seconds.
    """

    def __init__(self, app: Callable, keys: list[bytes], limits: Limits):
        self.app, self.keys, self.limits = app, keys, limits
        self.spaces = [space_of(key) for key in keys]

    async def __call__(self, scope, receive, send) -> None:
        """Pass a request on with its whole body, or answer it with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._needs_key(scope):
            key = self._key(headers)
            if key is None:
                await self._refuse_key(scope, receive, send)
                return
            scope[SPACE] = self.spaces[key]
        try:
            body = await self._read_body(headers, receive)
        except ApiError as error:
            await JSONResponse(error.body, error.status, {"Connection": "close"})(scope, receive, send)
            return
        if body is None:  # the client has disconnected
            return
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again():
            return unread.pop() if unread else await receive()

        await self.app(scope, receive_again, send)

    def _needs_key(self, scope) -> bool:
        return bool(self.keys) and scope["path"] != "/health"

    def _key(self, headers: dict[bytes, bytes]) -> int | None:
        """The index of the key in the Authorization header (a bearer token or a browser's password); None if no valid key is in it."""
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
        # Compare with every key, so that the time taken does not depend on which one matches.
        found = [hmac.compare_digest(given, key) for key in self.keys]
        return found.index(True) if sum(found) else None

    async def _refuse_key(self, scope, receive, send) -> None:
        """Answer 401. For the page, ask for Basic authentication: a browser then prompts for the key."""
        message = "The API key is missing or wrong: send 'Authorization: Bearer KEY'."
        error = ApiError(401, message, code="invalid_api_key")
        scheme = "Basic realm=API-key-as-password" if scope["path"] == "/" else "Bearer"
        await JSONResponse(error.body, 401, {"WWW-Authenticate": scheme})(scope, receive, send)

    async def _read_body(self, headers: dict[bytes, bytes], receive) -> bytes | None:
        """Read the whole body; None if the client disconnects before its end.

        Raises:
            ApiError: 413, the body is too large; 408, it arrives too slowly.
        """
        too_large = ApiError(413, f"The body has more than {self.limits.max_body_bytes} bytes.")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.limits.max_body_bytes:
            raise too_large
        pieces, num_bytes, began, more = [], 0, time.monotonic(), True
        while more:
            deadline = began + self.limits.read_seconds + num_bytes / _BYTES_PER_EXTRA_SECOND
            try:
                message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0))
            except asyncio.TimeoutError:
                raise ApiError(408, "The body did not arrive in time.") from None
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            num_bytes += len(pieces[-1])
            if num_bytes > self.limits.max_body_bytes:
                raise too_large
            more = message.get("more_body", False)
        return b"".join(pieces)
