"""The ASGI application: OpenAI's endpoints, and errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

import hf_specdec

from .endpoints import IGNORED_HEADER, Chat, Completions, ignored_header
from .errors import ApiError, bad_request, failed
from .guard import Guard
from .protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .responses import Responses, ResponsesRequest
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

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(request: Request, error: RequestValidationError) -> Response:
        found = _invalid_body(error.errors(), error.body, request.headers.get("content-type", ""))
        return JSONResponse(found.body, 400)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path, encoding = request.url.path, request.headers.get("content-encoding")
        messages = {404: f"Nothing is served at {path}.", 405: f"{path} does not accept {request.method}."}
        if error.__cause__ is not None:  # FastAPI could not parse the body
            compressed = f" It is compressed ({encoding}), which is not supported." if encoding else ""
            messages[400] = f"The body cannot be read as JSON: {error.__cause__}.{compressed}"
        body = ApiError(error.status_code, messages.get(error.status_code, str(error.detail))).body
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def on_failure(request: Request, error: Exception) -> Response:
        return JSONResponse(failed("The server failed; its log says why.").body, 500, {"x-should-retry": "false"})


def _invalid_body(errors: Sequence[dict[str, Any]], body: Any, content_type: str) -> ApiError:
    """What is wrong with a body, from pydantic's errors, of which there is one for each type that a field may have."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return bad_request(
            f"The body is not JSON: {first.get('ctx', {}).get('error', first['msg'])} (character {first['loc'][-1]})."
        )
    places = [_place(error, body) for error in errors]
    place = max((each for each in places if each[:1] == places[0][:1]), key=len)
    if not place and "json" not in content_type.lower():
        return bad_request(
            f"The body has the type {content_type!r}: send JSON, with the header Content-Type: application/json."
        )
    found = [error for error, each in zip(errors, places, strict=True) if each == place]
    name = ".".join(place)
    if found[0]["type"] == "value_error":  # raised by our own checks, whose message names the field
        return bad_request(f"{found[0]['ctx']['error']}.", name or None)
    first_message, *others = dict.fromkeys(error["msg"] for error in found)
    message = " or ".join([first_message, *(each.removeprefix("Input should be ") for each in others)])
    return bad_request(f"{name or 'The body'}: {message}.", name or None)


def _place(error: dict[str, Any], body: Any) -> list[str]:
    """Field names and indices that lead to what is wrong, without those that pydantic adds for each type that a field may have."""
    found, value = [], body
    for part in error["loc"][1:]:
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
            found.append(str(part))
    return [*found, str(error["loc"][-1])] if error["type"] == "missing" and len(error["loc"]) > 1 else found


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
        one = {
            "object": "model",
            "created": server.created,
            "owned_by": "hf-specdec",
            "max_model_len": server.max_model_len,
        }
        return {"object": "list", "data": [{"id": name, **one} for name in server.names]}


def _add_tokenizer_routes(app: FastAPI, server: Server) -> None:
    """Text to token ids, and back."""

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, response: Response) -> dict[str, Any]:
        response.headers.update(ignored_header(body.unknown_fields))
        server.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("Give either prompt or messages.", "prompt")
        ids = server.chat_prompt(body) if body.prompt is None else server.encode(body.prompt, body.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": server.max_model_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, response: Response) -> dict[str, str]:
        response.headers.update(ignored_header(body.unknown_fields))
        server.check_model(body.model)
        size = len(server.tokenizer)
        if any(not 0 <= token < size for token in body.tokens):
            raise bad_request(f"tokens must be ids from 0 to {size - 1}.", "tokens")
        return {"prompt": server.tokenizer.decode(body.tokens)}


def _add_generation_routes(app: FastAPI, server: Server) -> None:
    """The endpoints that generate text."""

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await Completions(server, body).respond(request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await Chat(server, body).respond(request)

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await Responses(server, body).respond(request)
