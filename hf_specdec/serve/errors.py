"""Errors of the HTTP API, in OpenAI's shape."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: what is wrong, and what to do.
        type: OpenAI's name of the kind of error.
        param: the field of the request that is wrong.
        code: OpenAI's short name of the error, such as "model_not_found".
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body: dict[str, Any] = {"error": {"message": message, "type": type, "param": param, "code": code}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400: the client's mistake."""
    return ApiError(400, message, param=param)


def overloaded(message: str) -> ApiError:
    """429: a limit of the server; the same request may succeed later."""
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", headers={"Retry-After": "1"})


def failed(message: str) -> ApiError:
    """500: the model raised. Trying again would raise again, so clients are told not to."""
    return ApiError(500, message, "server_error", headers={"x-should-retry": "false"})
