"""Decoding end to end: steps against the memory's bandwidth, tokens per second beside transformers', where the time goes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from decode import batches
from transformers.utils import logging as transformers_logging

import hf_specdec

from . import floors
from .context import Context, kernels
from .experts import expert_rows
from .generating import Timing, Way, measure, run
from .kernel_times import bandwidth
from .models import Models, decoding_models
from .profile import trace
from .repeating import METHOD
from .report import Row, at_least, at_most

SECTION = "decoding"
K = 5


def ways_of_running(context: Context) -> dict[str, dict[str, Any]]:
    """Keys for each way our steps can be run, the default first."""
    if not context.on_gpu:
        return {"eager": {"cuda_graphs": False}}
    graphs = {"cuda_graphs": True}
    return {
        "graphs": graphs,
        "graphs, untraced": {**graphs, "compile": False},
        "graphs, compiled": {**graphs, "compile": True},
    }


def prompts(context: Context, models: Models, batch_size: int) -> Any:
    """A batch of chat prompts of a task."""
    batch = batches(models.tokenizer, "math", batch_size, 1)[0].to(context.device)
    if context.toy:  # their ends
        batch = {name: each[:, -6:] for name, each in batch.items()}
    return batch


def lengths(context: Context) -> tuple[int, int]:
    """New tokens of short and long calls: prompt and text stay within one bucket of 256 tokens."""
    return (1, 3) if context.toy else (16, 112)


# ---- steps ----------------------------------------------------------------------------------------------------------


def step_way(num_tokens: int, keys: dict[str, Any]) -> Way:
    """Steps that verify so many tokens per row."""
    config = {"method": METHOD, "num_speculative_tokens": num_tokens - 1} if num_tokens > 1 else {"method": "none"}
    return Way(f"{num_tokens} tokens", {"speculative_config": {**config, **keys}})


def step_rows(
    context: Context, models: Models, how: str, keys: dict[str, Any], sizes: tuple[int, ...]
) -> Iterator[Row]:
    """Step times by batch size: one token against the floor, eight against one."""
    for batch_size in sizes:
        batch = prompts(context, models, batch_size)
        one = measure(context, models, batch, step_way(1, keys), lengths(context))
        context_length = batch["input_ids"].shape[1] + sum(lengths(context)) // 2
        target = models.target
        num_bytes = floors.step_weight_bytes(target) + floors.step_cache_bytes(
            target.config, batch_size, context_length, target.dtype.itemsize
        )
        floor = floors.milliseconds_of(num_bytes, bandwidth(context))
        name = f"step, {how}, batch {batch_size}"
        note = f"call's setup {one.setup_seconds:.2f} s {one.note}".strip()
        yield Row(SECTION, f"{name}, 1 token", one.step_ms, "ms", floor=floor, note=note)
        best = batch_size == 1 and how == next(iter(ways_of_running(context)))
        share = floor / one.step_ms
        if best:
            yield at_least(SECTION, f"{name}: of the bandwidth", share, 0.85, "share", context.judges_times, floor=1.0)
        else:
            yield Row(SECTION, f"{name}: of the bandwidth", share, "share", floor=1.0)
        eight = measure(context, models, batch, step_way(8, keys), lengths(context))
        yield Row(SECTION, f"{name}, 8 tokens", eight.step_ms, "ms", floor=floor, note=eight.note)
        ratio, what = eight.step_ms / one.step_ms, f"{name}: 8 tokens over 1"
        if best:
            yield at_most(SECTION, what, ratio, 1.10, "ratio", context.judges_times)
        else:
            yield Row(SECTION, what, ratio, "ratio")


# ---- tokens per second ----------------------------------------------------------------------------------------------


def our_methods(models: Models) -> dict[str, dict[str, Any]]:
    """Configurations, and the draft model under "assistant_model"."""
    chain = {"num_speculative_tokens": K}
    return {
        "plain": {"method": "none"},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, **chain},
        "EAGLE-3": {"method": "eagle3", "model": models.eagle3, **chain},
        "EAGLE-3 tree": {"method": "eagle3", "model": models.eagle3, "depth": K, "top_k": 4, "total_tokens": 24},
        "draft model": {"method": "draft_model", **chain},
    }


def our_way(models: Models, name: str, how: str, keys: dict[str, Any]) -> Way:
    """One of our methods."""
    kwargs: dict[str, Any] = {"speculative_config": {**our_methods(models)[name], **keys}}
    if name == "draft model":
        kwargs["assistant_model"] = models.drafter
    return Way(f"ours, {name}, {how}", kwargs)


def their_ways(models: Models, batch_size: int) -> list[Way]:
    """transformers' own, but for compiled ones; its assisted generation takes one sequence."""
    ways = [Way("transformers, plain")]
    if batch_size == 1:
        models.drafter.generation_config.num_assistant_tokens = K
        models.drafter.generation_config.num_assistant_tokens_schedule = "constant"
        models.drafter.generation_config.assistant_confidence_threshold = 0.0
        ways.append(Way("transformers, prompt lookup", {"prompt_lookup_num_tokens": K, "max_matching_ngram_size": 3}))
        ways.append(Way("transformers, assisted", {"assistant_model": models.drafter}))
    return ways


def speed_row(way: Way, batch_size: int, timing: Timing, plain: float | None) -> Row:
    """Tokens per second, and what else is known."""
    notes = [f"τ {timing.tau:.2f}, step {timing.step_ms:.2f} ms"] if way.ours else []
    if plain is not None:
        notes.append(f"{timing.tokens_per_second / plain:.2f} x transformers, plain")
    notes += [timing.note] if timing.note else []
    return Row(SECTION, f"{way.name}, batch {batch_size}", timing.tokens_per_second, "tokens/s", note="; ".join(notes))


Speeds = dict[tuple[str, int], float]  # (a method's name, batch size) → tokens/s


def speed_rows(context: Context, models: Models, sizes: tuple[int, ...], speeds: Speeds) -> Iterator[Row]:
    """Ours by method (all at batch 1, three beyond) next to transformers', on the same prompts, in turn; ours are put into `speeds`."""
    how, keys = next(iter(ways_of_running(context).items()))
    for batch_size in sizes:
        batch = prompts(context, models, batch_size)
        names = list(our_methods(models)) if batch_size == 1 else ["plain", "ngram", "EAGLE-3"]
        plain = None
        for way in their_ways(models, batch_size):
            timing = measure(context, models, batch, way, lengths(context))
            plain = timing.tokens_per_second if way.name == "transformers, plain" else plain
            yield speed_row(way, batch_size, timing, plain)
        for name in names:
            way = our_way(models, name, how, keys)
            timing = measure(context, models, batch, way, lengths(context))
            speeds[name, batch_size] = timing.tokens_per_second
            yield speed_row(way, batch_size, timing, plain)


def length_rows(context: Context, models: Models, sizes: tuple[int, ...], speeds: Speeds) -> Iterator[Row]:
    """EAGLE-3 with other draft lengths, and with those that are learnt: beside the best fixed one and plain decoding.

    Args:
        speeds: what `speed_rows` found: K tokens, and none.
    """
    how, keys = next(iter(ways_of_running(context).items()))
    for batch_size in sizes:
        batch, found = prompts(context, models, batch_size), {}
        for length in (1, 3, "auto"):
            config = our_methods(models)["EAGLE-3"] | {"num_speculative_tokens": length} | keys
            way = Way(f"ours, EAGLE-3, K = {length}, {how}", {"speculative_config": config})
            timing = measure(context, models, batch, way, lengths(context))
            found[length] = timing.tokens_per_second
            yield speed_row(way, batch_size, timing, None)
        learnt = found.pop("auto")
        best = max(*found.values(), speeds["EAGLE-3", batch_size], speeds["plain", batch_size])
        name = f"EAGLE-3, auto over the best of K = 0, 1, 3, {K}, batch {batch_size}"
        yield at_least(SECTION, name, learnt / best, 0.97, "ratio", context.judges_times)


# ---- where the time goes --------------------------------------------------------------------------------------------


def profile_rows(context: Context, models: Models) -> Iterator[Row]:
    """Shares of kernels' time by what they do, and the wall time in which none ran, as steps are run by default."""
    batch, length = prompts(context, models, 1), lengths(context)[0] * 2
    names = ("ngram",) if context.toy else ("plain", "EAGLE-3")
    how, keys = next(iter(ways_of_running(context).items()))
    for name in names:
        way = our_way(models, name, how, keys)
        found = trace(context, lambda way=way: run(models, batch, way, length))
        of = f"time of {name}, {how}"
        for kind, seconds in found.kinds.items():
            yield Row(SECTION, f"{of}: {kind}", seconds / max(found.busy, 1e-12), "of kernels")
        gaps = (found.wall - found.busy) / found.wall
        note = f"wall {1e3 * found.wall:.1f} ms, kernels {1e3 * found.busy:.1f} ms, {found.launches} launches"
        yield Row(SECTION, f"{of}: host gaps", gaps, "of wall", note=note)


# ---- options --------------------------------------------------------------------------------------------------------


def deterministic_rows(context: Context, models: Models) -> Iterator[Row]:
    """Whether drafts change nothing, not even in bfloat16, and what that costs."""
    batch, (_, length) = prompts(context, models, 1 if context.toy else 8), lengths(context)
    usual = {"cuda_graphs": context.on_gpu}
    keys = {**usual, "deterministic": True}
    with kernels("reference" if context.toy else "triton"):  # interpreted products of whole models take minutes
        plain = run(models, batch, our_way(models, "plain", "", keys), length).sequences
        drafted = run(models, batch, our_way(models, "ngram", "", keys), length).sequences
    hf_specdec.release(models.target)
    equal = float((plain == drafted).all(1).double().mean())
    yield at_least(SECTION, "deterministic: rows with drafts equal to plain", equal, 1.0, "share")
    if context.toy:
        return
    costs = [measure(context, models, batch, step_way(8, each), lengths(context)) for each in (keys, usual)]
    ratio = costs[0].step_ms / costs[1].step_ms
    yield Row(
        SECTION, "deterministic: step of 8 tokens, batch 8, over the usual one", ratio, "ratio", note=costs[0].note
    )


def compiled_rows(context: Context, models: Models) -> Iterator[Row]:
    """transformers' static cache, compiled."""
    if context.on_gpu:
        static = Way("transformers, static cache and compile", {"cache_implementation": "static"}, whole_calls=True)
        timing = measure(context, models, prompts(context, models, 1), static, lengths(context))
        yield speed_row(static, 1, timing, None)


def quantized_rows(context: Context, models: Models) -> Iterator[Row]:
    """Weight-only quantization of the target, which keeps another copy of the weights."""
    if not context.on_gpu or importlib.util.find_spec("torchao") is None:
        return
    for kind in ("wint8", "wint4"):
        keys = {**next(iter(ways_of_running(context).values())), "target_quantization": kind}
        timing = measure(context, models, prompts(context, models, 1), step_way(1, keys), lengths(context))
        name = f"step, graphs, compiled, {kind} target, batch 1, 1 token"
        yield Row(SECTION, name, timing.step_ms, "ms", note=timing.note)
        hf_specdec.release(models.target)


def rows(context: Context) -> Iterator[Row]:
    """The most important first: time may run out."""
    transformers_logging.set_verbosity_error()
    yield Row(SECTION, "bandwidth of a copy, read and written", bandwidth(context) / 1e9, "GB/s")
    with decoding_models(context) as models:
        target = models.target
        size = sum(parameter.numel() for parameter in target.parameters())
        yield Row(
            SECTION,
            "target",
            size / 1e9,
            "billion parameters",
            note=f"{target.dtype}, vocabulary {target.config.vocab_size}",
        )
        sizes = (1,) if context.toy else (1, 8, 32, 128)
        (default, *others), speeds = ways_of_running(context).items(), {}
        yield from step_rows(context, models, *default, sizes)
        yield from speed_rows(context, models, sizes, speeds)
        yield from profile_rows(context, models)
        yield from length_rows(context, models, (1,) if context.toy else (1, 32, 128), speeds)
        yield from compiled_rows(context, models)
        for other in others:
            yield from step_rows(context, models, *other, sizes[:1])
        yield from expert_rows(context, models, lengths(context))
        yield from deterministic_rows(context, models)
        yield from quantized_rows(context, models)
    if context.on_gpu:
        torch.cuda.empty_cache()
