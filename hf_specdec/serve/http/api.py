"""The ASGI application: the table of all paths, of OpenAI's and Anthropic's APIs and our own, and errors in their shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException

import hf_specdec

from ..engine.images import adds_special_tokens
from . import protocol
from .audio import AudioRequest, Transcription
from .bodies import Body, checked, read_body
from .endpoints import IGNORED_HEADER, Chat, Completions, ignored_header, served
from .errors import MESSAGES, ApiError, bad_request, failed
from .guard import Guard
from .lookup import CorpusRequest, delete_corpus, list_corpora, put_corpus, show_corpus
from .messages import CountTokensRequest, Messages, MessagesRequest
from .responses import Responses, ResponsesRequest
from .routes import EVENTS, INTEGER, JSON, PLAIN, TEXT, Route, component, document, holding
from .server import Server
from .stored import PAGE_OPTIONS, delete_response, list_input_items, show_response
from .weights import ROUTES as WEIGHT_ROUTES

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
    """
    app = FastAPI(title="hf-specdec", version=hf_specdec.__version__, lifespan=lifespan)
    open_paths = [route.path for route in ROUTES if not route.needs_key]
    # The last one added runs first. That is CORS: browsers send no key with a preflight, and a page must be able to read a refusal.
    keys = [key.encode() for key in api_keys or []]
    app.add_middleware(Guard, keys=keys, limits=server.limits, open_paths=open_paths)  # type: ignore[arg-type]
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=[IGNORED_HEADER, "x-should-retry", "Retry-After"],
        )  # fmt: skip
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    for route in ROUTES:
        app.add_route(route.path, partial(served, route.work, server), methods=[route.method])
    app.openapi = lambda: document(ROUTES, bool(api_keys))
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    """Every error in the shape of the path's API."""
    path = request.url.path
    if isinstance(error, HTTPException):
        messages = {404: f"Nothing is served at {path}.", 405: f"{path} does not accept {request.method}."}
        message = messages.get(error.status_code, str(error.detail))
        error = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return (error if isinstance(error, ApiError) else failed("The server failed; its log says why.")).response(path)


async def _page(server: Server, request: Request, raw: bytes) -> Response:
    """The web page, one file that loads nothing from other hosts."""
    headers = {"Content-Security-Policy": _PAGE_POLICY}
    return Response(_PAGE, media_type="text/html; charset=utf-8", headers=headers)


async def _health(server: Server, request: Request, raw: bytes) -> Response:
    """200 if the model is loaded and the engine is running."""
    _ = server.running_worker  # raises ApiError 503 otherwise
    return Response()


async def _version(server: Server, request: Request, raw: bytes) -> Response:
    return JSONResponse({"version": hf_specdec.__version__})


async def _metrics(server: Server, request: Request, raw: bytes) -> Response:
    _ = server.running_worker  # raises ApiError 503 if it is not running
    return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _models(server: Server, request: Request, raw: bytes) -> Response:
    return JSONResponse({"object": "list", "data": [server.model(name) for name in server.served]})


async def _model(server: Server, request: Request, raw: bytes) -> Response:
    name = request.path_params["model"]
    server.check_model(name)
    return JSONResponse(server.model(name))


async def _change_adapters(form: type[Body], server: Server, request: Request, raw: bytes) -> Response:
    """Load or unload an adapter. The answer is a line of text, as vLLM's."""
    body: Any = await server.lanes.run(len(raw), _read, form, raw, dict(request.headers))
    is_load = isinstance(body, protocol.LoadAdapterRequest)
    path, replaces = (body.lora_path, body.load_inplace) if is_load else (None, False)
    await server.change_adapters(body.lora_name, path, replaces)
    text = f"Success: LoRA adapter '{body.lora_name}' {'added' if is_load else 'removed'} successfully."
    return PlainTextResponse(text, headers=ignored_header(body.unknown_fields))


def _read(server: Server, form: Any, raw: bytes, headers: dict[str, str]) -> Any:
    return read_body(form, raw, headers)


async def _in_a_lane(
    form: type[Body], work: Callable[[Server, Any], tuple[dict[str, Any], list[str]]], server: Server, request: Request, raw: bytes
) -> Response:  # fmt: skip
    """Answer a request by `work`, in a lane. It makes the answer, and the names of fields that were not read, of a server and a body."""
    answer, headers = await server.lanes.run(len(raw), _answered, form, work, raw, dict(request.headers))
    return Response(answer, headers=headers, media_type=JSON)


def _answered(server: Server, form: Any, work: Callable, raw: bytes, headers: dict[str, str]) -> tuple[bytes, dict]:
    body = read_body(form, raw, headers)
    server.check_model(body.model)
    answer, unread = work(server, body)
    # Written by pydantic, because Python takes several times as long for a list of a million ids.
    return to_json(answer), ignored_header([*body.unknown_fields, *unread])


def _tokenized(server: Server, body: protocol.TokenizeRequest) -> tuple[dict[str, Any], list[str]]:
    if body.prompt is None:
        ids, unread = _conversation_ids(server, body, "reasoning_effort")
    else:
        ids, unread = server.text_ids(body.prompt, "prompt", body.add_special_tokens), []
    return {"tokens": ids, "count": len(ids), **server.facts.length}, unread


def _counted(server: Server, body: CountTokensRequest) -> tuple[dict[str, Any], list[str]]:
    ids, unread = _conversation_ids(server, checked(protocol.Conversation, body.conversation()), Messages.effort_field)
    return {"input_tokens": len(ids)}, unread


def _conversation_ids(server: Server, body: protocol.Conversation, effort_field: str) -> tuple[list[int], list[str]]:
    """The token ids of a conversation without images and audio, and names of its fields that the chat template does not read."""
    server.check_reads("conversation")
    if server.media_urls(body):
        raise bad_request("Images and audio are not tokenized here: an answer's `usage` has the length.", "messages")
    text = server.chat_text(body)
    ids = server.text_ids(text, "messages", adds_special_tokens(server.tokenizer, server.processor, text))
    return ids, [effort_field] if body.reasoning_effort is not None and not server.template_reads_effort else []


def _detokenized(server: Server, body: protocol.DetokenizeRequest) -> tuple[dict[str, Any], list[str]]:
    size = len(server.tokenizer)
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < size:
        raise bad_request(f"tokens must be ids from 0 to {size - 1}.", "tokens")
    return {"prompt": server.tokenizer.decode(body.tokens)}, []


_CHOICES = holding(id=TEXT, choices={"type": "array"}, usage={"type": "object"})
_TOKENS = holding(tokens={"type": "array", "items": INTEGER}, count=INTEGER)
_LIST = holding(object={"const": "list"}, data={"type": "array"})
_MODELS = holding(object={"const": "list"}, data={"type": "array", "items": component("Model")})
_DELETED = holding(id=TEXT, deleted={"const": True})
_CORPUS = holding(id=TEXT, object={"const": "lookup"}, num_tokens=INTEGER, owned_by={"enum": ["client", "server"]})
_GENERATED = {"errors": (404, 429, 503), "kinds": (JSON, EVENTS)}
_HEARD = {**_GENERATED, "kinds": (JSON, EVENTS, PLAIN)}
_ADAPTERS = {"errors": (403, 404, 503), "kinds": (PLAIN,)}

# Everything that is served, but for what FastAPI adds: /openapi.json and pages that show it.
ROUTES: tuple[Route, ...] = (
    Route("GET", "/", _page, "The web page", kinds=("text/html",)),
    Route("GET", "/health", _health, "Whether the engine is running", errors=(503,), kinds=(), needs_key=False),
    Route("GET", "/version", _version, "Version of the package", holding(version=TEXT)),
    Route("GET", "/metrics", _metrics, "Metrics for Prometheus", errors=(503,), kinds=(PLAIN,)),
    Route("GET", "/v1/models", _models, "List the models", _MODELS),
    Route("GET", "/v1/models/{model:path}", _model, "Describe a model", component("Model"), errors=(404,)),
    Route("POST", "/v1/completions", Completions.respond, "Continue prompts", _CHOICES, protocol.CompletionRequest, **_GENERATED),
    Route("POST", "/v1/chat/completions", Chat.respond, "Answer a conversation", _CHOICES, protocol.ChatRequest, **_GENERATED),
    Route(
        "POST", "/v1/responses", Responses.respond, "Answer a conversation",
        holding(id=TEXT, output={"type": "array"}), ResponsesRequest, **_GENERATED,
    ),
    Route("GET", "/v1/responses/{id}", show_response, "A stored response", holding(id=TEXT), errors=(400, 404, 500)),
    Route("DELETE", "/v1/responses/{id}", delete_response, "Delete a stored response", _DELETED, errors=(404,)),
    Route(
        "GET", "/v1/responses/{id}/input_items", list_input_items, "What a stored response answers", _LIST,
        errors=(400, 404, 500), query=PAGE_OPTIONS,
    ),
    Route(
        "POST", MESSAGES, Messages.respond, "Answer a conversation",
        holding(id=TEXT, content={"type": "array"}, usage={"type": "object"}), MessagesRequest, **_GENERATED,
    ),
    Route(
        "POST", f"{MESSAGES}/count_tokens", partial(_in_a_lane, CountTokensRequest, _counted), "Count the tokens of a conversation",
        holding(input_tokens=INTEGER), CountTokensRequest, errors=(404,),
    ),
    Route(
        "POST", "/v1/audio/transcriptions", partial(Transcription.respond, "transcribe"), "Write down what is said",
        holding(text=TEXT), AudioRequest, **_HEARD,
    ),
    Route(
        "POST", "/v1/audio/translations", partial(Transcription.respond, "translate"), "Write down in English what is said",
        holding(text=TEXT), AudioRequest, **_HEARD,
    ),
    Route(
        "POST", "/v1/load_lora_adapter", partial(_change_adapters, protocol.LoadAdapterRequest),
        "Load a LoRA adapter, which requests then name as their model", form=protocol.LoadAdapterRequest, **_ADAPTERS,
    ),
    Route(
        "POST", "/v1/unload_lora_adapter", partial(_change_adapters, protocol.UnloadAdapterRequest), "Unload a LoRA adapter",
        form=protocol.UnloadAdapterRequest, **_ADAPTERS,
    ),
    Route(
        "POST", "/tokenize", partial(_in_a_lane, protocol.TokenizeRequest, _tokenized), "Text or messages to token ids", _TOKENS,
        protocol.TokenizeRequest, errors=(404,),
    ),
    Route(
        "POST", "/detokenize", partial(_in_a_lane, protocol.DetokenizeRequest, _detokenized), "Token ids to text", holding(prompt=TEXT),
        protocol.DetokenizeRequest, errors=(404,),
    ),
    Route("GET", "/v1/lookup", list_corpora, "List the corpora that look-ups draft from", _LIST),
    Route("GET", "/v1/lookup/{name:path}", show_corpus, "Describe a corpus", _CORPUS, errors=(404,)),
    Route(
        "PUT", "/v1/lookup/{name:path}", put_corpus, "Add a corpus, or replace it", _CORPUS, CorpusRequest, errors=(403, 503)
    ),
    Route("DELETE", "/v1/lookup/{name:path}", delete_corpus, "Remove a corpus", _DELETED, errors=(400, 403, 404, 503)),
    *WEIGHT_ROUTES,
)  # fmt: skip
