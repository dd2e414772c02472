"""The description of the API at /openapi.json, which OpenAPI's tools read."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import hf_specdec

from .endpoints import IGNORED_HEADER
from .protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .responses import ResponsesRequest

_REFERENCE = "#/components/schemas/{model}"
_JSON, _TEXT, _INTEGER = "application/json", {"type": "string"}, {"type": "integer"}
_IDS = {"type": "array", "items": _INTEGER}
_CHOICES = {"id": _TEXT, "choices": {"type": "array"}, "usage": {"type": "object"}}
_POSTS: dict[
    str, tuple[type[BaseModel], str, dict[str, Any]]
] = {  # body, what it does, required properties of the answer
    "/v1/completions": (CompletionRequest, "Continue prompts", _CHOICES),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation", _CHOICES),
    "/v1/responses": (ResponsesRequest, "Answer a conversation", {"id": _TEXT, "output": {"type": "array"}}),
    "/tokenize": (TokenizeRequest, "Text or messages to token ids", {"tokens": _IDS, "count": _INTEGER}),
    "/detokenize": (DetokenizeRequest, "Token ids to text", {"prompt": _TEXT}),
}
_ERRORS = {
    400: "The request is wrong.", 401: "The API key is missing or wrong.", 404: "The model does not exist.",
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
_EVENT = {
    "description": "One event. Its data is JSON, or [DONE] at the end.",
    "type": "object", "required": ["data"], "properties": {"event": _TEXT, "data": _TEXT},
}  # fmt: skip
_MODEL = {
    "type": "object", "required": ["id", "object", "created", "owned_by"],
    "properties": {"id": _TEXT, "object": {"const": "model"}, "created": _INTEGER, "owned_by": _TEXT, "max_model_len": _INTEGER},
}  # fmt: skip


def describe(needs_key: bool) -> dict[str, Any]:
    """The OpenAPI document. `needs_key`: every path but /health needs an API key."""
    _, schemas = models_json_schema([(form, "validation") for form, _, _ in _POSTS.values()], ref_template=_REFERENCE)
    components: dict[str, Any] = {"schemas": {**schemas["$defs"], "Error": _ERROR, "Model": _MODEL}}
    usual = [401] if needs_key else []
    model = {"$ref": _REFERENCE.format(model="Model")}
    models = {"object": {"const": "list"}, "data": {"type": "array", "items": model}}
    name = {"name": "model", "in": "path", "required": True, "schema": _TEXT}
    plain, page = ({kind: {"schema": _TEXT}} for kind in ("text/plain", "text/html"))
    paths = {
        **{path: _post(path, usual) for path in _POSTS},
        "/v1/models": _get("List the models", {_JSON: {"schema": {"type": "object", "properties": models}}}, *usual),
        "/v1/models/{model}": _get("Describe a model", {_JSON: {"schema": model}}, *usual, 404, parameters=[name]),
        "/version": _get("Version of the package", {_JSON: {"schema": {"type": "object", "required": ["version"]}}}, *usual),
        "/metrics": _get("Metrics for Prometheus", plain, *usual, 503),
        "/health": _get("Whether the engine is running", None, 503, security=[]),
        "/": _get("The web page", page, *usual),
    }  # fmt: skip
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "hf-specdec", "version": hf_specdec.__version__}
    security = {"security": [{"key": []}]} if needs_key else {}
    return {"openapi": "3.1.0", "info": info, "components": components, **security, "paths": paths}


def _get(summary: str, content: dict[str, Any] | None, *errors: int, **more: Any) -> dict[str, Any]:
    ok = {"description": "OK"} if content is None else {"description": "OK", "content": content}
    return {"get": {"summary": summary, "responses": {"200": ok, **_errors(*errors)}, **more}}


def _post(path: str, usual: list[int]) -> dict[str, Any]:
    form, summary, required = _POSTS[path]
    answer: dict[str, Any] = {_JSON: {"schema": {"type": "object", "required": list(required), "properties": required}}}
    errors = [*usual, 400, 404, 408, 413, 500]
    if path.startswith("/v1"):  # it generates, and may stream
        answer["text/event-stream"], errors = {"schema": _EVENT}, [*errors, 429, 503]
    header = {"description": "Names of fields that were ignored.", "schema": _TEXT}
    ok = {"description": "OK", "content": answer, "headers": {IGNORED_HEADER: header}}
    body = {"required": True, "content": {_JSON: {"schema": {"$ref": _REFERENCE.format(model=form.__name__)}}}}
    return {"post": {"summary": summary, "requestBody": body, "responses": {"200": ok, **_errors(*errors)}}}


def _errors(*statuses: int) -> dict[str, Any]:
    content = {_JSON: {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    return {str(status): {"description": _ERRORS[status], "content": content} for status in statuses}
