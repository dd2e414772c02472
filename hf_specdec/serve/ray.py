"""Replicas with Ray Serve: each replica runs the server's application, and an ingress resends a request if its replica dies.

    serve run hf_specdec.serve.ray:app model=Qwen/Qwen3-0.6B num_replicas=4

`hf-specdec serve MODEL --replicas 4` does the same on this machine. The application takes the arguments of `LLM` and those of
`Arguments`. A request survives the death of its replica; only a stream that has begun ends with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import signal
import threading
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

try:
    ray, serve = import_module("ray"), import_module("ray.serve")  # `import ray` would be this file for type checkers
    RayError = import_module("ray.exceptions").RayError
except ImportError as error:
    raise ImportError("replicas need Ray Serve: pip install 'hf-specdec[ray]'") from error

from .http.api import make_app
from .http.endpoints import unless_disconnected
from .http.errors import ApiError
from .http.guard import Guard
from .http.server import Limits, Privacy, Server
from .ipc.engine_process import SIGNALS
from .llm import LLM

logger = logging.getLogger(__name__)

_ATTEMPTS = 4  # how often a request is sent, each time to a replica that Ray chooses
_PAUSE = 0.5  # seconds between two attempts
_DIED = json.dumps(ApiError(503, "The replica that had this request has died.", "server_error").body).encode()


@dataclass
class Arguments:
    """How many replicas there are and what each needs.

    Attributes:
        model: a name, a folder or a bundled model's name.
        served_model_name: the name by which clients call the model; None: `model`.
        num_replicas: number of replicas; not used with `autoscaling`.
        autoscaling: Ray's autoscaling_config, such as {"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 16}.
        num_cpus, num_gpus: resources of one replica. For a sharded model, num_gpus is its number of ranks: all are on one machine.
        max_ongoing_requests: maximum number of requests that a replica takes at a time; others wait in the ingress.
        api_keys: any of them is accepted on every path; None: no key is needed.
        private_requests, share_across_api_keys: see `Privacy`. Each replica learns for itself.
        max_body_bytes, keep_alive_seconds, answer_seconds: see `Limits`.
        num_ingresses: number of ingress processes, which receive the requests.
        llm: further arguments of `LLM`.
    """

    model: str
    served_model_name: str | None = None
    num_replicas: int | None = 1
    autoscaling: dict[str, Any] | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    max_ongoing_requests: int = 256
    api_keys: list[str] | None = None
    private_requests: bool = False
    share_across_api_keys: bool = False
    max_body_bytes: int = 16 << 20
    keep_alive_seconds: float = 15.0
    answer_seconds: float | None = None
    num_ingresses: int = 1
    llm: dict[str, Any] = field(default_factory=dict)

    @property
    def limits(self) -> Limits:
        """The limits of a replica's server; those that are no arguments have their defaults."""
        names = ("max_body_bytes", "keep_alive_seconds", "answer_seconds")
        return Limits(**{name: getattr(self, name) for name in names})

    @classmethod
    def of(cls, given: dict[str, Any]) -> Arguments:
        """Make them from one dictionary of these arguments and `LLM`'s, whose values may be text, as on a command line. Raises
        ValueError: no model is named.
        """
        values = {key: _read(value) for key, value in given.items()}
        names = {field.name for field in dataclasses.fields(cls)} - {"llm"}
        if "model" not in values:
            raise ValueError("Name the model: serve run hf_specdec.serve.ray:app model=NAME.")
        of_llm = {key: value for key, value in values.items() if key not in names}
        return cls(**{key: value for key, value in values.items() if key in names}, llm=of_llm)


def _read(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


class Replica:
    """A Ray Serve deployment: an engine, and the server's application in front of it."""

    async def __init__(self, arguments: Arguments):
        privacy = Privacy(arguments.private_requests, arguments.share_across_api_keys)
        privacy.check(arguments.llm.get("speculative_config"), arguments.api_keys)
        self.llm = LLM(arguments.model, **arguments.llm)
        names = [arguments.served_model_name or arguments.model]
        self.server = Server(self.llm.tokenizer, names, arguments.limits, privacy=privacy, processor=self.llm.processor)
        self.server.is_alone = False
        self.server.start(self.llm, asyncio.get_running_loop())
        self.app = make_app(self.server, arguments.api_keys)

    async def stream(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
        """Run the application on a request. Yields (status, headers), then pieces of the body."""
        pieces: asyncio.Queue[Any] = asyncio.Queue()
        unread, gone = [{"type": "http.request", "body": body, "more_body": False}], asyncio.Event()

        async def receive() -> MutableMapping[str, Any]:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                pieces.put_nowait((message["status"], [(bytes(k), bytes(v)) for k, v in message["headers"]]))
            elif message.get("body"):
                pieces.put_nowait(message["body"])

        task = asyncio.create_task(self.app(scope, receive, send))
        task.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await task
        finally:
            gone.set()
            task.cancel()

    def check_health(self) -> None:
        """Raise RuntimeError if the engine has stopped; Ray then replaces this replica."""
        worker = self.server.worker
        if worker is None or not worker.is_alive():
            raise RuntimeError("The engine has stopped.")

    def __del__(self) -> None:
        if hasattr(self, "server"):
            self.server.stop()
            self.llm.close()


class Ingress:
    """The ingress deployment: sends a request to a replica, and to another if that dies before it has answered. `limits`: size and time."""

    def __init__(self, replicas: Any, limits: Limits):
        self.replicas = replicas
        self._guard = Guard(self._answer, [], limits)

    async def serve(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer a request of ASGI, unless it is too large or too slow."""
        await self._guard(scope, receive, send)

    async def _answer(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer a request, whose whole body is its first message. Stop if its client disconnects."""
        body = (await receive())["body"]
        kept = (
            "type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server",
        )  # fmt: skip
        plain = {key: scope[key] for key in kept if key in scope} | {"root_path": "", "asgi": {"version": "3.0"}}
        with contextlib.suppress(ApiError):  # the client has disconnected
            await unless_disconnected(receive, self._pass_on(plain, body, send))

    async def _pass_on(self, scope: dict[str, Any], body: bytes, send: Any) -> None:
        """Send a replica's answer: events as they come, others whole. If the replica dies before that began, another gets the request."""
        for attempt in range(1, _ATTEMPTS + 1):
            held: list[dict[str, Any]] = []
            streams, pieces = None, self.replicas.options(stream=True).stream.remote(scope, body)
            try:
                async for piece in pieces:
                    message = {"type": "http.response.body", "body": piece, "more_body": True}
                    if streams is None:
                        message = {"type": "http.response.start", "status": piece[0], "headers": piece[1]}
                        streams = dict(piece[1]).get(b"content-type", b"").startswith(b"text/event-stream")
                    await send(message) if streams else held.append(message)
                for message in [*held, {"type": "http.response.body", "body": b""}]:
                    await send(message)
                return
            except asyncio.CancelledError:  # the client has disconnected
                pieces.cancel()
                raise
            except RayError as error:
                kind = type(error).__name__
                logger.warning("A replica has died with a request (attempt %d of %d): %s", attempt, _ATTEMPTS, kind)
                if streams:
                    await send({"type": "http.response.body", "body": b"data: " + _DIED + b"\n\ndata: [DONE]\n\n"})
                    return
                if attempt < _ATTEMPTS:
                    await asyncio.sleep(_PAUSE)
        await send({"type": "http.response.start", "status": 503, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": _DIED})


async def _asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
    elif scope["type"] == "http":
        await serve.get_replica_context().servable_object.serve(scope, receive, send)


def _make_ingress() -> Any:
    """Ray calls this in each ingress process to get its application."""
    return _asgi


def app(given: dict[str, Any]) -> Any:
    """The application for `serve run` and Ray Serve's configuration files. `given`: see `Arguments.of`."""
    return application(Arguments.of(given))


def application(arguments: Arguments) -> Any:
    """Ray Serve's application: replicas, and the ingresses that pass requests to them."""
    many: dict[str, Any] = {"num_replicas": arguments.num_replicas}
    if arguments.autoscaling is not None:
        many = {"autoscaling_config": arguments.autoscaling}
    replicas = serve.deployment(
        Replica, name="Replica", ray_actor_options={"num_cpus": arguments.num_cpus, "num_gpus": arguments.num_gpus},
        max_ongoing_requests=arguments.max_ongoing_requests, health_check_period_s=5, **many,
    )  # fmt: skip
    ingresses = serve.deployment(
        serve.ingress(_make_ingress)(Ingress), name="Ingress", num_replicas=arguments.num_ingresses, ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=4096,
    )  # fmt: skip
    return ingresses.bind(replicas.bind(arguments), arguments.limits)


def run(arguments: Arguments, host: str = "127.0.0.1", port: int = 8000, on_ready: Any = lambda url: None) -> None:
    """Serve until SIGINT or SIGTERM, in an existing cluster (RAY_ADDRESS) or in a new one on this machine."""
    stopped = threading.Event()
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in SIGNALS}
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(application(arguments), name="hf-specdec")
        on_ready(f"http://{host}:{port}")
        stopped.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)
