"""Model cards: a head's target, its training data, and measured acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from .state import write_whole

_BEGIN, _END = "<!-- measured: written by hf-specdec eval -->", "<!-- end of measured -->"


def write_card(folder: Path, facts: dict[str, Any]) -> None:
    """Write README.md of an exported head, replacing an earlier one with its table of measurements.

    Args:
        facts: method, target, license, data, num_samples, num_tokens, step, options, estimate (tau, acceptance), parameters, file,
            dtype.
    """
    estimate, name = facts.get("estimate"), folder.resolve().name
    target = facts["target"]
    front = {
        "license": facts["license"] or "other",
        "library_name": "hf-specdec",
        "base_model": target,
        "tags": ["speculative-decoding", facts["method"]],
    }
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False).strip(),
        "---",
        f"# {name}",
        "",
        f"A draft head for speculative decoding with `{target}`, method `{facts['method']}`.",
        "It makes generation faster and does not change the output. It is of no use with any other model.",
        "",
        "```python",
        f'model.generate(**inputs, speculative_config={{"model": "{name}"}})',
        "```",
        "",
        "| | |",
        "|---|---|",
        f"| target | `{target}` |",
        f"| parameters | {facts['parameters']:,} in {facts['dtype']} (`{facts['file']}`) |",
        f"| data | {facts['data']} |",
        f"| samples, tokens | {facts['num_samples']:,}, {facts['num_tokens']:,} a pass |",
        f"| steps | {facts['step']:,} |",
        f"| licence | {facts['license'] or 'not stated'} |",
    ]
    if estimate is not None:
        rates = ", ".join(f"{rate:.0%}" for rate in estimate.acceptance)
        lines += [f"| τ on held-out text, estimated | {estimate.tau:.2f} (acceptance per position: {rates}) |"]
    lines += [
        "",
        _BEGIN,
        _END,
        "",
        "Options of the run:",
        "",
        "```json",
        json.dumps(facts["options"], indent=1),
        "```",
        "",
    ]
    write_whole(folder / "README.md", lambda file: file.write("\n".join(lines).encode("utf-8")))


def has_measurements(folder: Path) -> bool:
    """Whether the folder has a card of ours, which has a place for measurements."""
    path = folder / "README.md"
    return path.is_file() and 0 <= (text := path.read_text(encoding="utf-8")).find(_BEGIN) < text.find(_END)


def add_measurements(folder: Path, table: str) -> Path:
    """Put a table of measurements in the place of the earlier one in a card of ours. Returns the card's file."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8")
    new = f"{text[: text.find(_BEGIN) + len(_BEGIN)]}\n{table.strip()}\n{text[text.find(_END) :]}"
    write_whole(path, lambda file: file.write(new.encode("utf-8")))
    return path
