"""Answer and Inbox: a client's request in the event loop, where the engine's updates arrive."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from .outputs import Logprob
from .params import SamplingParams
from .text import Detokenizer
from .worker import Update


class Inbox:
    """Queue of the updates for one client's request, with one reader. It also delivers None after `seconds` without an update.

    Used in the event loop's thread only. Each step brings an update for each stream, so this is kept cheaper than an asyncio.Queue
    with a timeout for each item: one timer serves all of them.

    Args:
        seconds: time without an update after which `get` returns None.
    """

    def __init__(self, seconds: float):
        self.seconds, self.loop = seconds, asyncio.get_running_loop()
        self._items: deque[tuple[Answer, Update] | None] = deque()
        self._reader: asyncio.Future[None] | None = None  # what `get` waits for
        self._last_put = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._on_timer)

    def put(self, item: tuple[Answer, Update] | None) -> None:
        """Add an item and wake the reader."""
        self._last_put = self.loop.time()
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> tuple[Answer, Update] | None:
        """Wait for the next item and remove it."""
        while not self._items:
            self._reader = self.loop.create_future()
            await self._reader
        return self._items.popleft()

    def close(self) -> None:
        """Stop the timer. Call once nobody reads any more."""
        self._timer.cancel()

    def _on_timer(self) -> None:
        """Put None if nothing came for `seconds`; then set the timer for `seconds` after the last item."""
        if self.loop.time() >= self._last_put + self.seconds:
            self.put(None)
        self._timer = self.loop.call_at(self._last_put + self.seconds, self._on_timer)


@dataclass
class Answer:
    """The state of the answer to one prompt, while it is generated.

    Attributes:
        number: index of the prompt in the client's request, from 0.
        inbox: receives its updates, and those of the other prompts of the same client's request.
        num_prompt, num_new, num_cached: prompt tokens; new tokens of all choices so far; prompt tokens whose KV was cached.
        began, first: `time.monotonic()` when the request came, and when its first token did; None before that.
        ended: True after its last update, or once the client has disconnected.
        deadline: timer that ends it when its time limit is reached; None: no limit.
        prompt: the prompt's ids, which a `Detokenizer` needs.
        prompt_logprobs: see `Request`; None before the first update, and unless requested.
        texts: detokenizers by choice index; empty if the engine makes the text, because it must look for stop texts.
    """

    id: str
    number: int
    inbox: Inbox
    num_prompt: int
    params: SamplingParams
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    ended: bool = False
    num_new: int = 0
    num_cached: int = 0
    deadline: asyncio.TimerHandle | None = None
    prompt: list[int] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    texts: dict[int, Detokenizer] = field(default_factory=dict)

    def make_text(self, update: Update, tokenizer: Any) -> None:
        """Set `update.text`, unless the engine has done it."""
        if self.params.detokenize:
            return
        text = self.texts.get(update.index)
        if text is None:
            text = Detokenizer(tokenizer, self.prompt, self.params.skip_special_tokens)
            self.texts[update.index] = text
        tokens = update.token_ids[:-1] if update.hides_end else update.token_ids
        update.text = "".join([text.add(token) for token in tokens])
        if update.finish_reason is not None:
            update.text += text.finish()
