"""`hf-specdec models`: what is bundled, and which methods exist, with their keys and what they need."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig

import hf_specdec
from hf_specdec import SpeculativeConfig

EPILOG = """\
examples:
  hf-specdec models                   everything
  hf-specdec models suffix            one method in full

Every bundled name works wherever a model name does: as MODEL here, as "model" in a speculative configuration, and as
hf_specdec.bundled(NAME), which is the local folder for from_pretrained.
"""


def add_command(commands) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = commands.add_parser("models", help="list bundled models and methods", description=__doc__, epilog=EPILOG)
    parser.add_argument("method", nargs="?", metavar="METHOD", help="show only this method")
    return parser


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand; returns the exit code."""
    console = Console(highlight=False)
    methods = hf_specdec.available_methods()
    if args.method is not None:
        if args.method not in methods:
            raise ValueError(f"no method {args.method!r}; there are {', '.join(methods)}.")
        methods = {args.method: methods[args.method]}
    else:
        console.print("[bold]bundled models[/bold]")
        for name in hf_specdec.bundled_names():
            console.print(bundled_line(name), soft_wrap=True, markup=False)
        console.print("\n[bold]methods[/bold]")
    shared = {f.name for f in dataclasses.fields(SpeculativeConfig)}
    for name, config in methods.items():
        console.print(f"[bold]{name}[/bold] – {escape(description(config))}")
        console.print(f"  needs {escape(', '.join(config.requires) or 'nothing more')}", soft_wrap=True)
        own = [f for f in dataclasses.fields(config) if f.name not in shared]
        if config().num_speculative_tokens != SpeculativeConfig.default_num_speculative_tokens:
            own += [f for f in dataclasses.fields(config) if f.name == "num_speculative_tokens"]
        if own:
            console.print(keys_table(own, config))
        console.print()
    console.print("[bold]keys of every method[/bold]")
    console.print(
        keys_table(dataclasses.fields(SpeculativeConfig)[1:], SpeculativeConfig)
    )  # the first is the method itself
    return 0


def bundled_line(name: str) -> str:
    """A bundled model's size, shape and folder."""
    folder = Path(hf_specdec.bundled(name))
    config = AutoConfig.from_pretrained(folder)
    megabytes = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
    return (
        f"  {name:<12}{config.model_type}, {config.num_hidden_layers} layers, hidden {config.hidden_size}, "
        f"vocabulary {config.vocab_size}, {megabytes:.1f} MB\n{'':14}{folder}"
    )


def description(config: type[SpeculativeConfig]) -> str:
    """The first paragraph of a configuration class's docstring, on one line."""
    return " ".join((inspect.getdoc(config) or "").split("\n\n")[0].split())


def keys_table(fields, config: type[SpeculativeConfig]) -> Table:
    """Keys with their defaults and meaning."""
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for field in fields:
        table.add_row(field.name, default_text(field, config), field.metadata.get("help", ""))
    return table


def default_text(field: dataclasses.Field, config: type[SpeculativeConfig]) -> str:
    """The default of a key as JSON, "required" without one."""
    if field.name == "num_speculative_tokens":
        return json.dumps(config().num_speculative_tokens)  # a method may derive it from other keys
    if field.default is not dataclasses.MISSING:
        return json.dumps(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return json.dumps(field.default_factory())
    return "required"
