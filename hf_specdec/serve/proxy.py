"""A proxy in front of prefill and decode servers: `python -m hf_specdec.serve.proxy --prefill URL --decode URL`.

The proxy sends each request to a prefill server, which reads the prompt and generates one token. Its answer is a stream. As soon as
`kv_transfer_params` arrive in it, the proxy sends the request with them to a decode server, and passes that server's answer or stream on
to the client. For a long prompt they arrive after its first chunk, and the decode server pulls each chunk while the next one is read. If
the prefill server does not answer, the decode server reads the prompt itself. The servers of each kind take turns. This is an example
of the protocol in one file; for larger deployments use a router.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from .http.address import listen

logger = logging.getLogger(__name__)

_SECONDS = 600.0  # time limit of an answer
# Not sent to prefill servers, which generate one token: a larger min_tokens would be refused beside max_tokens 1.
_DECODE_FIELDS = {"stream", "stream_options", "max_completion_tokens", "min_tokens"}
_HEADERS = ("Authorization", "Content-Type")  # passed on to both kinds of servers


def _post(url: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> http.client.HTTPResponse:
    """Send a request to a server. Returns its answer, whose body is still to be read. Raises OSError: the server does not answer."""
    where = urlsplit(url)
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    connection = kind(where.hostname or "", where.port, timeout=_SECONDS)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        return connection.getresponse()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error


def _prefill(url: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any] | None:
    """Let a prefill server read the prompt. Returns kv_transfer_params; None if the decode server must read the prompt itself."""
    first = {key: value for key, value in body.items() if key not in _DECODE_FIELDS}
    first |= {"max_tokens": 1, "stream": True, "kv_transfer_params": {"do_remote_decode": True, "in_chunks": True}}
    try:
        answer = _post(url, path, first, headers)
        if answer.status != 200:  # the decode server will report the error
            answer.close()
            return None
        events = (json.loads(line[6:]) for line in iter(answer.readline, b"") if line.startswith(b"data: {"))
        handed = (event.get("kv_transfer_params") for event in events)
        params = next((params for params in handed if params is not None), None)
    except (OSError, ValueError, http.client.HTTPException) as error:
        logger.warning("The prefill server %s does not answer: %s", url, error)
        return None
    # A prefill server stops reading the prompt of a client that disconnects.
    threading.Thread(target=_read_to_the_end, args=(url, answer), daemon=True).start()
    return params


def _read_to_the_end(url: str, answer: http.client.HTTPResponse) -> None:
    try:
        for _ in _pieces(answer):
            pass
    except (OSError, http.client.HTTPException) as error:
        logger.warning("The prefill server %s ended an answer early: %s", url, error)


def _pieces(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        while piece := answer.read1(1 << 16):
            yield piece
    finally:
        answer.close()


def make_app(prefill: list[str], decode: list[str]) -> Any:
    """The proxy as an ASGI application. `prefill`, `decode`: URLs of the servers of both kinds."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    prefill_turns, decode_turns = itertools.cycle(prefill), itertools.cycle(decode)

    def forward(path: str, body: dict[str, Any], headers: dict[str, str]) -> http.client.HTTPResponse:
        """Have both kinds of servers answer a request. One with several choices or prompts goes to a decode server only."""
        prompt = body.get("prompt")
        is_list = isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt)
        is_one = body.get("n", 1) == 1 and not is_list
        params = _prefill(next(prefill_turns), path, body, headers) if is_one else None
        handed = {} if params is None else {"kv_transfer_params": params}
        return _post(next(decode_turns), path, {**body, **handed}, headers)

    async def complete(request: Request) -> Response:
        try:
            body = json.loads(await request.body())
            if not isinstance(body, dict):
                raise ValueError(f"it is a {type(body).__name__}")
        except (ValueError, RecursionError) as error:
            return JSONResponse({"error": {"message": f"The body is not a JSON object: {error}"}}, 400)
        headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
        try:
            answer = await run_in_threadpool(forward, request.url.path, body, headers)
        except OSError as error:
            return JSONResponse({"error": {"message": f"The decode server does not answer: {error}"}}, 502)
        return StreamingResponse(_pieces(answer), answer.status, media_type=answer.getheader("Content-Type"))

    async def health(request: Request) -> Response:
        return Response()

    paths = ("/v1/completions", "/v1/chat/completions")
    return Starlette(routes=[*(Route(path, complete, methods=["POST"]) for path in paths), Route("/health", health)])


def main() -> None:
    """Run the proxy with the options of the command line until a signal ends it."""
    import uvicorn

    parser = argparse.ArgumentParser(prog="python -m hf_specdec.serve.proxy", description=__doc__)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL", help="prefill servers")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="decode servers")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    args = parser.parse_args()
    app = make_app(args.prefill, args.decode)
    try:
        sockets = listen(args.host, args.port)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    uvicorn.Server(uvicorn.Config(app, host=args.host, port=args.port, log_level="warning")).run(sockets)


if __name__ == "__main__":
    main()
