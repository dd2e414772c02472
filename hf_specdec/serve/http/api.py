"""The ASGI application: endpoints of OpenAI's and Anthropic's APIs, errors in their shapes, and the description at /openapi.json."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.exceptions import HTTPException

import hf_specdec

from ..engine.images import adds_special_tokens
from ..ipc.messages import LoadAdapter, UnloadAdapter
from .audio import AudioRequest, Transcription
from .bodies import checked, read_body
from .endpoints import IGNORED_HEADER, Chat, Completions, ignored_header, served
from .errors import MESSAGES, ApiError, bad_request, failed
from .guard import Guard
from .lookup import CorpusRequest, delete_corpus, list_corpora, put_corpus, show_corpus
from .messages import CountTokensRequest, Messages, MessagesRequest
from .protocol import (
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from .responses import Responses, ResponsesRequest
from .server import Server
from .stored import PAGE_OPTIONS, delete_response, list_input_items, show_response
from .weights import GETS, POSTS, add_weight_routes

_PAGE = Path(__file__).with_name("page.html").read_bytes()
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)

_REFERENCE = "#/components/schemas/{model}"
_JSON, _TEXT, _INTEGER = "application/json", {"type": "string"}, {"type": "integer"}
_FILE = {"file": {"type": "string", "format": "binary"}}
_IDS = {"type": "array", "items": _INTEGER}
_CHOICES = {"id": _TEXT, "choices": {"type": "array"}, "usage": {"type": "object"}}
# body, what it does, required properties of the answer
_POSTS: dict[str, tuple[type[BaseModel], str, dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, "Continue prompts", _CHOICES),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation", _CHOICES),
    "/v1/responses": (ResponsesRequest, "Answer a conversation", {"id": _TEXT, "output": {"type": "array"}}),
    MESSAGES: (
        MessagesRequest,
        "Answer a conversation",
        {"id": _TEXT, "content": {"type": "array"}, "usage": {"type": "object"}},
    ),
    f"{MESSAGES}/count_tokens": (CountTokensRequest, "Count the tokens of a conversation", {"input_tokens": _INTEGER}),
    "/v1/audio/transcriptions": (AudioRequest, "Write down what is said", {"text": _TEXT}),
    "/v1/audio/translations": (AudioRequest, "Write down in English what is said", {"text": _TEXT}),
    "/v1/load_lora_adapter": (LoadAdapterRequest, "Load a LoRA adapter, which requests then name as their model", {}),
    "/v1/unload_lora_adapter": (UnloadAdapterRequest, "Unload a LoRA adapter", {}),
    "/tokenize": (TokenizeRequest, "Text or messages to token ids", {"tokens": _IDS, "count": _INTEGER}),
    "/detokenize": (DetokenizeRequest, "Token ids to text", {"prompt": _TEXT}),
}
_CORPUS = {
    "id": _TEXT,
    "object": {"const": "lookup"},
    "num_tokens": _INTEGER,
    "owned_by": {"enum": ["client", "server"]},
}
_LIST, _DELETED = {"object": {"const": "list"}, "data": {"type": "array"}}, {"id": _TEXT, "deleted": {"const": True}}
# path, method, what serves it, what it does, required properties of the answer, errors
_OTHERS: tuple[tuple[str, str, Any, str, dict[str, Any], tuple[int, ...]], ...] = (
    ("/v1/lookup", "get", list_corpora, "List the corpora that look-ups draft from", _LIST, ()),
    ("/v1/lookup/{name}", "get", show_corpus, "Describe a corpus", _CORPUS, (404,)),
    ("/v1/lookup/{name}", "put", put_corpus, "Add a corpus, or replace it", _CORPUS, (400, 403, 408, 413, 500, 503)),
    ("/v1/lookup/{name}", "delete", delete_corpus, "Remove a corpus", _DELETED, (400, 403, 404, 503)),
    ("/v1/responses/{id}", "get", show_response, "A stored response", {"id": _TEXT}, (400, 404, 500)),
    ("/v1/responses/{id}", "delete", delete_response, "Delete a stored response", _DELETED, (404,)),
    (
        "/v1/responses/{id}/input_items",
        "get",
        list_input_items,
        "What a stored response answers",
        _LIST,
        (400, 404, 500),
    ),
)
_ERRORS = {
    400: "The request is wrong.", 401: "The API key is missing or wrong.", 403: "The server does not allow this.",
    404: "What is named does not exist.",
    408: "The body arrives too slowly.", 413: "The body is too large.", 429: "Too many requests are waiting.",
    500: "The model or the server raised.", 503: "The model is loading, or the engine is not running.",
}  # fmt: skip
_ERROR = {
    "type": "object", "required": ["error"],
    "properties": {"error": {
        "type": "object", "required": ["message", "type", "param", "code"],
        "properties": {"message": _TEXT, "type": _TEXT, **{name: {"type": ["string", "null"]} for name in ("param", "code")}},
    }},
}  # fmt: skip
_ANTHROPIC_ERROR = {
    "type": "object", "required": ["type", "error"],
    "properties": {"type": {"const": "error"}, "error": {
        "type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT},
    }},
}  # fmt: skip
_HEADERS = {IGNORED_HEADER: {"description": "Names of fields that were ignored.", "schema": _TEXT}}
_EVENT = {
    "description": "One event. Its data is JSON, or [DONE] at the end.",
    "type": "object", "required": ["data"], "properties": {"event": _TEXT, "data": _TEXT},
}  # fmt: skip
_MODEL = {
    "type": "object", "required": ["id", "object", "created", "owned_by"],
    "properties": {"id": _TEXT, "object": {"const": "model"}, "created": _INTEGER, "owned_by": _TEXT, "max_model_len": _INTEGER,
                   "parent": _TEXT},
}  # fmt: skip


def make_app(
    server: Server, api_keys: list[str] | None = None, allowed_origins: list[str] | None = None, lifespan=None
) -> FastAPI:
    """Make the ASGI application of a server.

    Args:
        api_keys: any of them is accepted on every path; /health needs none. None: no path needs a key.
        allowed_origins: origins of web pages that may call the API from a browser (CORS); None: no page may.
    """
    app = FastAPI(title="hf-specdec", version=hf_specdec.__version__, lifespan=lifespan)
    # The last one added runs first. That is CORS: browsers send no key with a preflight, and a page must be able to read a refusal.
    app.add_middleware(Guard, keys=[key.encode() for key in api_keys or []], limits=server.limits)  # type: ignore[arg-type]
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=[IGNORED_HEADER, "x-should-retry", "Retry-After"],
        )  # fmt: skip
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    _add_status_routes(app, server)
    works = (
        Completions.respond, Chat.respond, Responses.respond, Messages.respond, partial(_in_a_lane, _counted),
        partial(Transcription.respond, "transcribe"), partial(Transcription.respond, "translate"),
        partial(_change_adapters, LoadAdapterRequest), partial(_change_adapters, UnloadAdapterRequest),
        partial(_in_a_lane, _tokenized), partial(_in_a_lane, _detokenized),
    )  # fmt: skip
    for path, work in zip(_POSTS, works, strict=True):
        app.add_route(path, partial(served, work, server), methods=["POST"])
    add_weight_routes(app, server)
    for path, method, work, *_ in _OTHERS:
        app.add_route(path.replace("{name}", "{name:path}"), partial(served, work, server), methods=[method.upper()])
    app.openapi = lambda: describe(bool(api_keys))
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    """Every error in the shape of the path's API."""
    path = request.url.path
    if isinstance(error, HTTPException):
        messages = {404: f"Nothing is served at {path}.", 405: f"{path} does not accept {request.method}."}
        message = messages.get(error.status_code, str(error.detail))
        error = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return (error if isinstance(error, ApiError) else failed("The server failed; its log says why.")).response(path)


def _add_status_routes(app: FastAPI, server: Server) -> None:
    """The web page, one file that loads nothing from other hosts; and what load balancers, Prometheus and OpenAI's clients ask."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        headers = {"Content-Security-Policy": _PAGE_POLICY}
        return Response(_PAGE, media_type="text/html; charset=utf-8", headers=headers)

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
        return {"object": "list", "data": [server.model(name) for name in server.served]}

    @app.get("/v1/models/{name:path}")  # a name may contain slashes
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return server.model(name)


async def _change_adapters(form: type[BaseModel], server: Server, request: Request, raw: bytes) -> Response:
    """Load or unload an adapter. The answer is a line of text, as vLLM's."""
    body: Any = await server.lanes.run(len(raw), _read, form, raw, dict(request.headers))
    is_load = isinstance(body, LoadAdapterRequest)
    wish = LoadAdapter(body.lora_name, body.lora_path, body.load_inplace) if is_load else UnloadAdapter(body.lora_name)
    await server.change_adapters(wish)
    text = f"Success: LoRA adapter '{body.lora_name}' {'added' if is_load else 'removed'} successfully."
    return PlainTextResponse(text, headers=ignored_header(body.unknown_fields))


def _read(server: Server, form: Any, raw: bytes, headers: dict[str, str]) -> Any:
    return read_body(form, raw, headers)


async def _in_a_lane(work: Callable[..., tuple[bytes, dict]], server: Server, request: Request, raw: bytes) -> Response:
    """Answer a request with JSON and headers that `work` makes of a server, a body and its headers."""
    answer, headers = await server.lanes.run(len(raw), work, raw, dict(request.headers))
    return Response(answer, headers=headers, media_type="application/json")


# An answer is written by pydantic, because Python takes several times as long for a list of a million ids.


def _tokenized(server: Server, raw: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    body = read_body(TokenizeRequest, raw, headers)
    server.check_model(body.model)
    if body.prompt is None:
        ids, unread = _conversation_ids(server, body, "reasoning_effort")
    else:
        ids, unread = server.text_ids(body.prompt, "prompt", body.add_special_tokens), []
    answer = to_json({"tokens": ids, "count": len(ids), **server.facts.length})
    return answer, ignored_header([*body.unknown_fields, *unread])


def _counted(server: Server, raw: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    body = read_body(CountTokensRequest, raw, headers)
    server.check_model(body.model)
    conversation = checked(Conversation, body.conversation())
    ids, unread = _conversation_ids(server, conversation, Messages.effort_field)
    return to_json({"input_tokens": len(ids)}), ignored_header([*body.unknown_fields, *unread])


def _conversation_ids(server: Server, body: Conversation, effort_field: str) -> tuple[list[int], list[str]]:
    """The token ids of a conversation without images, and names of its fields that the chat template does not read."""
    server.check_reads("conversation")
    if server.image_urls(body):
        raise bad_request("Images are not tokenized here: an answer's `usage` has the length.", "messages")
    text = server.chat_text(body)
    ids = server.text_ids(text, "messages", adds_special_tokens(server.tokenizer, server.processor, text))
    return ids, [effort_field] if body.reasoning_effort is not None and not server.template_reads_effort else []


def _detokenized(server: Server, raw: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    body = read_body(DetokenizeRequest, raw, headers)
    server.check_model(body.model)
    size = len(server.tokenizer)
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < size:
        raise bad_request(f"tokens must be ids from 0 to {size - 1}.", "tokens")
    return to_json({"prompt": server.tokenizer.decode(body.tokens)}), ignored_header(body.unknown_fields)


def describe(needs_key: bool) -> dict[str, Any]:
    """The OpenAPI document. `needs_key`: every path but /health needs an API key."""
    forms = [*(form for form, _, _ in (_POSTS | POSTS).values()), CorpusRequest]
    _, schemas = models_json_schema([(form, "validation") for form in forms], ref_template=_REFERENCE)
    more = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR, "Model": _MODEL}
    components: dict[str, Any] = {"schemas": {**schemas["$defs"], **more}}
    usual = [401] if needs_key else []
    model = {"$ref": _REFERENCE.format(model="Model")}
    models = {"object": {"const": "list"}, "data": {"type": "array", "items": model}}
    name = {"name": "model", "in": "path", "required": True, "schema": _TEXT}
    plain, page = ({kind: {"schema": _TEXT}} for kind in ("text/plain", "text/html"))
    paths = {
        **{path: _post(path, usual) for path in _POSTS | POSTS},
        **{path: _get(summary, {_JSON: {"schema": {"type": "object"}}}, *usual, 403, 503) for path, summary in GETS.items()},
        "/v1/models": _get("List the models", {_JSON: {"schema": {"type": "object", "properties": models}}}, *usual),
        "/v1/models/{model}": _get("Describe a model", {_JSON: {"schema": model}}, *usual, 404, parameters=[name]),
        "/version": _get("Version of the package", {_JSON: {"schema": {"type": "object", "required": ["version"]}}}, *usual),
        "/metrics": _get("Metrics for Prometheus", plain, *usual, 503),
        "/health": _get("Whether the engine is running", None, 503, security=[]),
        "/": _get("The web page", page, *usual),
    }  # fmt: skip
    for path, method, _, summary, required, errors in _OTHERS:
        paths.setdefault(path, {})[method] = _other(path, method, summary, required, *usual, *errors)
    if needs_key:
        header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}, "header": header}
    info = {"title": "hf-specdec", "version": hf_specdec.__version__}
    security = {"security": [{"key": []}, {"header": []}]} if needs_key else {}
    return {"openapi": "3.1.0", "info": info, "components": components, **security, "paths": paths}


def _get(summary: str, content: dict[str, Any] | None, *errors: int, **more: Any) -> dict[str, Any]:
    ok = {"description": "OK"} if content is None else {"description": "OK", "content": content}
    return {"get": {"summary": summary, "responses": {"200": ok, **_errors(*errors)}, **more}}


def _other(path: str, method: str, summary: str, required: dict[str, Any], *errors: int) -> dict[str, Any]:
    """One of `_OTHERS`."""
    answer = {_JSON: {"schema": {"type": "object", "required": list(required), "properties": required}}}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    made = _get(summary, answer, *errors)["get"]
    made["parameters"] = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    options = PAGE_OPTIONS if path.endswith("/input_items") else ()
    made["parameters"] += [{"name": name, "in": "query", "schema": _TEXT} for name in options]
    if method == "put":
        made["responses"]["200"]["headers"] = _HEADERS
        schema = {"$ref": _REFERENCE.format(model=CorpusRequest.__name__)}
        made["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return made


def _post(path: str, usual: list[int]) -> dict[str, Any]:
    form, summary, required = (_POSTS | POSTS)[path]
    answer: dict[str, Any] = {_JSON: {"schema": {"type": "object", "required": list(required), "properties": required}}}
    errors = [*usual, 400, 404, 408, 413, 500]
    if form in (LoadAdapterRequest, UnloadAdapterRequest):
        answer, errors = {"text/plain": {"schema": _TEXT}}, [*errors, 403, 503]
    elif path in POSTS:
        errors += [403, 503]
    elif "stream" in form.model_fields:  # it generates
        answer["text/event-stream"], errors = {"schema": _EVENT}, [*errors, 429, 503]
    ok = {"description": "OK", "content": answer, "headers": _HEADERS}
    schema: dict[str, Any] = {"$ref": _REFERENCE.format(model=form.__name__)}
    kind = _JSON
    if form is AudioRequest:
        kind = "multipart/form-data"
        schema = {"allOf": [schema, {"type": "object", "required": ["file"], "properties": _FILE}]}
        answer["text/plain"] = {"schema": _TEXT}
    body = {"required": True, "content": {kind: {"schema": schema}}}
    shape = "AnthropicError" if path.startswith(MESSAGES) else "Error"
    responses = {"200": ok, **_errors(*errors, shape=shape)}
    return {"post": {"summary": summary, "requestBody": body, "responses": responses}}


def _errors(*statuses: int, shape: str = "Error") -> dict[str, Any]:
    content = {_JSON: {"schema": {"$ref": _REFERENCE.format(model=shape)}}}
    return {str(status): {"description": _ERRORS[status], "content": content} for status in statuses}
