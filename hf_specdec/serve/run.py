"""A server process: the model is loaded while /health says 503, requests are served, SIGTERM drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from transformers import AutoTokenizer

from ..bundled import resolve_model
from .api import make_app
from .connections import impatient
from .llm import LLM
from .server import Limits, Server

logger = logging.getLogger(__name__)


def serve(
    model: str,
    names: list[str],
    limits: Limits,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_keys: list[str] | None = None,
    allowed_origins: list[str] | None = None,
    shutdown_timeout: float = 30,
    chat_template: str | None = None,
    tokenizer: str | None = None,
    response_template: dict | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
    **arguments: Any,
) -> None:
    """Serve a model until SIGINT or SIGTERM.

    Args:
        shutdown_timeout: seconds that running requests get then; no new ones are taken.
        chat_template, response_template: instead of the tokenizer's.
        arguments: of LLM.

    Raises:
        Exception: what loading the model raised.
    """
    name = resolve_model(os.fspath(tokenizer or model))
    loading = {key: arguments[key] for key in ("revision", "trust_remote_code") if key in arguments}
    own_tokenizer = AutoTokenizer.from_pretrained(name, **loading)
    if chat_template is not None:
        own_tokenizer.chat_template = chat_template
    server = Server(own_tokenizer, names, limits, response_template)
    failure: list[BaseException] = []

    def load(loop: asyncio.AbstractEventLoop) -> None:
        try:
            llm = LLM(model, own_tokenizer, **arguments)
            server.start(llm, loop)
        except BaseException as error:
            failure.append(error)
            os.kill(os.getpid(), signal.SIGINT)
            return
        on_ready(f"http://{host}:{port}")

    @contextlib.asynccontextmanager
    async def lifespan(app):
        thread = threading.Thread(
            target=load, args=(asyncio.get_running_loop(),), name="hf-specdec-loading", daemon=True
        )
        thread.start()
        yield
        await asyncio.to_thread(server.stop)

    app = make_app(server, api_keys, allowed_origins, lifespan)
    config = uvicorn.Config(
        app, http=impatient(limits.read_seconds), host=host, port=port, log_level="warning", access_log=False, timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(shutdown_timeout)), h11_max_incomplete_event_size=64 << 10,
    )  # fmt: skip
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn drains, then raises the signal once more
    try:
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run()
    finally:
        signal.signal(signal.SIGTERM, before)
    if failure:
        raise failure[0]
