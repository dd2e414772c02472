"""`hf-specdec serve`: an OpenAI-compatible server with continuous batching and speculation."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

import hf_specdec

from .options import DTYPES, positive_float, positive_int

EPILOG = """\
examples:
  hf-specdec serve tiny --speculative-config '{"method": "eagle3", "model": "tiny-eagle3"}'
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Tell me a story about a dog."}]}'

Answers do not depend on the speculative configuration, nor on what else runs: greedy answers are those of plain decoding, and a
request's seed gives the same tokens every time. Flags have vLLM's names.
"""


def add_command(commands) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = commands.add_parser("serve", help="serve a model over HTTP", description=__doc__, epilog=EPILOG)
    parser.add_argument("model", metavar="MODEL", help="a bundled name, a folder, or a Hub id")
    parser.add_argument(
        "--speculative-config", metavar="JSON", help="JSON text or the path of a JSON file (default: plain decoding)"
    )
    group = parser.add_argument_group("model")
    group.add_argument("--tokenizer", metavar="NAME", help="default: the model's")
    group.add_argument("--revision", help="branch, tag or commit on the Hub")
    group.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="precision of the weights (default: the checkpoint's)"
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one, else cpu)")
    group.add_argument(
        "--tensor-parallel-size", "-tp", type=positive_int, default=1, metavar="N",
        help="ranks that hold a part of every layer each (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--enable-expert-parallel", action="store_true", help="experts are on ranks of their own")
    group.add_argument("--trust-remote-code", action="store_true", help="allow code that the checkpoint brings")
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja file (default: the tokenizer's, else ChatML)")
    group.add_argument(
        "--response-template",
        metavar="FILE",
        help="JSON: how the model marks reasoning and tool calls (default: its own)",
    )
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--max-model-len", type=positive_int, metavar="N", help="tokens of a prompt and its answer, at most"
    )
    group.add_argument(
        "--max-num-seqs", type=positive_int, default=256, metavar="N", help="rows at once (default: %(default)s)"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=positive_int, default=2048, metavar="N",
        help="tokens of a step: prompt chunks and drafts (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--kv-cache-memory-bytes", type=positive_int, metavar="N", help="memory of the KV cache")
    group.add_argument(
        "--kv-transfer-config", metavar="JSON",
        help='prefill and decode apart: {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_consumer" or "kv_both"}',
    )  # fmt: skip
    group.add_argument("--seed", type=int, metavar="N", help="of requests that have none (default: random)")
    group.add_argument(
        "--replicas", type=positive_int, default=1, metavar="N",
        help="engines behind one address, by Ray Serve (default: %(default)s; needs hf-specdec[ray])",
    )  # fmt: skip
    group = parser.add_argument_group("HTTP")
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s; 0.0.0.0 for all interfaces")
    group.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="guards everything but /health; repeatable (default: HF_SPECDEC_API_KEY)",
    )
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="default: MODEL")
    group.add_argument(
        "--allowed-origins", nargs="+", metavar="URL", help="web pages that may call (CORS; default: none)"
    )
    group.add_argument("--max-num-queued-reqs", type=positive_int, metavar="N", help="beyond them the answer is 429")
    group.add_argument(
        "--max-body-bytes", type=positive_int, default=16 << 20, metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--sse-keep-alive-interval", type=float, default=15.0, metavar="S", help="default: %(default)s; 0: off"
    )
    group.add_argument(
        "--request-read-timeout", type=float, default=30.0, metavar="S",
        help="for a request to come in (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max-request-seconds", type=positive_float, metavar="S",
        help="for an answer; it ends with what is written then (default: no limit)",
    )  # fmt: skip
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="to drain after SIGTERM (default: %(default)s)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand; returns the exit code."""
    try:
        from ..serve.hidden_states import KVTransferConfig
        from ..serve.run import serve
        from ..serve.server import Limits
    except ImportError as error:
        raise ImportError(f"serve needs {error.name}: pip install 'hf-specdec[serve]'") from error
    if args.speculative_config is not None:
        hf_specdec.parse_config(args.speculative_config)  # before the model is loaded
    transfer = None
    if args.kv_transfer_config is not None:
        try:
            transfer = json.loads(args.kv_transfer_config)
        except ValueError as error:
            raise ValueError(f"--kv-transfer-config is no JSON: {error}") from None
        if not isinstance(transfer, dict):
            raise ValueError(
                '--kv-transfer-config must be an object: {"kv_connector": "NixlConnector", "kv_role": "kv_both"}.'
            )
        KVTransferConfig.of(transfer)
    if args.replicas > 1:
        return _run_replicas(args, transfer)
    template = None if args.chat_template is None else Path(args.chat_template).read_text(encoding="utf-8")
    response = None
    if args.response_template is not None:
        response = json.loads(Path(args.response_template).read_text(encoding="utf-8"))
    serve(
        args.model,
        args.served_model_name or [args.model],
        Limits(
            args.max_body_bytes,
            args.max_num_queued_reqs,
            args.sse_keep_alive_interval,
            args.request_read_timeout,
            args.max_request_seconds,
        ),
        host=args.host,
        port=args.port,
        api_keys=args.api_key or ([key] if (key := os.environ.get("HF_SPECDEC_API_KEY")) else None),
        allowed_origins=args.allowed_origins,
        shutdown_timeout=args.shutdown_timeout,
        chat_template=template,
        response_template=response,
        tokenizer=args.tokenizer,
        on_ready=lambda url: print(f"Serving {args.model} on {url}", file=sys.stderr, flush=True),
        speculative_config=args.speculative_config,
        dtype=args.dtype,
        device=args.device,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        seed=args.seed,
        tensor_parallel_size=args.tensor_parallel_size,
        enable_expert_parallel=args.enable_expert_parallel,
        kv_transfer_config=transfer,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
    )
    return 0


def _run_replicas(args: argparse.Namespace, transfer: dict | None) -> int:
    """Several engines, in processes of Ray."""
    left_out = {
        "--chat-template": args.chat_template, "--response-template": args.response_template, "--tokenizer": args.tokenizer,
        "--allowed-origins": args.allowed_origins, "--max-num-queued-reqs": args.max_num_queued_reqs, "--kv-transfer-config": transfer,
    }  # fmt: skip
    given = [name for name, value in left_out.items() if value is not None]
    if given or len(args.served_model_name or []) > 1:
        raise ValueError(
            f"--replicas does not pass on {', '.join(given) or 'several --served-model-name'}: start the servers one by one, with a "
            "router in front of them (docs/distributed.md)."
        )
    from ..serve.ray import Arguments, run

    config = args.speculative_config
    names = (
        "dtype", "device", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "seed", "revision",
        "trust_remote_code", "tensor_parallel_size", "enable_expert_parallel",
    )  # fmt: skip
    llm = {name: getattr(args, name) for name in names}
    llm["speculative_config"] = None if config is None else hf_specdec.parse_config(config).to_dict()
    on_gpus = args.device != "cpu" and torch.cuda.is_available()
    arguments = Arguments(
        args.model, (args.served_model_name or [None])[0], args.replicas, num_cpus=0.5,
        num_gpus=args.tensor_parallel_size if on_gpus else 0,
        api_keys=args.api_key or ([key] if (key := os.environ.get("HF_SPECDEC_API_KEY")) else None), llm=llm,
    )  # fmt: skip
    run(
        arguments, args.host, args.port,
        lambda url: print(f"Serving {args.model} on {url} with {args.replicas} replicas", file=sys.stderr, flush=True),
    )  # fmt: skip
    return 0
