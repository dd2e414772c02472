"""Replicas by Ray Serve: the server's own application in every replica, and a door that sends a request again if its replica dies.

    serve run hf_specdec.serve.ray:app model=Qwen/Qwen3-0.6B num_replicas=4

`hf-specdec serve MODEL --replicas 4` does the same on this machine. Keys of the application's arguments: those of `LLM`, and those of
`Arguments`. Requests that are answered in one piece survive the death of a replica; a stream that has begun ends with an error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import signal
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

try:
    import ray
    from ray import serve
    from ray.exceptions import RayError
except ImportError as error:
    raise ImportError("replicas need Ray Serve: pip install 'hf-specdec[ray]'") from error

logger = logging.getLogger(__name__)

_ATTEMPTS = 4  # replicas that a request is sent to, one after the other
_PAUSE = 0.5  # seconds between two of them


@dataclass
class Arguments:
    """How many replicas there are and what each needs.

    Attributes:
        served_model_name: what clients call the model; None: `model`.
        num_replicas: how many; None: as `autoscaling` says.
        autoscaling: Ray's autoscaling_config, such as {"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 16}.
        num_cpus, num_gpus: of each replica. A replica of a sharded model needs as many GPUs as it has ranks: all are on one machine.
        max_ongoing_requests: of each replica; others wait at the door.
        api_keys: any of them opens everything.
        num_doors: processes that take requests.
    """

    model: str
    served_model_name: str | None = None
    num_replicas: int | None = 1
    autoscaling: dict[str, Any] | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    max_ongoing_requests: int = 256
    api_keys: list[str] | None = None
    num_doors: int = 1
    llm: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: dict[str, Any]) -> Arguments:
        """From a flat dictionary, whose values may be texts, as those of a command line are.

        Raises:
            ValueError: no model is named.
        """
        values = {key: _read(value) for key, value in given.items()}
        own = {each.name for each in dataclasses.fields(cls)} - {"llm"}
        if "model" not in values:
            raise ValueError("Name the model: serve run hf_specdec.serve.ray:app model=NAME.")
        return cls(
            **{k: v for k, v in values.items() if k in own}, llm={k: v for k, v in values.items() if k not in own}
        )


def _read(value: Any) -> Any:
    """The value that a text stands for: JSON where it is JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


class Replica:
    """One engine with the server's application around it."""

    async def __init__(self, arguments: Arguments):
        from transformers import AutoTokenizer

        from ..bundled import resolve_model
        from .api import make_app
        from .llm import LLM
        from .server import Limits, Server

        tokenizer = AutoTokenizer.from_pretrained(resolve_model(arguments.model))
        self.llm = LLM(arguments.model, tokenizer, **arguments.llm)
        self.server = Server(tokenizer, [arguments.served_model_name or arguments.model], Limits())
        self.server.start(self.llm, asyncio.get_running_loop())
        self.app = make_app(self.server, arguments.api_keys)

    async def respond(self, scope: dict[str, Any], body: bytes) -> tuple[int, list, bytes]:
        """(status, headers, body) of a request."""
        pieces = [piece async for piece in self.stream(scope, body)]
        status, headers = pieces[0]
        return status, headers, b"".join(pieces[1:])

    async def stream(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
        """(status, headers) of a request, then pieces of its body."""
        found: asyncio.Queue[Any] = asyncio.Queue()
        is_sent, gone = False, asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal is_sent
            if not is_sent:
                is_sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                found.put_nowait((message["status"], [(bytes(k), bytes(v)) for k, v in message["headers"]]))
            elif message.get("body"):
                found.put_nowait(message["body"])

        async def run() -> None:
            try:
                await self.app(scope, receive, send)
            finally:
                found.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (piece := await found.get()) is not None:
                yield piece
            await task
        finally:
            gone.set()
            task.cancel()

    def check_health(self) -> None:
        """Ray replaces a replica whose engine has stopped."""
        worker = self.server.worker
        if worker is None or not worker.is_alive():
            raise RuntimeError("The engine has stopped.")

    def __del__(self) -> None:
        if hasattr(self, "server"):
            self.server.stop()
            self.llm.close()


class Door:
    """Takes requests and sends each to a replica; again to another one if that dies before it has answered."""

    def __init__(self, replicas: Any):
        self.replicas = replicas

    async def serve(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """An ASGI request."""
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        kept = (
            "type",
            "http_version",
            "method",
            "scheme",
            "path",
            "raw_path",
            "query_string",
            "headers",
            "client",
            "server",
        )
        plain = {key: scope[key] for key in kept if key in scope} | {"root_path": "", "asgi": {"version": "3.0"}}
        if _wants_stream(body):
            await self._stream(plain, body, send)
            return
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                status, headers, answer = await self.replicas.respond.remote(plain, body)
                break
            except RayError as error:
                logger.warning(
                    "A replica has died with a request (attempt %d of %d): %s", attempt, _ATTEMPTS, type(error).__name__
                )
                status, headers, answer = _failed()
                await asyncio.sleep(_PAUSE)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _stream(self, scope: dict[str, Any], body: bytes, send: Any) -> None:
        begun = False
        try:
            async for piece in self.replicas.options(stream=True).stream.remote(scope, body):
                if begun:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                else:
                    begun = True
                    await send({"type": "http.response.start", "status": piece[0], "headers": piece[1]})
            await send({"type": "http.response.body", "body": b""})
        except RayError as error:
            logger.warning("A replica has died with a stream: %s", type(error).__name__)
            status, headers, answer = _failed()
            if begun:
                await send({"type": "http.response.body", "body": b"data: " + answer + b"\n\ndata: [DONE]\n\n"})
            else:
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await send({"type": "http.response.body", "body": answer})


def _failed() -> tuple[int, list, bytes]:
    message = {
        "error": {
            "message": "The replica that had this request has died.",
            "type": "server_error",
            "param": None,
            "code": None,
        }
    }
    return 503, [(b"content-type", b"application/json")], json.dumps(message).encode()


def _wants_stream(body: bytes) -> bool:
    try:
        return bool(json.loads(body).get("stream"))
    except (ValueError, AttributeError):
        return False


async def _at_the_door(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """The ASGI application of every door."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
    elif scope["type"] == "http":
        await serve.get_replica_context().servable_object.serve(scope, receive, send)


def _door() -> Any:
    """Ray asks for the application in each door's process."""
    return _at_the_door


def app(given: dict[str, Any]) -> Any:
    """The application for `serve run` and Serve's configuration files. `given`: see `Arguments`."""
    return application(Arguments.of(given))


def application(arguments: Arguments) -> Any:
    """Doors before replicas."""
    many: dict[str, Any] = {"num_replicas": arguments.num_replicas}
    if arguments.autoscaling is not None:
        many = {"autoscaling_config": arguments.autoscaling}
    replicas = serve.deployment(
        Replica, name="Replica", ray_actor_options={"num_cpus": arguments.num_cpus, "num_gpus": arguments.num_gpus},
        max_ongoing_requests=arguments.max_ongoing_requests, health_check_period_s=5, **many,
    )  # fmt: skip
    doors = serve.deployment(
        serve.ingress(_door)(Door), name="Door", num_replicas=arguments.num_doors, ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=4096,
    )  # fmt: skip
    return doors.bind(replicas.bind(arguments))


def run(arguments: Arguments, host: str = "127.0.0.1", port: int = 8000, on_ready: Any = lambda url: None) -> None:
    """Serve until SIGINT or SIGTERM, in a cluster that exists (RAY_ADDRESS) or one of this machine."""
    stopped = threading.Event()
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    before = {each: signal.signal(each, lambda *_: stopped.set()) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(application(arguments), name="hf-specdec")
        on_ready(f"http://{host}:{port}")
        stopped.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
        for each, handler in before.items():
            signal.signal(each, handler)
