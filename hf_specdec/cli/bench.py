"""`hf-specdec bench`: measure tokens/s of `generate()` with and without speculation, on a file of prompts."""

from __future__ import annotations

import argparse
from typing import Any

import hf_specdec

from . import measure, options
from .measure import Measurement, Variant
from .options import CONFIG_HELP, Output, positive_int

EPILOG = """\
examples:
  hf-specdec bench tiny --speculative-config '{"method": "ngram"}'
  hf-specdec bench tiny --speculative-config '{"method": "draft_model", "model": "tiny-draft"}' --batch-size 8
  hf-specdec bench ./my-model --prompts gsm8k.jsonl --limit 20 --repeats 5 --json result.json \\
      --speculative-config '{"method": "ngram"}' --speculative-config '{"method": "suffix"}'

Two baselines are measured with your configurations: transformers' own generate(), and the loop of this package without drafts (none).
Each batch is decoded in every way before the next one begins, so that other load on the machine affects all alike; on a CPU the clock
counts the CPU time of the decoding thread. tokens/s is the median over the repeats. Methods that learn from outputs start each empty.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_options(parser)
    options.add_ranks_option(parser)
    options.add_config_option(parser, f"{CONFIG_HELP}; repeat it to compare several", action="append", required=True)
    group = parser.add_argument_group("measurement")
    options.add_prompts_options(group)
    group.add_argument("--repeats", type=positive_int, default=3, metavar="R", help="default: %(default)s")
    steps = "decode the first batch once more with each configuration, and show what every step drafted, accepted and rejected, and "
    group.add_argument("--trace", action="store_true", help=f"{steps}its milliseconds")
    everything = "write everything to this file as JSON; - prints it instead of the table"
    group.add_argument("--json", metavar="OUT", help=everything)
    options.add_decoding_options(parser, max_new_tokens=128)


def run(args: argparse.Namespace) -> int:
    arguments = options.decoding_arguments(args)
    options.check_output_file(args.json, "--json")
    for text in args.speculative_config:
        hf_specdec.parse_config(text)
    prompts = [row["prompt"] for row in options.read_prompts(args.prompts)][: args.limit]
    options.start_ranks(args.tensor_parallel_size, args.argv)
    model, tokenizer = options.load_model_and_tokenizer(args)
    batches = options.encode_batches(tokenizer, prompts, args.batch_size, args.chat, model.device)
    variants = measure.with_baselines([Variant(text, text) for text in args.speculative_config])

    results = measure.measure(model, batches, variants, arguments, args.repeats, args.seed)

    shown = args.speculative_config if args.trace else []
    traces = {text: measure.traced(model, batches[0], Variant(text, text), arguments, args.seed) for text in shown}
    settings = {"batch_size": args.batch_size, "prompts": len(prompts), "repeats": args.repeats, "seed": args.seed}
    report = {
        "model": args.model,
        "environment": measure.environment(model),
        "settings": {**arguments, **settings},
        "results": [describe(result, results) for result in results],
    }
    if args.trace:
        report["traces"] = {text: trace.with_text(tokenizer) for text, trace in traces.items()}
    if options.write_report(report, args.json):
        return 0
    console = Output()
    console.say(
        f"{args.model}: {measure.setup_line(report['environment'])}; {len(prompts)} prompts, batch size {args.batch_size}, "
        f"{args.max_new_tokens} new tokens, {args.repeats} repeats"
    )
    console.print(measure.results_table(results, compare=not args.do_sample))
    console.say(measure.remarks(results))
    for text, trace in traces.items():
        print(f"\n{text}\n{trace.table(tokenizer)}")
    return 0


def describe(result: Measurement, results: list[Measurement]) -> dict[str, Any]:
    """The figures of a result as values for JSON. The first of `results` is plain `generate()`."""
    plain = results[0]
    return {
        "speculative_config": result.variant.speculative_config,
        "tokens_per_second": result.tokens_per_second,
        "speed_up_over_none": measure.speed_up(result, measure.loop_of(result, results)),
        "speed_up": measure.speed_up(result, plain),
        "seconds": result.seconds,
        "new_tokens": result.new_tokens,
        "mean_accepted_length": result.accepted_length,
        "acceptance_rate": result.acceptance_rate,
        "num_draft_tokens": result.drafted,
        "num_accepted_tokens": result.accepted,
        "rows": len(result.outputs),
        "rows_equal_to_baseline": measure.equal_rows(result, plain),
    }
