"""`hf-specdec calibrate`: measure how often a drafter is right at each depth and rank, and compute the best static tree; or count which
tokens a target writes, and choose a draft vocabulary."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.table import Column, Table

import hf_specdec

from ..config import SpeculativeConfig
from ..core.sequence import end_ids
from . import options
from .options import Output, positive_int

EPILOG = """\
examples:
  hf-specdec calibrate tiny --speculative-config '{"method": "draft_model", "model": "tiny-draft"}' --nodes 12
  hf-specdec calibrate ./my-model --prompts chat.jsonl --limit 100 --nodes 63 --json tree.json \\
      --speculative-config '{"method": "medusa", "model": "./my-medusa"}'
  hf-specdec calibrate ./my-model --prompts chat.jsonl --draft-vocabulary 32000 --json ids.json

The target generates a greedy continuation of each prompt; then the drafter drafts from every position of it. The last
line of the output is the configuration with the tree, ready for --speculative-config. With a larger tree more tokens are accepted,
but it costs more to verify: compare several sizes with `hf-specdec bench`. With --draft-vocabulary no drafter is needed: the
list of ids is written to the file of --json, or is the last line.
"""

# Keys for the shape of drafts, which the tree replaces.
_SHAPE_KEYS = (
    "num_speculative_tokens", "depth", "branching_factors", "top_k", "total_tokens", "draft_length",
    "top_k_tokens_per_head", "n_candidates", "use_checkpoint_tree",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_options(parser)
    options.add_config_option(parser)
    group = parser.add_argument_group("measurement")
    options.add_prompts_options(group, batch_size=8)
    options.add_chat_option(group)
    group.add_argument(
        "--max-new-tokens", type=options.whole_number, default=128, metavar="N",
        help="default: %(default)s; with --draft-vocabulary, 0 counts the ids of the prompts themselves",
    )  # fmt: skip
    group.add_argument(
        "--ranks", type=positive_int, default=10, metavar="R", help="children a node may have (default: %(default)s)"
    )
    group.add_argument(
        "--nodes", type=positive_int, default=63, metavar="N", help="most nodes of the tree (default: %(default)s)"
    )
    group.add_argument(
        "--draft-vocabulary", type=positive_int, metavar="N",
        help="instead of a tree, choose the N tokens that the target writes most, for the key 'draft_vocabulary'",
    )  # fmt: skip
    group.add_argument("--json", metavar="OUT", help="write accuracies and tree, or the ids, to this file as JSON")


def run(args: argparse.Namespace) -> int:
    from ..candidate_generators.base import DrafterContext
    from ..candidate_generators.checkpoints.target_parts import most_frequent
    from ..decoding.calibration import calibrated_tree, expected_accepted_length, measure_accuracies, written_ids
    from ..integration import get_decoder

    options.check_output_file(args.json, "--json")
    size = args.draft_vocabulary
    if (size is None) == (args.speculative_config is None):
        raise ValueError("give either --speculative-config, the drafter to fit a tree to, or --draft-vocabulary.")
    if size is None and not args.max_new_tokens:
        raise ValueError("--max-new-tokens must be at least 1, except with --draft-vocabulary.")
    config = hf_specdec.parse_config(args.speculative_config or "none")
    prompts = [row["prompt"] for row in options.read_prompts(args.prompts)][: args.limit]
    model, tokenizer = options.load_model_and_tokenizer(args)
    encoded = [
        options.encode_prompts(tokenizer, [prompt], args.chat, model.device)["input_ids"][0].tolist()
        for prompt in prompts
    ]
    decoder = get_decoder(model, config, DrafterContext(tokenizer=tokenizer))
    console, ends = Output(), end_ids(model.generation_config.eos_token_id)
    measured = f"{args.model}: {len(prompts)} prompts, up to {args.max_new_tokens} new tokens"
    if size is not None:
        new = args.max_new_tokens
        texts = written_ids(decoder, encoded, new, ends, args.batch_size) if new else encoded
        ids, written = most_frequent(texts, size), [token for text in texts for token in text]
        share = sum(map(set(ids).__contains__, written)) / len(written)
        console.say(
            f"{measured}\n{len(ids)} of {len(set(written))} different tokens: {100 * share:.1f} % of {len(written)}"
        )
        if args.json != "-":
            print(json.dumps(ids if args.json is None else {"draft_vocabulary": args.json}))
        options.write_report(ids, args.json)
        return 0
    accuracies = measure_accuracies(decoder, encoded, args.max_new_tokens, args.ranks, ends, args.batch_size)
    tree = calibrated_tree(accuracies, args.nodes)
    chain = [[0] * depth for depth in range(1, len(accuracies) + 1)]
    shapes = {"tree": tree, "chain": chain}
    expected = {name: expected_accepted_length(accuracies, shape) for name, shape in shapes.items()}
    fitted = with_tree(config, tree)

    console.say(measured)
    ranks = (Column(str(rank + 1), justify="right") for rank in range(accuracies.shape[1]))
    table = Table("depth", *ranks, title="how often the drafter's n-th token is the right one (%)")
    for depth, rates in enumerate(accuracies, 1):
        table.add_row(str(depth), *(f"{100 * rate:.1f}" for rate in rates))
    console.print(table)
    console.print(
        f"expected τ: {expected['tree']:.2f} with {len(tree)} nodes; {expected['chain']:.2f} with a chain of {len(chain)}",
        soft_wrap=True,
    )
    print(json.dumps(fitted))
    report = {"model": args.model, "speculative_config": fitted, "accuracies": accuracies.tolist()}
    options.write_report({**report, "expected_mean_accepted_length": expected}, args.json)
    return 0


def with_tree(config: SpeculativeConfig, tree: list[list[int]]) -> dict[str, Any]:
    """The configuration with this tree as the shape of its drafts."""
    kept = {key: value for key, value in config.to_dict().items() if key not in _SHAPE_KEYS}
    return kept | {"speculative_token_tree": tree}
