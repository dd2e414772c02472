"""Stored responses: their files, and the paths of /v1/responses/{id}."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...core.folders import write_private
from .errors import ApiError, bad_request, failed
from .guard import SPACE
from .server import Server

_ID = re.compile("resp_[0-9a-f]{32}")
_MOST_ITEMS, _USUAL_ITEMS = 100, 20  # of a page, as in OpenAI's API


class ResponseStore:
    """Responses in files, a folder for each space (API key). Any thread may call its methods; only one server may use a folder.

    Args:
        most_bytes: maximum size of all files together. The oldest go first.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: str | Path, most_bytes: int):
        self.folder, self.most_bytes = Path(folder).expanduser(), most_bytes
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for unfinished in self.folder.glob("*/*.partial"):
            unfinished.unlink()
        known = sorted((file.stat().st_mtime, file) for file in self.folder.glob("*/*.json"))
        self._sizes = {file: file.stat().st_size for _, file in known}  # the oldest first
        self._total = sum(self._sizes.values())
        self._lock = threading.Lock()
        self._shrink()

    def _file(self, space: str, id: str) -> Path:
        if not _ID.fullmatch(id):
            raise _unknown(id)
        return self.folder / (space or "all") / f"{id}.json"

    def save(self, space: str, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Store a response and the items that it answers. Raises ApiError: 500, it cannot be written."""
        file = self._file(space, response["id"])
        content = json.dumps({"response": response, "input": items}).encode()
        try:
            if len(content) > self.most_bytes:
                raise OSError(f"it has {len(content)} bytes, and --store-bytes is {self.most_bytes}")
            write_private(file, content)
        except OSError as error:
            raise failed(f"The response cannot be stored: {error.strerror or error}. Send store: false.") from None
        with self._lock:
            self._sizes[file] = len(content)
            self._total += len(content)
            self._shrink()

    def _shrink(self) -> None:
        while self._total > self.most_bytes:
            oldest = next(iter(self._sizes))
            self._total -= self._sizes.pop(oldest)
            oldest.unlink(missing_ok=True)

    def load(self, space: str, id: str) -> dict[str, Any]:
        """A stored "response" and the "input" items that it answers. Raises ApiError: 404, this space has none of this id; 500, its file
        is broken."""
        try:
            return json.loads(self._file(space, id).read_bytes())
        except FileNotFoundError:
            raise _unknown(id) from None
        except (OSError, ValueError) as error:
            raise failed(f"The stored response {id} cannot be read: {error}.") from None

    def delete(self, space: str, id: str) -> None:
        """Delete a stored response. Raises ApiError: 404, this space has none of this id."""
        file = self._file(space, id)
        with self._lock:
            if file not in self._sizes:
                raise _unknown(id)
            self._total -= self._sizes.pop(file)
            file.unlink(missing_ok=True)


def _unknown(id: str) -> ApiError:
    return ApiError(404, f"There is no stored response {id!r}.", code="response_not_found")


def _refuse_options(request: Request, known: tuple[str, ...]) -> None:
    for name, value in request.query_params.items():
        if name not in known and not (name == "stream" and value == "false"):
            raise bad_request(f"{name} is not served here.", name)


async def _called(
    method: Callable[[ResponseStore], Callable[[str, str], Any]], server: Server, request: Request
) -> Any:
    """The result of one of the store's methods for the response of a request's path. A thread calls it."""
    if server.store is None:
        raise ApiError(404, "Responses are not stored here: start the server with --store FOLDER.")
    return await asyncio.to_thread(method(server.store), request.scope.get(SPACE, ""), request.path_params["id"])


async def show_response(server: Server, request: Request, raw: bytes) -> Response:
    """GET /v1/responses/{id}. Raises ApiError: 400, 404, 500."""
    _refuse_options(request, ())
    return JSONResponse((await _called(lambda store: store.load, server, request))["response"])


async def delete_response(server: Server, request: Request, raw: bytes) -> Response:
    """DELETE /v1/responses/{id}. Raises ApiError: 404."""
    await _called(lambda store: store.delete, server, request)
    return JSONResponse({"id": request.path_params["id"], "object": "response", "deleted": True})


async def list_input_items(server: Server, request: Request, raw: bytes) -> Response:
    """GET /v1/responses/{id}/input_items: the whole conversation before the response, in pages. Raises ApiError: 400, 404, 500."""
    _refuse_options(request, ("limit", "order", "after"))
    query = request.query_params
    limit, order, after = query.get("limit", str(_USUAL_ITEMS)), query.get("order", "desc"), query.get("after")
    if not limit.isdecimal() or not 1 <= int(limit) <= _MOST_ITEMS:
        raise bad_request(f"limit must be a number from 1 to {_MOST_ITEMS}.", "limit")
    if order not in ("asc", "desc"):
        raise bad_request("order must be asc or desc.", "order")
    items = (await _called(lambda store: store.load, server, request))["input"][:: 1 if order == "asc" else -1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise bad_request(f"after: there is no item {after!r}.", "after")
    left = items[0 if after is None else ids.index(after) + 1 :]
    page = left[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(left) > len(page)})
