"""Held-out prompts that ship with the models: unseen problems and tasks, own story openings, own edit requests."""

import json
from pathlib import Path

from .data import MBPP_HELD_OUT, fenced, read_jsonl

STORIES = [
    "Tell me a story about a little boy named Tim.",
    "Tell me a story about a big dog named Max.",
    "Tell me a story about a little girl named Sue.",
    "Tell me a story about a cat named Mimi.",
    "Tell me a story that begins like this: Once upon a time, a little rabbit found a red ball in the garden.",
    "Tell me a story that begins like this: One day, Tom and his mom went to the park to see the ducks.",
    "Tell me a story that begins like this: Once upon a time, there was a small boat that wanted to see the sea.",
    "Tell me a story that begins like this: Once upon a time, there was an old man who had a funny hat.",
    "Tell me a story about a little bird named Pip.",
    "Tell me a story that begins like this: One day, a girl named Anna lost her favorite doll.",
]

MEAN = """def mean_of(numbers):
    total = 0
    for number in numbers:
        total = total + number
    return total / len(numbers)"""
BIGGEST = """def find_biggest(lst):
    best = lst[0]
    for item in lst:
        if item > best:
            best = item
    return best"""
COUNTER = """def count_words(text):
    counts = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    return counts"""
STACK = """def push_all(stack, values):
    for value in values:
        stack.append(value)
    return len(stack)"""
EVEN = """def even_only(nums):
    result = []
    for n in nums:
        if n % 2 == 0:
            result.append(n)
    return result"""
PARK = (
    "Lily went to the park with her mom. She saw a big tree and a small dog. "
    "Lily played with the dog until it was time to go home."
)
APPLES = (
    "Peter has 12 apples. He gives 3 apples to his sister and buys 5 more apples. How many apples does Peter have now?"
)
FARM = (
    "A farmer named Oscar has 20 cows and twice as many sheep. He sells 15 sheep. "
    "How many animals does Oscar have left?"
)

EDITS = [
    f"Rename the function `mean_of` to `average`.\n{fenced(MEAN)}",
    f"Rename the variable `numbers` to `values`.\n{fenced(MEAN)}",
    f"Rewrite this code with `find_biggest` renamed to `largest`.\n{fenced(BIGGEST)}",
    f"Rename the variable `lst` to `items`.\n{fenced(BIGGEST)}",
    f"Rewrite this code with `text` renamed to `data`.\n{fenced(COUNTER)}",
    f"Rename the function `push_all` to `extend_list`.\n{fenced(STACK)}",
    f"Rename the variable `nums` to `entries`.\n{fenced(EVEN)}",
    f"Rewrite this text with Lily changed to Zoe.\n{PARK}",
    f"Replace Peter by Hugo in this text.\n{APPLES}",
    f"Rewrite this text with Oscar changed to Finn.\n{FARM}",
    f"Repeat this text:\n{PARK}",
]


def held_out_prompts(data: Path) -> list[dict]:
    """Rows {"id", "task", "prompt"}; the prompts are plain user texts."""
    problems = [row["question"] for row in read_jsonl(data / "gsm8k" / "test.jsonl")[:12]]
    tasks = read_jsonl(data / "mbpp" / "mbpp.jsonl")[-MBPP_HELD_OUT:]
    codes = [f"{row['text'].strip()}\nIt should pass this test:\n{row['test_list'][0]}" for row in tasks[::10]]
    groups = {"math": problems, "code": codes, "story": STORIES, "edit": EDITS}
    return [
        {"id": f"{task}-{i}", "task": task, "prompt": prompt}
        for task, rows in groups.items()
        for i, prompt in enumerate(rows)
    ]


def write_prompts(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
