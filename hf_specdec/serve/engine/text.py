"""Turns new token ids into new text, and finds stop texts."""

from __future__ import annotations

import codecs
import re
import weakref
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")
_SPACE = "\u2581"  # how SentencePiece writes a space
_UNKNOWN = "\ufffd"  # what stands for bytes that are no character
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
# Characters. transformers' clean-up of spaces rewrites at most this many at the end of a text (`n ' t` to `n't`).
_CLEANED = 5
# Bytes. UTF-8 has no longer character, so that many tokens later a decoder that began inside one is in step again.
_LONGEST = 4
_utf8 = codecs.getincrementaldecoder("utf-8")
# By tokenizer, what its single tokens are, as asked so far.
_kinds = weakref.WeakKeyDictionary[Any, "_Kinds"]()


class _Kinds(dict[int, "tuple[bool, bool, int | None]"]):
    """By id: whether the tokenizer lacks it, whether it is a special token that can be left out, and its `_fallback_byte`."""

    def __init__(self, tokenizer: Any):
        super().__init__()
        self._tokenizer = weakref.ref(tokenizer)
        self.size = _size(tokenizer)

    @classmethod
    def of(cls, tokenizer: Any) -> _Kinds:
        """Those of a tokenizer; none, if tokens were added to it since they were asked."""
        kinds = _kinds.get(tokenizer)
        if kinds is None or kinds.size != _size(tokenizer):
            kinds = _kinds[tokenizer] = cls(tokenizer)
        return kinds

    def __missing__(self, token: int) -> tuple[bool, bool, int | None]:
        tokenizer: Any = self._tokenizer()
        kind = True, False, None
        if tokenizer.convert_ids_to_tokens(token) is not None:
            shown, whole = (tokenizer.decode([token], skip_special_tokens=skips) for skips in (True, False))
            kind = False, bool(whole) and not shown, _fallback_byte(tokenizer, token)
        self[token] = kind
        return kind


def _size(tokenizer: Any) -> int:
    return len(tokenizer) if hasattr(tokenizer, "__len__") else 0


class Detokenizer:
    """The text of one choice: always what `tokenizer.decode` makes of prompt and answer together, less the prompt's text.

    Only the end of the tokens is decoded for new ones, from a place where characters and runs of bytes begin.

    Attributes:
        CONTEXT: number of ids before a token that are decoded with it, at least. Without any a leading space could be lost.
        text: the text that no later token can change.
        tail: what would follow `text` if no token came any more. The bytes of an incomplete character are left out.
    """

    CONTEXT = 6

    def __init__(self, tokenizer: Any, prompt: list[int], skip_special_tokens: bool = True):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self._kinds = _Kinds.of(tokenizer)
        self.text = self.tail = ""
        self._margin = _CLEANED if _cleans_up(tokenizer) else 0
        # of a run of bytes; None after one that fits no character
        self._run: codecs.IncrementalDecoder | None = _utf8("strict")
        self._ids, decoded = self._context(prompt)
        self._of_prompt, end = decoded, self._end_of_fixed(decoded)
        if decoded.endswith(_UNKNOWN) and self._kinds[self._ids[-1]][2] is not None:
            end = len(decoded.rstrip(_UNKNOWN))  # the answer may complete the character that the prompt begins
        self._num_shown = end

    def add(self, tokens: list[int]) -> str:
        """Add tokens. Returns the text that they complete; empty if it ends inside a character of several tokens."""
        piece, is_shown = "", True
        for token in tokens:
            if self._is_left_out(token):
                continue
            byte = self._kinds[token][2]
            if byte is None:
                if is_shown:  # else the run is a new one already
                    self._run, is_shown = _utf8("strict"), False
                self._ids.append(token)
                continue
            piece, is_shown = piece if is_shown else piece + self._show(), True
            self._ids.append(token)
            try:  # a later byte that fits no character turns all bytes of the run into U+FFFD
                self.tail += "" if self._run is None else self._run.decode(bytes([byte]))
            except UnicodeDecodeError:
                self._run = None
        return piece if is_shown else piece + self._show()

    def finish(self, tokens: list[int]) -> str:
        """Add the last tokens. Returns the text after `text`, with U+FFFD for the bytes of an incomplete last character. Call once."""
        self._ids += [token for token in tokens if not self._is_left_out(token)]
        decoded = self._decode(self._ids)
        self._pass_prompt(decoded)
        piece = decoded[self._num_shown :]
        self._num_shown += len(piece)
        self.text, self.tail = self.text + piece, ""
        return piece

    def _show(self) -> str:
        """Append the part of the tokens' text that is fixed and new to the text, and return it."""
        decoded = self._decode(self._ids)
        fixed = self._end_of_fixed(decoded)
        if fixed >= len(self._of_prompt):
            self._pass_prompt(decoded)
        end = max(self._num_shown, fixed - self._margin)
        piece, self._num_shown = decoded[self._num_shown : end], end
        self.text += piece
        self.tail = decoded[end : max(end, fixed)]
        if len(self._ids) > 2 * self.CONTEXT:
            self._forget(decoded)
        return piece

    def _pass_prompt(self, decoded: str) -> None:
        """The bytes at the prompt's end are decided. What they are was its text, unless the answer has completed them."""
        if decoded.startswith(self._of_prompt):
            self._num_shown = max(self._num_shown, len(self._of_prompt))
        self._of_prompt = ""

    def _forget(self, decoded: str) -> None:
        """Drop tokens at the beginning if the text of the others shows that it does not depend on them."""
        ids = self._ids[self._start_of_text(self._ids, self.CONTEXT) :]
        shorter = self._decode(ids)
        fixed, num_dropped = shorter[: self._end_of_fixed(shorter)], len(decoded) - len(shorter)
        in_step = len(fixed) >= _LONGEST or bool(fixed.strip(_UNKNOWN))
        if in_step and num_dropped <= self._num_shown and decoded.endswith(shorter):
            self._ids, self._num_shown = ids, self._num_shown - num_dropped
            self._of_prompt = self._of_prompt[num_dropped:]

    def _context(self, prompt: list[int]) -> tuple[list[int], str]:
        """The last ids of the prompt, from a place where a character begins, and their text."""
        count = self.CONTEXT
        while True:
            start = self._start_of_text(prompt, count)
            decoded = self._decode(prompt[start:])
            if start == 0 or (decoded and not decoded.startswith(_UNKNOWN)):
                return prompt[start:], decoded
            count = 2 * (len(prompt) - start)

    def _start_of_text(self, ids: list[int], count: int) -> int:
        """Where the last `count` ids begin, or before them, so that no run of bytes is cut."""
        start = max(0, len(ids) - count)
        while start and (self._is_left_out(ids[start]) or self._kinds[ids[start]][2] is not None):
            start -= 1
        return start

    def _is_left_out(self, token: int) -> bool:
        """True for special tokens that are left out, and for ids of the model that the tokenizer does not have."""
        is_unknown, is_special, _ = self._kinds[token]
        return is_unknown or (is_special and self.skip_special_tokens)

    def _end_of_fixed(self, decoded: str) -> int:
        """Where the text ends whose bytes are complete."""
        return len(decoded) - (decoded.endswith(_UNKNOWN) and self._is_incomplete())

    def _is_incomplete(self) -> bool:
        """True unless the last tokens' bytes show that no later byte can complete the last character."""
        pieces = [_bytes_of_piece(self.tokenizer.convert_ids_to_tokens(token)) for token in self._ids[-_LONGEST:]]
        if None in pieces:
            return True
        decoder = _utf8("replace")
        decoder.decode(b"".join(pieces))  # type: ignore[arg-type]
        return bool(decoder.getstate()[0])

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)


def _cleans_up(tokenizer: Any) -> bool:
    """True if the tokenizer removes spaces before punctuation when it decodes."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    insists = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return insists or type(getattr(backend, "model", None)).__name__ != "BPE"  # transformers skips BPE otherwise


def _fallback_byte(tokenizer: Any, token: int) -> int | None:
    """The byte that a token of SentencePiece stands for; None if it stands for text."""
    piece = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(piece, str) or not _BYTE_PIECE.fullmatch(piece) or tokenizer.decode([token]) == piece:
        return None
    return int(piece[3:-1], 16)


def _bytes_of_piece(piece: str | bytes | None) -> bytes | None:
    """The bytes of a token of byte-level BPE, which writes each of them as a character; None if the token is of another kind."""
    if isinstance(piece, bytes):
        return piece
    values = [_BYTE_OF.get(character) for character in piece or ""]
    return None if None in values else bytes(values)  # type: ignore[arg-type]


def find_stop(text: str, num_new: int, stops: list[str]) -> tuple[int, str] | None:
    """Find the first stop text that ends within the last `num_new` characters: (its start, the stop text); None if there is no match."""
    places = ((text.find(stop, max(0, len(text) - num_new - len(stop) + 1)), stop) for stop in stops)
    return min(((start, stop) for start, stop in places if start >= 0), default=None)


def token_text(tokenizer: Any, token: int) -> str | None:
    """The text of one token by itself, as it is within a text; None without a tokenizer."""
    if tokenizer is None:
        return None
    text, piece = tokenizer.decode([token]), tokenizer.convert_ids_to_tokens(token)
    num_spaces = len(piece) - len(piece.lstrip(_SPACE)) if isinstance(piece, str) else 0
    # Tokenizers of Llama 2's kind leave out one space at the beginning of a text.
    return " " * num_spaces + text.lstrip(" ") if num_spaces else text


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes of one token by itself. Unlike its text they are exact for a token that is a part of a character."""
    text = token_text(tokenizer, token) or ""
    if "\ufffd" not in text:
        return text.encode()
    byte = _fallback_byte(tokenizer, token)
    if byte is not None:
        return bytes([byte])
    spelt = _bytes_of_piece(tokenizer.convert_ids_to_tokens(token))
    return text.encode() if spelt is None else spelt


def safe_length(text: str, stops: list[str]) -> int:
    """Number of characters of a growing text that can be delivered: what follows them may be the beginning of a stop text."""
    for start in range(max(0, len(text) - max(map(len, stops), default=0) + 1), len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return start
    return len(text)
