"""More stories than the sample holds: written by a small openly licensed TinyStories model (karpathy/tinyllamas, MIT)."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def write_stories(model_folder: Path, path: Path, count: int = 2048, rows: int = 512, seed: int = 0) -> None:
    """Sample `count` stories of at most 400 of the model's tokens into `path`, one JSON string a line; ended ones only."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    start = torch.full((rows, 1), model.config.bos_token_id)
    mask = torch.ones_like(start)
    stories = []
    for _ in range(count // rows):
        out = model.generate(
            start, attention_mask=mask, do_sample=True, temperature=0.6, top_k=0, max_new_tokens=400, pad_token_id=2
        )
        ended = [row for row in out[:, 1:].tolist() if {1, 2} & set(row)]  # both mark the end of a story
        stories += tokenizer.batch_decode(ended, skip_special_tokens=True)
    lines = "".join(json.dumps(story.strip(), ensure_ascii=False) + "\n" for story in stories)
    path.write_text(lines, encoding="utf-8")
