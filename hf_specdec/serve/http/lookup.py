"""/v1/lookup: corpora that a client gives the look-ups of its own requests."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from ...candidate_generators.corpora import ids_of
from .bodies import Body, Items, read_body
from .endpoints import ignored_header
from .errors import ApiError, bad_request
from .guard import SPACE
from .protocol import MOST_MESSAGES
from .reader import RequestReader
from .server import Server

_MOST_CHARACTERS_OF_NAMES = 256


class CorpusRequest(Body):
    """PUT /v1/lookup/{name}."""

    text: str | Annotated[Items[str], Field(max_length=MOST_MESSAGES)] = Field(description="one text or several")


def _space(server: Server, request: Request) -> str:
    return "" if server.privacy.shares_across_keys else request.scope.get(SPACE, "")


def _corpora(server: Server, request: Request) -> dict[str, dict[str, Any]]:
    """The corpora that a client's requests look into, as they are shown, by name: its own before the server's."""
    added = server.corpora.get(_space(server, request), {})
    owners = ((server.facts.corpora, "server"), (added, "client"))
    return {name: _shown(name, size, owner) for sizes, owner in owners for name, size in sizes.items()}


def _shown(name: str, size: int, owner: str) -> dict[str, Any]:
    return {"id": name, "object": "lookup", "num_tokens": size, "owned_by": owner}


async def put_corpus(server: Server, request: Request, raw: bytes) -> Response:
    """Add a corpus, or replace it. Raises ApiError: 400, it is wrong or too large; 503."""
    name = request.path_params["name"]
    if not server.is_alone:
        raise ApiError(
            403, "Several replicas answer here, and only one would have the corpus: start them with lookup_corpus."
        )
    if not 0 < len(name) <= _MOST_CHARACTERS_OF_NAMES:
        raise bad_request(f"The name must have 1 to {_MOST_CHARACTERS_OF_NAMES} characters, not {len(name)}.")
    ids, unknown = await server.lanes.run(len(raw), _read, raw, dict(request.headers))
    await server.change_corpus(_space(server, request), name, ids)
    return JSONResponse(_shown(name, len(ids), "client"), headers=ignored_header(unknown))


def _read(server: RequestReader, raw: bytes, headers: dict[str, str]) -> tuple[np.ndarray, list[str]]:
    body = read_body(CorpusRequest, raw, headers)
    texts = [body.text] if isinstance(body.text, str) else body.text
    server.check_length(sum(map(len, texts)), "text")
    return ids_of(texts, server.tokenizer), body.unknown_fields


async def list_corpora(server: Server, request: Request, raw: bytes) -> Response:
    """All corpora that the client's requests look into."""
    return JSONResponse({"object": "list", "data": list(_corpora(server, request).values())})


async def show_corpus(server: Server, request: Request, raw: bytes) -> Response:
    """One of them. Raises ApiError: 404."""
    return JSONResponse(_existing(server, request))


async def delete_corpus(server: Server, request: Request, raw: bytes) -> Response:
    """Remove a corpus of the client. Raises ApiError: 403, it is the server's; 404; 503."""
    corpus = _existing(server, request)
    name = corpus["id"]
    if corpus["owned_by"] == "server":
        raise ApiError(403, f"{name!r} was given to the server when it started (lookup_corpus), and stays.")
    await server.change_corpus(_space(server, request), name, None)
    return JSONResponse({"id": name, "object": "lookup.deleted", "deleted": True})


def _existing(server: Server, request: Request) -> dict[str, Any]:
    name = request.path_params["name"]
    corpus = _corpora(server, request).get(name)
    if corpus is None:
        raise ApiError(404, f"There is no corpus {name!r}.", code="not_found")
    return corpus
