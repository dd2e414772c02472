"""Spans of requests for OpenTelemetry, sent to a collector as JSON over HTTP (OTLP) by the standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import queue
import re
import secrets
import threading
import time
import urllib.request
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote, urlsplit

logger = logging.getLogger(__name__)

PARENT = ContextVar[bytes]("traceparent", default=b"")  # this header of the HTTP request that is being answered
_HEADER = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_INTERNAL, _SERVER, _ERROR = 1, 2, 2  # numbers of OTLP: kinds of spans, and a status
_MOST_WAITING = 2048  # requests whose spans wait; others are dropped while a collector does not answer
_SECONDS = 10.0  # for a collector to answer, and for the last spans to be sent when the server ends


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: urllib would follow it without the spans, and with the headers."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        """No request follows."""


_opener = urllib.request.build_opener(_NoRedirects)


class Spans:
    """A span for each prompt of a request that has ended, with its parts: queue, prompt and steps. A header `traceparent` names its
    parent; where that is not sampled, there is no span.

    OTEL_SERVICE_NAME and OTEL_EXPORTER_OTLP_HEADERS are read from the environment.

    Args:
        endpoint: http(s) URL of the collector. Without a path, /v1/traces is added.

    Raises:
        ValueError: it is no such URL.
    """

    def __init__(self, endpoint: str):
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{endpoint!r} is no URL of an OTLP collector: give http://HOST:4318 (JSON over HTTP).")
        self.url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        pairs = (pair.partition("=") for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(",") if pair)
        self._headers = {name.strip(): unquote(value.strip()) for name, _, value in pairs}
        self._service = os.environ.get("OTEL_SERVICE_NAME", "hf-specdec")
        self._ended = queue.Queue[list[dict[str, Any]] | None](_MOST_WAITING)
        self._is_lost = False  # the latest spans were not sent, which was reported
        self._thread: threading.Thread | None = None  # none before a first request, since the server's process forks

    def request(self, answer: Any, model: str, reason: str) -> None:
        """A server's `Answer` has ended with this finish_reason, "abort" or "error"."""
        parent = _HEADER.fullmatch(answer.parent)
        if parent is not None and not int(parent[3], 16) & 1:
            return
        trace, whole = (secrets.token_hex(16) if parent is None else parent[1].decode()), secrets.token_hex(8)
        figures, now = answer.statistics or {}, time.monotonic()
        to_epoch = time.time() - now

        def span(name: str, begin: float, end: float, above: str, attributes: dict[str, Any]) -> dict[str, Any]:
            is_whole = name == "llm_request"
            return {
                "traceId": trace, "spanId": whole if is_whole else secrets.token_hex(8), "parentSpanId": above, "name": name,
                "kind": _SERVER if is_whole else _INTERNAL, "status": {"code": _ERROR} if reason == "error" and is_whole else {},
                "startTimeUnixNano": str(int(1e9 * (begin + to_epoch))), "endTimeUnixNano": str(int(1e9 * (end + to_epoch))),
                "attributes": [{"key": key, "value": _value(value)} for key, value in attributes.items()],
            }  # fmt: skip

        used = {
            "gen_ai.request.id": answer.id, "gen_ai.request.model": model, "gen_ai.response.finish_reasons": [reason],
            "gen_ai.usage.input_tokens": answer.num_prompt, "gen_ai.usage.output_tokens": answer.num_new,
            "hf_specdec.cached_tokens": answer.num_cached,
        }  # fmt: skip
        stepped = {
            f"hf_specdec.{key.removeprefix('num_')}": figures[key]
            for key in ("num_steps", "num_draft_tokens", "num_accepted_tokens", "mean_accepted_length")
            if figures.get(key) is not None
        }
        stepped["hf_specdec.detokenize_seconds"] = answer.text_seconds
        spans = [span("llm_request", answer.began, now, "" if parent is None else parent[2].decode(), used)]
        times = answer.began, figures.get("started"), answer.first, now
        for name, begin, end in zip(("queue", "prompt", "steps"), times, times[1:], strict=False):
            if begin is not None and end is not None:
                spans.append(span(name, begin, end, whole, stepped if name == "steps" else {}))
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, name="hf-specdec-spans", daemon=True)
            self._thread.start()
        try:
            self._ended.put_nowait(spans)
        except queue.Full:
            self._report("too many wait to be sent")

    def close(self) -> None:
        """Send what is left, and end the thread."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._ended.put(None, timeout=_SECONDS)
            self._thread.join(_SECONDS)

    def _send_all(self) -> None:
        is_open = True
        while is_open:
            spans, is_open = [], False
            while (ended := self._ended.get()) is not None:
                spans += ended
                if self._ended.empty():
                    is_open = True
                    break
            if spans:
                self._send(spans)

    def _send(self, spans: list[dict[str, Any]]) -> None:
        resource = {"attributes": [{"key": "service.name", "value": _value(self._service)}]}
        scopes = [{"scope": {"name": "hf_specdec"}, "spans": spans}]
        body = json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}).encode()
        headers = {"Content-Type": "application/json", **self._headers}
        try:
            _opener.open(urllib.request.Request(self.url, body, headers), timeout=_SECONDS).close()
            self._is_lost = False
        # A URLError is an OSError; a header that cannot be sent is a wrong value.
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._report(str(error))

    def _report(self, problem: str) -> None:
        if not self._is_lost:
            logger.warning(
                "Spans are lost, because %s does not take them: %s. The next ones are tried.", self.url, problem
            )
        self._is_lost = True


def _value(value: Any) -> dict[str, Any]:
    """A value in OTLP's JSON, where whole numbers are text."""
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    if isinstance(value, str):
        return {"stringValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}
