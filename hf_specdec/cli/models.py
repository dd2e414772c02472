"""`hf-specdec models`: list the bundled models, the methods with their keys and requirements, and published heads."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

import hf_specdec
from hf_specdec.bundled import APART, HOW_TO_INSTALL
from hf_specdec.config import SpeculativeConfig, SpeculativeConfigError, nearest_hint

from .options import Output

EPILOG = """\
examples:
  hf-specdec models                   bundled models and heads, and the methods' names
  hf-specdec models suffix            one method in full
  hf-specdec models qwen3             published heads with this in their name or their target's
  hf-specdec models --all             every method in full, and every published head

A bundled name works wherever a model name does: as MODEL on the command line and as "model" in a speculative configuration.
hf_specdec.bundled(NAME) is its local folder, for from_pretrained.
"""

MORE = "`hf-specdec models WORD` shows a method, or published heads; `hf-specdec models --all` shows everything."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "word", nargs="?", metavar="WORD", help="show this method, or published heads whose names hold it"
    )
    shown.add_argument("--all", action="store_true", help="show every method in full, and every published head")
    shown.add_argument("--markdown", action="store_true", help="print methods and keys as the page docs/keys.md")


def run(args: argparse.Namespace) -> int:
    methods = hf_specdec.available_methods()
    if args.markdown:
        print(markdown_page(methods), end="")
        return 0
    console = Output()
    if args.word is None:
        print_bundled(console)
    if args.word is None and not args.all:
        console.say(f"\nmethods: {', '.join(methods)}\n\n{MORE}")
        return 0
    shown = methods if args.all else {name: config for name, config in methods.items() if name == args.word}
    heads = [] if args.word in methods else head_lines(args.word or "")
    if not shown and not heads:
        hint = nearest_hint(args.word, methods)
        others = f"and no published head has that in its name; the methods are {', '.join(methods)}."
        raise ValueError(f"no method {args.word!r}{hint}, {others}")
    if shown:
        print_methods(console, shown)
    if heads:
        console.say("\n".join(["published heads, on the Hub:", *heads]))
    return 0


def print_bundled(console: Output) -> None:
    """Print the bundled models and heads."""
    from ..kernels import native

    console.print("[bold]bundled models[/bold]")
    for name in hf_specdec.bundled_names():
        console.say(bundled_line(name))
    missing = sorted(set(APART) - set(hf_specdec.bundled_names()))
    if missing:
        console.say(f"  not installed: {', '.join(missing)}; {HOW_TO_INSTALL}")
    console.print(f"\n[bold]native library[/bold] for CPUs {native.description()}", soft_wrap=True)


def head_lines(word: str) -> list[str]:
    """A line for each published head in whose name or target's name `word` is, whatever the case."""
    from ..candidate_generators.auto.hub import known_heads

    lines = (f"  {head.repo} ({head.method}{head.about}) for {target}" for target, head in known_heads())
    return [line for line in lines if word.lower() in line.lower()]


def print_methods(console: Output, methods: dict[str, type[SpeculativeConfig]]) -> None:
    """Print all methods, a line each."""
    parts = sections(methods)
    for title, text, fields, config in [*parts[-len(methods) :], *reversed(parts[: -len(methods)])]:
        console.print(f"[bold]{title.strip('`')}[/bold]{escape(' – ' + text if text else '')}")
        if fields:
            console.print(keys_table(fields, config))
        console.print()


def sections(methods: dict[str, type[SpeculativeConfig]]) -> list[tuple[str, str, list[dataclasses.Field], Any]]:
    """Title, text, keys and configuration: of what all methods take, of the groups of keys that these take, and of these methods. A
    text says what K, `num_speculative_tokens`, is by default, if that is another number.
    """
    out: list[Any] = [("Keys of every method", "", shared_fields(), SpeculativeConfig)]
    groups = key_groups()
    for group, base in groups.items():
        if any(issubclass(config, base) for config in methods.values()):
            out.append((f"Keys of {group}", "", fields_beside(base, [base.__mro__[1]]), base))
    for name, config in methods.items():
        taken = {group: base for group, base in groups.items() if issubclass(config, base)}
        fields = fields_beside(config, [SpeculativeConfig, *taken.values()])
        length = default_length(config)
        common = "derived", str(SpeculativeConfig.default_num_speculative_tokens)
        k = "" if length in common else f" Default K: {length}."
        takes = f" Takes the keys of {' and '.join(taken)}." if taken else ""
        needs = f" Needs {', '.join(config.requires)}." if config.requires else ""
        out.append((f"`{name}`", description(config) + needs + takes + k, fields, config))
    return out


def key_groups() -> dict[str, type[SpeculativeConfig]]:
    """Keys that several methods take: the name of a group, and the base of their configurations."""
    from ..candidate_generators.checkpoints.config import HeadConfig
    from ..candidate_generators.corpora import CorpusConfig
    from ..candidate_generators.growing.tree_shapes import TreeDraftingConfig
    from ..candidate_generators.lookup_cache import LookupCacheConfig

    return {"trees": TreeDraftingConfig, "heads": HeadConfig, "look-ups": LookupCacheConfig, "corpora": CorpusConfig}


def fields_beside(config: type[SpeculativeConfig], bases: list[Any]) -> list[dataclasses.Field]:
    """The keys of a configuration that none of these bases has, or that mean something else there."""
    known = {(f.name, f.metadata.get("help")) for base in bases for f in dataclasses.fields(base)}
    return [f for f in dataclasses.fields(config) if (f.name, f.metadata.get("help")) not in known]


def shared_fields() -> list[dataclasses.Field]:
    """The keys that every method has, except `method`."""
    return list(dataclasses.fields(SpeculativeConfig)[1:])


def default_length(config: type[SpeculativeConfig]) -> str:
    """The default of `num_speculative_tokens` as JSON; "derived" if the method computes it from keys that it requires."""
    try:
        return json.dumps(config().num_speculative_tokens)
    except SpeculativeConfigError:  # other keys are required
        return "derived"


def markdown_page(methods: dict[str, type[SpeculativeConfig]]) -> str:
    """All methods with their keys: the page docs/keys.md."""
    lines = ["# Keys of `speculative_config`", "", "Written by `hf-specdec models --markdown`.", ""]
    for title, text, fields, config in sections(methods):
        lines += [f"## {title}", ""] + ([text, ""] if text else [])
        if fields:
            lines += ["| key | default | meaning |", "|---|---|---|"]
            for field in fields:
                meaning = field.metadata.get("help", "").replace("|", "\\|")
                lines.append(f"| `{field.name}` | {default_text(field, config)} | {meaning} |")
            lines.append("")
    return "\n".join(lines)


def bundled_line(name: str) -> str:
    """A line about a bundled model: its name, shape (or method, for a head) and size."""
    folder = Path(hf_specdec.bundled(name))
    megabytes = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
    if (folder / "tokenizer.json").is_file():
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder)
        what = f"{config.model_type}, {config.num_hidden_layers} layers, hidden {config.hidden_size}, vocabulary {config.vocab_size}"
    else:
        what = f"{hf_specdec.parse_config({'model': name}).method} head for tiny"
    return f"  {name:<20}{what}, {megabytes:.1f} MB"


def description(config: type[SpeculativeConfig]) -> str:
    """The first paragraph of a configuration class's docstring, on one line."""
    return " ".join((inspect.getdoc(config) or "").split("\n\n")[0].split())


def keys_table(fields, config: type[SpeculativeConfig]) -> Table:
    whole = Column(no_wrap=True), Column(no_wrap=True)
    table = Table(*whole, Column(overflow="fold"), box=None, padding=(0, 2), show_header=False)
    for field in fields:
        table.add_row(field.name, default_text(field, config), field.metadata.get("help", ""))
    return table


def default_text(field: dataclasses.Field, config: type[SpeculativeConfig]) -> str:
    """The default of a key as JSON; "required" if it has none."""
    if field.name == "num_speculative_tokens":
        return default_length(config)
    if field.default is not dataclasses.MISSING:
        return json.dumps(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return json.dumps(field.default_factory())
    return "required"
