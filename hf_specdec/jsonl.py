"""Files of rows: JSON Lines, an object on every line, or one plain text. Prompts and training data come in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_rows(path: str | Path, plain_key: str) -> list[dict[str, Any]]:
    """The rows of a UTF-8 file (a byte order mark is no part of it), see `rows_of`.

    Raises:
        ValueError: no such file, not UTF-8, a line that is no JSON object; the message begins with the place.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}).") from None
    return rows_of(text, str(path), plain_key)


def rows_of(text: str, name: str, plain_key: str) -> list[dict[str, Any]]:
    """The JSON objects of a text named like a .jsonl or .ndjson file, each with its place ("file:line") under "_where".
    Any other text that is not blank is one row with itself under `plain_key` and "_plain": True."""
    if Path(name).suffix in (".jsonl", ".ndjson"):
        return [_row(line, f"{name}:{n}") for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [{plain_key: text, "_where": name, "_plain": True}] if text.strip() else []


def _row(line: str, where: str) -> dict[str, Any]:
    return {**json_object(line, where), "_where": where}


def json_object(text: str, where: str) -> dict[str, Any]:
    """The object that a JSON text holds. Raises `ValueError`, which names `where` the text stood, for anything else."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}).") from None
    except RecursionError:
        raise ValueError(f"{where}: JSON that is nested too deeply.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object.")
    return value
