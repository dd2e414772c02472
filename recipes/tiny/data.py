"""The texts the tiny models learn from: openly licensed, local, split into training and held-out documents.

A document is one string. Chat documents are already written out with the special tokens of `tokenizer.py`, exactly as
the chat template writes them; plain ones are raw text. `<|endoftext|>` is appended when a document is tokenised.
"""

import ast
import json
import random
import re
import sysconfig
from pathlib import Path

STDLIB_PACKAGES = (
    "asyncio",
    "collections",
    "concurrent",
    "email",
    "html",
    "http",
    "importlib",
    "json",
    "logging",
    "urllib",
    "xml",
)
STDLIB_HELD_OUT = ("fractions", "heapq", "sched", "shlex", "statistics", "textwrap", "colorsys", "cmd", "json/decoder")
STDLIB_SKIPPED = (
    "this",
    "antigravity",
    "sre_",
    "_pydecimal",
    "pydoc_data",
    "turtle",
    "__phello__",
    "lib2to3",
    "_sysconfigdata",
)
MBPP_HELD_OUT = 100
NAMES = (
    "Ann",
    "Ben",
    "Carla",
    "Dan",
    "Eva",
    "Finn",
    "Gina",
    "Hugo",
    "Ivy",
    "Jon",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Pia",
    "Quinn",
    "Sue",
    "Zoe",
)
VARIABLES = (
    "total",
    "value",
    "items",
    "result",
    "data",
    "number",
    "count",
    "index",
    "entry",
    "left",
    "current",
    "size",
    "limit",
)


def chat(prompt: str, answer: str) -> str:
    """One question and its answer, as the chat template writes them."""
    return f"<|user|>{prompt.strip()}<|end|><|assistant|>{answer.strip()}<|end|>"


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def gsm8k_documents(path: Path) -> list[str]:
    """Questions with worked answers; the `<<48/2=24>>` calculator marks are taken out."""
    return [chat(row["question"], re.sub(r"<<.*?>>", "", row["answer"])) for row in read_jsonl(path)]


def clean_code(code: str) -> str:
    """Unix line ends, four spaces for a tab, no trailing blanks."""
    lines = code.replace("\r\n", "\n").replace("\r", "\n").expandtabs(4).split("\n")
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def mbpp_documents(path: Path) -> tuple[list[str], list[str], list[str]]:
    """Training chats (each task with and without its first test), held-out chats, and the training solutions alone."""
    train, held_out, solutions = [], [], []
    rows = read_jsonl(path)
    for i, row in enumerate(rows):
        code, task = clean_code(row["code"]), row["text"].strip()
        with_test = f"{task}\nIt should pass this test:\n{row['test_list'][0]}"
        if i >= len(rows) - MBPP_HELD_OUT:
            held_out.append(chat(with_test, fenced(code)))
        else:
            train += [chat(task, fenced(code)), chat(with_test, fenced(code))]
            solutions.append(code)
    return train, held_out, solutions


def split_stories(text: str) -> list[str]:
    """Stories out of the sample, which marks no borders: a paragraph with a usual opening starts a new one."""
    opening = re.compile(r"(Once upon a time|Once there was|One day, (a|an|two|there|in) |There was once|In a )")
    stories: list[list[str]] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if not stories or opening.match(paragraph):
            stories.append([])
        stories[-1].append(paragraph.strip())
    return ["\n\n".join(story) for story in stories]


def story_chat(story: str, rng: random.Random) -> str:
    """A request that the story answers: about its hero where the opening names one, else continue the opening."""
    first = re.match(r".*?[.!?]\"?(?=\s|$)", story, re.DOTALL)
    opening = first.group(0) if first else story[:80]
    hero = re.search(r"\b(an?|two) ([a-z ,]{3,30}) named ([A-Z][a-z]+( and [A-Z][a-z]+)?)", opening)
    if hero and rng.random() < 0.6:
        return chat(f"Tell me a story about {hero.group(0)}.", story)
    return chat(f"Tell me a story that begins like this: {opening}", story)


def stdlib_modules() -> dict[str, str]:
    """Source of the running interpreter's standard library by module name (`json/decoder`), without tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = list(root.glob("*.py")) + [p for name in STDLIB_PACKAGES for p in (root / name).rglob("*.py")]
    modules = {}
    for path in sorted(paths):
        name = path.relative_to(root).with_suffix("").as_posix()
        if "test" not in name and not name.startswith(STDLIB_SKIPPED) and path.stat().st_size < 120_000:
            modules[name] = clean_code(path.read_text(encoding="utf-8", errors="replace"))
    return modules


def functions_of(source: str) -> list[tuple[str, str, str]]:
    """(name, first line of the docstring, dedented source) of the short documented top-level functions and methods."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and 4 <= node.end_lineno - node.lineno <= 40:
            lines = source.split("\n")[node.lineno - 1 : node.end_lineno]
            code = "\n".join(line[node.col_offset :] for line in lines)
            found.append((node.name, (ast.get_docstring(node) or "").split("\n")[0], code))
    return found


def split_long(text: str, characters: int) -> list[str]:
    """Cut a long text at line ends into pieces of at most about `characters`."""
    pieces, piece = [], ""
    for line in text.split("\n"):
        if len(piece) + len(line) > characters and piece:
            pieces.append(piece)
            piece = ""
        piece += line + "\n"
    return [*pieces, piece] if piece.strip() else pieces


def rename_variable(code: str, rng: random.Random) -> str | None:
    """An edit request over `code` whose answer is the code with one local name or the function's name changed."""
    defined = re.search(r"def (\w+)\((\w*)", code)
    if not defined:
        return None
    old = defined.group(1) if rng.random() < 0.5 or len(defined.group(2)) < 2 else defined.group(2)
    new = rng.choice(VARIABLES) + rng.choice(["", "_1", "_2", "_new", "_list"])
    if old in ("self", "cls") or re.search(rf"\b{new}\b", code):
        return None
    kind = "function" if old == defined.group(1) else "variable"
    request = rng.choice(
        [f"Rename the {kind} `{old}` to `{new}`.", f"Rewrite this code with `{old}` renamed to `{new}`."]
    )
    return chat(f"{request}\n{fenced(code)}", fenced(re.sub(rf"\b{re.escape(old)}\b", new, code)))


def rename_person(text: str, rng: random.Random) -> str | None:
    """An edit request over a story or a problem whose answer is the same text with one name changed."""
    names = sorted(set(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,8}\b", text)))
    if not names or len(text) > 900:
        return None
    old, new = rng.choice(names), rng.choice(NAMES)
    if rng.random() < 0.15:
        return chat(f"Repeat this text:\n{text}", text)
    request = rng.choice([f"Rewrite this text with {old} changed to {new}.", f"Replace {old} by {new} in this text."])
    return chat(f"{request}\n{text}", re.sub(rf"\b{old}\b", new, text))


def edit_documents(codes: list[str], texts: list[str], rng: random.Random) -> list[str]:
    made = [rename_variable(code, rng) for code in codes if len(code) < 900] + [
        rename_person(text, rng) for text in texts
    ]
    return [document for document in made if document]


def load_documents(
    folder: Path, more_stories: Path, seed: int = 0
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """(training, held-out) documents by source name, from `folder` (see README.md) and Python's own files.

    `more_stories` (one JSON string a line, from stories.py) is left out if it is not there.
    """
    rng = random.Random(seed)
    train: dict[str, list[str]] = {}
    held_out: dict[str, list[str]] = {}
    train["gsm8k"], held_out["gsm8k"] = (
        gsm8k_documents(folder / "gsm8k" / f"{part}.jsonl") for part in ("train", "test")
    )
    train["mbpp"], held_out["mbpp"], solutions = mbpp_documents(folder / "mbpp" / "mbpp.jsonl")

    stories = split_stories((folder / "text" / "tinystories_sample.txt").read_text(encoding="utf-8"))
    cut = int(len(stories) * 0.9)
    train["stories"] = stories[:cut]
    train["stories_chat"] = [story_chat(story, rng) for story in stories[:cut] for _ in range(2)]
    if more_stories.exists():
        train["more_stories"] = [story_chat(story, rng) for story in read_jsonl(more_stories)]
    held_out["stories"] = [story_chat(story, rng) for story in stories[cut:]]

    modules = stdlib_modules()
    kept = {name: source for name, source in modules.items() if name not in STDLIB_HELD_OUT}
    train["stdlib"] = [piece for source in kept.values() for piece in split_long(source, 2500)]
    held_out["stdlib"] = [piece for name in STDLIB_HELD_OUT for piece in split_long(modules[name], 2500)]
    functions = [function for source in kept.values() for function in functions_of(source)]
    train["stdlib_chat"] = [
        chat(f"Write a Python function `{n}`: {doc}", fenced(code)) for n, doc, code in functions if doc
    ]

    problems = [row["question"] for row in read_jsonl(folder / "gsm8k" / "train.jsonl")]
    texts = problems[::3] + stories[:cut] + (read_jsonl(more_stories)[::3] if more_stories.exists() else [])
    train["edit"] = edit_documents(solutions * 2 + [code for _, _, code in functions], texts, rng)
    held_problems = [row["question"] for row in read_jsonl(folder / "gsm8k" / "test.jsonl")[:60]]
    held_out["edit"] = edit_documents([], held_problems, rng)
    train["shakespeare"] = split_long((folder / "text" / "tinyshakespeare.txt").read_text(encoding="utf-8"), 2000)
    if (folder / "humaneval" / "HumanEval.jsonl").exists():
        rows = read_jsonl(folder / "humaneval" / "HumanEval.jsonl")
        held_out["humaneval"] = [row["prompt"] + row["canonical_solution"] for row in rows]
    return train, held_out
