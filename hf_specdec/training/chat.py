"""Conversations: reading common formats, applying the chat template, and finding the answers in the rendered text."""

from __future__ import annotations

from typing import Any

from .options import TrainingError

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant"}


def conversation_of(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The messages of a row, roles "system", "user", "assistant" (or "tool"); None if it has none.

    Takes {"role", "content"} and ShareGPT's {"from", "value"}.

    Raises:
        TrainingError: the value is not a list of such messages.
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
    """The chat template's text; with `prompt`, up to the beginning of an answer.

    Raises:
        TrainingError: the tokenizer has no template, or the template refuses these messages.
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
    answers (reasoning) give one text per answer.

    Raises:
        TrainingError: the conversation has no answer, or an answer does not follow the template's generation prompt.
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
