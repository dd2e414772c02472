"""Checks the table of published heads; with --online also that the Hub has them: python scripts/check_published_heads.py [--online]"""

import argparse
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from hf_specdec.candidate_generators import available_methods
from hf_specdec.candidate_generators.auto.hub import TABLE

NEEDED = {"target", "head", "method", "licence", "tau", "task", "source"}
REPO = re.compile(r"[\w.-]+/[\w.-]+")


def problems(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What is wrong with the table's form, a line for each fault."""
    for row in rows:
        where = f"{row.get('target')}, {row.get('head')}"
        if set(row) - {"gigabytes"} != NEEDED:
            yield f"{where}: has the keys {', '.join(row)}; needed: {', '.join(sorted(NEEDED))}; optional: gigabytes"
            continue
        for key in ("target", "head"):
            if not REPO.fullmatch(row[key]):
                yield f"{where}: {key!r} is not of the form owner/name"
        if row["method"] not in available_methods():
            yield f"{where}: there is no method {row['method']!r}"
        if not row["source"]:
            yield f"{where}: has no source"
        if row["tau"] is not None and not (row["tau"] >= 1 and row["task"]):
            yield f"{where}: 'tau' is at least 1 and has a task"
        if row.get("gigabytes", 1) <= 0:
            yield f"{where}: 'gigabytes' is positive, or is left out"
    places = [(str(row.get("target")).lower(), str(row.get("head")).lower()) for row in rows]
    for before, after in pairwise(places):
        if after <= before:
            yield f"{', '.join(after)}: " + (
                "is there twice" if after == before else f"belongs before {', '.join(before)}"
            )


def missing(heads: list[str]) -> Iterator[str]:
    """The heads that the Hub does not have."""
    api = HfApi()
    for head in heads:
        try:
            api.model_info(head)
        except RepositoryNotFoundError:
            yield f"{head}: is not on the Hub"


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--online", action="store_true", help="ask the Hub whether it has every head")
    online = parser.parse_args(args).online
    rows = json.loads(TABLE.read_text(encoding="utf-8"))
    found = list(problems(rows))
    if online and not found:
        found = list(missing(sorted({row["head"] for row in rows})))
    print(*found, f"{len(rows)} rows, {len(found)} problems", sep="\n")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
