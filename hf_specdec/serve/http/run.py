"""A server: a process for HTTP, which starts another one for the engine; it drains requests after SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from transformers import AutoConfig, AutoTokenizer

from ...bundled import resolve_model
from ..engine.images import load_processor
from ..ipc.engine_process import EngineProcess
from .address import address, listen
from .api import make_app
from .errors import stopped
from .guard import protocol_with_timeout
from .server import Limits, Privacy, Server
from .spans import Spans
from .store import ResponseStore

logger = logging.getLogger(__name__)

_SECONDS_FOR_ERRORS = 5  # for clients to receive the error that ends an answer when the time for draining is over


class _DrainingServer(uvicorn.Server):
    """A uvicorn server that, after the signal, gives answers `seconds` to end, and then ends the rest with an error."""

    def __init__(self, config: uvicorn.Config, server: Server, seconds: float):
        super().__init__(config)
        self._server, self._seconds = server, seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn after the signal: drain, then stop."""
        timer = asyncio.get_running_loop().call_later(self._seconds, self._server.end_answers)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


class _Watch:
    """Tells the server when the model is loaded, and ends it (`failure`) if the engine is gone. `ends` is set once the server ends."""

    def __init__(self, server: Server, engine: EngineProcess, on_ready: Callable[[], None]):
        self.server, self.engine, self.on_ready = server, engine, on_ready
        self.failure: BaseException | None = None
        self.ends = threading.Event()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        """Watch the engine while the application runs; end it when the application stops."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), name="hf-specdec-watch", daemon=True).start()
        yield
        self.ends.set()
        await asyncio.to_thread(self.server.stop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until the model is loaded, then until the engine ends. A failure ends the server."""
        try:
            self.server.connect(self.engine, self.engine.loaded.result(), loop)
            self.on_ready()
            self.engine.join()
            if self.engine.failure is not None:
                loop.call_soon_threadsafe(self.server.end_with, stopped())
            if isinstance(self.engine.failure, ChildProcessError) and not self.ends.wait(_SECONDS_FOR_ERRORS):
                raise self.engine.failure
        except BaseException as error:
            if not self.ends.is_set():
                self.failure = error
                os.kill(os.getpid(), signal.SIGINT)


def serve(
    model: str, names: list[str], limits: Limits, host: str = "127.0.0.1", port: int = 8000,
    api_keys: list[str] | None = None, allowed_origins: list[str] | None = None, shutdown_timeout: float = 30,
    chat_template: str | None = None, tokenizer: str | None = None, response_template: dict | None = None,
    privacy: Privacy | None = None, media_hosts: list[str] | None = None, loads_adapters: bool = False,
    store: ResponseStore | None = None, updates_weights: bool = False, spans: Spans | None = None,
    on_ready: Callable[[str], None] = lambda url: None, **arguments: Any
) -> None:  # fmt: skip
    """Serve a model until SIGINT or SIGTERM, with the engine in a process of its own.

    If the engine raises, the server keeps running and answers every request with 503. If the engine's process is killed, the server does so
    for a few seconds only and then ends, so that whoever watches it can start it again.

    Args:
        shutdown_timeout: seconds that running requests get to end after the signal; those left then end with an error, 503. New
            requests are refused.
        on_ready: called with the server's URL once the model is loaded.
        arguments: further arguments of `LLM`, which must be picklable.

    Raises:
        ValueError: see `Privacy.check`.
        OSError: the address cannot be had (see `listen`); the model has not been loaded then.
        Exception: the error with which loading the model failed.
        ChildProcessError: the engine's process was killed.
    """
    privacy = privacy or Privacy()
    privacy.check(arguments.get("speculative_config"), api_keys)
    loading = {key: arguments[key] for key in ("revision", "trust_remote_code") if key in arguments}
    loaded_tokenizer = AutoTokenizer.from_pretrained(resolve_model(os.fspath(tokenizer or model)), **loading)
    folder = resolve_model(os.fspath(model))
    processor = load_processor(folder, AutoConfig.from_pretrained(folder, **loading), loaded_tokenizer, **loading)
    if chat_template is not None:
        loaded_tokenizer.chat_template = chat_template
    allowed = loads_adapters, updates_weights
    server = Server(
        loaded_tokenizer, names, limits, response_template, privacy, processor, media_hosts, *allowed, store, spans
    )
    server.lanes.fork()
    sockets = listen(host, port)
    where = address(host, sockets[0].getsockname()[1])
    engine = EngineProcess(server.deliver, {**arguments, "model": model, "tokenizer": tokenizer})
    watch = _Watch(server, engine, lambda: on_ready(f"http://{where}"))
    app = make_app(server, api_keys, allowed_origins, watch.lifespan)
    config = uvicorn.Config(  # after the signal uvicorn waits until `_DrainingServer` has ended all answers
        app, http=protocol_with_timeout(limits.read_seconds), log_level="warning", access_log=False,
        timeout_keep_alive=30, timeout_graceful_shutdown=math.ceil(shutdown_timeout) + _SECONDS_FOR_ERRORS,
        h11_max_incomplete_event_size=64 << 10,
    )  # fmt: skip
    # After draining, uvicorn raises SIGTERM again for the handler that was set before its own: it must not end the process.
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            _DrainingServer(config, server, shutdown_timeout).run(sockets)
    finally:
        watch.ends.set()
        server.lanes.close()
        engine.end()
        if spans is not None:
            spans.close()
        for listening in sockets:
            listening.close()
        signal.signal(signal.SIGTERM, handler)
    if watch.failure is not None:
        raise watch.failure
