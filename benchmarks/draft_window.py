"""Tokens per target forward (τ) by length of the text, with and without `draft_window`: conversations of growing length.

    python benchmarks/draft_window.py --windows 128 512

A conversation is made of bundled prompts and the model's own answers to them; the last question is answered with every drafter. The bundled
model and heads were trained on texts of at most 1024 tokens. So that the target's answers stay good beyond it, its layers see the last 512
tokens here, as Mistral's do; the heads see everything, unless they have a window.
"""

from __future__ import annotations

import argparse
import itertools
import random
from typing import Any

import torch
from transformers import AutoTokenizer, MistralForCausalLM

import hf_specdec
from hf_specdec.cli.options import BUNDLED_PROMPTS, read_prompts

HEADS = {
    "eagle": {"model": "tiny-eagle", "num_speculative_tokens": 5},
    "eagle3": {"model": "tiny-eagle3", "num_speculative_tokens": 5},
    "mtp": {"method": "mtp", "model": "tiny-mtp", "num_speculative_tokens": 3},
    "dflash": {"model": "tiny-dflash"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--windows", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--texts", type=int, default=6, help="conversations per length")
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    folder = hf_specdec.bundled("tiny")
    model: Any = MistralForCausalLM.from_pretrained(
        folder, sliding_window=512, max_position_embeddings=2**15
    )  # Llama's layers, and a window
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    turns = []
    for row in read_prompts(str(BUNDLED_PROMPTS)):
        chat = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        turns.append((ids["input_ids"], model.generate(**ids, max_new_tokens=128, do_sample=False)))
    print(f"| tokens | head | no window | {' | '.join(map(str, args.windows))} |")
    print("|---" * (3 + len(args.windows)) + "|")
    for length, name in itertools.product(args.lengths, args.heads):
        found: dict[int | None, list[int]] = {window: [0, 0] for window in (None, *args.windows)}
        for seed in range(args.texts):
            chosen = random.Random(seed)
            last, said = chosen.choice(turns)[0], []
            while sum(each.shape[1] for each in said) + last.shape[1] < length:
                said.append(chosen.choice(turns)[1])
            text = torch.cat([*said, last], dim=1)[:, -length:]
            call = {"attention_mask": torch.ones_like(text), "max_new_tokens": args.new_tokens, **end}
            plain = model.generate(text, **call)
            for window, counts in found.items():
                config = HEADS[name] | ({} if window is None else {"draft_window": window})
                out = model.generate(text, **call, speculative_config=config, return_dict_in_generate=True)
                assert torch.equal(out.sequences, plain), (name, window, length, seed)
                counts[0] += out.speculation.num_new_tokens
                counts[1] += out.speculation.num_steps
        print(
            f"| {length} | {name} | {' | '.join(f'{new / steps:.2f}' for new, steps in found.values())} |", flush=True
        )


if __name__ == "__main__":
    main()
