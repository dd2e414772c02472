"""Options that subcommands share, and what is made from them: models, prompts, arguments of `generate()`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

import hf_specdec

from ..bundled import BUNDLED_PROMPTS
from ..config import nearest_hint
from ..jsonl import read_rows, rows_of

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "bfloat16", "float16")
PROMPTS_HELP = (
    'prompts: a .jsonl file with a "prompt" a row, a .txt file with one a line, or a text that is one; - reads stdin'
)
CONFIG_HELP = "a method's name, JSON text, or the path of a JSON file"


def _number(kind: type, what: str, fits: Callable[[Any], bool]) -> Callable[[str], Any]:
    """An argparse type: numbers of one kind that fit."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {what}, not {text!r}")

    return read


positive_int = _number(int, "an integer of at least 1", lambda value: value >= 1)
whole_number = _number(int, "an integer of at least 0", lambda value: value >= 0)
positive_float = _number(float, "a number above 0", lambda value: 0 < value < float("inf"))
port_number = _number(int, "a port from 0 to 65535", lambda value: 0 <= value <= 65535)


class Output(Console):
    """A console on stdout that raises BrokenPipeError if the pipe is closed."""

    def __init__(self) -> None:
        super().__init__(highlight=False, emoji=False)

    def say(self, text: str) -> None:
        """Print text as it is: no markup, and no line breaks of the console's own."""
        self.print(text, soft_wrap=True, markup=False)

    def on_broken_pipe(self) -> None:
        """Raise, so that `main` handles it."""
        raise BrokenPipeError


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A progress bar on stderr: what, a bar, how many of how many, the time, and further columns."""
    first = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*first, *columns, console=Console(stderr=True), transient=True)


def write_report(report: dict[str, Any] | list[int], path: str | None) -> bool:
    """Write a report as JSON to a file; "-" prints it. Returns whether it was printed. None: write nothing."""
    text = json.dumps(report, indent=2)
    if path == "-":
        print(text)
    elif path:
        Path(path).write_text(text + "\n", encoding="utf-8")
    return path == "-"


def check_output_file(path: str | None, option: str) -> None:
    """Raise ValueError if the file of an option cannot be written. None and "-" are not files."""
    if path in (None, "-"):
        return
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{option} {path}: a folder, not a file.")
    if not file.parent.is_dir():
        raise ValueError(f"{option} {path}: no such folder: {file.parent}.")
    if file.exists() and not file.is_file():  # a pipe or device: opening it may wait for a reader
        if not os.access(file, os.W_OK):
            raise ValueError(f"{option} {path}: not writable.")
        return
    # Permissions are not all that can be in the way: the file system may be read-only, or one like /proc.
    is_new, file = not file.exists(), file.resolve()  # what a link points to is made
    try:
        os.close(os.open(file, os.O_WRONLY | (os.O_CREAT | os.O_EXCL if is_new else 0), 0o666))
        if is_new:
            file.unlink()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ValueError(f"{option} {path}: cannot be written: {why}.") from None


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a model and say how it is loaded."""
    parser.add_argument("model", metavar="MODEL", help="a bundled name (`hf-specdec models`), a folder, or a Hub id")
    add_loading_options(parser.add_argument_group("loading"), "the", "cpu, cuda, cuda:1, ...")


def add_loading_options(group: argparse._ArgumentGroup, whose: str, devices: str) -> None:
    """Add the options of loading a model."""
    group.add_argument(
        "--dtype", choices=DTYPES, default="auto", help=f"precision of {whose} weights (default: the checkpoint's)"
    )
    group.add_argument("--device", default="auto", help=f"{devices} (default: cuda if there is one, else cpu)")
    group.add_argument("--trust-remote-code", action="store_true", help="run Python code that the checkpoint contains")


def add_decoding_options(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Add the options of decoding."""
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--max-new-tokens", type=positive_int, default=max_new_tokens, metavar="N", help="default: %(default)s"
    )
    group.add_argument("--do-sample", action="store_true", help="sample; without it decoding is greedy")
    group.add_argument("--temperature", type=float, metavar="T", help="divides the logits (with --do-sample)")
    group.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling (with --do-sample)")
    group.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens (with --do-sample)")
    group.add_argument("--seed", type=int, default=0, metavar="S", help="torch's seed (default: %(default)s)")
    add_chat_option(group)


def add_chat_option(group: argparse._ArgumentGroup) -> None:
    """Add --chat and --no-chat."""
    template = "wrap each prompt in the tokenizer's chat template (default: if it has one)"
    group.add_argument("--chat", action=argparse.BooleanOptionalAction, help=template)


def add_prompts_options(group: argparse._ArgumentGroup, limit: int | None = None, batch_size: int = 1) -> None:
    """Add the options that name prompts."""
    prompts = f"{PROMPTS_HELP} (default: the bundled prompts)"
    group.add_argument("--prompts", default=str(BUNDLED_PROMPTS), metavar="FILE", help=prompts)
    few = "use only N of the prompts" + (" (default: %(default)s)" if limit else "")
    group.add_argument("--limit", type=positive_int, default=limit, metavar="N", help=few)
    usual = "default: %(default)s"
    group.add_argument("--batch-size", type=positive_int, default=batch_size, metavar="B", help=usual)


def add_config_option(group: Any, help: str = CONFIG_HELP, **more: Any) -> None:
    """Add --speculative-config."""
    group.add_argument("--speculative-config", metavar="JSON", help=help, **more)


def decoding_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `generate()` from the options of `add_decoding_options`. Raises ValueError: a sampling option without --do-sample."""
    sampling = {key: getattr(args, key) for key in ("temperature", "top_p", "top_k") if getattr(args, key) is not None}
    if sampling and not args.do_sample:
        names = ", ".join("--" + key.replace("_", "-") for key in sampling)
        raise ValueError(f"{names} has an effect only with --do-sample: add it, or leave {names} out.")
    return {"max_new_tokens": args.max_new_tokens, "do_sample": args.do_sample, **sampling}


def load_model_and_tokenizer(args: argparse.Namespace) -> tuple[Any, Any]:
    """Load the model, in eval mode on its device, and its tokenizer, which pads on the left. Raises ValueError: there is no such folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from ..model.encoder_decoder import check_decoder_only

    folder = hf_specdec.resolve_model(args.model)
    if folder.startswith(("/", ".", "~")) and not Path(folder).is_dir():
        beside = [path.name for path in Path(folder).parent.glob("*") if path.is_dir()]
        raise ValueError(f"{folder}: no such folder{nearest_hint(Path(folder).name, beside)}.")
    if not args.debug:
        transformers_logging.set_verbosity_error()
    if folder != args.model:  # a bundled model loads too fast for a progress bar
        transformers_logging.disable_progress_bar()
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    options = {"trust_remote_code": args.trust_remote_code}
    training = args.command == "train"
    instead = "no drafter can be trained for such a target yet" if training else "use hf-specdec serve, or generate()"
    check_decoder_only(folder, instead, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", **options)
    size, sharding = getattr(args, "tensor_parallel_size", 1), {}
    if size > 1:
        from transformers.distributed import DistributedConfig  # pyright: ignore[reportPrivateImportUsage]

        sharding = {"distributed_config": DistributedConfig(tp_size=size)}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=args.dtype, **sharding, **options)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return (model if size > 1 else model.to(device)).eval(), tokenizer


def encode_prompts(
    tokenizer: Any, prompts: list[str], chat: bool | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """Encode prompts as `input_ids` and `attention_mask`, each [B, S], padded on the left. `chat`: wrap each in the chat template; None:
    if the tokenizer has one. Raises ValueError: `chat` is True and there is no template.
    """
    if chat is None:
        chat = tokenizer.chat_template is not None
    elif chat and tokenizer.chat_template is None:
        raise ValueError("--chat: this tokenizer has no chat template.")
    if chat:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(prompts, padding=True, add_special_tokens=not chat, return_tensors="pt")
    return {key: batch[key].to(device) for key in ("input_ids", "attention_mask")}


def encode_batches(
    tokenizer: Any, prompts: list[str], batch_size: int, chat: bool | None, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Prompts as batches of `batch_size`, see `encode_prompts`; the last may be smaller."""
    groups = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    return [encode_prompts(tokenizer, group, chat, device) for group in groups]


def read_prompts(path: str) -> list[dict[str, str]]:
    """Read prompts: for each row of a .jsonl file a dictionary with "prompt" and "task" ("" if the row has none). A .txt file has a
    prompt a line. Any other file is one prompt; "-" reads stdin. Raises ValueError: the file has no prompts, or a row has no prompt.
    """
    piped = path == "-"
    rows = rows_of(sys.stdin.read().removeprefix("\ufeff"), path, "prompt") if piped else read_rows(path, "prompt")
    if rows and rows[0].get("_plain") and not piped:
        form = "the whole file (.txt: a prompt a line; .jsonl: rows)"
        if Path(path).suffix == ".txt":
            rows = [{"prompt": line} for line in rows[0]["prompt"].splitlines() if line.strip()]
            form = "a prompt a line"
        print(f"{path}: {len(rows)} prompt{'s' * (len(rows) > 1)}, {form}", file=sys.stderr)
    if not rows:
        raise ValueError(f"{path}: no prompt in it.")
    return [{"prompt": prompt_of(row), "task": str(row.get("task", ""))} for row in rows]


def spread(rows: list[Any], count: int) -> list[Any]:
    """Up to `count` rows at even distances, so that all parts of a file are represented."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def prompt_of(row: dict[str, Any]) -> str:
    """The prompt of a row: its "prompt", or "question" or the first of "turns". Raises ValueError: it has none of them."""
    prompt = row.get("prompt") or row.get("question") or next(iter(row.get("turns") or ()), None)
    if not isinstance(prompt, str):
        raise ValueError(f'{row["_where"]}: no text under "prompt" (or "question", "turns").')
    return prompt


def add_ranks_option(parser: argparse.ArgumentParser) -> None:
    """Add --tensor-parallel-size."""
    sharded = "shard the model over N ranks; the command starts them on this machine (default: %(default)s)"
    parser.add_argument("--tensor-parallel-size", type=positive_int, default=1, metavar="N", help=sharded)


def start_ranks(size: int, argv: Sequence[str]) -> None:
    """Replace this process by torchrun with `size` ranks of the same command. Returns only in a rank, or if `size` is 1. Raises ValueError:
    torchrun has started another number of ranks.
    """
    world = os.environ.get("WORLD_SIZE")
    if world is not None and int(world) != size:
        raise ValueError(f"--tensor-parallel-size is {size}, but torchrun has started {world} ranks: make them equal.")
    if world is not None or size == 1:
        if int(os.environ.get("RANK", "0")) > 0:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (only rank 0 prints)
            sys.stderr = sys.stdout
        return
    sys.stdout.flush()
    # Without this variable torchrun sets it to 1, with a warning.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))
    ranks = ["--standalone", "--nproc_per_node", str(size)]
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *ranks, "-m", "hf_specdec", *argv])


def leave_ranks() -> None:
    """Leave this process's group of ranks, if it has one: the group's threads must not outlive `main`."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
