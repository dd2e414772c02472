"""The ASGI application: OpenAI's endpoints, errors in its shape, keys and limits."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

import hf_specdec

from .endpoints import Chat, Completions
from .errors import ApiError, bad_request, failed
from .protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .responses import Responses, ResponsesRequest
from .server import Limits, Server

_SLOWEST = 10_000  # bytes of a body that each further second is allowed for
_PAGE = Path(__file__).with_name("page.html").read_bytes()
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def make_app(
    server: Server, api_keys: list[str] | None = None, allowed_origins: list[str] | None = None, lifespan=None
):
    """The ASGI application.

    Args:
        api_keys: any of them opens everything; /health needs none. None: all is open.
        allowed_origins: of pages that may call from a browser (CORS); none by default.
        lifespan: loads the model and starts the engine.
    """
    app = FastAPI(title="hf-specdec", version=hf_specdec.__version__, lifespan=lifespan)
    if allowed_origins:
        from fastapi.middleware.cors import CORSMiddleware

        app.add_middleware(CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Guard, keys=[key.encode() for key in api_keys or []], limits=server.limits)  # type: ignore[arg-type]

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        return JSONResponse(bad_request(f"{place or 'The body'}: {first['msg']}.", place or None).body, 400)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        messages = {404: f"There is no {request.url.path}.", 405: f"{request.method} is not for {request.url.path}."}
        body = ApiError(error.status_code, messages.get(error.status_code, str(error.detail))).body
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def on_error(request: Request, error: Exception) -> Response:
        return JSONResponse(failed("The server failed; its log says why.").body, 500, {"x-should-retry": "false"})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page for people: one file, which loads nothing from elsewhere."""
        return Response(_PAGE, media_type="text/html; charset=utf-8", headers={"Content-Security-Policy": _POLICY})

    @app.get("/health")
    async def health() -> Response:
        """200 once the model is loaded."""
        _ = server.engine
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": hf_specdec.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        _ = server.engine
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        one = {
            "object": "model",
            "created": server.created,
            "owned_by": "hf-specdec",
            "max_model_len": server.max_model_len,
        }
        return {"object": "list", "data": [{"id": name, **one} for name in server.names]}

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        server.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("Give either prompt or messages.", "prompt")
        ids = server.chat_prompt(body) if body.prompt is None else server.encode(body.prompt, body.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": server.max_model_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        server.check_model(body.model)
        size = len(server.tokenizer)
        if any(not 0 <= token < size for token in body.tokens):
            raise bad_request(f"tokens must be ids from 0 to {size - 1}.", "tokens")
        return {"prompt": server.tokenizer.decode(body.tokens)}

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await Completions(server, body).respond(request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await Chat(server, body).respond(request)

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await Responses(server, body).respond(request)

    return app


class Guard:
    """ASGI middleware: keys, and the size and speed of bodies.

    Args:
        keys: none: everything is open.
        limits: of bodies.
    """

    def __init__(self, app: Callable, keys: list[bytes], limits: Limits):
        self.app, self.keys, self.limits = app, keys, limits

    async def __call__(self, scope, receive, send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self.keys and scope["path"] != "/health" and scope["method"] != "OPTIONS" and not self._opens(headers):
            error = ApiError(
                401, "The API key is missing or wrong: send 'Authorization: Bearer KEY'.", code="invalid_api_key"
            )
            asks = "Basic realm=API-key-as-password" if scope["path"] == "/" else "Bearer"  # a browser asks for it then
            await JSONResponse(error.body, 401, {"WWW-Authenticate": asks})(scope, receive, send)
            return
        try:
            body = await self._body(headers, receive)
        except ApiError as error:
            await JSONResponse(error.body, error.status, {"Connection": "close"})(scope, receive, send)
            return
        if body is None:  # the client has left
            return
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed():
            return unread.pop() if unread else await receive()

        await self.app(scope, replayed, send)

    async def _body(self, headers: dict[bytes, bytes], receive) -> bytes | None:
        """The whole body; None if the client leaves before.

        Raises:
            ApiError: it is too large, or comes too slowly.
        """
        too_large = ApiError(413, f"The body has more than {self.limits.max_body_bytes} bytes.")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.limits.max_body_bytes:
            raise too_large
        pieces, seen, began, more = [], 0, time.monotonic(), True
        while more:
            left = began + self.limits.read_seconds + seen / _SLOWEST - time.monotonic()
            try:
                message = await asyncio.wait_for(receive(), max(left, 0))
            except asyncio.TimeoutError:
                raise ApiError(408, "The body did not come in time.") from None
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            seen += len(pieces[-1])
            if seen > self.limits.max_body_bytes:
                raise too_large
            more = message.get("more_body", False)
        return b"".join(pieces)

    def _opens(self, headers: dict[bytes, bytes]) -> bool:
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"basic":  # from the page: the key is the password
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        return sum(hmac.compare_digest(given, key) for key in self.keys) > 0  # all are compared: time tells nothing
