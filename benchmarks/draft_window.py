"""Tokens per target forward (τ) by length of the text, with and without `draft_window`: conversations of growing length.

    python benchmarks/draft_window.py --windows 128 512
    python benchmarks/draft_window.py --self-window --lengths 8192 32768 --windows 512 --texts 1

A conversation is made of bundled prompts and the model's own answers to them; the last question is answered with every drafter. The bundled
model and heads were trained on texts of at most 1024 tokens. So that the target's answers stay good beyond it, its layers see the last 512
tokens here, as Mistral's do; the heads see everything, unless they have a window.

With `--self-window`: τ and CPU time over `none` of method `self_window`, one thread. All layers see all of the text; a larger rotary base
stretches the model to it. It is inflated to 100 M parameters, with 12 key heads. Every batch of `--texts` reads its prompts once.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, MistralForCausalLM

import hf_specdec
from hf_specdec.cli.options import BUNDLED_PROMPTS, read_prompts
from hf_specdec.inflation import DIMENSIONS, PRESETS, inflate

HEADS = {
    "eagle": {"model": "tiny-eagle", "num_speculative_tokens": 5},
    "eagle3": {"model": "tiny-eagle3", "num_speculative_tokens": 5},
    "mtp": {"method": "mtp", "model": "tiny-mtp", "num_speculative_tokens": 3},
    "dflash": {"model": "tiny-dflash"},
}


def conversation(turns: list[Any], length: int, seed: int) -> torch.Tensor:
    """`length` tokens of a conversation, int64 [1, length]: answered prompts, then one without an answer."""
    chosen = random.Random(seed)
    last, said = chosen.choice(turns)[0], []
    while sum(each.shape[1] for each in said) + last.shape[1] < length:
        said.append(chosen.choice(turns)[1])
    return torch.cat([*said, last], dim=1)[:, -length:]


def time_self_window(args: argparse.Namespace, tokenizer: Any, turns: list[Any], length: int) -> None:
    """Print a line for each window, at one length."""
    torch.set_num_threads(1)
    rope = {"rope_type": "default", "rope_theta": 10000.0 * max(length // 1024, 1) ** 2}
    model: Any = LlamaForCausalLM.from_pretrained(
        hf_specdec.bundled("tiny"), max_position_embeddings=length + 2048, rope_parameters=rope
    )
    sizes: dict[str, Any] = dict(zip(DIMENSIONS, PRESETS["100m"], strict=True)) | {"num_key_value_heads": 12}
    methods: dict[str, Any] = {"none": {"method": "none"}}
    methods |= {str(window): {"method": "self_window", "draft_window": window} for window in args.windows}
    config = {"method": "per_request", "methods": methods}
    llm = hf_specdec.LLM(
        inflate(model.eval(), **sizes), tokenizer, config, max_model_len=length + 256, max_num_seqs=args.texts
    )
    prompts: Any = [conversation(turns, length, 1 + seed)[0].tolist() for seed in range(args.texts)]
    seconds, texts = {}, []
    for name in ("none", *methods):  # the first time, prompts are read
        call = hf_specdec.SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True, drafter=name)
        began = time.process_time()
        answers: Any = llm.generate(prompts, call, use_tqdm=False)
        seconds[name] = time.process_time() - began
        texts.append([answer.outputs[0].token_ids for answer in answers])
        assert texts[-1] == texts[0], name
        tau = args.texts * args.new_tokens / sum(answer.speculation.num_steps for answer in answers)
        if len(texts) > 1:
            print(f"| {length} | {name} | τ {tau:.2f} | × none {seconds['none'] / seconds[name]:.2f} |", flush=True)
    llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--windows", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--texts", type=int, default=6, help="conversations per length")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--self-window", action="store_true", help="time method `self_window` instead of heads")
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
    for length in args.lengths if args.self_window else ():
        time_self_window(args, tokenizer, turns, length)
    if args.self_window:
        return
    print(f"| tokens | head | no window | {' | '.join(map(str, args.windows))} |")
    print("|---" * (3 + len(args.windows)) + "|")
    for length, name in itertools.product(args.lengths, args.heads):
        found: dict[int | None, list[int]] = {window: [0, 0] for window in (None, *args.windows)}
        for seed in range(args.texts):
            text = conversation(turns, length, seed)
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
