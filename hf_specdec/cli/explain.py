"""`hf-specdec explain`: show which drafters the method "auto" would use, and what they cost on this machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.table import Table

from hf_specdec.candidate_generators import parse_config
from hf_specdec.candidate_generators.auto import AutoConfig, AutoGenerator
from hf_specdec.config import SpeculativeConfigError
from hf_specdec.decoding.auto_method import AutoMethod
from hf_specdec.integration import get_decoder

from .measure import environment, setup_line
from .options import (
    BUNDLED_PROMPTS,
    Output,
    add_decoding_options,
    add_model_options,
    decoding_arguments,
    encode_prompts,
    load_model_and_tokenizer,
    positive_int,
    read_prompts,
    spread,
)

EPILOG = """\
examples:
  hf-specdec explain tiny
  hf-specdec explain ./my-model --no-measurement
  hf-specdec explain ./my-model --prompts mine.jsonl --batch-size 8 --json

It searches as `generate(speculative_config="auto")` does: the model's own MTP layers, a bundled head, a head in the local cache or on
the Hub, a small model with the same vocabulary. Methods that look up earlier text (suffix, ngram, token_recycling) are always included.
"""


def add_command(commands) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = commands.add_parser("explain", help='show what "auto" would do', description=__doc__, epilog=EPILOG)
    add_model_options(parser)
    parser.add_argument(
        "--speculative-config",
        default="auto",
        metavar="JSON",
        help='a configuration of method "auto" (default: %(default)s)',
    )
    group = parser.add_argument_group("measurement")
    group.add_argument("--no-measurement", action="store_true", help="only list what was found")
    group.add_argument(
        "--prompts",
        default=str(BUNDLED_PROMPTS),
        metavar="FILE",
        help=".jsonl with a prompt a row (default: bundled ones)",
    )
    group.add_argument("--limit", type=positive_int, default=8, metavar="N", help="prompts (default: %(default)s)")
    group.add_argument("--batch-size", type=positive_int, default=1, metavar="B", help="default: %(default)s")
    group.add_argument("--json", action="store_true", help="print JSON")
    add_decoding_options(parser, max_new_tokens=64)
    return parser


def run(args: argparse.Namespace) -> int:
    """Find the drafters, decode the prompts to measure them, and print the report; returns the exit code."""
    config = parse_config(args.speculative_config)
    if not isinstance(config, AutoConfig):
        raise SpeculativeConfigError(f"--speculative-config has method {config.method!r}; `explain` needs 'auto'.")
    output = Output()
    model, tokenizer = load_model_and_tokenizer(args)
    decoder = get_decoder(model, config)
    generator, policy = decoder.generator, decoder.policy
    assert isinstance(generator, AutoGenerator) and isinstance(policy, AutoMethod)
    found = generator.found
    report: dict[str, Any] = {
        "drafters": [{"method": each.config.method, "from": each.why} for each in found.taken],
        "not_taken": found.notes,
        "downloads": found.downloads,
    }
    if not args.no_measurement:
        report |= _measured(args, model, tokenizer, config, policy)
    if args.json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
        return 0
    for each in report["drafters"]:
        output.print(f"drafts with {each['method']}: {each['from']}")
    for title in ("not_taken", "downloads"):
        for line in report[title]:
            output.print(f"{title.replace('_', ' ')}: {line}")
    if "plain_ms" in report:
        output.print(f"\n{setup_line(environment(model))}, batch size {args.batch_size}")
        output.print(
            f"a step without drafts: {report['plain_ms']:.2f} ms; each drafted token adds {report['token_ms']:.2f} ms"
        )
        output.print(_table(report["measured"]))
        output.print(f"τ {report['mean_accepted_length']:.2f}: tokens per forward of the model")
    return 0


def _measured(args: argparse.Namespace, model, tokenizer, config: AutoConfig, policy: AutoMethod) -> dict[str, Any]:
    """Decode the prompts, and return what the policy has learnt: milliseconds, acceptance, τ."""
    prompts = [row["prompt"] for row in spread(read_prompts(args.prompts), args.limit)]
    arguments = decoding_arguments(args)
    steps = tokens = 0
    for first in range(0, len(prompts), args.batch_size):
        inputs = encode_prompts(tokenizer, prompts[first : first + args.batch_size], args.chat, model.device)
        out = model.generate(**inputs, **arguments, speculative_config=config, return_dict_in_generate=True)
        steps += out.speculation["num_steps"]
        tokens += out.speculation["num_new_tokens"]
    report = policy.report(args.batch_size)
    return {
        "plain_ms": report["plain_ms"], "token_ms": report["token_ms"], "measured": report["drafters"],
        "mean_accepted_length": tokens / max(steps, 1),
    }  # fmt: skip


def _table(drafters: dict[str, dict[str, Any]]) -> Table:
    """One row a drafter. A dash stands for what was not measured, because the drafter was never asked."""
    table = Table("drafter", "ms to ask it", "first token accepted", "drafts taken")
    for name, figures in drafters.items():
        milliseconds, acceptance = figures["milliseconds"], figures["acceptance"]
        table.add_row(
            name,
            "–" if milliseconds is None else f"{milliseconds:.2f}",
            "–" if acceptance is None else f"{acceptance:.0%}",
            f"{figures['steps']}",
        )
    return table
