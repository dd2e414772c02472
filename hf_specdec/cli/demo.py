"""`hf-specdec demo`: show a text, then tokens/s without and with drafts, with the bundled model made as slow as a real one."""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

import hf_specdec

from ..bundled import HOW_TO_INSTALL
from . import measure, options
from .measure import Measurement, Variant
from .options import Output, positive_int

if TYPE_CHECKING:
    import torch

EPILOG = """\
examples:
  hf-specdec demo
  hf-specdec demo --all
  hf-specdec demo --all --limit 12 --max-new-tokens 64 --batch-size 4

The bundled model has 6 million parameters, too few for any drafter to make it faster. So the demo first makes it bigger: the added zeros
and idle layers change no logit, but cost as much time as the weights of a real model. --all runs every method on the small model in
float32 and compares its text with that of plain generate(); the exit code is 1 if one differs.
"""

SIZES = ("tiny", "100m", "300m", "1b")
LEARNT = {"draft_length": "auto"}
DRAFT: dict[str, Any] = {"method": "draft_model", "model": "tiny-draft"}
TREE = {"depth": 5, "top_k": 4, "total_tokens": 24}
SHOWN = Variant("draft_model, chain", {**DRAFT, "num_speculative_tokens": 5})
BATCH = 8
SECONDS = {1: 34.0, BATCH: 26.0}  # time limit by batch size; a slow machine measures fewer prompts in it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="run every method on the small model and compare the texts")
    parser.add_argument("--limit", type=positive_int, metavar="N", help="use only N prompts (default: 8; with --all 6)")
    parser.add_argument("--prompts", dest="limit", type=positive_int, help=argparse.SUPPRESS)  # its earlier name
    parser.add_argument("--max-new-tokens", type=positive_int, metavar="N", help="default: 48; with --all 96")
    parser.add_argument("--size", choices=["auto", *SIZES], default="auto", help="of the model (default: %(default)s)")
    precisions = ("auto", "float32", "bfloat16")
    parser.add_argument("--dtype", choices=precisions, default="auto", help="default: bfloat16 if the device has it")
    parser.add_argument("--batch-size", type=positive_int, default=1, metavar="B", help="with --all (default: 1)")
    parser.set_defaults(model="tiny", device="auto", trust_remote_code=False)


def run(args: argparse.Namespace) -> int:
    args.max_new_tokens = args.max_new_tokens or (96 if args.all else 48)
    args.limit = args.limit or (6 if args.all else 8)
    if args.all:
        return run_all(args)
    console = Output()
    console.print("Making a model that costs as much as a real one and generates what the bundled one generates ..")
    began = time.perf_counter()
    with demo_model(args) as demo:
        setup = measure.setup_line(measure.environment(demo.model))
        console.print(f"{setup}; made in {time.perf_counter() - began:.1f} s")
        return show(console, demo, args)


@dataclass
class DemoModel:
    """The target, which writes `tiny`'s text, and its EAGLE-3 head's folder, if installed."""

    model: Any
    tokenizer: Any
    eagle3: str | None


def has_bfloat16(device: torch.device) -> bool:
    """True if the device multiplies in bfloat16 in hardware."""
    import torch

    if device.type != "cpu":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@contextmanager
def demo_model(args: argparse.Namespace) -> Iterator[DemoModel]:
    """The model of `args.size` ("auto": a size for the device) in `args.dtype` ("auto": bfloat16 if the device has it)."""
    import torch

    from hf_specdec.inflation import DIMENSIONS, PRESETS, inflate, inflate_eagle3

    args.model, wanted, args.dtype = "tiny", args.dtype, "float32"
    source, tokenizer = options.load_model_and_tokenizer(args)
    in_bfloat16 = has_bfloat16(source.device) if wanted == "auto" else wanted == "bfloat16"
    dtype = torch.bfloat16 if in_bfloat16 else torch.float32
    # Steps must be long enough to gain from drafts, and short enough for the demo's time limit.
    affordable = "1b" if source.device.type == "cuda" else "300m" if in_bfloat16 else "100m"
    name = affordable if args.size == "auto" else args.size
    sizes = {} if name == "tiny" else dict(zip(DIMENSIONS, PRESETS[name], strict=True))
    model = inflate(source, **sizes, dtype=dtype)
    with tempfile.TemporaryDirectory(prefix="hf-specdec-demo-") as folder:
        has_head = "tiny-eagle3" in hf_specdec.bundled_names()
        if has_head:
            head = hf_specdec.bundled("tiny-eagle3")
            inflate_eagle3(head, source.config, model.config, folder, dtype, device=source.device)
        try:
            yield DemoModel(model, tokenizer, folder if has_head else None)
        finally:
            hf_specdec.release(model)


def bundled_prompts(count: int) -> list[str]:
    """Up to `count` of the bundled prompts, of all tasks."""
    return [row["prompt"] for row in options.spread(options.read_prompts(str(options.BUNDLED_PROMPTS)), count)]


def show(console: Output, demo: DemoModel, args: argparse.Namespace) -> int:
    """Show one text, then the table. Returns 1 if a text differs in float32."""
    prompts = bundled_prompts(max(args.limit, 2 * BATCH))
    show_text(console, demo, prompts[0], args.max_new_tokens)
    tables = {
        1: compare(demo, options.spread(prompts, args.limit), single_variants(demo), args.max_new_tokens, 1),
        BATCH: compare(demo, prompts, batch_variants(demo), args.max_new_tokens, BATCH),
    }
    for batch_size, results in tables.items():
        console.print(f"Batch size {batch_size}:")
        console.print(measure.results_table(results, compare=True))
    console.say(measure.remarks(*tables.values()))
    float32 = str(demo.model.dtype) == "torch.float32"
    console.say(remark(demo, float32))
    return int(float32 and any(map(num_different, tables.values())))


def num_different(results: list[Measurement]) -> int:
    """The number of outputs that differ from those of the first result."""
    return sum(len(results[0].outputs) - measure.equal_rows(result, results[0]) for result in results)


def show_text(console: Output, demo: DemoModel, prompt: str, max_new_tokens: int) -> None:
    """Print the answer to one prompt as it is generated, drafted tokens in green."""
    stream(console, demo.model, demo.tokenizer, prompt, max_new_tokens, single_variants(demo)[-1])
    drafter = "a draft model" if demo.eagle3 is None else "an EAGLE-3 head"
    console.print(f"\n[green]Green[/green]: drafted by {drafter}, accepted by the model.\n")


def stream(console: Output, model: Any, tokenizer: Any, prompt: str, max_new_tokens: int, variant: Variant) -> None:
    """Print the prompt, and then the answer as it is generated."""
    from .accepted_tokens import AcceptedTokens

    console.print(Text(f"\n▌ {prompt}", style="bold"))
    inputs = options.encode_prompts(tokenizer, [prompt], None, model.device)
    arguments = {**inputs, "max_new_tokens": max_new_tokens, "speculative_config": variant.speculative_config}
    with AcceptedTokens(console, model, tokenizer) as streamer:
        model.generate(**arguments, do_sample=False, streamer=streamer)


def single_variants(demo: DemoModel) -> list[Variant]:
    """The variants at batch size 1, EAGLE-3 last: a look-up, and drafters with weights. The lengths of their drafts are learnt."""
    lookup = "suffix" if importlib.util.find_spec("arctic_inference") else "ngram"
    return measure.with_baselines([Variant(lookup, {"method": lookup, **LEARNT}), *with_weights(demo)])


def batch_variants(demo: DemoModel) -> list[Variant]:
    """The variants in a batch, where a drafted token costs more: one drafter, the head if there is one."""
    return measure.with_baselines(with_weights(demo)[-1:])


def with_weights(demo: DemoModel) -> list[Variant]:
    """The draft model, and the head if there is one. The head drafts trees on a GPU, where many more tokens cost little."""
    shape = TREE if demo.model.device.type == "cuda" else {}
    heads = [] if demo.eagle3 is None else [Variant("eagle3", {"model": demo.eagle3, **shape, **LEARNT})]
    return [Variant("draft_model", {**DRAFT, **LEARNT}), *heads]


def compare(
    demo: DemoModel, prompts: list[str], variants: list[Variant], max_new_tokens: int, batch_size: int
) -> list[Measurement]:
    """Measure the variants once, within the time limit of the batch size."""
    batches = options.encode_batches(demo.tokenizer, prompts, batch_size, None, demo.model.device)
    arguments = {"max_new_tokens": max_new_tokens, "do_sample": False}
    limit, title = SECONDS[batch_size], f"batch size {batch_size}"
    return measure.measure(demo.model, batches, variants, arguments, repeats=1, seed=0, seconds=limit, title=title)


def remark(demo: DemoModel, float32: bool) -> str:
    """Notes on reading the table, for this machine."""
    lines = ["Drafts have the lengths that are fastest by what the loop measures, up to none at all."]
    if not float32:
        lines.append(
            "bfloat16 rounds: where two tokens are about equally likely, a text may continue with the other token. Two batch sizes "
            "of generate() differ in the same way."
        )
    if demo.model.device.type == "cpu" and not has_bfloat16(demo.model.device):
        lines.append(
            "This processor has no bfloat16 arithmetic. In float32, verifying four tokens takes about 1.6 times as long as one; "
            "with bfloat16, or on a GPU, it takes hardly longer than one, so that more of τ becomes speed-up."
        )
    if demo.eagle3 is None:
        lines.append(f"An EAGLE-3 head is compared, too, where the bundled heads are installed: {HOW_TO_INSTALL}.")
    lines.append("`hf-specdec demo --all`: every method, and its text compared with generate()'s in float32.")
    return "\n".join(lines)


def all_variants() -> list[Variant]:
    """The variants of --all, after those without drafts."""
    return [
        measure.PLAIN,
        measure.without_drafts({"method": "none"}),
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


def run_all(args: argparse.Namespace) -> int:
    """Decode with every method; returns the exit code, 1 if a text differs."""
    import torch

    console = Output()
    # The bundled models are too small to gain from a second thread, which is slow on a busy machine.
    torch.set_num_threads(1)
    args.dtype = "float32"
    model, tokenizer = options.load_model_and_tokenizer(args)
    prompts = bundled_prompts(args.limit)
    for prompt in prompts:
        stream(console, model, tokenizer, prompt, args.max_new_tokens, SHOWN)
    console.print("\n[green]Green[/green]: drafted by tiny-draft, accepted by tiny. The rest: tiny's own tokens.\n")

    batches = options.encode_batches(tokenizer, prompts, args.batch_size, None, model.device)
    arguments = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    usable = []
    for variant in all_variants():
        try:
            measure.warm_up(model, batches[0], variant, arguments)
            usable.append(variant)
        except ImportError as error:
            console.print(f"{variant.name}: skipped, {' '.join(str(error).split())}", markup=False)
    results = measure.measure(model, batches, usable, arguments, repeats=2, seed=0, title="comparing the methods")
    console.say(
        f"tiny: {measure.setup_line(measure.environment(model))}; {len(prompts)} prompts, batch size {args.batch_size}, "
        f"up to {args.max_new_tokens} new tokens, greedy"
    )
    console.print(measure.results_table(results, compare=True))
    console.say(measure.remarks(results))
    if different := num_different(results):
        console.print(f"[red]{different} outputs differ from transformers' generate().[/red]")
        return 1
    console.print("Every method gave every prompt the tokens of transformers' generate().")
    return 0
