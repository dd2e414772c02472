"""What the parts of a step cost beside the target's forward.

    python benchmarks/micro.py [--json out.json]

Prints: µs per proposed row on a 100,000-token context (n-gram, suffix); ms of one call of the native attention kernel over scattered
blocks; ms of one decoding step reading contiguous blocks, scattered blocks and through the gather path; the share of a step that is not
the target's forward; prepacked weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec.candidate_generators import generator_class, parse_config
from hf_specdec.core.rows import RowInput
from hf_specdec.core.sequence import Sequence
from hf_specdec.decoding import SpeculativeDecoder
from hf_specdec.kernels.attention.inputs import NativeRows, RowDescription
from hf_specdec.kernels.attention.native import paged_attention
from hf_specdec.kernels.native import library
from hf_specdec.model.prepare import ModelOptions, prepare

sys.path.insert(0, str(Path(__file__).parent))
from decode import machine


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median wall time of `run`, after one warm-up."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def small_target(**sizes) -> LlamaForCausalLM:
    """A random Llama."""
    torch.manual_seed(0)
    defaults = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    return LlamaForCausalLM(
        LlamaConfig(
            **{
                **defaults,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "max_position_embeddings": 131072,
                **sizes,
            }
        )
    ).eval()


def proposal(method: dict[str, Any], length: int = 100_000) -> float:
    """µs per row: propose 5 tokens and take in 3, on a context of `length` tokens with repetitions."""
    target = prepare(small_target(num_hidden_layers=1))
    config = parse_config(method)
    generator = generator_class(config.method)(config, target, None)
    rng = np.random.default_rng(0)
    phrases = rng.integers(0, 4096, (200, 50))
    tokens = phrases[rng.integers(0, 200, length // 50)].ravel().tolist()
    seq = Sequence(tokens, max_length=2 * length)
    generator.start(seq)
    from hf_specdec.core.outcome import StepOutcome

    times = []
    for _ in range(300):
        begin = time.perf_counter()
        trees = generator.propose([seq], [5])
        times.append(time.perf_counter() - begin)
        new = phrases[rng.integers(0, 200), :3].tolist()
        seq.tokens += new
        begin = time.perf_counter()
        generator.observe(StepOutcome([seq], trees, [[]], [new]))
        times[-1] += time.perf_counter() - begin
    generator.stop(seq)
    return statistics.median(times) * 1e6


def reading(context: int) -> dict[str, float]:
    """ms of a 6-token step of one row with `context` tokens: contiguous, scattered and gathered."""
    model = small_target()
    results = {}
    for kind in ("contiguous", "scattered", "gather"):
        packed = prepare(model)
        packed.gather = kind == "gather"
        cache = packed.new_cache(2 * context // 16 + 8, 16, share_prefixes=False)
        cache.add(0)
        if kind == "scattered":  # every second block belongs to somebody else
            cache.add(1)
            for slots in range(16, context + 32, 16):
                cache.reserve(0, slots)
                cache.reserve(1, slots)
        cache.reserve(0, context + 16)
        tokens = np.arange(context) % 4096
        with packed.active(), torch.no_grad():
            packed.forward([RowInput(0, tokens, 0)], cache)
            step = RowInput(0, tokens[:6], context, logits=6)
            results[kind] = 1e3 * median_seconds(lambda p=packed, s=step, c=cache: p.forward([s], c), 15)
    return results


ATTENTION = {  # rows, keys, heads, key heads, width, queries of a row
    "8 rows, 1500 keys": (8, 1500, 12, 12, 64, 1, torch.float32),
    "1 row, 8000 keys": (1, 8000, 32, 32, 128, 1, torch.bfloat16),
    "8 rows, 700 keys, 5 queries": (8, 700, 16, 8, 64, 5, torch.bfloat16),
}


def attention_call(rows: int, keys: int, heads: int, kv_heads: int, width: int, queries: int, dtype) -> float:
    """ms of the kernel in one thread; blocks of 16 keys lie anywhere in the pools."""
    blocks = np.random.default_rng(0).permutation(rows * -(-keys // 16)).reshape(rows, -1)
    slots = (16 * blocks[:, :, None] + np.arange(16)).reshape(rows, -1)[:, :keys]
    query = torch.randn(rows * queries, heads, width).to(dtype)
    key_pool, value_pool = (torch.randn(16 * blocks.size, kv_heads, width).to(dtype) for _ in range(2))
    table = NativeRows.of([RowDescription(row, queries, keys, None) for row in slots])
    return 1e3 * median_seconds(lambda: paged_attention(query, key_pool, value_pool, table, width**-0.5), 21)


def overhead(method: dict[str, Any], batch_size: int, model: LlamaForCausalLM) -> float:
    """Share of the steps' time that is not the target's forward (propose, verify, commit, bookkeeping)."""
    config = parse_config(method)
    target = prepare(model)
    decoder = SpeculativeDecoder(generator_class(config.method)(config, target, None))
    forward_seconds = 0.0
    original = target.forward

    def timed(*args, **kwargs):
        nonlocal forward_seconds
        begin = time.perf_counter()
        out = original(*args, **kwargs)
        forward_seconds += time.perf_counter() - begin
        return out

    target.forward = timed
    rows = [Sequence([(7 * i + j) % 50 + 3 for j in range(64)], 96) for i in range(batch_size)]
    decoder.allocate(batch_size * 128, batch_size)
    with decoder.active():
        for seq in rows:
            decoder.add(seq)
        decoder.step(rows)
        forward_seconds, begin = 0.0, time.perf_counter()
        while running := [seq for seq in rows if not seq.finished]:
            decoder.step(running)
        total = time.perf_counter() - begin
        for seq in rows:
            decoder.remove(seq)
    return 1 - forward_seconds / total


def prepacked(model: LlamaForCausalLM, rows: int) -> float:
    """Speed-up of a forward of `rows` tokens by prepacked weights."""
    seconds = {}
    for wanted in (False, True):
        packed = prepare(model, ModelOptions(prepack_weights=wanted))
        cache = packed.new_cache(16, 16)
        cache.add(0)
        cache.reserve(0, 128)
        row = RowInput(0, np.arange(rows), 0, logits=rows)
        with packed.active(), torch.no_grad():
            seconds[wanted] = median_seconds(lambda p=packed, r=row, c=cache: p.forward([r], c), 9)
    return seconds[False] / seconds[True]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    figures: dict[str, Any] = {}
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    figures["proposal_us_per_row_100k"] = {"ngram": proposal(ngram)}
    try:
        figures["proposal_us_per_row_100k"]["suffix"] = proposal({"method": "suffix"})
    except ImportError as error:
        print(error)
    if library() is not None:
        figures["attention_ms"] = {name: attention_call(*shape) for name, shape in ATTENTION.items()}
    figures["step_ms_6_tokens"] = {context: reading(context) for context in (512, 2048, 8192)}
    large: Any = small_target(hidden_size=1024, intermediate_size=3072, num_hidden_layers=8)
    for dtype in (torch.float32, torch.bfloat16):
        large = large.to(dtype)
        name = str(dtype).removeprefix("torch.")
        figures[f"prepacked_speedup_{name}"] = {rows: prepacked(large, rows) for rows in (1, 2, 6, 16, 48)}
        figures[f"not_forward_{name}"] = {
            f"{config['method']} batch {batch}": overhead(config, batch, large)
            for config in ({"method": "none"}, ngram)
            for batch in (1, 8, 32)
        }
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine(), "command": " ".join(["python", *sys.argv]), **figures}, indent=1)
        )


if __name__ == "__main__":
    main()
