"""Training data: conversations, prompts with answers, or plain text, as token ids with a mask of the tokens that count."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import jsonl
from .options import TrainingError

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant"}
PROMPT_KEYS, ANSWER_KEYS = ("prompt", "question"), ("completion", "answer", "response")


@dataclass
class Sample:
    """One text: token ids, int32 [n], and which of them are tokens of answers, bool [n].

    Attributes:
        group: samples of one group are either all trained on or all held out.
        task: the kind of text, "" if unknown.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    group: str
    task: str = ""

    def __len__(self) -> int:
        return len(self.token_ids)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file, each with its place under "_where"; any other file is one plain text. Raises TrainingError: the file is
    missing, empty or not UTF-8, or a line is not a JSON object.
    """
    try:
        rows = jsonl.read_rows(path, plain_key="text")
    except ValueError as error:
        raise TrainingError(str(error)) from None
    if not rows:
        raise TrainingError(f"{path}: the file has nothing in it.")
    return rows


def text_of(row: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    """The text under the first of `keys` that is present."""
    for key in keys:
        if row.get(key) is not None:
            if not isinstance(row[key], str):
                raise TrainingError(f"{row['_where']}: {key!r} is not text.")
            return row[key]
    return None


def conversation_of(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The messages of a row, roles "system", "user", "assistant" (or "tool"); None if it has none. Takes {"role", "content"} and ShareGPT's
    {"from", "value"}. Raises TrainingError: the value is not a list of such messages.
    """
    messages = row.get("messages", row.get("conversations"))
    if messages is None:
        return None
    if not isinstance(messages, list) or not messages:
        raise TrainingError(f"{row['_where']}: the conversation is not a list of messages.")
    return [_message(message, row["_where"]) for message in messages]


def _message(message: Any, where: str) -> dict[str, Any]:
    if isinstance(message, dict):
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if isinstance(role, str) and isinstance(content, str):
            others = {key: value for key, value in message.items() if key not in ("role", "from", "content", "value")}
            return {"role": _ROLES.get(role, role), "content": content, **others}
    raise TrainingError(
        f'{where}: a message needs text under "role" and "content" (or "from" and "value"), not {message!r:.80}.'
    )


def render(tokenizer: Any, messages: list[dict[str, Any]], where: str, prompt: bool = False) -> str:
    """The chat template's text; with `prompt`, up to the beginning of an answer. Raises TrainingError: there is no template, or it refuses
    these messages.
    """
    if tokenizer.chat_template is None:
        raise TrainingError(
            f'{where}: the target\'s tokenizer has no chat template; give "text", or "prompt" and "completion".'
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:  # jinja and templates raise many kinds
        raise TrainingError(f"{where}: the chat template refuses the conversation: {error}") from error


def answer_spans(messages: list[dict[str, Any]], tokenizer: Any, where: str) -> list[tuple[str, list[tuple[int, int]]]]:
    """Rendered texts, each with the spans [first, last) of characters that the target would write.

    One text, if the whole conversation contains every answer as it was first rendered. Templates that later drop parts of
    answers (reasoning) give one text per answer. Raises TrainingError: there is no answer, or one does not follow the generation prompt.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise TrainingError(
            f"{where}: a conversation without an answer of the assistant; with --regenerate the target writes one."
        )
    whole = render(tokenizer, messages, where)
    texts = []
    for i in turns:
        before, after = render(tokenizer, messages[:i], where, prompt=True), render(tokenizer, messages[: i + 1], where)
        if not after.startswith(before):
            raise TrainingError(
                f"{where}: the chat template renders an answer without its own generation prompt before it, so where the answer "
                'begins is not known: give "prompt" and "completion" texts instead.'
            )
        texts.append((after, (len(before), len(after))))
    if all(whole.startswith(after) for after, _ in texts):
        return [(whole, [span for _, span in texts])]
    return [(after, [span]) for after, span in texts]


def encode(
    rows: list[dict[str, Any]], tokenizer: Any, vocab_size: int, end_tokens: Collection[int], max_length: int
) -> list[Sample]:
    """Samples of all rows, at most `max_length` tokens each; samples without an answer token in it are dropped.

    In conversations and prompts the answers count; in plain text, which is cut into pieces, all tokens do.

    Raises:
        TrainingError: a row has an unknown format, conversations lack a chat template, ids are beyond the
            vocabulary, or no samples are left.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise TrainingError("The target's tokenizer is a slow one, which cannot say where answers begin in its tokens.")
    samples = [sample for row in rows for sample in _samples(row, tokenizer, end_tokens, max_length)]
    samples = [sample for sample in samples if sample.loss_mask[1:].any()]  # the first token cannot be predicted
    if not samples:
        raise TrainingError(
            f"None of the {len(rows)} rows has an answer within its first {max_length} tokens: raise --max-length, or look "
            "at the data."
        )
    largest = max(int(sample.token_ids.max()) for sample in samples)
    if largest >= vocab_size:
        raise TrainingError(
            f"The data has token id {largest}, but the target has {vocab_size} tokens: the data was made for another model."
        )
    return samples


def _samples(row: dict[str, Any], tokenizer: Any, end_tokens: Collection[int], max_length: int) -> Iterator[Sample]:
    task = str(row.get("task") or "")

    def begun(ids: np.ndarray, mask: np.ndarray, group: str) -> Sample:
        return Sample(ids[:max_length], mask[:max_length], group, task)

    if "prompt_ids" in row:  # written by --regenerate
        prompt, answer = _ids(row, "prompt_ids"), _ids(row, "answer_ids")
        mask = np.repeat([False, True], [len(prompt), len(answer)])
        yield begun(np.concatenate([prompt, answer]), mask, str(row.get("group") or row["prompt_ids"]))
        return
    messages = conversation_of(row)
    prompt, answer = text_of(row, PROMPT_KEYS), text_of(row, ANSWER_KEYS)
    if messages is None and prompt is not None and answer is not None and tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    if messages is not None:
        for text, spans in answer_spans(messages, tokenizer, row["_where"]):
            yield begun(*_tokenize(tokenizer, text, spans, False, end_tokens), str(messages[0]["content"]))
    elif prompt is not None and answer is not None:
        text = prompt + answer
        yield begun(*_tokenize(tokenizer, text, [(len(prompt), len(text))], True, set()), prompt)
    elif prompt is not None:
        raise TrainingError(f"{row['_where']}: a prompt without an answer; --regenerate has the target write one.")
    elif (text := text_of(row, ("text",))) is not None:
        ids, mask = _tokenize(tokenizer, text, [(0, len(text))], True, set())
        for start in range(0, len(ids), max_length):
            piece = slice(start, start + max_length)
            group = f"{start}:{text[:64]}" if row.get("_plain") else text
            yield Sample(ids[piece], mask[piece], group, task)
    else:
        known, has = '"messages", "conversations", "prompt" with "completion", or "text"', row.keys() - {"_where"}
        raise TrainingError(f"{row['_where']} has none of {known}; it has {', '.join(sorted(has))}.")


def _ids(row: dict[str, Any], key: str) -> np.ndarray:
    ids = row.get(key)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise TrainingError(f"{row['_where']}: {key!r} is not a list of token ids.")
    return np.asarray(ids, dtype=np.int32)


def _tokenize(
    tokenizer: Any, text: str, spans: list[tuple[int, int]], special: bool, end_tokens: Collection[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Ids, and which of them begin inside the spans, up to the first end token of each span."""
    out = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(out["input_ids"], dtype=np.int32)
    starts, stops = np.asarray(out["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(ids), dtype=bool)
    for first, last in spans:
        inside = np.flatnonzero((starts >= first) & (starts < last) & (stops > starts))
        ends = np.flatnonzero(np.isin(ids[inside], list(end_tokens)))
        mask[inside[: ends[0] + 1] if len(ends) else inside] = True
    return ids, mask


def split(samples: list[Sample], share: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """(training, held out), divided by a hash of the group and the seed: equal prompts are on the same side, whatever the order. Raises
    TrainingError: all samples are one group, which cannot be split.
    """
    if share == 0:
        return samples, []
    place = {group: _place(group, seed) for group in {sample.group for sample in samples}}
    if len(place) < 2:
        raise TrainingError("The data is a single sample, so none can be held out: give more data, or --held-out 0.")
    limit = max(share, sorted(place.values())[0])  # at least one
    limit = min(limit, sorted(place.values())[-2])  # and not all
    held = [sample for sample in samples if place[sample.group] <= limit]
    return [sample for sample in samples if place[sample.group] > limit], held


def _place(group: str, seed: int) -> float:
    """A number in [0, 1), uniform over groups."""
    digest = hashlib.sha256(f"{seed}\0{group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
