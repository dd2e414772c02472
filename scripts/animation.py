"""Draws docs/figures/accepted.svg: the same text without drafts and with an EAGLE-3 head, a forward pass at a time.

    python scripts/animation.py

Both texts are real ones of the bundled model. A forward pass takes the same time on both sides, which in truth it does not quite.
"""

from __future__ import annotations

import html
from typing import Any

import torch
from step_figures import ACCEPTED, ADDED, CHARACTER, FOLDER, STORY
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec

TOKENS, PASS, REST, WIDTH, LINE = 40, 0.3, 2.0, 860, 24  # seconds of a pass, and of the finished text; pixels
WAYS: dict[str, dict[str, Any]] = {
    "without drafts": {"method": "none"},
    "with EAGLE-3": {"model": "tiny-eagle3", "top_k": 4, "total_tokens": 24, "depth": 5},
}


def panel(title: str, steps: list[dict[str, Any]], top: float, seconds: float) -> tuple[list[str], float]:
    """Elements of one text, and the height below it. The tokens of a step appear together."""
    count = sum(len(step["written"]) for step in steps)
    shown = [f'<text x="16" y="{top}" class="title">{title}: {count} tokens in {len(steps)} forward passes</text>']
    x, y = 16.0, top + LINE
    for number, step in enumerate(steps, 1):
        at = f'values="0;1" keyTimes="0;{number * PASS / seconds:.4f}" calcMode="discrete" dur="{seconds}s" repeatCount="indefinite"'
        shown.append(f'<g><animate attributeName="opacity" {at}/>')
        for i, token in enumerate(step["written"]):
            label, width = html.escape(token.replace("\n", "⏎")), CHARACTER * len(token) + 2
            if x + width > WIDTH - 16:
                x, y = 16.0, y + LINE
            fill, ink = ACCEPTED if i < len(step["accepted"]) else ADDED
            shown.append(f'<rect x="{x:.1f}" y="{y - 14:.1f}" width="{width:.1f}" height="19" rx="3" fill="{fill}"/>')
            shown.append(f'<text x="{x + 1:.1f}" y="{y:.1f}" fill="{ink}" xml:space="preserve">{label}</text>')
            x += width + 1
        shown.append("</g>")
    return shown, y + LINE * 1.6


def main() -> None:
    """Decode, and draw."""
    torch.manual_seed(0)
    folder = hf_specdec.bundled("tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": STORY}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    texts = {}
    for title, config in WAYS.items():
        arguments = {"max_new_tokens": TOKENS, "do_sample": False, "return_dict_in_generate": True}
        output = model.generate(**inputs, **arguments, speculative_config={**config, "trace": True})
        texts[title] = output.speculation.trace.with_text(tokenizer)
    seconds = round(max(map(len, texts.values())) * PASS + REST, 1)
    elements, top = [], 24.0
    for title, steps in texts.items():
        shown, top = panel(title, steps, top, seconds)
        elements += shown
    key = "".join(
        f'<rect x="{x}" y="{top - 12}" width="14" height="14" rx="3" fill="{fill}"/><text x="{x + 20}" y="{top}">{text}</text>'
        for x, (fill, _), text in ((16, ACCEPTED, "drafted and accepted"), (216, ADDED, "the model's own"))
    )
    style = "text{font:12px ui-monospace,monospace;fill:#24292f}.title{font-weight:bold}"
    frame = f'<rect width="{WIDTH}" height="{top + 12}" rx="6" fill="#fff"/>'
    size = f'viewBox="0 0 {WIDTH} {top + 12}" width="{WIDTH}" height="{top + 12}"'
    picture = "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{style}</style>", frame, *elements, key, "</svg>"]
    )
    (FOLDER / "accepted.svg").write_text(picture + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
