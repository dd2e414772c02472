"""Attention variants on a GPU: times under CUDA graphs with the L2 flushed, and shares of the bandwidth of a copy.

python gpu_try.py            compiles in 8 processes, then checks and measures
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np
import torch
import triton
import triton.language as tl

import gpu_try_before
import gpu_try_last
from hf_specdec.kernels import attention_kernels
from hf_specdec.kernels.attention import paged_attention
from hf_specdec.kernels.attention_inputs import RowDescription, attention_inputs
from hf_specdec.kernels.attention_launch import AttentionLaunch as L

BEGIN, DEVICE = time.time(), "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV, D, BS, SLOTS = 32, 8, 128, 16, 64 * 2048
WORKERS, LIMIT = 8, 56.0
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Variant:
    """kind: before (as on main), new, last (the last program merges), default (paged_attention itself)."""

    name: str
    kind: str
    launch: L | None = None
    block_v: int = 128
    block_s: int = 32
    warps: int = 2


# ---- what is launched -------------------------------------------------------------------------------------------------


@triton.jit
def nothing_kernel(out):
    tl.store(out, 1)


@triton.jit
def read_kernel(source, out, per_program, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * per_program
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for i in range(0, per_program, BLOCK):
        total += tl.load(source + start + i + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total, axis=0))


ARRIVALS = None


def attend(v, q, k, vals, inputs, out):
    """One call; returns a function."""
    global ARRIVALS
    if v.kind == "default":
        return lambda: paged_attention(q, k, vals, inputs, D**-0.5, out=out)
    la, T = v.launch, q.shape[0]
    B, per_row = inputs.block_tables.shape[0], -(-inputs.max_query_length * HEADS // KV // la.block_m)
    split = la.num_splits > 1
    module = {"before": gpu_try_before, "new": attention_kernels, "last": gpu_try_last}[v.kind]
    extra, arrivals = {}, []
    if v.kind != "before":
        early = la.early_merge and split and v.kind == "new"
        extra = dict(PEEL=la.peel, LATE_SUMS=la.late_sums, EARLY_MERGE=early)
    if v.kind == "last":
        if ARRIVALS is None:
            ARRIVALS = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
        arrivals = [ARRIVALS]
    words = 0 if inputs.visibility is None else inputs.visibility.shape[1]

    def run():
        partial = lse = None
        if split:
            partial = q.new_empty(T, HEADS, la.num_splits, D, dtype=torch.float32)
            lse = q.new_empty(T, HEADS, la.num_splits, dtype=torch.float32)
        module.attention_kernel[KV, B * per_row, la.num_splits](
            out, partial, lse, *arrivals, q, k, vals, inputs.block_tables, inputs.query_starts, inputs.key_lengths,
            inputs.visibility, inputs.region_lengths, inputs.positions, inputs.region_positions, None, None,
            out.stride(0), out.stride(1), q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            vals.stride(0), vals.stride(1), inputs.block_tables.stride(0),
            B, per_row, la.num_splits, la.keys_per_split, 0, D**-0.5 * LOG2E, 0.0,
            GROUP=HEADS // KV, WIDTH=D, WIDTH1=D, WIDTH2=0, VALUE_WIDTH=D, VALUE_BLOCK=D, BLOCK_SIZE=BS, WORDS=words,
            HAS_WINDOW=False, HAS_SOFTCAP=False, VALUES_IN_KEYS=False, SPLIT=split, FIXED_SPLITS=False,
            BLOCK_M=la.block_m, BLOCK_N=la.block_n, STAGES=la.num_stages, UPCAST=DEVICE == "cpu", num_warps=la.num_warps, **extra,
        )  # fmt: skip
        if split and v.kind == "before":
            gpu_try_before.merge_kernel[T, HEADS, 1](
                out, partial, lse, inputs.query_starts, None, out.stride(0), out.stride(1), B, la.num_splits,
                VALUE_WIDTH=D, BLOCK_V=128, BLOCK_S=8, num_warps=2,
            )  # fmt: skip
        elif split and v.kind == "new":
            options = {"launch_pdl": True} if la.early_merge else {}
            attention_kernels.merge_kernel[T, HEADS, D // v.block_v](
                out, partial, lse, inputs.query_starts, None, out.stride(0), out.stride(1), B, la.num_splits,
                VALUE_WIDTH=D, BLOCK_V=v.block_v, BLOCK_S=v.block_s, EARLY=la.early_merge, num_warps=v.warps, **options,
            )  # fmt: skip

    return run


# ---- problems ---------------------------------------------------------------------------------------------------------


class Problem:
    """A uniform batch in scattered blocks of shared pools, with its float64 result."""

    def __init__(self, pools, rows, queries, keys, tree=False, slots=SLOTS):
        self.pools, self.rows, self.queries, self.keys, self.tree = pools, rows, queries, keys, tree
        per_row = -(-keys // BS)
        order = np.random.default_rng(rows * keys).permutation(slots // BS)
        seen = depths = None
        if tree:
            seen, depths = np.zeros((queries, queries), dtype=bool), np.zeros(queries, dtype=np.int64)
            for i in range(queries):
                if i:
                    seen[i], depths[i] = seen[(i - 1) // 2], depths[(i - 1) // 2] + 1
                seen[i, i] = True
            depths += keys - queries
        self.seen = seen
        described = [
            RowDescription(order[i * per_row : (i + 1) * per_row], queries, keys, seen, depths, depths)
            for i in range(rows)
        ]
        self.order = order
        self.inputs = attention_inputs(described, BS, DEVICE)
        self.query = torch.randn(rows * queries, HEADS, D, device=DEVICE).bfloat16()
        self.out = torch.full_like(self.query, float("nan"))
        self.bytes = 2 * (rows * keys * KV * 2 * D + rows * queries * HEADS * 2 * D)
        self._wanted = None

    @property
    def wanted(self):
        if self._wanted is None:
            parts, per_row, t, n = [], -(-self.keys // BS), self.queries, self.keys
            allowed = torch.ones(t, n, dtype=torch.bool).tril(n - t)
            if self.seen is not None:
                allowed[:, : n - t], allowed[:, n - t :] = True, torch.from_numpy(self.seen)
            allowed = allowed.to(DEVICE)
            for i in range(self.rows):
                blocks = torch.from_numpy(self.order[i * per_row : (i + 1) * per_row]).to(DEVICE)
                slots = (blocks[:, None] * BS + torch.arange(BS, device=DEVICE)).flatten()[:n]
                k, v = (pool[slots].double().transpose(0, 1) for pool in self.pools)  # [KV, n, D]
                q = self.query[i * t : (i + 1) * t].double().view(t, KV, HEADS // KV, D).permute(1, 2, 0, 3)
                s = torch.einsum("kgtd,knd->kgtn", q, k) * D**-0.5
                w = torch.softmax(s.masked_fill(~allowed, float("-inf")), dim=-1)
                parts.append(torch.einsum("kgtn,knd->kgtd", w, v).permute(2, 0, 1, 3).reshape(t, HEADS, D))
            self._wanted = torch.cat(parts)
        return self._wanted

    def run(self, v):
        return attend(v, self.query, *self.pools, self.inputs, self.out)

    def error(self):
        return float((self.out.double() - self.wanted).norm() / self.wanted.norm())


# ---- times ------------------------------------------------------------------------------------------------------------

DIRTY = CLEAN = None


def captured(run):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def microseconds(replay, flush, reps=100):
    """Median; flush "write": 256 MB zeroed before (as do_bench, leaves dirty lines in the L2), "read": and then 256 MB read."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
    for i in range(-10, reps):
        if flush != "none":
            DIRTY.zero_()
        if flush == "read":
            torch.sum(CLEAN)
        begin, end = events[max(i, 0)]
        begin.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * float(np.median([a.elapsed_time(b) for a, b in events]))


# ---- the list ---------------------------------------------------------------------------------------------------------

N = L(16, 64, 4, 4, 33, 64, peel=False, early_merge=True)  # the best guess for decoding
OLD = L(16, 64, 4, 4, 30, 256)


def v(name, launch=N, kind="new", **options):
    merge = {key: options.pop(key) for key in ("block_v", "block_s", "warps") if key in options}
    return Variant(name, kind, replace(launch, **options), **merge)


def long_list(m):
    """1 x 32k; m: queries of a tile."""
    base = replace(N, block_m=m)
    found = [
        v("before", replace(OLD, block_m=m), "before"),
        v("new kernel, peeled, plain merge launch", base, peel=True, early_merge=False),
        v("no peel, plain merge launch", base, early_merge=False),
        v("no peel, early merge", base),
        *(v(f"  splits {s}", base, num_splits=s, block_s=64 if s > 32 else 32) for s in (16, 24, 32, 48, 64)),
        v("  late sums", base, late_sums=True),
        v("  merge 64 at once", base, block_s=64),
        v("  merge 64 at once, 4 warps, 64 columns", base, block_s=64, block_v=64, warps=4),
        v("  merge 32 columns", base, block_s=64, block_v=32),
        v("  3 stages, splits 49", base, num_stages=3, num_splits=49, block_s=64),
        v("  3 stages, splits 33", base, num_stages=3, block_s=64),
        v("  tile 32, 6 stages", base, block_n=32, num_stages=6),
        v("  tile 32, 2 warps, 6 stages", base, block_n=32, num_warps=2, num_stages=6),
        v(
            "  tile 128, 8 warps, 4 stages, splits 16",
            base,
            block_n=128,
            num_warps=8,
            num_splits=16,
            keys_per_split=128,
        ),
        v("  tile 128, 8 warps, 4 stages, splits 33", base, block_n=128, num_warps=8, keys_per_split=128),
        v("  tile 64, 8 warps", base, num_warps=8),
    ]
    if m == 16:
        found += [v("last program merges", base, "last"), v("  splits 16", base, "last", num_splits=16)]
    return [Variant("paged_attention", "default"), *found]


def short_list(keys):
    """1 x some hundreds."""
    one = replace(N, num_splits=1)
    found = [Variant("paged_attention", "default"), v("before, 1 split", OLD, "before", num_splits=1),
             v("before, 2 splits", OLD, "before", num_splits=2)]  # fmt: skip
    found += [v("tile 64, 1 split", one), v("tile 64, 1 split, late sums", one, late_sums=True)]
    found += [v("tile 32, 1 split", one, block_n=32, num_stages=6), v("tile 64, 8 warps, 1 split", one, num_warps=8)]
    found += [v("tile 128, 8 warps, 1 split", one, block_n=128, num_warps=8, keys_per_split=128)]
    for s in (2, 4, 8, 16):
        if s * 64 <= keys:
            found += (
                [v(f"tile 64, {s} splits, plain merge", num_splits=s, block_s=8, early_merge=False)] if s == 4 else []
            )
            found += [v(f"tile 64, {s} splits, early merge", num_splits=s, block_s=8 if s <= 8 else 32)]
            found += [v(f"tile 64, {s} splits, last merges", N, "last", num_splits=s)]
    narrow = dict(block_n=32, num_stages=6, keys_per_split=32)
    for s in (4, 16):
        if s * 32 <= keys:
            found += [v(f"tile 32, {s} splits, early merge", **narrow, num_splits=s, block_s=8 if s <= 8 else 32)]
            found += [v(f"tile 32, {s} splits, last merges", N, "last", **narrow, num_splits=s)]
    return found


def many_list(m):
    """64 x 2k."""
    base = replace(N, block_m=m, num_splits=1)
    return [
        Variant("paged_attention", "default"),
        v("before", replace(OLD, block_m=m, num_splits=1), "before"),
        v("peeled", base, peel=True),
        v("no peel", base),
        v("no peel, late sums", base, late_sums=True),
        v("tile 32, 6 stages", base, block_n=32, num_stages=6),
    ]


def plan():
    """(title, arguments of Problem, variants, whether also 32 layers in a row)."""
    yield "1 x 32k decode", (1, 1, 32768), long_list(16), False
    yield "1 x 32k tree of 8", (1, 8, 32768, True), long_list(32), False
    yield "1 x 512 decode", (1, 1, 512), short_list(512), True
    yield "1 x 32k chain of 8", (1, 8, 32768), long_list(32), False
    yield "64 x 2k decode", (64, 1, 2048), many_list(16), False
    yield "64 x 2k tree of 8", (64, 8, 2048, True), many_list(32), False
    yield "1 x 1024 decode", (1, 1, 1024), short_list(1024), True
    yield "1 x 200 decode", (1, 1, 200), short_list(200), True
    yield "64 x 2k chain of 8", (64, 8, 2048), many_list(32)[:4], False


def compile_share(share):
    """Every 8th variant once, so that it is in Triton's cache."""
    pools = [torch.zeros(SLOTS, KV, D, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    seen = set()
    for _, shape, variants, _ in plan():
        for each in variants:
            if each.kind == "default":
                continue
            compiled = replace(each.launch, num_splits=min(each.launch.num_splits, 2), keys_per_split=0)
            key = (shape[1], len(shape) > 3, each.kind, compiled)
            if key in seen:
                continue
            seen.add(key)
            if len(seen) % WORKERS == share:
                try:
                    Problem(pools, *shape).run(each)()
                except Exception as error:
                    print(f"compile of {each.name}: {str(error)[:200]}", flush=True)
    torch.cuda.synchronize()


def main():
    global DIRTY, CLEAN
    workers = [subprocess.Popen([sys.executable, __file__, str(i)]) for i in range(WORKERS)]
    torch.manual_seed(0)
    pools = [torch.randn(SLOTS, KV, D, device=DEVICE).bfloat16() for _ in range(2)]
    DIRTY = torch.empty(256 * 2**20, dtype=torch.int8, device=DEVICE)
    CLEAN = torch.zeros(64 * 2**20, dtype=torch.float32, device=DEVICE)
    for worker in workers:
        try:
            worker.wait(timeout=40)
        except subprocess.TimeoutExpired:
            worker.kill()
    print(f"compiled, {time.time() - BEGIN:.1f} s; triton {triton.__version__}, torch {torch.__version__}", flush=True)

    big = torch.zeros(2**28, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(big)
    best = min(microseconds(captured(lambda: target.copy_(big)), "none", 10) for _ in range(2))
    bandwidth = 2 * big.nbytes / best * 1e-3  # GB/s
    print(f"copy {bandwidth:.0f} GB/s on {torch.cuda.get_device_name()}")
    big = target = None
    number = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
    nothing = captured(lambda: nothing_kernel[(1,)](number))
    print("nothing:", *(f"{flush} {microseconds(nothing, flush):.2f} us" for flush in ("write", "read", "none")))
    flat = torch.cat([pool[:32768].flatten() for pool in pools]).view(torch.int32)
    for programs, block in ((264, 8192), (1024, 4096), (4096, 8192)):
        replay = captured(
            lambda p=programs, b=block: read_kernel[(p,)](
                flat, number, flat.numel() // p // b * b, BLOCK=b, num_warps=8
            )
        )
        times = [microseconds(replay, flush) for flush in ("write", "read")]
        floor = 4 * (flat.numel() // programs // block * block) * programs / bandwidth * 1e-3
        print(f"plain read of 134 MB, {programs} programs: " + " ".join(f"{t:.1f} us {floor / t:.3f}" for t in times))
    print(
        "columns: us and share after a flush by writing (as kernel_times.py), after one by reading; error; us per layer of 32 in a row"
    )
    for title, shape, variants, in_a_row in plan():
        print(f"\n{title}   ({time.time() - BEGIN:.0f} s)", flush=True)
        problem = Problem(pools, *shape)
        floor = problem.bytes / bandwidth * 1e-3
        layers = None
        if in_a_row:
            layers = [[pool[i * 4096 : (i + 1) * 4096] for pool in pools] for i in range(32)]
            row = Problem(layers[0], *shape, slots=4096)
        for each in variants:
            if time.time() - BEGIN > LIMIT:
                print("out of time")
                return
            try:
                problem.out.fill_(float("nan"))
                run = problem.run(each)
                run()
                first = problem.error()
                replay = captured(run)
                problem.out.fill_(float("nan"))
                dirty, clean = microseconds(replay, "write"), microseconds(replay, "read", 50)
                line = f"{each.name:44s} {dirty:7.2f} {floor / dirty:.3f}  {clean:7.2f} {floor / clean:.3f}"
                line += f"  {max(first, problem.error()):.1e}"
                if layers is not None:
                    runs = [attend(each, row.query, *pair, row.inputs, row.out) for pair in layers]
                    replay = captured(lambda runs=runs: [r() for r in runs])
                    line += f"  {microseconds(replay, 'read', 20) / 32:6.2f}"
                print(line, flush=True)
            except Exception as error:
                print(f"{each.name:44s} {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"\ndone, {time.time() - BEGIN:.0f} s")


if __name__ == "__main__":
    compile_share(int(sys.argv[1])) if len(sys.argv) > 1 else main()
