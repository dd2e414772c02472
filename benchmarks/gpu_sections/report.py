"""What a run finds, line by line, how it is judged, printed and written."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        section, name: what was measured.
        value: the figure; None: there is none, `note` says why.
        unit: of value and floor ("ms", "tokens/s", "share", ..).
        floor: what the device allows at best, in the same unit; None: no such bound.
        aim: what `value` should be, as in "≥ 0.7"; "" where nothing is asked.
        ok: whether it is; None: not judged.
        note: what else there is to say.
    """

    section: str
    name: str
    value: float | None = None
    unit: str = ""
    floor: float | None = None
    aim: str = ""
    ok: bool | None = None
    note: str = ""


def at_least(
    section: str, name: str, value: float, aim: float, unit: str = "share", judged: bool = True, **more
) -> Row:
    """A figure that should reach `aim`."""
    return Row(section, name, value, unit, aim=f"≥ {aim:g}", ok=value >= aim if judged else None, **more)


def at_most(section: str, name: str, value: float, aim: float, unit: str = "share", judged: bool = True, **more) -> Row:
    """A figure that should stay within `aim`; NaN does not."""
    return Row(section, name, value, unit, aim=f"≤ {aim:g}", ok=value <= aim if judged else None, **more)


@dataclass
class SectionResult:
    """How a section ended.

    Attributes:
        status: "done", "out of time" or "failed".
        seconds: how long it took.
        error: the traceback, if it failed.
    """

    name: str
    status: str = "done"
    seconds: float = 0.0
    error: str = ""


@dataclass
class Report:
    """A whole run, as the JSON file holds it."""

    command: str
    environment: dict[str, Any]
    sections: list[SectionResult] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[SectionResult]:
        """Sections that ended in an error."""
        return [section for section in self.sections if section.status == "failed"]

    def write(self, path: Path) -> None:
        """As JSON: first beside `path`, then in its place, so that a kill leaves a whole file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)


def number(value: float | None) -> str:
    """Four significant digits, plain where that is readable."""
    if value is None:
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.2e}"


def table(rows: Iterable[Row]) -> str:
    """The rows as plain text, columns aligned."""
    verdicts = {True: "yes", False: "NO", None: ""}
    lines = [("section", "what", "value", "unit", "floor", "aim", "ok", "note")]
    for row in rows:
        floor = "" if row.floor is None else number(row.floor)
        lines.append((row.section, row.name, number(row.value), row.unit, floor, row.aim, verdicts[row.ok], row.note))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    right = (2, 4)
    return "\n".join(
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def condensed(rows: list[Row]) -> list[Row]:
    """Neighbours whose names agree up to the colon, and that all meet one aim, as one row with the worst value."""
    out: list[Row] = []
    for key, group in itertools.groupby(
        rows, lambda row: (row.section, row.name.split(":")[0], row.aim, row.unit, row.ok)
    ):
        alike = list(group)
        if len(alike) == 1 or not key[4] or ":" not in alike[0].name or not key[2].startswith("≤"):
            out += alike
            continue
        worst = max(alike, key=lambda row: row.value or 0.0)
        name, note = f"{key[1]} ({len(alike)} variants)", f"worst: {worst.name.split(': ', 1)[1]}"
        out.append(replace(worst, name=name, note=note if worst.value else ""))
    return out


def summary(report: Report) -> str:
    """What missed its aim, and how the sections ended."""
    missed = [row for row in report.rows if row.ok is False]
    judged = sum(row.ok is not None for row in report.rows)
    lines = [f"{judged - len(missed)} of {judged} aims met"]
    lines += [
        f"  missed: {row.section}: {row.name}: {number(row.value)} {row.unit}, aim {row.aim} {row.note}"
        for row in missed
    ]
    lines += [f"  {section.name}: {section.status}, {section.seconds:.0f} s" for section in report.sections]
    lines += [f"  warning: {text}" for text in report.warnings]
    return "\n".join(lines)
