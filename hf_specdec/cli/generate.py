"""`hf-specdec generate`: continue prompts, with or without speculation. Texts go to stdout, statistics to stderr."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

import hf_specdec

from ..core.sequence import cut_at_end, end_ids
from . import options
from .options import CONFIG_HELP

if TYPE_CHECKING:
    import torch

EPILOG = """\
examples:
  hf-specdec generate tiny --prompt "Tell me a story about a dog."
  hf-specdec generate tiny --prompt "Tell me a story about a dog." --speculative-config '{"method": "ngram"}'
  hf-specdec generate tiny --prompt "..." --speculative-config '{"method": "draft_model", "model": "tiny-draft"}'
  hf-specdec generate ./my-model --prompts prompts.jsonl --speculative-config speculation.json
  hf-specdec generate tiny --prompt "..." --do-sample --temperature 0.8 --top-p 0.95 --seed 7

The speculative configuration changes the speed, not the text: greedy decoding gives the same tokens with every method, and
so does sampling with the same --seed. Several prompts (repeat --prompt) are decoded as one batch.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_options(parser)
    options.add_ranks_option(parser)
    source = parser.add_argument_group("prompts").add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", metavar="TEXT", help="the prompt; repeat it for a batch")
    source.add_argument("--prompts", metavar="FILE", help=options.PROMPTS_HELP)
    source.add_argument("--prompt-file", dest="prompts", metavar="FILE", help=argparse.SUPPRESS)  # its earlier name
    plain = f"{CONFIG_HELP} (default: %(default)s, plain decoding)"
    options.add_config_option(parser, plain, default='{"method": "none"}')
    options.add_decoding_options(parser, max_new_tokens=128)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end when this text appears; repeatable")
    streaming = "print tokens as they are accepted (default: for one prompt on a terminal)"
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, help=streaming)


class TokenBar:
    """A streamer, for `generate()`, that advances a progress bar as tokens arrive. The first call of `put` passes the prompt."""

    def __init__(self, progress: Progress, total: int):
        self.progress = progress
        self.task = progress.add_task("decoding", total=total)
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_seen:
            self.progress.advance(self.task, value.numel())
        self.prompt_seen = True

    def end(self) -> None:
        """Do nothing: the bar needs no last step."""


def run(args: argparse.Namespace) -> int:
    import torch
    from transformers import TextStreamer

    arguments = options.decoding_arguments(args)
    hf_specdec.parse_config(args.speculative_config)
    prompts = args.prompt or [row["prompt"] for row in options.read_prompts(args.prompts)]
    stream = args.stream if args.stream is not None else len(prompts) == 1 and sys.stdout.isatty()
    if stream and len(prompts) > 1:
        raise ValueError("--stream shows one prompt at a time.")
    options.start_ranks(args.tensor_parallel_size, args.argv)
    model, tokenizer = options.load_model_and_tokenizer(args)
    inputs = options.encode_prompts(tokenizer, prompts, args.chat, model.device)
    arguments |= {"tokenizer": tokenizer, **({"stop_strings": args.stop} if args.stop else {})}

    bar = nullcontext() if stream else options.progress_bar()
    torch.manual_seed(args.seed)
    start = time.perf_counter()
    with bar as progress:
        if progress is None:
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        else:
            streamer = TokenBar(progress, total=len(prompts) * args.max_new_tokens)
        arguments |= {"speculative_config": args.speculative_config, "return_dict_in_generate": True}
        output = model.generate(**inputs, **arguments, streamer=streamer)
    seconds = time.perf_counter() - start

    rows = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    rows = cut_at_end(rows, end_ids(model.generation_config.eos_token_id))
    texts = [] if stream else tokenizer.batch_decode(rows, skip_special_tokens=True)
    for number, text in enumerate(texts, 1):
        print(f"--- {number} ---\n{text}" if len(texts) > 1 else text)
    line = summary(sum(map(len, rows)), seconds, output.speculation)
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)
    return 0


def summary(new_tokens: int, seconds: float, speculation: Any) -> str:
    """What was generated, how fast, and what speculation did for it, on one line."""
    parts = [f"{new_tokens} tokens in {seconds:.2f} s", f"{new_tokens / seconds:.1f} tokens/s"]
    if speculation["num_draft_tokens"]:
        parts.append(f"τ {speculation['mean_accepted_length']:.2f} tokens per forward")
        rate, count = speculation["acceptance_rate"], speculation["num_draft_tokens"]
        parts.append(f"{rate:.0%} of {count} drafted tokens accepted")
    parts.append(f"KV cache {speculation['kv_cache_bytes'] / 2**20:.1f} MiB")
    return " · ".join(parts)
