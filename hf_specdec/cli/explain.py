"""`hf-specdec explain`: show which drafters the method "auto" would use, and what they cost on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from typing import Any

import hf_specdec
from hf_specdec.config import SpeculativeConfig, SpeculativeConfigError

from . import measure, options
from .measure import Measurement, Variant
from .options import Output

EPILOG = """\
examples:
  hf-specdec explain tiny
  hf-specdec explain ./my-model --no-measurement
  hf-specdec explain ./my-model --prompts mine.jsonl --batch-size 8 --json

It searches as `generate(speculative_config="auto")` does: the model's own MTP layers, a bundled head, a head in the local cache or on
the Hub, a small model with the same vocabulary. Methods that look up earlier text (suffix, ngram, token_recycling) are always included.
Every drafter is measured on its own, with its usual draft length in every step, beside "auto", which drafts where that pays, decoding
without drafts (none), and transformers' own generate().
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_options(parser)
    options.add_config_option(parser, 'a configuration of method "auto" (default: %(default)s)', default="auto")
    group = parser.add_argument_group("measurement")
    group.add_argument("--no-measurement", action="store_true", help="only list what was found")
    options.add_prompts_options(group, limit=8)
    group.add_argument("--json", action="store_true", help="print JSON")
    options.add_decoding_options(parser, max_new_tokens=64)


def run(args: argparse.Namespace) -> int:
    """Find the drafters, decode the prompts with all of them, and print the report; returns the exit code."""
    from ..candidate_generators.auto import AutoConfig, AutoGenerator
    from ..integration import get_decoder

    config = hf_specdec.parse_config(args.speculative_config)
    if not isinstance(config, AutoConfig):
        raise SpeculativeConfigError(f"--speculative-config has method {config.method!r}; `explain` needs 'auto'.")
    output = Output()
    model, tokenizer = options.load_model_and_tokenizer(args)
    generator = get_decoder(model, config).generator
    assert isinstance(generator, AutoGenerator)
    search = generator.search
    report: dict[str, Any] = {
        "drafters": [{"method": drafter.config.method, "from": drafter.why} for drafter in search.taken],
        "not_taken": search.notes,
        "downloads": search.downloads,
    }
    drafters = [Variant(name, _always_drafting(part.config)) for name, part in generator.by_name.items()]
    results: list[Measurement] = []
    if not args.no_measurement:
        results = _measure(args, model, tokenizer, [*drafters, Variant("auto", config)], report)
    if args.json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
        return 0
    for drafter in report["drafters"]:
        output.say(f"drafts with {drafter['method']}: {drafter['from']}")
    for title in ("not_taken", "downloads"):
        for line in report[title]:
            output.say(f"{title.replace('_', ' ')}: {line}")
    if results:
        output.print(f"\n{measure.setup_line(measure.environment(model))}, batch size {args.batch_size}")
        output.print(measure.results_table(results, compare=not args.do_sample))
        output.say(_times(report))
        output.say(measure.remarks(results))
    return 0


def _always_drafting(config: SpeculativeConfig) -> SpeculativeConfig:
    """The configuration with the method's usual draft length in every step. With learnt lengths, a drafter that loses would not draft."""
    usual = config.default_num_speculative_tokens
    length = min(config.num_speculative_tokens or usual, usual)
    return dataclasses.replace(config, draft_length="fixed", num_speculative_tokens=length)


def _measure(
    args: argparse.Namespace, model, tokenizer, variants: list[Variant], report: dict[str, Any]
) -> list[Measurement]:
    """Decode the prompts with the variants, "auto" last, and add to the report what each of them costs and gains."""
    from ..candidate_generators.auto import AutoGenerator
    from ..integration import get_decoder

    prompts = [row["prompt"] for row in options.spread(options.read_prompts(args.prompts), args.limit)]
    batches = options.encode_batches(tokenizer, prompts, args.batch_size, args.chat, model.device)
    arguments = options.decoding_arguments(args)
    decoded = measure.with_baselines(variants)
    results = measure.measure(model, batches, decoded, arguments, repeats=1, seed=args.seed)
    generator = get_decoder(model, hf_specdec.parse_config(args.speculative_config)).generator
    assert isinstance(generator, AutoGenerator)
    learnt = generator.policy.report(args.batch_size)
    report |= {key: learnt[key] for key in ("plain_ms", "token_ms")}
    report |= {"mean_accepted_length": results[-1].accepted_length, "measured": {}}
    for variant, result in zip(variants, results[-len(variants) :], strict=True):
        steps = [step for step in measure.traced(model, batches[0], variant, arguments, args.seed) if step["drafted"]]
        drafting = [step["propose_ms"] + step["observe_ms"] for step in steps]
        report["measured"][variant.name] = {
            "speed_up_over_none": measure.speed_up(result, measure.loop_of(result, results)),
            "mean_accepted_length": result.accepted_length,
            "milliseconds": statistics.median(drafting) if drafting else None,
            "acceptance": sum(bool(step["accepted"]) for step in steps) / len(steps) if steps else None,
            "steps": learnt["drafters"].get(variant.name, {}).get("steps"),
        }
    return results


def _times(report: dict[str, Any]) -> str:
    """What steps cost, and what "auto" drafted with. A drafter that found nothing to draft has no time."""
    measured = {name: figures for name, figures in report["measured"].items() if name != "auto"}
    times = ((name, figures["milliseconds"]) for name, figures in measured.items())
    drafting = (f"{name} {'–' if time is None else format(time, '.2f')}" for name, time in times)
    taken = (f"{name} {figures['steps']}" for name, figures in measured.items() if figures["steps"])
    return (
        f"A step without drafts: {report['plain_ms']:.2f} ms; each drafted token adds {report['token_ms']:.2f} ms. Drafting, in ms: "
        f"{', '.join(drafting)}. Drafts that auto took: {', '.join(taken) or 'none'}."
    )
