"""Replaces the data's answers with the target's own, because those are what heads must predict."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from ..core.sequence import cut_at_end
from .data import PROMPT_KEYS, conversation_of, render, text_of
from .options import TrainingError
from .state import disk_full, progress_bar, write_text
from .target import TargetModel

_SHORTEST = 16  # fewest tokens of room for which an answer is generated


@dataclass
class Regeneration:
    """How answers are generated.

    Attributes:
        path: the file of the answers, continued if it exists. None: a file in the run's folder.
        max_new_tokens: of an answer.
        temperature: 0: greedy.
        top_p: nucleus, with a temperature.
        batch_size: conversations at a time. Answers do not depend on it.
        prompt_tokens: for plain text, how many tokens of each piece are the prompt.
        speculative_config: the method that drafts; the answers do not depend on it.
        seed: of sampling.
    """

    path: str | Path | None = None
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    batch_size: int = 16
    prompt_tokens: int = 64
    speculative_config: dict[str, Any] = field(default_factory=lambda: {"method": "ngram"})
    seed: int = 0


@dataclass
class _Source:
    """A prompt or conversation that is being answered.

    Attributes:
        copy: number of earlier sources that begin with the same prompt. Each copy is sampled with another seed.
        group, task: of its samples, see data.py.
        where: its place in the data, for errors.
        turns: a conversation's messages before each answer; None: the prompt is `prompt_ids`, without template.
        messages: a conversation's messages so far, answers included.
        rows: rows to write, one per answer.
    """

    number: int
    group: str
    task: str
    where: str
    turns: list[list[dict[str, Any]]] | None = None
    prompt_ids: list[int] | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    copy: int = 0

    @property
    def num_turns(self) -> int:
        return 1 if self.turns is None else len(self.turns)


def regenerate(
    target: TargetModel,
    rows: list[dict[str, Any]],
    path: Path,
    settings: Regeneration,
    quiet: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Have the target answer every prompt of `rows` (conversations turn by turn, after its own earlier answers) and write
    `path`: a row per answer with `prompt_ids`, `answer_ids`, `group`, `task` and the texts.

    Raises:
        TrainingError: a row has no prompt, the file was written with other settings, or the disk is full.
    """
    if not hasattr(GenerationConfig, "speculative_config"):
        raise TrainingError("The target answers with speculation, which is uninstalled: call hf_specdec.install().")
    sources = [source for row in rows for source in _sources(row, target, settings)]
    copies = Counter[str]()
    for number, source in enumerate(sources):
        begins = json.dumps(source.prompt_ids if source.turns is None else source.turns[0])
        source.number, source.copy = number, copies[begins]
        copies[begins] += 1
    prompts = _digest(json.dumps([[source.turns, source.prompt_ids] for source in sources], sort_keys=True))
    identity = {"target": target.name, "prompts": prompts, **asdict(settings)}
    for free in ("path", "batch_size", "speculative_config"):  # the answers do not depend on these
        del identity[free]
    answers = _Answers(path, identity)
    done = answers.done
    say(f"the target answers {len(sources)} prompts into {path}" + (f"; {done} are done already" if done else ""))
    with progress_bar(not quiet, transient=True) as progress:
        task = progress.add_task("answering", total=len(sources), completed=done)
        for first in range(done, len(sources), settings.batch_size):
            chunk = sources[first : first + settings.batch_size]
            for turn in range(max(source.num_turns for source in chunk)):
                _answer([source for source in chunk if source.num_turns > turn], turn, target, settings)
            answers.append([row for source in chunk for row in source.rows], first + len(chunk))
            progress.advance(task, len(chunk))
    if not path.stat().st_size:
        raise TrainingError(
            f"None of the {len(sources)} prompts leaves room for an answer: they are longer than the target reads."
        )
    return path


def _sources(row: dict[str, Any], target: TargetModel, settings: Regeneration) -> list[_Source]:
    tokenizer, where, task = target.tokenizer, row["_where"], str(row.get("task") or "")
    messages, prompt = conversation_of(row), text_of(row, PROMPT_KEYS)
    if messages is None and prompt is not None and tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": prompt}]
    if messages is not None:
        turns = _turns(messages)
        if not turns:
            raise TrainingError(f"{where}: the conversation has nothing to answer.")
        return [_Source(0, _digest(messages[0]["content"]), task, where, turns=turns)]
    if prompt is not None:
        return [_Source(0, _digest(prompt), task, where, prompt_ids=tokenizer(prompt, verbose=False)["input_ids"])]
    text = text_of(row, ("text",))
    if text is None:
        raise TrainingError(f'{where} has no prompt: give "messages", "conversations", "prompt" or "text".')
    ids = tokenizer(text, verbose=False)["input_ids"]
    piece = settings.prompt_tokens + settings.max_new_tokens
    starts = range(0, max(1, len(ids) - settings.prompt_tokens), piece)
    pieces = [ids[start : start + settings.prompt_tokens] for start in starts]
    groups = (_digest(f"{i}:{text}") for i in itertools.count())
    return [_Source(0, group, task, where, prompt_ids=ids) for group, ids in zip(groups, pieces, strict=False) if ids]


def _turns(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The messages before each answer, without the answers; an unanswered question gets an answer too."""
    turns, waiting = [], []
    for message in messages:
        if message["role"] != "assistant":
            waiting.append(message)
        elif waiting:
            turns.append(waiting)
            waiting = []
    return [*turns, waiting] if any(message["role"] == "user" for message in waiting) else turns


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _answer(sources: list[_Source], turn: int, target: TargetModel, settings: Regeneration) -> None:
    """Generate one answer for each source, except for sources whose prompt has become too long."""
    tokenizer, limit = target.tokenizer, getattr(target.config, "max_position_embeddings", None) or 2**31
    asked: list[tuple[_Source, list[int]]] = []
    for source in sources:
        if len(source.rows) < turn:  # an earlier answer did not fit
            continue
        ids = source.prompt_ids
        if source.turns is not None:
            source.messages += source.turns[turn]
            text = render(tokenizer, source.messages, source.where, prompt=True)
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        assert ids is not None
        if len(ids) + _SHORTEST <= limit:
            asked.append((source, ids))
    # A prompt that leaves less room than the others is answered alone, because it would cut their answers short. Copies of a prompt are
    # sampled one after another, because in one batch they would be told apart by their order there.
    batches: dict[tuple[int, int | None], list[tuple[_Source, list[int]]]] = {}
    for source, ids in asked:
        has_room = len(ids) + settings.max_new_tokens <= limit
        copy = source.copy if settings.temperature else 0
        batches.setdefault((copy, None if has_room else source.number), []).append((source, ids))
    for (copy, _), batch in batches.items():
        room = min(settings.max_new_tokens, limit - max(len(ids) for _, ids in batch))
        answers = _generate([ids for _, ids in batch], room, target, settings, settings.seed + copy)
        for (source, ids), answer in zip(batch, answers, strict=True):
            text = tokenizer.decode(answer, skip_special_tokens=True)
            source.messages.append({"role": "assistant", "content": text})
            known = {"prompt": tokenizer.decode(ids), "answer": text, "prompt_ids": ids, "answer_ids": answer}
            source.rows.append({"source": source.number, "task": source.task, "group": source.group, **known})


def _generate(
    prompts: list[list[int]], max_new_tokens: int, target: TargetModel, settings: Regeneration, seed: int
) -> list[list[int]]:
    """The new tokens of each prompt, with the end token if one was generated."""
    input_ids, attention_mask = (
        pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_side="left")
        for rows in (prompts, [[1] * len(ids) for ids in prompts])
    )
    sampling = dict(temperature=settings.temperature, top_p=settings.top_p, top_k=0) if settings.temperature else {}
    model: Any = target.model  # whose own `generate` may be a repository's
    output = type(model).generate(
        model,
        input_ids=input_ids.to(target.model.device),
        attention_mask=attention_mask.to(target.model.device),
        max_new_tokens=max_new_tokens,
        do_sample=bool(settings.temperature),
        eos_token_id=sorted(target.end_tokens) or None,
        pad_token_id=next(iter(target.end_tokens), 0),
        speculative_config={**settings.speculative_config, "seed": seed},
        **sampling,
    )
    rows = output[:, input_ids.shape[1] :].tolist()
    return cut_at_end(rows, target.end_tokens)


class _Answers:
    """The file of the answers, with a record of their settings and of how much of the file is complete."""

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path, self.identity = path, identity
        self.record = path.with_name(path.name + ".state.json")
        self.done = self._resume()

    def _resume(self) -> int:
        """The number of finished sources; the file is truncated after their rows."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.record.is_file():
            if self.path.is_file():
                raise TrainingError(f"{self.path} exists, but is not from --regenerate: name another file.")
            self.path.touch()
            self._note(0)
            return 0
        known = json.loads(self.record.read_text(encoding="utf-8"))
        if (theirs := known["settings"]) != self.identity:
            changed = sorted(k for k in theirs.keys() | self.identity.keys() if theirs.get(k) != self.identity.get(k))
            raise TrainingError(
                f"{self.path} was written with other settings ({', '.join(changed)}): name another file, or remove it and "
                f"{self.record.name}."
            )
        if not self.path.is_file() or self.path.stat().st_size < known["bytes"]:
            raise TrainingError(f"{self.path} is shorter than when it was written: remove it and {self.record.name}.")
        os.truncate(self.path, known["bytes"])
        return known["done"]

    def append(self, rows: list[dict[str, Any]], done: int) -> None:
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        except OSError as error:
            raise disk_full(self.path, error) from error
        self._note(done)

    def _note(self, done: int) -> None:
        known = {"settings": self.identity, "done": done, "bytes": self.path.stat().st_size}
        write_text(self.record, json.dumps(known))
