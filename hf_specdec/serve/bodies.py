"""From the bytes of a request's body to a checked body, or to an error that says what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from .errors import ApiError, bad_request
from .protocol import Body

AnyBody = TypeVar("AnyBody", bound=Body)


def read_body(form: type[AnyBody], raw: bytes, headers: Mapping[str, str]) -> AnyBody:
    """The body that these bytes hold.

    Raises:
        ApiError: 400, they are not JSON, or not what an endpoint expects.
    """
    kind, encoding = headers.get("content-type", ""), headers.get("content-encoding")
    if "json" not in kind.lower():
        raise bad_request(f"The body has the type {kind!r}: send JSON, with the header Content-Type: application/json.")
    try:  # pydantic's parser refuses NaN, lone surrogates and deep nesting, and is faster than Python's
        value = from_json(raw.decode(), allow_inf_nan=False)
    except ValueError as error:
        compressed = f" It is compressed ({encoding}), which is not supported." if encoding else ""
        raise bad_request(f"The body is not JSON: {error}.{compressed}") from None
    try:
        return form.model_validate(value)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_input=False), value) from None


def _invalid(errors: Sequence[ErrorDetails], body: Any) -> ApiError:
    """What is wrong with a body, from pydantic's errors, of which there is one for each type that a field may have."""
    places = [_place(error, body) for error in errors]
    place = max((each for each in places if each[:1] == places[0][:1]), key=len)
    found = [error for error, each in zip(errors, places, strict=True) if each == place]
    name = ".".join(place)
    if found[0]["type"] == "value_error":  # raised by our own checks, whose message names the field
        return bad_request(f"{found[0].get('ctx', {})['error']}.", name or None)
    first_message, *others = dict.fromkeys(error["msg"] for error in found)
    message = " or ".join([first_message, *(each.removeprefix("Input should be ") for each in others)])
    return bad_request(f"{name or 'The body'}: {message}.", name or None)


def _place(error: ErrorDetails, body: Any) -> list[str]:
    """Field names and indices that lead to what is wrong, without those that pydantic adds for each type that a field may have."""
    found, value = [], body
    for part in error["loc"]:
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
            found.append(str(part))
    return [*found, str(error["loc"][-1])] if error["type"] == "missing" and error["loc"] else found
