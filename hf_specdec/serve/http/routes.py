"""Routes: the shape of the API's table, and the document at /openapi.json that is made of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic.json_schema import models_json_schema

import hf_specdec

from .bodies import Body
from .endpoints import IGNORED_HEADER
from .errors import MESSAGES
from .server import Server

JSON, EVENTS, PLAIN = "application/json", "text/event-stream", "text/plain"
TEXT, INTEGER = {"type": "string"}, {"type": "integer"}
_REFERENCE = "#/components/schemas/{model}"
_ERRORS = {
    400: "The request is wrong.", 401: "The API key is missing or wrong.", 403: "The server does not allow this.",
    404: "What is named does not exist.",
    408: "The body arrives too slowly.", 413: "The body is too large.", 429: "Too many requests are waiting.",
    500: "The model or the server raised.", 503: "The model is loading, or the engine is not running.",
}  # fmt: skip
_ERRORS_OF_BODIES = (400, 408, 413, 500)


def holding(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has all of these properties, and perhaps others."""
    return {"type": "object", "required": list(properties), "properties": properties}


def component(name: str) -> dict[str, Any]:
    """The schema that is under this name in the document."""
    return {"$ref": _REFERENCE.format(model=name)}


_EVENT = {"description": "One event. Its data is JSON, or [DONE] at the end.", **holding(data=TEXT)}
_EVENT["properties"]["event"] = TEXT
_MODEL = holding(id=TEXT, object={"const": "model"}, created=INTEGER, owned_by=TEXT)
_MODEL["properties"] |= {"max_model_len": INTEGER, "parent": TEXT}
_OR_NULL = {"type": ["string", "null"]}
_SHAPES = {
    "Error": {
        "description": "What is wrong, of which field.",
        **holding(error=holding(message=TEXT, type=TEXT, param=_OR_NULL, code=_OR_NULL)),
    },
    "AnthropicError": {
        "description": "What is wrong, in Anthropic's shape.",
        **holding(type={"const": "error"}, error=holding(type=TEXT, message=TEXT)),
    },
    "Model": {"description": "A name of the model, or an adapter; `created`: seconds since 1970.", **_MODEL},
}


@dataclass(frozen=True)
class Route:
    """A method of a path.

    Attributes:
        path: in Starlette's form: "{name:path}" is a part that may hold slashes.
        work: answers a request, given the server, the request and its body. Raises ApiError: it cannot be served.
        summary: what it does.
        answer: the schema of an answer that is JSON.
        form: what the body must be; None: there is none.
        errors: statuses of its errors, besides those of reading a body and of a wrong key.
        kinds: media types of its answers.
        query: names of what may be in the query.
        needs_key: False: it is served without an API key, too.
    """

    method: str
    path: str
    work: Callable[[Server, Request, bytes], Awaitable[Response]]
    summary: str
    answer: dict[str, Any] | None = None
    form: type[Body] | None = None
    errors: tuple[int, ...] = ()
    kinds: tuple[str, ...] = (JSON,)
    query: tuple[str, ...] = ()
    needs_key: bool = True

    def described(self, has_keys: bool) -> dict[str, Any]:
        """The operation in the document. `has_keys`: the server has API keys."""
        schemas = {JSON: self.answer, EVENTS: _EVENT}
        shown: dict[str, Any] = {"description": "OK"}
        if self.kinds:
            shown["content"] = {kind: {"schema": schemas.get(kind, TEXT)} for kind in self.kinds}
        operation: dict[str, Any] = {"summary": self.summary, "responses": {"200": shown}}
        statuses = {
            *self.errors,
            *([401] if has_keys and self.needs_key else []),
            *(_ERRORS_OF_BODIES if self.form else []),
        }
        error = component("AnthropicError" if self.path.startswith(MESSAGES) else "Error")
        for status in sorted(statuses):
            operation["responses"][str(status)] = {"description": _ERRORS[status], "content": {JSON: {"schema": error}}}
        if self.form is not None:
            shown["headers"] = {IGNORED_HEADER: {"description": "Names of fields that were ignored.", "schema": TEXT}}
            schema = component(self.form.__name__)
            if self.form.media_type != JSON:
                schema = {"allOf": [schema, holding(file={"type": "string", "format": "binary"})]}
            operation["requestBody"] = {"required": True, "content": {self.form.media_type: {"schema": schema}}}
        names = [part[1:-1].removesuffix(":path") for part in self.path.split("/") if part.startswith("{")]
        parameters = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in names]
        if parameters := [*parameters, *({"name": name, "in": "query", "schema": TEXT} for name in self.query)]:
            operation["parameters"] = parameters
        return operation if self.needs_key else {**operation, "security": []}


def document(routes: Sequence[Route], has_keys: bool) -> dict[str, Any]:
    """The OpenAPI document of these routes. `has_keys`: the server has API keys."""
    forms = dict.fromkeys(route.form for route in routes if route.form is not None)
    _, schemas = models_json_schema([(form, "validation") for form in forms], ref_template=_REFERENCE)
    components: dict[str, Any] = {"schemas": {**schemas["$defs"], **_SHAPES}}
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path.replace(":path}", "}"), {})[route.method.lower()] = route.described(has_keys)
    shown = {"openapi": "3.1.0", "info": {"title": "hf-specdec", "version": hf_specdec.__version__}, "paths": paths}
    if has_keys:
        header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}, "header": header}
        shown["security"] = [{"key": []}, {"header": []}]
    return {**shown, "components": components}
