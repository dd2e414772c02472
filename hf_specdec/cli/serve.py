"""`hf-specdec serve`: an OpenAI-compatible server with continuous batching and speculation."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import hf_specdec

from ..config import KV_CACHE_DTYPES
from ..jsonl import json_object
from .options import CONFIG_HELP, DTYPES, port_number, positive_float, positive_int

EPILOG = """\
examples:
  hf-specdec serve tiny --speculative-config '{"method": "eagle3", "model": "tiny-eagle3"}'
  curl --retry 60 --retry-delay 1 --retry-connrefused localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Tell me a story about a dog."}]}'

The speculative configuration and the other requests change the speed, not the answers: greedy answers are those of plain decoding, and
a request's seed gives the same tokens every time. Flags have vLLM's names.
"""

# options that are arguments of `LLM`, which the HTTP side does not import
_OF_ENGINE = (
    "speculative_config", "revision", "dtype", "device", "tensor_parallel_size", "enable_expert_parallel", "trust_remote_code",
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "kv_cache_dtype",
    "kv_transfer_config", "seed",
)  # fmt: skip

# Defaults of options that replicas refuse. argparse's default is None, which shows that an option is not given.
_READ_SECONDS = 30.0
_SHUTDOWN_SECONDS = 30.0
_STORE_BYTES = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a bundled name, a folder, or a Hub id")
    parser.add_argument("--speculative-config", metavar="JSON", help=f"{CONFIG_HELP} (default: plain decoding)")
    _add_model_options(parser.add_argument_group("model"))
    _add_engine_options(parser.add_argument_group("engine"))
    _add_http_options(parser.add_argument_group("HTTP"))


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tokenizer", metavar="NAME", help="default: the model's")
    group.add_argument("--revision", help="branch, tag or commit on the Hub")
    group.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="precision of the weights (default: the checkpoint's)"
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one, else cpu)")
    group.add_argument(
        "--tensor-parallel-size", "-tp", type=positive_int, default=1, metavar="N",
        help="number of ranks, each of which holds a part of every layer (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--enable-expert-parallel", action="store_true", help="place whole experts on the ranks")
    group.add_argument("--trust-remote-code", action="store_true", help="run Python code that the checkpoint contains")
    group.add_argument(
        "--lora-modules", nargs="+", metavar="NAME=PATH", default=[],
        help="LoRA adapters of PEFT: folders or Hub ids; requests choose one by its name as their model",
    )  # fmt: skip
    group.add_argument(
        "--lookup-corpus", nargs="+", metavar="FILE", default=[],
        help="texts (or .jsonl with a \"text\" a row) that suffix and ngram draft from; FILE or NAME=FILE",
    )  # fmt: skip
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja file (default: the tokenizer's, else ChatML)")
    group.add_argument(
        "--response-template", metavar="FILE",
        help="a JSON file: how the model marks reasoning and tool calls (default: the tokenizer's)",
    )  # fmt: skip


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
    count = partial(group.add_argument, type=positive_int, metavar="N")
    count("--max-model-len", help="most tokens of a prompt and its answer together (default: the model's positions)")
    count("--max-num-seqs", default=256, help="most rows that run at once (default: %(default)s)")
    count(
        "--max-num-batched-tokens",
        help="most tokens of a step, prompt chunks and drafts included (default: 2048; on a CPU 256, while few rows decode)",
    )
    count("--kv-cache-memory-bytes", help="memory of the KV cache (default: a share of the free memory)")
    group.add_argument(
        "--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto",
        help="int8: keep keys and values in 8 bits (lossy); default: the model's dtype",
    )  # fmt: skip
    group.add_argument(
        "--kv-transfer-config", metavar="JSON",
        help='disaggregated prefill: {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_consumer" or "kv_both"}',
    )  # fmt: skip
    group.add_argument("--seed", type=int, metavar="N", help="seed for requests without one (default: random)")
    engines = "number of engines at one address, by Ray Serve (default: %(default)s; needs hf-specdec[ray])"
    count("--replicas", default=1, help=engines)


def _add_http_options(group: argparse._ArgumentGroup) -> None:
    add, count = group.add_argument, partial(group.add_argument, type=positive_int, metavar="N")
    add("--host", default="127.0.0.1", help="default: %(default)s; 0.0.0.0 for all interfaces")
    add("--port", type=port_number, default=8000, help="default: %(default)s")
    keys = "needed for every path but /health; repeatable (default: HF_SPECDEC_API_KEY)"
    add("--api-key", action="append", metavar="KEY", help=keys)
    add(
        "--share-across-api-keys", action="store_true",
        help="let look-ups draft for one API key's requests from another's texts (default: each key has its own tables)",
    )  # fmt: skip
    add(
        "--private-requests", action="store_true",
        help="learn from no request, as if each set speculative_config.private (default: requests that set it are left out)",
    )  # fmt: skip
    add(
        "--allow-runtime-lora-updating", action="store_true", default=None,
        help="let clients load adapters from any path of this machine (/v1/load_lora_adapter), and unload them",
    )  # fmt: skip
    add(
        "--enable-weight-updates", action="store_true", default=None,
        help="let clients pause the engine, let it sleep and update its weights, also from any folder of this machine (for training loops)",
    )  # fmt: skip
    add("--served-model-name", nargs="+", metavar="NAME", help="names by which clients call it (default: MODEL)")
    origins = "origins of web pages that may call the server (CORS; default: none)"
    add("--allowed-origins", nargs="+", metavar="URL", help=origins)
    hosts = "hosts from which images are fetched; *: any public one (default: none, images must be in requests)"
    add("--allowed-media-hosts", "--allowed-media-domains", nargs="+", metavar="HOST", help=hosts)
    add("--store", metavar="FOLDER", help="keep responses there (store, previous_response_id; default: none is kept)")
    count("--store-bytes", help=f"most bytes of them, the oldest go first (default: {_STORE_BYTES})")
    collector = "a collector (JSON over HTTP) that is sent OpenTelemetry spans of requests (default: none)"
    add("--otlp-traces-endpoint", metavar="URL", help=collector)
    count("--max-num-queued-reqs", help="most requests that wait; the next is answered with 429 (default: no limit)")
    count("--max-body-bytes", default=16 << 20, help="largest body of a request (default: %(default)s)")
    silence = "seconds of silence after which a stream sends a comment (default: %(default)s; 0: never)"
    add("--sse-keep-alive-interval", type=float, default=15.0, metavar="S", help=silence)
    reading = f"seconds for the headers of a request to arrive, and for its body (default: {_READ_SECONDS})"
    add("--request-read-timeout", type=float, metavar="S", help=reading)
    answering = "seconds for an answer, which then ends with what has been generated (default: no limit)"
    add("--max-request-seconds", type=positive_float, metavar="S", help=answering)
    ending = f"seconds that running requests get to end after SIGTERM (default: {_SHUTDOWN_SECONDS})"
    add("--shutdown-timeout", type=float, metavar="S", help=ending)


def run(args: argparse.Namespace) -> int:
    try:
        from ..serve.hidden_states import KVTransferConfig
        from ..serve.http.run import serve
        from ..serve.http.server import Limits, Privacy
        from ..serve.http.spans import Spans
        from ..serve.http.store import ResponseStore
    except ImportError as error:
        raise ImportError(f"serve needs {error.name}: pip install 'hf-specdec[serve]'") from error
    if args.store is None and args.store_bytes is not None:
        raise ValueError("--store-bytes is for --store FOLDER: give both.")
    if args.lookup_corpus:
        args.speculative_config = _with_corpora(args.speculative_config, args.lookup_corpus)
    if args.kv_transfer_config is not None:
        args.kv_transfer_config = json_object(args.kv_transfer_config, "--kv-transfer-config")
        KVTransferConfig.of(args.kv_transfer_config)  # report errors before the model is loaded
    if args.replicas > 1:
        return _run_replicas(args)
    template = _text_of("--response-template", args.response_template)
    limits = Limits(
        max_body_bytes=args.max_body_bytes, max_queued_requests=args.max_num_queued_reqs,
        keep_alive_seconds=args.sse_keep_alive_interval, answer_seconds=args.max_request_seconds,
        read_seconds=_READ_SECONDS if args.request_read_timeout is None else args.request_read_timeout,
    )  # fmt: skip
    serve(
        args.model, args.served_model_name or [args.model], limits, host=args.host, port=args.port, api_keys=_api_keys(args),
        allowed_origins=args.allowed_origins, tokenizer=args.tokenizer,
        shutdown_timeout=_SHUTDOWN_SECONDS if args.shutdown_timeout is None else args.shutdown_timeout,
        chat_template=_text_of("--chat-template", args.chat_template),
        response_template=None if template is None else json_object(template, f"--response-template {args.response_template}"),
        privacy=Privacy(args.private_requests, args.share_across_api_keys), media_hosts=args.allowed_media_hosts,
        loads_adapters=bool(args.allow_runtime_lora_updating), updates_weights=bool(args.enable_weight_updates),
        store=None if args.store is None else ResponseStore(args.store, args.store_bytes or _STORE_BYTES),
        spans=None if args.otlp_traces_endpoint is None else Spans(args.otlp_traces_endpoint),
        on_ready=lambda url: print(f"Serving {args.model} on {url}", file=sys.stderr, flush=True),
        **_engine_arguments(args),
    )  # fmt: skip
    return 0


def _text_of(option: str, file: str | None) -> str | None:
    """The text of an option's file; None if no file is given. Raises ValueError: the file is not text."""
    try:
        return None if file is None else Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file}: not UTF-8 text ({error}).") from None


def _api_keys(args: argparse.Namespace) -> list[str] | None:
    """The keys of --api-key, else that of the environment; None if no key is needed."""
    key = os.environ.get("HF_SPECDEC_API_KEY")
    return args.api_key or (None if key is None else [key])


def _engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `LLM` that have the same name as an option, but for the model and its tokenizer."""
    given = {name: getattr(args, name) for name in _OF_ENGINE}
    return {**given, "lora_modules": _lora_modules(args.lora_modules)}


def _with_corpora(config: Any, given: list[str]) -> dict[str, Any]:
    """The speculative configuration with these files. Raises ValueError: two have one name, no method is to look into them, or it
    has some already."""
    named = (text.partition("=") if "=" in text else (Path(text).stem, "=", text) for text in given)
    files = {name: file for name, _, file in named}
    if len(files) < len(given):
        raise ValueError("--lookup-corpus: give files with different names, or NAME=FILE.")
    if config is None:
        raise ValueError("--lookup-corpus is for methods that look up: add --speculative-config auto, suffix or ngram.")
    parsed = hf_specdec.parse_config(config).to_dict()
    if parsed.get("lookup_corpus") is not None:
        raise ValueError("Name corpora by --lookup-corpus or by the key lookup_corpus, not in both.")
    return {**parsed, "lookup_corpus": files}


def _lora_modules(given: list[str]) -> dict[str, str]:
    """Paths by name. Raises ValueError: one is not NAME=PATH, or a name is given twice."""
    modules: dict[str, str] = {}
    for text in given:
        name, _, path = text.partition("=")
        if not name or not path or name in modules:
            raise ValueError(f"--lora-modules {text!r}: give a new name and a path as NAME=PATH.")
        modules[name] = path
    return modules


def _run_replicas(args: argparse.Namespace) -> int:
    """Serve several engines, in processes of Ray. OSError: the address is in use; ValueError: replicas do not support an option."""
    unsupported = (
        "chat_template", "response_template", "tokenizer", "allowed_origins", "max_num_queued_reqs", "kv_transfer_config",
        "allowed_media_hosts", "request_read_timeout", "shutdown_timeout", "allow_runtime_lora_updating", "enable_weight_updates",
        "store", "store_bytes", "otlp_traces_endpoint",
    )  # fmt: skip
    given = [f"--{name.replace('_', '-')}" for name in unsupported if getattr(args, name) is not None]
    if given or len(args.served_model_name or []) > 1:
        raise ValueError(
            f"--replicas does not support {', '.join(given) or 'several names (--served-model-name)'}: start the servers one by one, "
            "with a router in front of them (docs/distributed.md)."
        )
    import torch

    from ..serve.http.address import listen
    from ..serve.ray import Arguments, run

    # Without a cluster, Ray's proxy will run here; it reports an address in use only after models are loaded.
    for taken in listen(args.host, args.port) if "RAY_ADDRESS" not in os.environ else ():
        taken.close()
    config = args.speculative_config
    llm = _engine_arguments(args)
    llm["speculative_config"] = None if config is None else hf_specdec.parse_config(config).to_dict()
    on_gpus = args.device != "cpu" and torch.cuda.is_available()
    arguments = Arguments(
        args.model, (args.served_model_name or [None])[0], args.replicas, num_cpus=0.5,
        num_gpus=args.tensor_parallel_size if on_gpus else 0, api_keys=_api_keys(args), llm=llm,
        private_requests=args.private_requests, share_across_api_keys=args.share_across_api_keys,
        max_body_bytes=args.max_body_bytes, keep_alive_seconds=args.sse_keep_alive_interval, answer_seconds=args.max_request_seconds,
    )  # fmt: skip
    run(
        arguments, args.host, args.port,
        lambda url: print(f"Serving {args.model} on {url} with {args.replicas} replicas", file=sys.stderr, flush=True),
    )  # fmt: skip
    return 0
