"""The description of the API at /openapi.json, which OpenAPI's tools read."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import hf_specdec

from .endpoints import IGNORED_HEADER, Chat, Completions
from .protocol import DetokenizeRequest, TokenizeRequest
from .responses import Responses

_FORMS: dict[str, type[BaseModel]] = {
    "/v1/completions": Completions.form, "/v1/chat/completions": Chat.form, "/v1/responses": Responses.form,
    "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest,
}  # fmt: skip
_REFERENCE = "#/components/schemas/{model}"
_JSON, _TEXT = "application/json", {"type": "string"}
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
_INTEGER = {"type": "integer"}
_MODEL = {
    "type": "object", "required": ["id", "object", "created", "owned_by"],
    "properties": {"id": _TEXT, "object": {"const": "model"}, "created": _INTEGER, "owned_by": _TEXT, "max_model_len": _INTEGER},
}  # fmt: skip


def describe(needs_key: bool) -> dict[str, Any]:
    """The OpenAPI document. `needs_key`: every path but /health needs an API key."""
    _, found = models_json_schema([(form, "validation") for form in _FORMS.values()], ref_template=_REFERENCE)
    components: dict[str, Any] = {"schemas": {**found["$defs"], "Error": _ERROR, "Model": _MODEL}}
    document: dict[str, Any] = {
        "openapi": "3.1.0", "info": {"title": "hf-specdec", "version": hf_specdec.__version__}, "components": components,
    }  # fmt: skip
    usual = [401] if needs_key else []
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]

    def get(summary: str, content: dict[str, Any] | None, *errors: int, **more: Any) -> dict[str, Any]:
        shown = {} if content is None else {"content": content}
        return {
            "get": {
                "summary": summary,
                "responses": {"200": {"description": "OK", **shown}, **_errors(*errors)},
                **more,
            }
        }

    def post(path: str, summary: str, required: dict[str, Any], *errors: int, streams: bool = True) -> dict[str, Any]:
        answer = {_JSON: {"schema": {"type": "object", "required": list(required), "properties": required}}}
        if streams:
            answer["text/event-stream"] = {"schema": _EVENT}
        header = {"description": "Names of fields that were ignored.", "schema": _TEXT}
        ok = {"description": "OK", "content": answer, "headers": {IGNORED_HEADER: header}}
        form = {_JSON: {"schema": {"$ref": _REFERENCE.format(model=_FORMS[path].__name__)}}}
        responses = {"200": ok, **_errors(*usual, 400, 404, 408, 413, 500, *errors)}
        return {
            "post": {"summary": summary, "requestBody": {"required": True, "content": form}, "responses": responses}
        }

    ids, choices = (
        {"type": "array", "items": _INTEGER},
        {"id": _TEXT, "choices": {"type": "array"}, "usage": {"type": "object"}},
    )
    models = {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {"$ref": _REFERENCE.format(model="Model")}},
    }
    name = {"name": "model", "in": "path", "required": True, "schema": _TEXT}
    plain, page = ({kind: {"schema": _TEXT}} for kind in ("text/plain", "text/html"))
    document["paths"] = {
        "/v1/completions": post("/v1/completions", "Continue prompts", choices, 429, 503),
        "/v1/chat/completions": post("/v1/chat/completions", "Answer a conversation", choices, 429, 503),
        "/v1/responses": post("/v1/responses", "Answer a conversation", {"id": _TEXT, "output": {"type": "array"}}, 429, 503),
        "/tokenize": post("/tokenize", "Text or messages to token ids", {"tokens": ids, "count": _INTEGER}, streams=False),
        "/detokenize": post("/detokenize", "Token ids to text", {"prompt": _TEXT}, streams=False),
        "/v1/models": get("List the models", {_JSON: {"schema": {"type": "object", "properties": models}}}, *usual),
        "/v1/models/{model}": get("Describe a model", {_JSON: {"schema": models["data"]["items"]}}, *usual, 404, parameters=[name]),
        "/version": get("Version of the package", {_JSON: {"schema": {"type": "object", "required": ["version"]}}}, *usual),
        "/metrics": get("Metrics for Prometheus", plain, *usual, 503),
        "/health": get("Whether the engine is running", None, 503, security=[]),
        "/": get("The web page", page, *usual),
    }  # fmt: skip
    return document


def _errors(*statuses: int) -> dict[str, Any]:
    """Answers with these statuses."""
    content = {_JSON: {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    return {str(status): {"description": _ERRORS[status], "content": content} for status in statuses}
