"""`hf-specdec train`: train a draft head for a target, and write it to a folder in a published format."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

import hf_specdec

from ..training.options import options_by_method
from .options import DTYPES, add_config_option, add_loading_options, load_model_and_tokenizer, positive_int

if TYPE_CHECKING:
    from ..training.pipeline import Trained

EPILOG = """\
examples:
  hf-specdec train medusa --target tiny --data chats.jsonl --output ./my-medusa --regenerate
  hf-specdec train medusa --help                      the options of one method
  hf-specdec train hydra --target ./my-model --data chats.jsonl --output ./my-hydra --cache-dir ./states --max-steps 2000
  hf-specdec eval ./my-medusa --target tiny

--data takes .jsonl rows with "messages" or "conversations", "prompt" and "completion", or "text"; any other file is plain text.
More drafts are accepted if a head was trained on the target's own answers: --regenerate lets the target write them, once, to a file
that several heads can share. If the run is interrupted, the same command continues it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There is a further subcommand for each method."""
    methods = parser.add_subparsers(title="methods", metavar="METHOD", dest="method", required=True)
    for name, options_class in options_by_method().items():
        about, epilog = options_class.__doc__, "See `hf-specdec train --help` for examples.\n"
        method = methods.add_parser(name, help=about, description=about, epilog=epilog)
        add_shared_arguments(method)
        group = method.add_argument_group("training")
        for field in dataclasses.fields(options_class):
            add_option(group, field)
        method.set_defaults(parser=method)
        method.add_argument("--debug", action="store_true", help="show the traceback of an error and all log messages")


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that all methods share."""
    needed = parser.add_argument_group("what and where")
    needed.add_argument("--target", required=True, metavar="MODEL", help="a bundled name, a folder, or a Hub id")
    needed.add_argument("--data", required=True, metavar="FILE", help="training text; .jsonl, or plain text")
    folder = "the head's folder; an unfinished run in it is continued"
    needed.add_argument("--output", required=True, metavar="DIR", help=folder)
    states = "keep the target's hidden states here (default: compute them each time)"
    needed.add_argument("--cache-dir", metavar="DIR", help=states)
    needed.add_argument("--quiet", action="store_true", help="no progress bar")
    add_loading_options(parser.add_argument_group("loading the target"), "its", "cpu, cuda, ...")
    answers = parser.add_argument_group("answers by the target")
    file = "let the target write the answers first, into this file (default: OUTPUT/training/regenerated.jsonl); an unfinished "
    answers.add_argument("--regenerate", nargs="?", const="", metavar="FILE", help=f"{file}file is continued")
    most = "most tokens of an answer (default: %(default)s)"
    answers.add_argument("--max-new-tokens", type=positive_int, default=512, metavar="N", help=most)
    answers.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default: %(default)s)")
    usual = "default: %(default)s"
    answers.add_argument("--generation-batch-size", type=positive_int, default=16, metavar="B", help=usual)
    add_config_option(answers, "drafter for the answers (default: %(default)s)", default='{"method": "ngram"}')
    export = parser.add_argument_group("the exported head")
    export.add_argument("--format", metavar="NAME", help="layout of the files (default: the method's original one)")
    export.add_argument("--export-dtype", choices=DTYPES[1:], help="precision of the weights (default: the target's)")
    export.add_argument("--license", metavar="ID", help="for the model card, e.g. apache-2.0")
    export.add_argument("--push-to-hub", metavar="REPO", help="upload the folder to this Hub repository")
    export.add_argument("--private", action="store_true", help="make that repository a private one")


def add_option(group: argparse._ArgumentGroup, field: dataclasses.Field) -> None:
    """Add the command-line option of one field of a method's options."""
    name, meta = "--" + field.name.replace("_", "-"), field.metadata
    default = "none" if field.default is None else field.default
    help = meta["help"].replace("%", "%%")
    kind = str(field.type).split(" | ")[0]
    if kind == "bool":
        shown = f"{help} (default: {'on' if field.default else 'off'})"
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default, help=shown)
        return
    parse = {"int": int, "float": float, "str": str}[kind]
    shown = help if "default:" in help else f"{help} (default: {default})"
    metavar = None if meta["choices"] else {"int": "N", "float": "X", "str": "TEXT"}[kind]
    group.add_argument(
        name, type=parse, default=field.default, choices=meta["choices"] or None, metavar=metavar, help=shown
    )
    if field.name == "loss":
        earlier: dict = {"dest": "loss", "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        group.add_argument("--objective", choices=meta["choices"], **earlier)  # its earlier name


def run(args: argparse.Namespace) -> int:
    import torch

    from ..training import export
    from ..training.base import trainer_class
    from ..training.pipeline import check_installed, train_head

    check_installed()
    trainer = trainer_class(args.method)
    names = [field.name for field in dataclasses.fields(trainer.options_class)]
    options = trainer.options_class(**{name: getattr(args, name) for name in names})
    export.check_format(trainer, args.format)
    if not Path(args.data).is_file():
        raise ValueError(f"--data {args.data}: no such file.")
    if args.debug:
        logging.basicConfig(level=logging.INFO)
    console = Console(stderr=True, highlight=False, emoji=False)
    args.model = args.target
    if args.device == "auto" and "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"  # this is one of several processes
    regeneration = None
    if args.regenerate is not None:
        from ..training.regenerate import Regeneration

        config = hf_specdec.parse_config(args.speculative_config).to_dict()
        regeneration = Regeneration(
            args.regenerate or None, args.max_new_tokens, args.temperature, batch_size=args.generation_batch_size,
            speculative_config=config, seed=args.seed,
        )  # fmt: skip
    model, tokenizer = load_model_and_tokenizer(args)
    trained = train_head(
        args.method,
        model,
        tokenizer,
        args.data,
        args.output,
        options,
        target_name=args.target,
        regeneration=regeneration,
        cache_dir=args.cache_dir,
        form=args.format,
        dtype=export.DTYPES[args.export_dtype] if args.export_dtype else None,
        license=args.license,
        quiet=args.quiet,
        say=lambda line: console.print(line, soft_wrap=True, markup=False),
    )
    print(summary(trained))
    if args.push_to_hub:
        print(export.push_to_hub(trained.folder, args.push_to_hub, private=args.private))
    return 0


def summary(trained: Trained) -> str:
    """What was trained, on one line; with τ if there was held-out text."""
    parts = [f"{trained.folder}: {trained.steps} steps"]
    if trained.estimate is not None:
        rates = " ".join(f"{rate:.0%}" for rate in trained.estimate.acceptance)
        parts.append(f"estimated τ {trained.estimate.tau:.2f} on held-out text (acceptance {rates})")
    return "; ".join(parts)
