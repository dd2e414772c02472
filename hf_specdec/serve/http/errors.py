"""Errors of the HTTP API, in OpenAI's shape, or in Anthropic's on its paths."""

from __future__ import annotations

import logging
from typing import Any

from starlette.responses import JSONResponse

logger = logging.getLogger(__name__)

MESSAGES = "/v1/messages"  # how the paths of Anthropic's API begin
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class ApiError(Exception):
    """An error that is sent to the client as the answer.

    Args:
        type: OpenAI's name for the kind of error.
        param: the field of the request that is wrong; None: no single field.
        code: OpenAI's short name of the error, such as "model_not_found".
    """

    def __init__(
        self, status: int, message: str, type: str = "invalid_request_error", param: str | None = None,
        code: str | None = None, headers: dict[str, str] | None = None
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body: dict[str, Any] = {"error": {"message": message, "type": type, "param": param, "code": code}}

    @property
    def anthropic(self) -> dict[str, Any]:
        """The body in Anthropic's shape."""
        usual = "api_error" if self.status >= 500 else "invalid_request_error"
        return {"type": "error", "error": {"type": _ANTHROPIC_TYPES.get(self.status, usual), "message": str(self)}}

    def response(self, path: str) -> JSONResponse:
        """The answer to a request for this path."""
        return JSONResponse(self.anthropic if path.startswith(MESSAGES) else self.body, self.status, self.headers)

    def __reduce__(self) -> tuple:
        return ApiError, (self.status, *self.body["error"].values(), self.headers)


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400: the request is wrong; `param` is the field at fault."""
    return ApiError(400, message, param=param)


def overloaded(message: str) -> ApiError:
    """429: the server is at a limit; the same request may succeed later."""
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", headers={"Retry-After": "1"})


def unavailable(message: str) -> ApiError:
    """503: the server cannot answer now; the client may try again in a few seconds."""
    return ApiError(503, message, "service_unavailable", headers={"Retry-After": "5"})


def shutting_down() -> ApiError:
    """503: the time for draining is over."""
    return unavailable("The server is shutting down. Send the request again, to another server or later.")


def stopped() -> ApiError:
    """503: there is no engine any more."""
    return ApiError(503, "The engine has stopped; the log says why.", "service_unavailable")


def failed(message: str) -> ApiError:
    """500: the model or the server raised. The header tells clients not to retry, because the same request would fail again."""
    return ApiError(500, message, "server_error", headers={"x-should-retry": "false"})


def shown(error: Exception) -> ApiError:
    """An error that ends a stream, as the client is shown it. If it is not an ApiError, the server is at fault, and the log says why."""
    if isinstance(error, ApiError):
        return error
    logger.error("A stream has ended because the server failed.", exc_info=error)
    return failed("The server failed; its log says why.")
