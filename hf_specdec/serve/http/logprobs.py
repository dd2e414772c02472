"""Log-probabilities in OpenAI's and vLLM's shapes."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from ..engine.outputs import Logprob
from ..ipc.messages import Update

_LEAST = -9999.0  # sent in place of minus infinity, which JSON cannot hold
_PART = "\ufffd"  # stands in the text of a token that is only part of a character


def chat_logprobs(update: Update, top: int, bytes_of: Callable[[int], bytes], as_ids: bool = False) -> dict[str, Any]:
    """The field `logprobs` of a chat choice: one entry per new token, each with the `top` most probable tokens. A token that is only part
    of a character has exact bytes (`bytes_of`), but U+FFFD as its text. `as_ids`: tokens are shown by vLLM's "token_id:5".
    """

    def of_token(token: int, scored: Logprob) -> dict[str, Any]:
        text = scored.decoded_token or ""
        shown = f"token_id:{token}" if as_ids else text
        return {"token": shown, "logprob": max(scored.logprob, _LEAST), "bytes": list(_bytes(token, text, bytes_of))}

    content = []
    for entry, token in zip(update.logprobs or [], update.token_ids, strict=True):
        best = sorted(entry.items(), key=lambda item: item[1].rank)[:top]
        content.append({**of_token(token, entry[token]), "top_logprobs": [of_token(*item) for item in best]})
    return {"content": content, "refusal": None}


def prompt_logprobs(
    entries: Sequence[dict[int, Logprob] | None] | None, tokens: Sequence[int], top: int | None
) -> list[dict[str, Any] | None] | None:
    """vLLM's field `prompt_logprobs`: for each token of a prompt, the log-probabilities of itself and of the `top` most probable tokens,
    by id. None for the first, and for tokens that were not read. `top` None: it is not wanted.
    """
    if top is None:
        return None
    shown: list[dict[str, Any] | None] = [None] * len(tokens)
    for place, (token, entry) in enumerate(zip(tokens, entries or [], strict=False)):
        if entry is not None:
            best = {id: scored for id, scored in entry.items() if scored.rank <= top or id == token}
            shown[place] = {str(id): {**vars(it), "logprob": max(it.logprob, _LEAST)} for id, it in best.items()}
    return shown


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
    entries: Sequence[dict[int, Logprob] | None], tokens: Sequence[int], texts: Sequence[str], top: int,
    offsets: Sequence[int], bytes_of: Callable[[int], bytes], as_ids: bool = False
) -> dict[str, Any]:  # fmt: skip
    """The field `logprobs` of a completion choice.

    Args:
        entries: for each token; None for the first token of a prompt, which no logits predict.
        offsets: the place of each token in the text, in characters.
        bytes_of: a token's bytes, by which OpenAI shows a token that is a part of a character: "bytes:\\xc3".
        as_ids: see `chat_logprobs`.
    """

    def name(token: int, text: str) -> str:
        if as_ids:
            return f"token_id:{token}"
        spelt = _bytes(token, text, bytes_of)
        return text if spelt == text.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)

    logprobs, tops = [], []
    for entry, token in zip(entries, tokens, strict=True):
        logprobs.append(None if entry is None else max(entry[token].logprob, _LEAST))
        best = dict(sorted((entry or {}).items(), key=lambda item: item[1].rank)[:top])
        if entry is not None:
            best.setdefault(token, entry[token])
        named = {name(id, scored.decoded_token or ""): max(scored.logprob, _LEAST) for id, scored in best.items()}
        tops.append(None if entry is None else named)
    shown = [name(token, text) for token, text in zip(tokens, texts, strict=True)]
    return {"text_offset": list(offsets), "token_logprobs": logprobs, "tokens": shown, "top_logprobs": tops}
