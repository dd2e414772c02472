"""The `hf-specdec` command. Each subcommand is a module: `add_arguments` fills its parser, `run` carries it out and returns the exit code.

`main` runs it and turns an exception into one line.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence

import hf_specdec
from hf_specdec.config import nearest_hint

from . import bench, calibrate, demo, env, eval, explain, generate, models, serve, train
from .options import leave_ranks

DESCRIPTION = "Speculative decoding for Hugging Face transformers: the same output, several tokens per forward."

EPILOG = """\
start here:
  hf-specdec demo                     a text, and the speed on a model of realistic cost, in about a minute
  hf-specdec models                   the bundled models and the methods; a word: that method, or heads on the Hub
  hf-specdec generate tiny --prompt "Tell me a story about a dog." --speculative-config '{"method": "ngram"}'
  hf-specdec bench tiny --speculative-config '{"method": "draft_model", "model": "tiny-draft"}'

`hf-specdec COMMAND --help` explains each command with examples.
"""

COMMANDS = {
    generate: "continue a prompt",
    serve: "serve a model over HTTP",
    demo: "text and speed of the bundled models",
    models: "list bundled models and methods",
    bench: "measure tokens/s",
    calibrate: "measure a drafter and fit a draft tree to it",
    train: "train a draft head for a target",
    eval: "measure a draft head",
    explain: 'show what "auto" would do',
    env: "print what a bug report needs",
}
EXPECTED_ERRORS = (ValueError, OSError, ImportError)
# An opening quote follows no letter: the apostrophe in "target's", or the end of another value, opens nothing.
LONG_VALUE = re.compile(r"(?<!\w)'[^']{200,}'|(?<!\w)\"[^\"]{200,}\"|\S{200,}")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line that points to --help; exit code 2."""

    def __init__(self, **options):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse the command line. An option that the subcommand does not have is an error with the nearest one that it has."""
        parsed, unknown = self.parse_known_args(args, namespace)
        parser = getattr(parsed, "parser", self)
        if unknown:
            parser.error(
                f"unrecognized arguments: {' '.join(unknown)}{nearest_hint(unknown[0], parser._option_string_actions)}"
            )
        return parsed

    def _check_value(self, action, value):
        if action.choices is not None and value not in action.choices:
            choices = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(
                action, f"invalid choice: {value!r}{nearest_hint(value, action.choices)} (choose from {choices})"
            )

    def exit(self, status: int = 0, message: str | None = None):
        """Flush stdout, so that `main` notices a closed pipe, and end the process."""
        sys.stdout.flush()
        super().exit(status, message)

    def error(self, message: str):
        """Print the message on one line and exit with 2."""
        self.exit(2, f"{self.prog}: error: {shortened(message)} (see `{self.prog} --help`)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command. The parsed arguments have `run`: the function of the chosen subcommand."""
    parser = Parser(prog="hf-specdec", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"hf-specdec {hf_specdec.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module, about in COMMANDS.items():
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=about, description=module.__doc__, epilog=module.EPILOG)
        module.add_arguments(command)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error and all log messages")
        command.set_defaults(run=module.run, parser=command)
    return parser


def shortened(message: str) -> str:
    """A message in which quoted values and words of 200 characters or more are cut to 80."""
    return LONG_VALUE.sub(lambda value: value[0][:80] + "…", message)


def one_line(error: BaseException) -> str:
    """The message of an error on one line. For an unexpected error, it has the error's type and says how to see more."""
    text = shortened(" ".join(str(error).split())) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        what = f"{error.strerror[0].lower()}{error.strerror[1:]}."
        return what if error.filename is None else f"{shortened(str(error.filename))}: {what}"
    if isinstance(error, EXPECTED_ERRORS):
        return text
    if isinstance(error, RecursionError):
        return "something is nested too deeply (--debug shows the traceback)"
    return f"{type(error).__name__}: {text} (--debug shows the traceback)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own). Returns the exit code; argparse itself may exit. 0: done. 1: `demo` found
    an output that differs from plain decoding. 2: an error, one line on stderr. 130: interrupted.
    """
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe: Python's flush at exit must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _dispatch(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    for name, value in vars(args).items():  # shells leave "~" as it is in quotes and after "--option="
        if isinstance(value, str):
            setattr(args, name, os.path.expanduser(value))
    args.argv = sys.argv[1:] if argv is None else list(argv)
    if args.command is None:
        parser.print_help()
        return 0
    if args.debug:
        for logger in hf_specdec.FOREIGN_LOGGERS:
            logger.setLevel(logging.NOTSET)
    try:
        code = args.run(args)
        leave_ranks()
        return code
    except KeyboardInterrupt:
        print(f"hf-specdec {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        if args.debug:
            raise
        print(f"hf-specdec {args.command}: error: {one_line(error)}", file=sys.stderr)
        return 2
