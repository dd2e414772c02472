"""/v1/responses/{id}: responses that were stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from .errors import ApiError, bad_request
from .guard import SPACE
from .server import Server
from .store import ResponseStore

_MOST_ITEMS, _USUAL_ITEMS = 100, 20  # of a page, as in OpenAI's API
PAGE_OPTIONS = ("limit", "order", "after")  # query parameters that choose a page


def _refuse_options(request: Request, known: tuple[str, ...]) -> None:
    for name, value in request.query_params.items():
        if name not in known and not (name == "stream" and value == "false"):
            raise bad_request(f"{name} is not served here.", name)


async def _called(method: Callable[[ResponseStore, str, str], Any], server: Server, request: Request) -> Any:
    """The result of a method of the store for the response of a request's path. A thread calls it."""
    if server.store is None:
        raise ApiError(404, "Responses are not stored here: start the server with --store FOLDER.")
    return await asyncio.to_thread(method, server.store, request.scope.get(SPACE, ""), request.path_params["id"])


async def show_response(server: Server, request: Request, raw: bytes) -> Response:
    """GET /v1/responses/{id}. Raises ApiError: 400, 404, 500."""
    _refuse_options(request, ())
    return JSONResponse((await _called(ResponseStore.load, server, request))["response"])


async def delete_response(server: Server, request: Request, raw: bytes) -> Response:
    """DELETE /v1/responses/{id}. Raises ApiError: 404."""
    await _called(ResponseStore.delete, server, request)
    return JSONResponse({"id": request.path_params["id"], "object": "response", "deleted": True})


async def list_input_items(server: Server, request: Request, raw: bytes) -> Response:
    """GET /v1/responses/{id}/input_items: the whole conversation before the response, in pages. Raises ApiError: 400, 404, 500."""
    _refuse_options(request, PAGE_OPTIONS)
    query = request.query_params
    limit, order, after = query.get("limit", str(_USUAL_ITEMS)), query.get("order", "desc"), query.get("after")
    if limit not in map(str, range(1, _MOST_ITEMS + 1)):
        raise bad_request(f"limit must be a number from 1 to {_MOST_ITEMS}.", "limit")
    if order not in ("asc", "desc"):
        raise bad_request("order must be asc or desc.", "order")
    items = (await _called(ResponseStore.load, server, request))["input"][:: 1 if order == "asc" else -1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise bad_request(f"after: there is no item {after!r}.", "after")
    left = items[0 if after is None else ids.index(after) + 1 :]
    page = left[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(left) > len(page)})
