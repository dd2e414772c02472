"""New token ids to new text, one token at a time, and stop texts in it."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Text of one choice, which grows by whole characters.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: the prompt's ids.
        skip_special_tokens: leave special tokens out of the text.

    Attributes:
        CONTEXT: how many of the last ids a decoder needs, so that a leading space is kept.
        text: so far.
    """

    CONTEXT = 6

    def __init__(self, tokenizer: Any, prompt: list[int], skip_special_tokens: bool = True):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.text = ""
        self._fast = getattr(tokenizer, "_tokenizer", None)
        context = prompt[-self.CONTEXT :]
        self._stream = (
            DecodeStream(ids=context, skip_special_tokens=skip_special_tokens) if self._fast is not None else None
        )
        self._ids = list(context)  # since the last whole character, with what was decoded before it
        self._read = len(context)  # how many of them are in the text already

    def add(self, token: int) -> str:
        """The text that a token completes; empty inside a character of several tokens."""
        self._ids.append(token)
        piece = self._step(token)
        if piece:
            self._ids, self._read = self._ids[-self.CONTEXT :], min(len(self._ids), self.CONTEXT)
            self.text += piece
        return piece

    def finish(self) -> str:
        """The text of tokens that complete no character: U+FFFD for their bytes. Call once, at the end."""
        piece = (
            self._decode(self._ids)[len(self._decode(self._ids[: self._read])) :] if self._read < len(self._ids) else ""
        )
        self._read = len(self._ids)
        self.text += piece
        return piece

    def _step(self, token: int) -> str:
        if self._stream is not None:
            return self._stream.step(self._fast, token) or ""
        before, after = self._decode(self._ids[: self._read]), self._decode(self._ids)
        return "" if after.endswith("�") or len(after) <= len(before) else after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)


def find_stop(text: str, num_new: int, stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop text begins, and which it is, if one ends within the last `num_new` characters."""
    found = []
    for stop in stops:
        start = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
        if start >= 0:
            found.append((start, stop))
    return min(found, default=None)
