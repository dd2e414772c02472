"""Draws one real step of every method on the bundled model: docs/figures/step-METHOD.svg.

    python scripts/step_figures.py [METHOD ...]

A step is the draft tree of one round: what was accepted, what was not, and the token that the target adds.
"""

from __future__ import annotations

import argparse
import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.integration import get_decoder

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "figures"
STORY = "Tell me a story about a big dog."
EDIT = "Repeat this text.\nThe big dog ran to the park. The dog found a red ball."
TREE = {"top_k": 3, "total_tokens": 10, "depth": 4}
# method: the configuration that is drawn, and the prompt
DRAWN: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"method": "none"}, STORY),
    "ngram": ({"method": "ngram", "num_speculative_tokens": 5}, EDIT),
    "suffix": ({"method": "suffix"}, EDIT),
    "token_recycling": ({"method": "token_recycling", "speculative_token_tree": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]}, STORY),
    "lookahead": ({"method": "lookahead", "window_size": 3, "ngram_size": 4, "guess_set_size": 3}, STORY),
    "draft_model": ({"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 5}, STORY),
    "eagle": ({"model": "tiny-eagle", **TREE}, STORY),
    "eagle3": ({"model": "tiny-eagle3", **TREE}, STORY),
    "mlp_speculator": ({"model": "tiny-mlp_speculator", "branching_factors": [2, 1, 1]}, STORY),
    "medusa": ({"model": "tiny-medusa", "branching_factors": [3, 2, 1]}, STORY),
    "hydra": ({"model": "tiny-hydra", "branching_factors": [3, 2, 1]}, STORY),
    "mtp": ({"model": "tiny-mtp", "num_speculative_tokens": 4}, STORY),
    "dflash": ({"model": "tiny-dflash"}, STORY),
    "hybrid": ({"method": "hybrid", "strategy": "extend", "num_speculative_tokens": 6,
                "first": {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3},
                "second": {"method": "ngram"}}, EDIT),
}  # fmt: skip
ACCEPTED, REJECTED, ADDED, KNOWN = (
    ("#c8ead1", "#1a7f37"),
    ("#f6e3e1", "#b35b52"),
    ("#d3e3fd", "#1f5fbf"),
    ("#eceef1", "#57606a"),
)
HEIGHT, GAP, CHARACTER = 26, 34, 7.3


@dataclass
class Step:
    """One round of one row: its text before, the draft, the accepted nodes root to leaf, and the tokens written."""

    before: list[int]
    tokens: list[int]
    parents: list[int]
    accepted: list[int]
    written: list[int]

    @property
    def interest(self) -> tuple[int, int, int]:
        """What makes a step worth drawing: several accepted nodes, and a few that were not."""
        rejected = len(self.tokens) - len(self.accepted)
        return min(len(self.accepted), 4), min(rejected, 4), -len(self.tokens)


def steps_of(model: Any, tokenizer: Any, values: dict[str, Any], prompt: str) -> list[Step]:
    """Every step of a greedy answer of 64 tokens."""
    config = hf_specdec.parse_config(values)
    generator = get_decoder(model, config).generator
    steps: list[Step] = []
    observe = generator.observe

    def recording(outcome) -> None:
        if outcome.sequences:
            tree, written = outcome.trees, outcome.new_tokens[0]
            count = tree.lengths[0]
            parents = list(range(-1, count - 1)) if tree.parents is None else tree.parents[0, :count].tolist()
            before = outcome.sequences[0].tokens[: -len(written)]
            steps.append(Step(before, tree.tokens[0, :count].tolist(), parents, outcome.accepted[0], written))
        observe(outcome)

    generator.observe = recording
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model.generate(**inputs, max_new_tokens=64, do_sample=False, speculative_config=config)
    hf_specdec.release(model)
    return steps


def places(parents: list[int]) -> tuple[list[int], list[float]]:
    """Column (depth) and line of each node: leaves take lines in order, a parent stands level with its first child."""
    depths = [0] * len(parents)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        depths[node] = 0 if parent < 0 else depths[parent] + 1
        children.setdefault(parent, []).append(node)
    lines, free = [0.0] * len(parents), 0

    def place(node: int) -> None:
        nonlocal free
        below = children.get(node, [])
        for child in below:
            place(child)
        if below:
            lines[node] = lines[below[0]]
        else:
            lines[node], free = free, free + 1

    for node in children.get(-1, []):
        place(node)
    return depths, lines


def drawing(step: Step, tokenizer: Any, title: str) -> str:
    """The step as SVG."""
    shown = lambda ids: tokenizer.decode(ids).replace("\n", "⏎").replace(" ", "·")  # noqa: E731
    text = "…" + tokenizer.decode(step.before[-8:]).replace("\n", "⏎")[-24:]
    depths, lines = places(step.parents)
    labels = [shown([token]) for token in step.tokens]
    last = shown(step.written[-1:])
    columns = max(depths, default=-1) + 1
    width_of = [
        max((CHARACTER * len(labels[i]) + 18 for i in range(len(labels)) if depths[i] == d), default=30)
        for d in range(columns)
    ]
    known = CHARACTER * len(text) + 18
    starts = [16 + known + GAP]
    for width in width_of:
        starts.append(starts[-1] + width + GAP)
    top = 46
    boxes, edges = [], []

    def box(x: float, y: float, width: float, label: str, colour: tuple[str, str], dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        boxes.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{HEIGHT}" rx="5" fill="{colour[0]}" stroke="{colour[1]}"{dash}/>'
            f'<text x="{x + width / 2:.0f}" y="{y + 17:.0f}" text-anchor="middle">{html.escape(label)}</text>'
        )

    def edge(x: float, y: float, to_x: float, to_y: float, colour: str) -> None:
        middle = HEIGHT / 2
        edges.append(
            f'<path d="M{x:.0f} {y + middle:.0f} C{x + 18:.0f} {y + middle:.0f} {to_x - 18:.0f} {to_y + middle:.0f} {to_x:.0f} '
            f'{to_y + middle:.0f}" fill="none" stroke="{colour}"/>'
        )

    height_of = [top + line * (HEIGHT + 10) for line in lines]
    box(16, top, known, text, KNOWN)
    ends = {-1: (16 + known, top)}
    for i, label in enumerate(labels):
        colour = ACCEPTED if i in step.accepted else REJECTED
        width = CHARACTER * len(label) + 18
        edge(*ends[step.parents[i]], starts[depths[i]], height_of[i], colour[1])
        box(starts[depths[i]], height_of[i], width, label, colour)
        ends[i] = (starts[depths[i]] + width, height_of[i])
    leaf = step.accepted[-1] if step.accepted else -1
    x, y = ends[leaf]
    column = 0 if leaf < 0 else depths[leaf] + 1
    taken = [height_of[i] for i in range(len(labels)) if depths[i] == column]
    added_y = max(taken) + HEIGHT + 10 if taken else y
    edge(x, y, starts[column], added_y, ADDED[1])
    box(starts[column], added_y, CHARACTER * len(last) + 18, last, ADDED, dashed=True)
    right = max([*(end for end, _ in ends.values()), starts[column] + CHARACTER * len(last) + 18]) + 16
    drafted = f"{len(step.tokens)} drafted, {len(step.accepted)} accepted" if step.tokens else "nothing drafted"
    count = len(step.written)
    caption = f"{title}: {drafted}; {count} token{'s' if count > 1 else ''} from one forward pass of the model"
    legend = [
        ("text so far", KNOWN),
        ("accepted", ACCEPTED),
        ("rejected", REJECTED),
        ("the model's own next token", ADDED),
    ]
    bottom = max([top, added_y, *height_of]) + HEIGHT + 20
    row, x = [], 16.0
    for label, colour in legend:
        row.append(
            f'<rect x="{x:.0f}" y="{bottom:.0f}" width="12" height="12" rx="2" fill="{colour[0]}" stroke="{colour[1]}"/>'
            f'<text x="{x + 18:.0f}" y="{bottom + 10:.0f}" class="c">{label}</text>'
        )
        x += 18 + 6.6 * len(label) + 18
    right, bottom = max(right, x, 6.6 * len(caption) + 32), bottom + 26
    style = "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328}.c{font:12px system-ui,Helvetica,Arial,sans-serif}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:.0f} {bottom:.0f}" width="{right:.0f}" height="{bottom:.0f}" '
        f'role="img" aria-label="{html.escape(caption)}"><style>{style}</style>'
        f'<rect width="100%" height="100%" rx="8" fill="#ffffff"/><text x="16" y="26" class="c">{html.escape(caption)}</text>'
        f"{''.join(edges)}{''.join(boxes)}{''.join(row)}</svg>\n"
    )


def main() -> None:
    """Draw the methods named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", choices=[*DRAWN, []], metavar="METHOD")
    methods = parser.parse_args().methods or list(DRAWN)
    folder = hf_specdec.bundled("tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    FOLDER.mkdir(exist_ok=True)
    for method in methods:
        steps = steps_of(model, tokenizer, *DRAWN[method])
        step = max(steps[3:], key=lambda step: step.interest)
        (FOLDER / f"step-{method}.svg").write_text(drawing(step, tokenizer, method), encoding="utf-8")
        print(method, len(step.tokens), "drafted,", len(step.accepted), "accepted")


if __name__ == "__main__":
    main()
