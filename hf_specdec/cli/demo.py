"""`hf-specdec demo`: the bundled model decodes bundled prompts with every method; the text, τ and tokens/s of each."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from .measure import Variant, environment, equal_rows, measure_with_progress, results_table, setup_line, warm_up
from .options import BUNDLED_PROMPTS, encode_prompts, load_model_and_tokenizer, positive_int, read_prompts

EPILOG = """\
examples:
  hf-specdec demo
  hf-specdec demo --prompts 12 --max-new-tokens 64 --batch-size 4

Text in green was drafted by the small model and accepted by the large one; the rest are the tokens the large model had to
give itself, one per forward. Every method writes the same text: the table says so, and the exit code is 1 if one did not.
"""

DRAFT = {"method": "draft_model", "model": "tiny-draft"}
TREE = {"depth": 5, "top_k": 4, "total_tokens": 24}
SHOWN = Variant("draft_model, chain", {**DRAFT, "num_speculative_tokens": 5})


def add_command(commands) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = commands.add_parser("demo", help="see it work on the bundled models", description=__doc__, epilog=EPILOG)
    parser.add_argument("--prompts", type=positive_int, default=6, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive_int, default=96, metavar="N", help="default: %(default)s")
    parser.add_argument("--batch-size", type=positive_int, default=1, metavar="B", help="default: %(default)s")
    parser.set_defaults(model="tiny", dtype="float32", device="auto", trust_remote_code=False)
    return parser


def variants() -> list[Variant]:
    """What is compared; the first is the baseline."""
    return [
        Variant("plain generate()"),
        Variant("none", {"method": "none"}),
        Variant("ngram", {"method": "ngram"}),
        Variant("suffix", {"method": "suffix"}),
        SHOWN,
        Variant("draft_model, tree", {**DRAFT, "branching_factors": [3, 1, 1, 1, 1]}),
        Variant("token_recycling, tree", {"method": "token_recycling"}),
        Variant("lookahead", {"method": "lookahead"}),
        Variant("eagle, chain", {"model": "tiny-eagle", "num_speculative_tokens": 5}),
        Variant("eagle, tree", {"model": "tiny-eagle", **TREE}),
        Variant("eagle3, chain", {"model": "tiny-eagle3", "num_speculative_tokens": 5}),
        Variant("eagle3, tree", {"model": "tiny-eagle3", **TREE}),
        Variant("mtp, chain", {"model": "tiny-mtp", "num_speculative_tokens": 5}),
        Variant("mlp_speculator, chain", {"model": "tiny-mlp_speculator"}),
        Variant("medusa, tree", {"model": "tiny-medusa", "branching_factors": [4, 2, 2, 1]}),
        Variant("hydra, tree", {"model": "tiny-hydra", "branching_factors": [4, 2, 2]}),
        Variant("dflash", {"model": "tiny-dflash"}),
    ]


class AcceptedTokens(BaseStreamer):
    """Prints the tokens of one step together, those that a drafter proposed in green: all but the last.

    Streamers get single tokens; `model`'s embedding layer runs once per forward, and so tells where a step ends.
    """

    def __init__(self, console: Console, model: Any, tokenizer: Any):
        self.console = console
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.step: list[int] = []
        self.printed = ""
        self.prompt_seen = False
        self.hook = model.get_input_embeddings().register_forward_pre_hook(lambda *_: self.end_step())

    def put(self, value: torch.Tensor) -> None:
        """The next token; the first call brings the prompt."""
        if self.prompt_seen:
            self.step += value.flatten().tolist()
        self.prompt_seen = True

    def end_step(self) -> None:
        """Print what came since the last forward."""
        self.show(self.step[:-1], "green")
        self.show(self.step[-1:], "")
        self.step = []

    def show(self, tokens: list[int], style: str) -> None:
        """Print what `tokens` add to the text so far; half a character waits for its other half."""
        self.tokens += tokens
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            self.console.print(Text(text[len(self.printed) :], style=style), end="", soft_wrap=True)
            self.printed = text

    def end(self) -> None:
        """Print the last step and end the line."""
        self.hook.remove()
        self.end_step()
        self.console.print()


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand; returns the exit code."""
    console = Console(highlight=False)
    # The bundled models are too small for a second thread to pay, and two crawl beside a busy neighbour.
    torch.set_num_threads(1)
    rows = spread(read_prompts(str(BUNDLED_PROMPTS)), args.prompts)
    model, tokenizer = load_model_and_tokenizer(args)
    arguments = {"max_new_tokens": args.max_new_tokens, "do_sample": False}

    for row in rows:
        console.print(Text(f"\n▌ {row['prompt']}", style="bold"))
        inputs = encode_prompts(tokenizer, [row["prompt"]], None, model.device)
        streamer = AcceptedTokens(console, model, tokenizer)
        model.generate(**inputs, **arguments, streamer=streamer, speculative_config=SHOWN.speculative_config)
    console.print("\n[green]Green[/green]: drafted by tiny-draft, accepted by tiny. The rest: tiny's own tokens.\n")

    texts = [row["prompt"] for row in rows]
    groups = [texts[i : i + args.batch_size] for i in range(0, len(texts), args.batch_size)]
    batches = [encode_prompts(tokenizer, group, None, model.device) for group in groups]
    results = compare(console, model, batches, arguments)
    console.print(
        f"tiny: {setup_line(environment(model))}; {len(rows)} prompts, batch size {args.batch_size}, "
        f"up to {args.max_new_tokens} new tokens, greedy",
        soft_wrap=True,
    )
    console.print(results_table(results, compare=True))
    different = sum(len(results[0].outputs) - equal_rows(result, results[0]) for result in results)
    if different:
        console.print(f"[red]{different} outputs differ from transformers' generate().[/red]")
        return 1
    console.print("Every method gave every prompt the tokens of transformers' generate().")
    return 0


def spread(rows: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    """`count` of the rows, evenly spread over the file, so that every task has its turn."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def compare(console: Console, model, batches: list[dict[str, torch.Tensor]], arguments: dict[str, Any]) -> list:
    """Measure every variant that can run here (one line for one that cannot)."""
    usable = []
    for variant in variants():
        try:
            warm_up(model, batches[0], variant, arguments)
            usable.append(variant)
        except ImportError as error:
            console.print(f"{variant.name}: skipped, {' '.join(str(error).split())}")
    return measure_with_progress("comparing the methods", model, batches, usable, arguments, repeats=2, seed=0)
