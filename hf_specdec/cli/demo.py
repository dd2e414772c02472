"""`hf-specdec demo`: show a text, then tokens/s without and with drafts, with the bundled model made as slow as a real one."""

from __future__ import annotations

import argparse
import importlib.util
import time
from typing import Any

from rich.text import Text

from ..bundled import HOW_TO_INSTALL
from .demo_all import run_all
from .demo_model import SIZES, DemoModel, demo_model
from .measure import (
    Measurement,
    Variant,
    environment,
    equal_rows,
    measure_with_progress,
    remarks,
    results_table,
    setup_line,
    with_baselines,
)
from .options import BUNDLED_PROMPTS, Output, encode_prompts, positive_int, read_prompts, spread

EPILOG = """\
examples:
  hf-specdec demo
  hf-specdec demo --all
  hf-specdec demo --all --limit 12 --max-new-tokens 64 --batch-size 4

The bundled model has 6 million parameters, too few for any drafter to make it faster. So the demo first makes it bigger: the added zeros
and idle layers change no logit, but cost as much time as the weights of a real model. Green text was drafted and accepted; the other
tokens come from the model itself, one per forward pass. --all runs every method on the small model in float32 and compares its text
with that of plain generate(); the exit code is 1 if one differs.
"""

DRAFT: dict[str, Any] = {"method": "draft_model", "model": "tiny-draft"}
BATCH = 8
SECONDS = {1: 34.0, BATCH: 16.0}  # time limit by batch size; a slow machine measures fewer prompts in it


def add_command(commands) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = commands.add_parser(
        "demo", help="show text and speed on the bundled models", description=__doc__, epilog=EPILOG
    )
    parser.add_argument("--all", action="store_true", help="run every method on the small model and compare the texts")
    parser.add_argument("--limit", type=positive_int, metavar="N", help="use only N prompts (default: 8; with --all 6)")
    parser.add_argument("--prompts", dest="limit", type=positive_int, help=argparse.SUPPRESS)  # its earlier name
    parser.add_argument("--max-new-tokens", type=positive_int, metavar="N", help="default: 48; with --all 96")
    parser.add_argument("--size", choices=["auto", *SIZES], default="auto", help="of the model (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="default: bfloat16 if the device has it",
    )
    parser.add_argument("--batch-size", type=positive_int, default=1, metavar="B", help="with --all (default: 1)")
    parser.set_defaults(model="tiny", device="auto", trust_remote_code=False)
    return parser


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand; returns the exit code."""
    args.max_new_tokens = args.max_new_tokens or (96 if args.all else 48)
    args.limit = args.limit or (6 if args.all else 8)
    if args.all:
        return run_all(args)
    console = Output()
    console.print("Making a model that costs as much as a real one and generates what the bundled one generates ..")
    began = time.perf_counter()
    with demo_model(args) as demo:
        console.print(f"{setup_line(environment(demo.model))}; made in {time.perf_counter() - began:.1f} s")
        return show(console, demo, args)


def show(console: Output, demo: DemoModel, args: argparse.Namespace) -> int:
    """Show one text, then the table. Returns 1 if a text differs in float32."""
    rows = spread(read_prompts(str(BUNDLED_PROMPTS)), max(args.limit, 2 * BATCH))
    prompts = [row["prompt"] for row in rows]
    show_text(console, demo, prompts[0], args.max_new_tokens)
    single, batched = [[each] for each in spread(prompts, args.limit)], [prompts[:BATCH], prompts[BATCH:]]
    # Half as many tokens in a batch, so that its runs take about as long as those of single prompts.
    tables = {
        1: compare(demo, single, single_variants(demo), args.max_new_tokens, 1),
        BATCH: compare(demo, batched, batch_variants(demo), max(args.max_new_tokens // 2, 1), BATCH),
    }
    for batch_size, results in tables.items():
        console.print(f"Batch size {batch_size}:")
        console.print(results_table(results, compare=True))
    console.print(remarks(*tables.values()), soft_wrap=True, markup=False)
    float32 = str(demo.model.dtype) == "torch.float32"
    console.print(remark(demo, float32), soft_wrap=True, markup=False)
    results = [(result, found[0]) for found in tables.values() for result in found]
    return int(float32 and any(equal_rows(result, plain) < len(plain.outputs) for result, plain in results))


def show_text(console: Output, demo: DemoModel, prompt: str, max_new_tokens: int) -> None:
    """Print the answer to one prompt as it is generated, drafted tokens in green."""
    from .accepted_tokens import AcceptedTokens

    console.print(Text(f"\n▌ {prompt}", style="bold"))
    inputs = encode_prompts(demo.tokenizer, [prompt], None, demo.model.device)
    config = single_variants(demo)[-1].speculative_config
    with AcceptedTokens(console, demo.model, demo.tokenizer) as streamer:
        demo.model.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer, speculative_config=config
        )
    drafter = "a draft model" if demo.eagle3 is None else "an EAGLE-3 head"
    console.print(f"\n[green]Green[/green]: drafted by {drafter}, accepted by the model.\n")


def single_variants(demo: DemoModel) -> list[Variant]:
    """The variants at batch size 1, EAGLE-3 last: long drafts and trees if verifying more tokens is cheap, else short drafts."""
    if demo.cheap_rows:
        light = Variant("token_recycling, tree", {"method": "token_recycling"})
        tokens, tree = 5, {"depth": 5, "top_k": 4, "total_tokens": 15}
    else:
        method = "suffix" if importlib.util.find_spec("arctic_inference") else "ngram"
        light = Variant(method, {"method": method})
        tokens, tree = 3, {"depth": 4, "top_k": 3, "total_tokens": 8}
    variants = [light, Variant(f"draft_model, {tokens} tokens", {**DRAFT, "num_speculative_tokens": tokens})]
    if demo.eagle3 is not None:
        variants.append(Variant(f"eagle3, tree of {tree['total_tokens']}", {"model": demo.eagle3, **tree}))
    return with_baselines(variants)


def batch_variants(demo: DemoModel) -> list[Variant]:
    """The variants for a batch, in which each drafted token costs more: short drafts."""
    tokens = 4 if demo.cheap_rows else 2
    name, drafter = ("draft_model", DRAFT) if demo.eagle3 is None else ("eagle3", {"model": demo.eagle3})
    return with_baselines([Variant(f"{name}, {tokens} tokens", {**drafter, "num_speculative_tokens": tokens})])


def compare(
    demo: DemoModel, groups: list[list[str]], variants: list[Variant], max_new_tokens: int, batch_size: int
) -> list[Measurement]:
    """Decode the groups greedily with all variants in turn."""
    batches = [encode_prompts(demo.tokenizer, group, None, demo.model.device) for group in groups]
    arguments = {"max_new_tokens": max_new_tokens, "do_sample": False}
    title = f"batch size {batch_size}"
    return measure_with_progress(title, demo.model, batches, variants, arguments, 1, 0, SECONDS[batch_size])


def remark(demo: DemoModel, float32: bool) -> str:
    """Notes on reading the table, for this machine."""
    lines = []
    if not float32:
        lines.append(
            "bfloat16 rounds: where two tokens are about equally likely, a text may continue with the other token. Two batch sizes "
            "of generate() differ in the same way."
        )
    if not demo.cheap_rows and demo.model.device.type == "cpu":
        lines.append(
            "This processor has no bfloat16 arithmetic. In float32, verifying four tokens takes about 1.6 times as long as one; "
            "with bfloat16, or on a GPU, it takes hardly longer than one, so that more of τ becomes speed-up."
        )
    if demo.eagle3 is None:
        lines.append(f"An EAGLE-3 head is compared, too, where the bundled heads are installed: {HOW_TO_INSTALL}.")
    lines.append("`hf-specdec demo --all`: every method, and its text compared with generate()'s in float32.")
    return "\n".join(lines)
