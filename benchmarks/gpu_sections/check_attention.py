"""Paged attention in all its variants against a float64 reference, from poisoned outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hf_specdec.kernels.attention.inputs import (
    AttentionInputs,
    RowDescription,
    Window,
    attention_inputs,
    sizes_of,
    window_parts,
)

from .context import TOLERANCE, Context, relative_error, worst
from .report import Row, at_most

MODULES = ("attention",)
BLOCK_SIZE = 16


@dataclass(frozen=True)
class AttentionCase:
    """One variant.

    Attributes:
        rows: (kind, keys, queries) each; kind "causal", "tree" or "empty" (fills up a graph bucket).
        one_pool: the values are the first columns of the keys.
        padding: packed tokens behind the last row's, which must stay unwritten.
    """

    name: str
    rows: tuple[tuple[str, int, int], ...]
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    value_width: int | None = None
    window: int | Window | None = None
    softcap: float | None = None
    sinks: bool = False
    invariant: bool = False
    one_pool: bool = False
    padding: int = 0


_MIXED = (("causal", 3001, 1), ("tree", 1777, 24), ("causal", 600, 8), ("causal", 513, 300), ("tree", 40, 40))
CASES = (
    AttentionCase("decode 1 x 8k, split keys", (("causal", 8111, 1),)),
    AttentionCase("decode 16 rows", tuple(("causal", 100 + 130 * i, 1) for i in range(16))),
    AttentionCase("verify chains of 8", tuple(("causal", 900 + 77 * i, 8) for i in range(8))),
    AttentionCase("verify trees of 60", tuple(("tree", 1300 + 91 * i, 60) for i in range(4))),
    AttentionCase("decode, trees, prompts in one launch", _MIXED),
    AttentionCase("prompt of 1500", (("causal", 1500, 1500),)),
    AttentionCase("graph bucket with padding", (*_MIXED[:3], ("empty", 0, 0), ("empty", 0, 0)), padding=31),
    AttentionCase("batch-invariant", _MIXED, invariant=True),
    AttentionCase("window 256 (Mistral)", _MIXED, window=256),
    AttentionCase("window 256 and the first 40 (drafters)", _MIXED, window=Window(256, 40)),
    AttentionCase("softcap, 256 wide, window (Gemma 2)", _MIXED, 16, 8, 256, window=700, softcap=50.0),
    AttentionCase("sinks, 64 wide (gpt-oss)", _MIXED, 64, 8, 64, window=128, sinks=True),
    AttentionCase("80 wide, no groups (BLOOM)", _MIXED, 16, 16, 80),
    AttentionCase("96 wide, no groups (Phi-3)", _MIXED, 32, 32, 96),
    AttentionCase("32 wide, group of 7", _MIXED, 14, 2, 32),
    AttentionCase("192/128 wide (MLA prompts)", _MIXED, 16, 16, 192, 128),
    AttentionCase("576/512 wide (MLA)", _MIXED[:3], 16, 1, 576, 512),
    AttentionCase("576/512 wide, one pool (MLA)", _MIXED[:3], 16, 1, 576, 512, one_pool=True),
)


def shrunk(case: AttentionCase) -> AttentionCase:
    """The case for the interpreter: few short rows, few narrow heads of the same proportions."""
    group = min(case.heads // case.kv_heads, 3)
    rows = [(kind, -(-keys // 64) + queries % 7, min(queries, 1 + queries % 6)) for kind, keys, queries in case.rows]
    rows = [(kind, max(keys, queries), queries) for kind, keys, queries in rows[:4]]
    kv_heads = min(case.kv_heads, 2)
    width = min(case.width, 48) - case.width % 16
    value_width = None if case.value_width is None else min(case.value_width, 32)
    size, kept = window_parts(case.window)
    window = 1 + size % 29 if size else None
    window = Window(window, 1 + kept % 29) if window and kept else window
    sizes = dict(heads=kv_heads * group, kv_heads=kv_heads, width=max(width, 16), value_width=value_width)
    return dataclasses.replace(case, rows=tuple(rows), window=window, padding=min(case.padding, 3), **sizes)


class Problem:
    """Fresh inputs of a case: rows in scattered blocks of poisoned pools."""

    def __init__(self, case: AttentionCase, dtype: torch.dtype, context: Context):
        self.case, self.device = case, context.device
        rng = np.random.default_rng(context.number(2**31))
        rows = [random_row(rng, *row) for row in case.rows]
        counts = [-(-row.key_length // BLOCK_SIZE) for row in rows]
        order, ends = rng.permutation(sum(counts) + 2), np.cumsum(counts)
        self.rows = [
            row._replace(blocks=order[end - count : end]) for row, end, count in zip(rows, ends, counts, strict=True)
        ]
        num_tokens = sum(row.query_length for row in rows) + case.padding
        self.inputs: AttentionInputs = attention_inputs(
            self.rows, BLOCK_SIZE, self.device, dataclasses.replace(sizes_of(self.rows), num_tokens=num_tokens)
        )
        value_width = case.value_width or case.width
        slots = len(order) * BLOCK_SIZE
        # What is behind a row's keys stays NaN: reading it shows.
        self.keys = torch.full((slots, case.kv_heads, case.width), float("nan"), dtype=dtype, device=self.device)
        self.values = torch.full((slots, case.kv_heads, value_width), float("nan"), dtype=dtype, device=self.device)
        for row in self.rows:
            own = self.slots(row)
            self.keys[own] = context.randn(len(own), case.kv_heads, case.width, dtype=dtype)
            self.values[own] = context.randn(len(own), case.kv_heads, value_width, dtype=dtype)
        if case.one_pool:
            self.values = self.keys[..., :value_width]
        self.query = context.randn(case.heads, num_tokens, case.width, dtype=dtype).transpose(0, 1)
        self.sinks = context.randn(case.heads, dtype=dtype) if case.sinks else None
        self.scaling = case.width**-0.5

    def slots(self, row: RowDescription) -> torch.Tensor:
        """Where the row's keys are."""
        every = np.asarray(row.blocks, dtype=np.int64)[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)
        return torch.from_numpy(every.ravel()[: row.key_length]).to(self.device)

    def run(self) -> torch.Tensor:
        """The kernel's output, written into poison."""
        from hf_specdec.kernels.attention.triton import paged_attention

        out = self.query.new_full((*self.query.shape[:2], self.values.shape[2]), float("nan"))
        return paged_attention(
            self.query, self.keys, self.values, self.inputs, self.scaling, window=self.case.window,
            softcap=self.case.softcap, sinks=self.sinks, invariant=self.case.invariant, out=out,
        )  # fmt: skip

    def reference(self) -> torch.Tensor:
        """The same in float64 from the rounded inputs, row by row; NaN where no row is."""
        out = torch.full((*self.query.shape[:2], self.values.shape[2]), float("nan"), dtype=torch.float64)
        out = out.to(self.device)
        start, group = 0, self.case.heads // self.case.kv_heads
        for row in self.rows:
            end = start + row.query_length
            own = self.slots(row)
            keys, values = (pool[own].double().repeat_interleave(group, 1) for pool in (self.keys, self.values))
            scores = torch.einsum("thd,shd->hts", self.query[start:end].double(), keys) * self.scaling
            if self.case.softcap is not None:
                scores = self.case.softcap * torch.tanh(scores / self.case.softcap)
            seen = torch.from_numpy(visible(row, self.case.window)).to(self.device)
            scores = scores.masked_fill(~seen, float("-inf"))
            if self.sinks is not None:
                sink = self.sinks.double()[:, None, None].expand(-1, row.query_length, 1)
                scores = torch.cat([scores, sink], dim=2)
            weights = torch.softmax(scores, dim=2)[:, :, : row.key_length]
            out[start:end] = torch.einsum("hts,shd->thd", weights, values)
            start = end
        return out


def random_row(rng: np.random.Generator, kind: str, keys: int, queries: int) -> RowDescription:
    """A row without its blocks; a "tree" is a random one behind a random part of the region it is in."""
    if kind != "tree":
        return RowDescription([], queries, keys)
    before = int(rng.integers(0, min(keys - queries, 40) + 1))
    parents = [-1] + [int(rng.integers(-1, i)) for i in range(1, queries)]
    seen, depths = np.zeros((queries, before + queries), dtype=bool), np.zeros(queries, dtype=np.int64)
    for i, parent in enumerate(parents):
        seen[i] = seen[parent] if parent >= 0 else np.arange(before + queries) < before
        seen[i, before + i] = True
        depths[i] = depths[parent] + 1 if parent >= 0 else 0
    first = keys - queries
    return RowDescription(
        [], queries, keys, seen, first + depths, np.concatenate([np.arange(first - before, first), first + depths])
    )


def visible(row: RowDescription, window: int | Window | None) -> np.ndarray:
    """bool [t, S], which keys each query sees."""
    first = row.key_length - row.query_length
    seen = np.tril(np.ones((row.query_length, row.key_length), dtype=bool), first)
    queries = np.arange(first, row.key_length) if row.positions is None else row.positions
    keys = np.arange(row.key_length)
    if row.visibility is not None and row.region_positions is not None:
        region = row.visibility.shape[1]
        seen = np.ones_like(seen)
        seen[:, row.key_length - region :] = row.visibility
        keys[row.key_length - region :] = row.region_positions
    size, kept = window_parts(window)
    return seen & ((queries[:, None] - keys[None, :] < size) | (keys < kept)) if size else seen


def error_of(problem: Problem) -> float:
    """Relative error of what was to be written; infinite if anything else was."""
    out, wanted = problem.run(), problem.reference()
    there = ~wanted.isnan()
    if not bool(out[~there].isnan().all()):
        return float("inf")
    return relative_error(out[there], wanted[there])


def rows(context: Context, name: str, dtype: torch.dtype) -> Iterator[Row]:
    """A line per variant: the worst error of some draws."""
    repeats = 1 if context.toy else 3
    for case in CASES:
        own = shrunk(case) if context.toy else case
        errors = [error_of(Problem(own, dtype, context)) for _ in range(repeats)]
        yield at_most("correctness", f"attention {name}: {case.name}", worst(errors), TOLERANCE[name], "rel. error")
