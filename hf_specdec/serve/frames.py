"""Answers and stream frames as dictionaries, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .outputs import Logprob

_LEAST = -9999.0  # sent in place of minus infinity, which JSON cannot hold


def usage(num_prompt: int, num_new: int, num_cached: int) -> dict[str, Any]:
    """The field `usage`: numbers of tokens of the prompt, of the answer, and of the prompt's part that was cached."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def chat_logprobs(entries: Sequence[dict[int, Logprob]], tokens: Sequence[int], top: int) -> dict[str, Any]:
    """The field `logprobs` of a chat choice: one entry per token, each with the `top` most probable tokens."""
    content = []
    for entry, token in zip(entries, tokens, strict=True):
        ranked = sorted(entry.items(), key=lambda item: item[1].rank)
        content.append({**_token(entry[token]), "top_logprobs": [_token(each) for _, each in ranked[:top]]})
    return {"content": content, "refusal": None}


def _token(logprob: Logprob) -> dict[str, Any]:
    text = logprob.decoded_token or ""
    return {"token": text, "logprob": max(logprob.logprob, _LEAST), "bytes": list(text.encode())}


def completion_logprobs(
    entries: Sequence[dict[int, Logprob] | None], tokens: Sequence[int], texts: Sequence[str], top: int, offset: int
) -> dict[str, Any]:
    """The field `logprobs` of a completion choice.

    Args:
        entries: for each token; None for the first token of a prompt, which no logits predict.
        texts: the text of each token.
        top: number of most probable tokens to list for each token.
        offset: position of the first token in the text, in characters.
    """
    offsets, logprobs, tops = [], [], []
    for entry, token, text in zip(entries, tokens, texts, strict=True):
        offsets.append(offset)
        offset += len(text)
        logprobs.append(None if entry is None else max(entry[token].logprob, _LEAST))
        best = sorted((entry or {}).values(), key=lambda each: each.rank)[:top]
        own = [] if entry is None or entry[token] in best else [entry[token]]
        found = {each.decoded_token or "": max(each.logprob, _LEAST) for each in [*best, *own]}
        tops.append(None if entry is None else found)
    return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": list(texts), "top_logprobs": tops}
