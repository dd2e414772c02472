"""Answers and stream frames as dictionaries, in OpenAI's shapes."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from .outputs import Logprob

_LEAST = -9999.0  # sent in place of minus infinity, which JSON cannot hold
_PART = "\ufffd"  # stands in the text of a token that is only part of a character


def usage(num_prompt: int, num_new: int, num_cached: int) -> dict[str, Any]:
    """The field `usage`: numbers of tokens of the prompt, of the answer, and of the prompt's part that was cached."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def chat_logprobs(
    entries: Sequence[dict[int, Logprob]], tokens: Sequence[int], top: int, bytes_of: Callable[[int], bytes]
) -> dict[str, Any]:
    """The field `logprobs` of a chat choice: one entry per token, each with the `top` most probable tokens.

    Args:
        bytes_of: a token's bytes. A token that is only part of a character has exact bytes, but U+FFFD as its text.
    """

    def of_token(token: int, found: Logprob) -> dict[str, Any]:
        return {
            "token": found.decoded_token or "",
            "logprob": max(found.logprob, _LEAST),
            "bytes": list(_bytes(token, found.decoded_token or "", bytes_of)),
        }

    content = []
    for entry, token in zip(entries, tokens, strict=True):
        ranked = sorted(entry.items(), key=lambda item: item[1].rank)
        best = [of_token(*each) for each in ranked[:top]]
        content.append({**of_token(token, entry[token]), "top_logprobs": best})
    return {"content": content, "refusal": None}


def prompt_logprobs(
    entries: Sequence[dict[int, Logprob] | None] | None, tokens: Sequence[int], top: int | None
) -> list[dict[str, Any] | None] | None:
    """vLLM's field `prompt_logprobs`: for each token of a prompt, the log-probabilities of itself and of the `top` most probable tokens,
    by id. None for the first, and for tokens that were not read.

    Args:
        entries: one for each token that was read; an entry may hold more than the `top` most probable tokens.
        top: None: the field is not wanted, and null.
    """
    if top is None:
        return None
    found: list[dict[str, Any] | None] = [None] * len(tokens)
    for place, (token, entry) in enumerate(zip(tokens, entries or [], strict=False)):
        if entry is not None:
            shown = {id: each for id, each in entry.items() if each.rank <= top or id == token}
            found[place] = {str(id): {**vars(each), "logprob": max(each.logprob, _LEAST)} for id, each in shown.items()}
    return found


def _bytes(token: int, text: str, bytes_of: Callable[[int], bytes]) -> bytes:
    """A token's bytes, which are not those of its text if it is a part of a character."""
    return bytes_of(token) if _PART in text else text.encode()


class TextOffsets:
    """The places of a text's tokens in it, in characters. It is told the tokens in order, frame by frame.

    A place is not that of the text that a stream has sent: text is held back while it may begin a stop text, or is part of a character.
    """

    def __init__(self) -> None:
        self._next = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")  # counts a character of several tokens once

    def add(self, token: bytes) -> int:
        """The place of the next token; its bytes are empty if it is not shown."""
        place = self._next
        self._next += len(self._characters.decode(token))
        return place


def completion_logprobs(
    entries: Sequence[dict[int, Logprob] | None],
    tokens: Sequence[int],
    texts: Sequence[str],
    top: int,
    offsets: Sequence[int],
    bytes_of: Callable[[int], bytes],
) -> dict[str, Any]:
    """The field `logprobs` of a completion choice.

    Args:
        entries: for each token; None for the first token of a prompt, which no logits predict.
        texts: the text of each token.
        top: number of most probable tokens to list for each token.
        offsets: the place of each token in the text, in characters.
        bytes_of: a token's bytes. A token that is a part of a character is shown by them, as OpenAI does: "bytes:\\xc3".
    """

    def name(token: int, text: str) -> str:
        found = _bytes(token, text, bytes_of)
        return text if found == text.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    logprobs, tops = [], []
    for entry, token in zip(entries, tokens, strict=True):
        logprobs.append(None if entry is None else max(entry[token].logprob, _LEAST))
        best = sorted((entry or {}).items(), key=lambda each: each[1].rank)[:top]
        own = [] if entry is None or token in dict(best) else [(token, entry[token])]
        found = {name(id, each.decoded_token or ""): max(each.logprob, _LEAST) for id, each in [*best, *own]}
        tops.append(None if entry is None else found)
    shown = [name(token, text) for token, text in zip(tokens, texts, strict=True)]
    return {"text_offset": list(offsets), "token_logprobs": logprobs, "tokens": shown, "top_logprobs": tops}
