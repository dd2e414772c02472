"""Reads prompts and training data from files: JSON Lines (an object per line) or one plain text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_rows(path: str | Path, plain_key: str) -> list[dict[str, Any]]:
    """The rows of a UTF-8 file, see `rows_of`. A byte order mark is skipped. Raises ValueError: the file does not exist, is not UTF-8,
    or has a line that is not a JSON object. The message begins with the file and line."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}).") from None
    return rows_of(text, str(path), plain_key)


def rows_of(text: str, name: str, plain_key: str) -> list[dict[str, Any]]:
    """The rows of a text whose file is called `name`.

    A .jsonl or .ndjson file has one row per line: its JSON object, with "file:line" added under "_where". Any other text is
    one row, {plain_key: text, "_where": name, "_plain": True}; a blank text has no rows.
    """
    if Path(name).suffix in (".jsonl", ".ndjson"):
        lines = ((line, f"{name}:{n}") for n, line in enumerate(text.split("\n"), 1) if line.strip())
        return [{**json_object(line, where), "_where": where} for line, where in lines]
    return [{plain_key: text, "_where": name, "_plain": True}] if text.strip() else []


def json_object(text: str, where: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `ValueError`, whose message begins with `where`, if the text is anything else."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}).") from None
    except RecursionError:
        raise ValueError(f"{where}: JSON that is nested too deeply.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object.")
    return value
