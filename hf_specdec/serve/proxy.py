"""A proxy in front of prefill and decode servers: `python -m hf_specdec.serve.proxy --prefill URL --decode URL`.

Each request goes to a prefill server, which reads the prompt and writes one token, and with the `kv_transfer_params` of that answer to a
decode server, whose answer or stream goes to the client. If no prefill server answers, the decode server reads the prompt itself.
Servers take turns. For larger deployments use a router; this is the protocol, in one file.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

_SECONDS = 600.0  # for an answer
_LEFT_OUT = {"stream", "stream_options", "max_completion_tokens"}
_HEADERS = ("Authorization", "Content-Type")


def asked(url: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> http.client.HTTPResponse:
    """A server's answer, whose body has not been read.

    Raises:
        OSError: the server does not answer.
    """
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_SECONDS)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        return connection.getresponse()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error


def prefilled(url: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any] | None:
    """What a decode server needs to go on; None if it has to read the prompt itself."""
    first = {key: value for key, value in body.items() if key not in _LEFT_OUT}
    first |= {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    try:
        answer = asked(url, path, first, headers)
        found = json.loads(answer.read())
    except (OSError, ValueError) as error:
        logger.warning("The prefill server %s does not answer: %s", url, error)
        return None
    return found.get("kv_transfer_params") if answer.status == 200 else None  # the decode server says what is wrong


def pieces(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """The body, as it comes."""
    try:
        while piece := answer.read1(1 << 16):
            yield piece
    finally:
        answer.close()


def make_app(prefill: list[str], decode: list[str]) -> Any:
    """The proxy as an application."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    prefill_turns, decode_turns = itertools.cycle(prefill), itertools.cycle(decode)

    def forward(path: str, body: dict[str, Any], headers: dict[str, str]) -> http.client.HTTPResponse:
        is_one = body.get("n", 1) == 1 and not (isinstance(body.get("prompt"), list) and _is_several(body["prompt"]))
        params = prefilled(next(prefill_turns), path, body, headers) if is_one else None
        return asked(
            next(decode_turns), path, body if params is None else {**body, "kv_transfer_params": params}, headers
        )

    async def complete(request: Request) -> Response:
        try:
            body = json.loads(await request.body())
            if not isinstance(body, dict):
                raise ValueError("it is not an object")
        except ValueError as error:
            return Response(
                json.dumps({"error": {"message": f"The body is no JSON: {error}"}}), 400, media_type="application/json"
            )
        headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
        try:
            answer = await run_in_threadpool(forward, request.url.path, body, headers)
        except OSError as error:
            return Response(
                json.dumps({"error": {"message": f"The decode server does not answer: {error}"}}),
                502,
                media_type="application/json",
            )
        return StreamingResponse(pieces(answer), answer.status, media_type=answer.getheader("Content-Type"))

    async def health(request: Request) -> Response:
        return Response()

    return Starlette(
        routes=[
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/health", health),
        ]
    )


def _is_several(prompt: list[Any]) -> bool:
    return len(prompt) > 1 and not all(isinstance(token, int) for token in prompt)


def main() -> None:
    """The command line."""
    import uvicorn

    parser = argparse.ArgumentParser(prog="python -m hf_specdec.serve.proxy", description=__doc__)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL", help="prefill servers")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="decode servers")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    args = parser.parse_args()
    uvicorn.run(make_app(args.prefill, args.decode), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
