"""Turns new token ids into new text, one token at a time, and finds stop texts."""

from __future__ import annotations

import re
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers.convert_slow_tokenizer import bytes_to_unicode

_SPACE = "\u2581"  # how SentencePiece writes a space
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


class Detokenizer:
    """The text of one choice, which grows by whole characters.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: the prompt's ids, of which the last `CONTEXT` are used.
        skip_special_tokens: leave special tokens out of the text.

    Attributes:
        CONTEXT: number of ids before a token that must be decoded with it; without them a leading space could be lost.
        text: the text so far.
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
        self._ids = list(context)  # the tokens of an incomplete character, after up to CONTEXT earlier ones
        self._num_decoded = len(context)  # how many of these ids are in the text already

    def add(self, token: int) -> str:
        """Add a token. Returns the text it completes; empty if it ends inside a character of several tokens."""
        self._ids.append(token)
        piece = self._step(token)
        if piece:
            self._ids, self._num_decoded = self._ids[-self.CONTEXT :], min(len(self._ids), self.CONTEXT)
            self.text += piece
        return piece

    def finish(self) -> str:
        """Returns the text of an incomplete last character: U+FFFD for its bytes. Call once, after the last token."""
        piece = ""
        if self._num_decoded < len(self._ids):
            piece = self._decode(self._ids)[len(self._decode(self._ids[: self._num_decoded])) :]
        self._num_decoded = len(self._ids)
        self.text += piece
        return piece

    def _step(self, token: int) -> str:
        if self._stream is not None:
            return self._stream.step(self._fast, token) or ""
        before, after = self._decode(self._ids[: self._num_decoded]), self._decode(self._ids)
        return "" if after.endswith("�") or len(after) <= len(before) else after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)


def find_stop(text: str, num_new: int, stops: list[str]) -> tuple[int, str] | None:
    """Find the first stop text that ends within the last `num_new` characters: (its start, the stop text); None if there is no match."""
    found = []
    for stop in stops:
        start = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
        if start >= 0:
            found.append((start, stop))
    return min(found, default=None)


def token_text(tokenizer: Any, token: int) -> str | None:
    """The text of one token by itself, as it is within a text; None without a tokenizer."""
    if tokenizer is None:
        return None
    text, piece = tokenizer.decode([token]), tokenizer.convert_ids_to_tokens(token) or ""
    num_spaces = len(piece) - len(piece.lstrip(_SPACE))
    # Tokenizers of Llama 2's kind leave out one space at the beginning of a text.
    return " " * num_spaces + text.lstrip(" ") if num_spaces else text


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes of one token by itself. Unlike its text they are exact for a token that is a part of a character."""
    text = token_text(tokenizer, token) or ""
    if "\ufffd" not in text:
        return text.encode()
    piece = tokenizer.convert_ids_to_tokens(token) or ""
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):  # SentencePiece
        return bytes([int(piece[3:-1], 16)])
    found = [_BYTE_OF.get(character) for character in piece]  # byte-level BPE writes each byte as a character
    return text.encode() if None in found else bytes(found)
