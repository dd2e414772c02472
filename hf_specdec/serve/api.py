"""The ASGI application: OpenAI's endpoints, and errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException

import hf_specdec

from .bodies import read_body
from .endpoints import IGNORED_HEADER, Chat, Completions, Endpoint, ignored_header, unless_disconnected
from .errors import ApiError, bad_request, failed
from .guard import Guard
from .openapi import describe
from .protocol import DetokenizeRequest, TokenizeRequest
from .responses import Responses
from .server import Server

_PAGE = Path(__file__).with_name("page.html").read_bytes()
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


def make_app(
    server: Server, api_keys: list[str] | None = None, allowed_origins: list[str] | None = None, lifespan=None
) -> FastAPI:
    """Make the ASGI application of a server.

    Args:
        api_keys: any of them is accepted on every path; /health needs none. None: no path needs a key.
        allowed_origins: origins of web pages that may call the API from a browser (CORS); None: no page may.
        lifespan: an ASGI lifespan context manager, which loads the model and starts the engine.
    """
    app = FastAPI(title="hf-specdec", version=hf_specdec.__version__, lifespan=lifespan)
    _add_middleware(app, server, api_keys or [], allowed_origins or [])
    _add_error_handlers(app)
    _add_page(app)
    _add_status_routes(app, server)
    _add_tokenizer_routes(app, server)
    _add_generation_routes(app, server)
    app.openapi = lambda: describe(bool(api_keys))
    return app


def _add_middleware(app: FastAPI, server: Server, api_keys: list[str], allowed_origins: list[str]) -> None:
    """CORS, and the checks of `Guard`.

    The last one added runs first. That is CORS: browsers send no key with a preflight, and a page must be able to read why a request
    was refused.
    """
    app.add_middleware(Guard, keys=[key.encode() for key in api_keys], limits=server.limits)  # type: ignore[arg-type]
    if allowed_origins:
        from fastapi.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=[IGNORED_HEADER, "x-should-retry", "Retry-After"],
        )  # fmt: skip


def _add_error_handlers(app: FastAPI) -> None:
    """Answer every error in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        messages = {404: f"Nothing is served at {path}.", 405: f"{path} does not accept {request.method}."}
        body = ApiError(error.status_code, messages.get(error.status_code, str(error.detail))).body
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def on_failure(request: Request, error: Exception) -> Response:
        return JSONResponse(failed("The server failed; its log says why.").body, 500, {"x-should-retry": "false"})


def _add_page(app: FastAPI) -> None:
    """Serve the web page: one file, which loads nothing from other hosts."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """The web page."""
        headers = {"Content-Security-Policy": _PAGE_POLICY}
        return Response(_PAGE, media_type="text/html; charset=utf-8", headers=headers)


def _add_status_routes(app: FastAPI, server: Server) -> None:
    """What a load balancer, Prometheus and OpenAI's clients ask about a server."""

    @app.get("/health")
    async def health() -> Response:
        """200 if the model is loaded and the engine is running."""
        _ = server.running_worker  # raises ApiError 503 otherwise
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": hf_specdec.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        _ = server.running_worker  # raises ApiError 503 if it is not running
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.model(name) for name in server.names]}

    @app.get("/v1/models/{name:path}")  # a name may contain slashes
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return server.model(name)


def _add_tokenizer_routes(app: FastAPI, server: Server) -> None:
    """Text to token ids, and back."""

    def add(path: str, function: Callable[[Server, bytes, dict[str, str]], tuple[bytes, dict[str, str]]]) -> None:
        @app.post(path)
        async def answer(request: Request) -> Response:
            raw = await request.body()
            work = server.lanes.run(len(raw), function, raw, dict(request.headers))
            found, headers = await unless_disconnected(request, work)
            return Response(found, headers=headers, media_type="application/json")

    add("/tokenize", _tokenized)
    add("/detokenize", _detokenized)


# An answer is written by pydantic, because Python takes several times as long for a list of a million ids.


def _tokenized(server: Server, raw: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    """The answer to POST /tokenize, and its headers."""
    body = read_body(TokenizeRequest, raw, headers)
    server.check_model(body.model)
    if body.prompt is None:
        ids = server.text_ids(server.chat_text(body), "messages", add_special_tokens=False)
    else:
        ids = server.text_ids(body.prompt, "prompt", body.add_special_tokens)
    known = {} if server.facts is None else {"max_model_len": server.max_model_len}
    return to_json({"tokens": ids, "count": len(ids), **known}), ignored_header(body.unknown_fields)


def _detokenized(server: Server, raw: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    """The answer to POST /detokenize, and its headers."""
    body = read_body(DetokenizeRequest, raw, headers)
    server.check_model(body.model)
    size = len(server.tokenizer)
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < size:
        raise bad_request(f"tokens must be ids from 0 to {size - 1}.", "tokens")
    return to_json({"prompt": server.tokenizer.decode(body.tokens)}), ignored_header(body.unknown_fields)


def _add_generation_routes(app: FastAPI, server: Server) -> None:
    """The endpoints that generate text."""

    def add(path: str, kind: type[Endpoint]) -> None:
        @app.post(path)
        async def answer(request: Request) -> Response:
            return await kind.respond(server, request)

    add("/v1/completions", Completions)
    add("/v1/chat/completions", Chat)
    add("/v1/responses", Responses)
