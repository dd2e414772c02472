"""A streamer that shows which tokens were drafted."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers.generation.streamers import BaseStreamer


class AcceptedTokens(BaseStreamer):
    """Prints the tokens of each step: drafted tokens, which are all but the last, in green. Used as a context.

    A streamer gets single tokens. To know where a step ends, it hooks the model's embedding layer, inside the context only.
    """

    def __init__(self, console: Console, model: Any, tokenizer: Any):
        self.console = console
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.step: list[int] = []
        self.printed = ""
        self.prompt_seen = False
        self.embeddings = model.get_input_embeddings()

    def __enter__(self) -> AcceptedTokens:
        self.hook = self.embeddings.register_forward_pre_hook(lambda *_: self.end_step())
        return self

    def __exit__(self, *_: object) -> None:
        self.hook.remove()

    def put(self, value: torch.Tensor) -> None:
        """Receive the next token; the first call passes the prompt."""
        if self.prompt_seen:
            self.step += value.flatten().tolist()
        self.prompt_seen = True

    def end_step(self) -> None:
        self.show(self.step[:-1], "green")
        self.show(self.step[-1:], "")
        self.step = []

    def show(self, tokens: list[int], style: str) -> None:
        """Print the text that these tokens add. If the last character is incomplete, wait for the next tokens."""
        self.tokens += tokens
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            self.console.print(Text(text[len(self.printed) :], style=style), end="", soft_wrap=True)
            self.printed = text

    def end(self) -> None:
        self.end_step()
        self.console.print()
