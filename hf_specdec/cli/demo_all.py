"""`hf-specdec demo --all`: run every method on the bundled model as it is; all must give the text of plain `generate()`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from .measure import (
    PLAIN,
    Variant,
    environment,
    equal_rows,
    measure_with_progress,
    remarks,
    results_table,
    setup_line,
    warm_up,
    without_drafts,
)
from .options import BUNDLED_PROMPTS, Output, encode_prompts, load_model_and_tokenizer, read_prompts, spread

if TYPE_CHECKING:
    import torch

DRAFT = {"method": "draft_model", "model": "tiny-draft"}
TREE = {"depth": 5, "top_k": 4, "total_tokens": 24}
SHOWN = Variant("draft_model, chain", {**DRAFT, "num_speculative_tokens": 5})


def variants() -> list[Variant]:
    """The variants; the first two are the baselines."""
    return [
        PLAIN,
        without_drafts({"method": "none"}),
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

    from .accepted_tokens import AcceptedTokens

    console = Output()
    # The bundled models are too small to gain from a second thread, which is slow on a busy machine.
    torch.set_num_threads(1)
    rows = spread(read_prompts(str(BUNDLED_PROMPTS)), args.limit)
    args.dtype = "float32"
    model, tokenizer = load_model_and_tokenizer(args)
    arguments = {"max_new_tokens": args.max_new_tokens, "do_sample": False}

    for row in rows:
        console.print(Text(f"\n▌ {row['prompt']}", style="bold"))
        inputs = encode_prompts(tokenizer, [row["prompt"]], None, model.device)
        with AcceptedTokens(console, model, tokenizer) as streamer:
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
    console.print(remarks(results), soft_wrap=True, markup=False)
    different = sum(len(results[0].outputs) - equal_rows(result, results[0]) for result in results)
    if different:
        console.print(f"[red]{different} outputs differ from transformers' generate().[/red]")
        return 1
    console.print("Every method gave every prompt the tokens of transformers' generate().")
    return 0


def compare(console: Console, model, batches: list[dict[str, torch.Tensor]], arguments: dict[str, Any]) -> list:
    """Measure the variants whose packages are installed; print a line for each of the others."""
    usable = []
    for variant in variants():
        try:
            warm_up(model, batches[0], variant, arguments)
            usable.append(variant)
        except ImportError as error:
            console.print(f"{variant.name}: skipped, {' '.join(str(error).split())}", markup=False)
    return measure_with_progress("comparing the methods", model, batches, usable, arguments, repeats=2, seed=0)
