"""How request bodies are read and checked. What is wrong with a body is an ApiError, 400, which names the field."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from .errors import ApiError, bad_request

_PROMPT_FIELDS = {"prompt", "messages", "system", "input", "prediction"}

Item = TypeVar("Item")
AnyBody = TypeVar("AnyBody", bound="Body")
Items = Annotated[list[Item], Field(fail_fast=True)]  # one error per item of a long list would take seconds to make


class Part(BaseModel):
    """An object within a body. Its unknown fields are kept, so that they can be named. Types are those of JSON: "1" is no number."""

    model_config = ConfigDict(extra="allow", strict=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described = handler.resolve_ref_schema(handler(schema))
        for name, of_field in described.get("properties", {}).items():
            if name not in described.get("required", ()) and {"type": "null"} not in of_field.get("anyOf", ()):
                described["properties"][name] = {"anyOf": [of_field, {"type": "null"}]}
        return described

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, values: Any) -> Any:
        """null means that a field is not given, as in OpenAI's API, where most fields may be null."""
        if not isinstance(values, dict):
            return values
        needed = {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in values.items() if value is not None or name in needed}

    @property
    def without_effect(self) -> list[str]:
        """Names of the fields that change nothing: those that are unknown."""
        return list(self.model_extra or {})

    def ignored(self, place: str = "") -> Iterator[str]:
        """The same, and those of the parts in it. `place`: what they begin with."""
        yield from (place + name for name in self.without_effect)
        for name in self.model_fields_set & type(self).model_fields.keys():
            value = getattr(self, name)
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Part):
                    yield from part.ignored(f"{place}{name}.")


class Body(Part):
    """Base of all request bodies."""

    media_type: ClassVar = "application/json"

    @property
    def unknown_fields(self) -> list[str]:
        """Sorted names of fields that the server does not know or that change nothing, such as "stream_options.foo"."""
        return sorted(set(self.ignored()))

    def leave_out_what_is_done(self) -> None:
        """Forget the prompt, which has been read, and unknown fields: a body may have to be sent to another process."""
        for name in _PROMPT_FIELDS & self.model_fields_set:
            setattr(self, name, [])
        (self.model_extra or {}).clear()

    @model_validator(mode="before")
    @classmethod
    def _refuse_infinite(cls, values: Any) -> Any:
        """Refuse numbers such as 1e999, which JSON allows, Python reads as infinite, and no answer can hold."""
        inner = [values]
        while inner:
            value = inner.pop()
            if isinstance(value, float) and math.isinf(value):
                raise ValueError("a number is infinite")
            if isinstance(value, (dict, list)):  # a list may hold a million
                inner += [
                    part for part in (value.values() if isinstance(value, dict) else value) if type(part) is not int
                ]
        return values


def read_body(form: type[AnyBody], raw: bytes, headers: Mapping[str, str]) -> AnyBody:
    """The body that these bytes hold."""
    return checked(form, parsed(raw, headers))


def parsed(raw: bytes, headers: Mapping[str, str]) -> Any:
    """The JSON that these bytes hold."""
    kind, encoding = headers.get("content-type", ""), headers.get("content-encoding")
    if "json" not in kind.lower():
        raise bad_request(f"The body has the type {kind!r}: send JSON, with the header Content-Type: application/json.")
    try:  # pydantic's parser refuses NaN, lone surrogates and deep nesting, and is faster than Python's
        return from_json(raw.decode(), allow_inf_nan=False)
    except ValueError as error:
        compressed = f" It is compressed ({encoding}), which is not supported." if encoding else ""
        raise bad_request(f"The body is not JSON: {error}.{compressed}") from None


def checked(form: type[AnyBody], value: Any, strict: bool | None = None) -> AnyBody:
    """The body that a value is. `strict` False: its fields are texts, as in forms."""
    try:
        return form.model_validate(value, strict=strict)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_input=False), value) from None


def _invalid(errors: Sequence[ErrorDetails], body: Any) -> ApiError:
    """What is wrong with a body, from pydantic's errors, of which there is one for each type that a field may have."""
    places = [_place(error, body) for error in errors]
    place = max((place for place in places if place[:1] == places[0][:1]), key=len)
    at_place = [error for error, where in zip(errors, places, strict=True) if where == place]
    name = ".".join(place)
    if at_place[0]["type"] == "value_error":  # raised by our own checks, whose message names the field
        return bad_request(f"{at_place[0].get('ctx', {})['error']}.", name or None)
    first_message, *others = dict.fromkeys(error["msg"] for error in at_place)
    message = " or ".join([first_message, *(other.removeprefix("Input should be ") for other in others)])
    return bad_request(f"{name or 'The body'}: {message}.", name or None)


def _place(error: ErrorDetails, body: Any) -> list[str]:
    """Field names and indices that lead to what is wrong, without those that pydantic adds for each type that a field may have."""
    place, value = [], body
    for part in error["loc"]:
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]  # pyright: ignore[reportArgumentType, reportCallIssue]
            place.append(str(part))
    return [*place, str(error["loc"][-1])] if error["type"] == "missing" and error["loc"] else place
