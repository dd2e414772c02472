"""Any number of requests of one task: the bundled prompts, and variants of them with other names, numbers and words."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator

from loads import prompts

TASKS = ("math", "code", "edit", "summary", "story")
NAMES = (
    "Tim",
    "Lily",
    "Max",
    "Ben",
    "Sue",
    "Tom",
    "Mia",
    "Sam",
    "Anna",
    "Jack",
    "Lucy",
    "Bob",
    "Sara",
    "Leo",
    "Amy",
    "Joe",
)
WORDS = {
    "story": ("dog", "cat", "bird", "bear", "rabbit", "fish", "mouse", "duck", "frog", "horse"),
    "edit": ("items", "values", "result", "data", "entry", "words", "answer", "number", "output", "source", "target", "table"),
}  # fmt: skip
PLACES = ("park", "garden", "forest", "school", "beach", "kitchen", "farm", "river")
THINGS = ("ball", "cake", "kite", "hat", "book", "boat", "drum", "flower")
_NAME = re.compile(rf"\b({'|'.join((*NAMES, 'Janet', 'Josh', 'James', 'Wendi', 'Kylar', 'Toula', 'Carla'))})\b")
_NUMBER = re.compile(r"(?<![\w.$-])([2-9]|[1-9][0-9])(?![\w.%])")


def requests(task: str, count: int, seed: int = 0) -> list[str]:
    """The bundled prompts of a task ("mixed": of all tasks in turn), then variants of them; the same ones for the same seed."""
    if task == "mixed":
        each = [requests(one, -(-count // len(TASKS)), seed) for one in TASKS]
        return [text for texts in zip(*each, strict=True) for text in texts][:count]
    rng = random.Random(f"{task} {seed}")
    first = [] if task == "summary" else prompts(task)
    return list(itertools.islice(itertools.chain(first, _variants(task, first, rng)), count))


def _variants(task: str, bundled: list[str], rng: random.Random) -> Iterator[str]:
    seen = set(bundled)
    while True:
        text = _summary(rng) if task == "summary" else _variant(task, rng.choice(bundled), rng)
        if text not in seen:
            seen.add(text)
            yield text


def _variant(task: str, text: str, rng: random.Random) -> str:
    """Another request like this one."""
    line, _, rest = text.partition("\n")
    if task == "edit" and "`" in line:  # the new name stands in the last pair of backquotes of the first line
        at = line.rfind("`", 0, line.rfind("`"))
        return (
            f"{line[: at + 1]}{rng.choice(WORDS['edit'])}_{rng.choice(WORDS['edit'])}{line[line.rfind('`') :]}\n{rest}"
        )
    new = rng.choice(NAMES)
    text = _NAME.sub(lambda found: new, text)
    if task == "story":
        word = rng.choice(WORDS["story"])
        text = re.sub(
            r"\b(little boy|little girl|dog|cat|bird|rabbit|girl|boat|old man)\b", lambda found: word, text, count=1
        )
        return re.sub(r"\b(named|girl|boy) (?:[A-Z]\w+)", lambda found: f"{found[1]} {new}", text)
    return _NUMBER.sub(lambda found: str(max(2, int(found[1]) + rng.randint(-1, 3))), text)


def _summary(rng: random.Random) -> str:
    """A short story to be told in one sentence."""
    name, friend = rng.sample(NAMES, 2)
    place, thing, animal = rng.choice(PLACES), rng.choice(THINGS), rng.choice(WORDS["story"])
    return (
        f"Summarize this story in one sentence.\nOne day, {name} went to the {place} with a {animal}. {name} saw a big {thing} there. "
        f'{friend} wanted the {thing}, too. They were sad, because there was only one {thing}. Then {name} said, "We can share the '
        f'{thing}." {friend} smiled. They played with the {thing} in the {place} all day and the {animal} was happy.'
    )
