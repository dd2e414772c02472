"""What the host does in a step of decoding when the device's work is graphs: microseconds, operations and uploads.

    python benchmarks/host_time.py [--methods plain ngram ...] [--batches 1 32] [--steps 120] [--profile METHOD] [--json FILE]
    python benchmarks/host_time.py --engine --batches 1 8 64 256    # steps of `LLM` on a CPU, beside the native library's work

Forwards and drafting rounds are captured and their replays do nothing, verification is replaced by a verdict that accepts two
drafted tokens: what is left is the loop's own Python and the small operations around the graphs. Runs without a GPU; there the
operations are a CPU's, and their number is what counts: each is a launch on a GPU. Lower quartiles over
steps, as other programs on the machine delay some; the bundled model.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import hf_specdec
from hf_specdec.candidate_generators import make_generator, parse_config
from hf_specdec.candidate_generators.base import DrafterContext
from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.output import Taps
from hf_specdec.core.sequence import Sequence
from hf_specdec.decoding import SpeculativeDecoder, decoder
from hf_specdec.kernels import attention, transfer
from hf_specdec.kernels.cache import reference as cache_reference
from hf_specdec.model import captures, graphs
from hf_specdec.model.packed_model import PackedModel
from hf_specdec.model.prepare import ModelOptions, prepare
from hf_specdec.verification.verify import PendingVerdict

CONTEXT = 300  # tokens of a prompt
PERIOD = 7  # of the text: n-grams occurred before
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "none"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5},
    "eagle3 chain": {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 5},
    "eagle3 tree": {"method": "eagle3", "model": "tiny-eagle3", "branching_factors": [2, 2, 1, 1, 1]},
    "eagle3 dynamic": {"method": "eagle3", "model": "tiny-eagle3", "top_k": 8, "total_tokens": 32, "depth": 5},
}


class CaptureNothing:
    """Replays do nothing: outputs stay what the first run left."""

    def forget(self) -> None:
        """There is nothing to give back."""

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What it returned, and no work."""
        return function(), lambda: None


class CountedOperations(TorchDispatchMode):
    """Counts operations by name; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in func.__name__ and "pin" not in func.__name__:
            self.names[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class FixedVerification:
    """Accepts the first node and its first child; the text stays periodic. Knows how long it took."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(
        self, trees: DraftTrees, scores, sequences: list[Sequence], config, sampling=None, agree=None
    ) -> PendingVerdict:
        """The verdict, after no work on the device."""
        begin = time.perf_counter()
        batch, width = trees.tokens.shape
        table = np.zeros((batch, 2 * width + 1), dtype=np.int64)
        table[:, width : 2 * width] = trees.tokens.cpu().numpy()
        if width:
            follows = trees.parent_index == 0
            table[:, 0] = 1
            table[np.arange(batch), follows.argmax(1)] = follows.any(1) | (follows.argmax(1) == 0)
            table[:, :width] *= trees.valid
        path = table[:, :width].sum(1)
        table[:, -1] = [5 + (len(seq.tokens) + own) % PERIOD for seq, own in zip(sequences, path, strict=True)]
        verdict = PendingVerdict(torch.from_numpy(table).to(scores.device))
        self.seconds += time.perf_counter() - begin
        return verdict


def attend_nowhere(query, *args, **kwargs):
    """In place of the attention kernel [T, H, D]."""
    return torch.zeros_like(query)


@contextlib.contextmanager
def without_work():
    """The library with nothing for the device to do; yields the verification in use."""
    fixed = FixedVerification()
    with contextlib.ExitStack() as stack:
        patch = lambda *args: stack.enter_context(mock.patch.object(*args))  # noqa: E731
        patch(captures, "CudaGraphCapture", CaptureNothing)
        patch(decoder, "begin_verification", fixed)
        if not torch.cuda.is_available():
            from hf_specdec.kernels.attention import triton as attention_kernels

            patch(captures, "capture_obstacle", lambda model: None)
            patch(attention.attend, "on", lambda device, native: attention_kernels.attend)
            patch(attention_kernels, "paged_attention", attend_nowhere)
            patch(cache_reference, "write_keys_values", lambda *args: None)
        yield fixed


class Steps:
    """A batch that decodes for ever."""

    def __init__(self, packed_target: PackedModel, method: str, batch: int, num_steps: int):
        config = parse_config({**METHODS[method], "cuda_graphs": True})
        generator = make_generator(config, packed_target, DrafterContext())
        self.decoder = SpeculativeDecoder(generator)
        most = CONTEXT + 4 * num_steps
        self.rows = [Sequence([5 + i % PERIOD for i in range(CONTEXT)], most) for _ in range(batch)]
        self.decoder.allocate(batch * (most + generator.max_draft_nodes), batch, rows_have_places=True)
        for seq in self.rows:
            self.decoder.add(seq)
        self.pending = None

    def step(self) -> None:
        """One round, as `generate()` goes from step to step."""
        if self.pending is None:
            self.pending = self.decoder.begin(self.rows)
        following = None
        if self.decoder.can_begin_after(self.rows, self.pending):
            following = self.decoder.begin(self.rows, after=self.pending)
        self.decoder.finish(self.pending)
        self.pending = following


def measure(steps: Steps, fixed: FixedVerification, num_steps: int) -> dict[str, float]:
    """Microseconds of a step, and what it asks of the device."""
    for _ in range(20):
        steps.step()
    times = []
    for _ in range(num_steps):
        fixed.seconds, begin = 0.0, time.perf_counter()
        steps.step()
        times.append(time.perf_counter() - begin - fixed.seconds)
    uploads: list[str] = []
    with contextlib.ExitStack() as stack:
        for owner, name in ((transfer, "_on_host"), (getattr(transfer, "HostStaging", None), "send")):
            if owner is None:
                continue
            original = getattr(owner, name)
            stack.enter_context(
                mock.patch.object(
                    owner, name, lambda *args, _of=original, _name=name: (uploads.append(_name), _of(*args))[1]
                )
            )
        counted = stack.enter_context(CountedOperations())
        for _ in range(10):
            steps.step()
    operations = sum(counted.names.values()) / 10
    return {
        "microseconds": statistics.quantiles(times, n=4)[0] * 1e6, "operations": operations, "uploads": len(uploads) / 10,
    }  # fmt: skip


def print_engine(batches: list[int]) -> None:
    """Microseconds of CPU time of a step of `LLM` beside the native call, which is replaced by what an earlier one returned: scheduling,
    packing, verdict, bookkeeping and texts. The median of eleven runs of 64 tokens."""
    from hf_specdec.model.native.program import Program

    call, returned, replays, count = Program._call, {}, False, 0

    def replayed(program, inputs, features, num_outputs=None, ids=()):
        nonlocal count
        count += 1
        key = id(program), inputs.num_tokens, inputs.num_selected, num_outputs
        if not (replays and key in returned):
            returned[key] = call(program, inputs, features, num_outputs, ids)
        return list(returned[key])

    params = hf_specdec.SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    with mock.patch.object(Program, "_call", replayed):
        for batch in batches:
            llm = hf_specdec.LLM(hf_specdec.bundled("tiny"), speculative_config={"method": "none"}, max_num_seqs=batch)
            prompts, times, replays = [list(range(10, 30 + i % 7)) for i in range(batch)], [], False
            for _ in range(12):
                count, began = 0, time.process_time()
                llm.generate(prompts, params, use_tqdm=False)
                times.append((time.process_time() - began) / count)
                replays = True
            print(f"LLM, batch {batch:4}: {statistics.median(times[1:]) * 1e6:6.0f} µs a step", flush=True)


def main() -> None:
    """Print a table, and if asked for a profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument(
        "--profile", choices=list(METHODS), help="print where this method's time goes, at the first batch"
    )
    parser.add_argument("--sort", default="tottime", help="of the profile: tottime or cumtime")
    parser.add_argument("--engine", action="store_true", help="the steps of `LLM`, with method none")
    parser.add_argument("--json", help="write the figures here too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.engine:
        print_engine(args.batches)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    print(f"{'method':16} {'batch':>5} {'µs a step':>10} {'operations':>10} {'uploads':>8}")
    loaded: Any = AutoModelForCausalLM.from_pretrained(hf_specdec.bundled("tiny"))
    model = loaded.eval().to(device)
    packed = prepare(model, ModelOptions(prepack_weights=False))
    with without_work() as fixed, torch.no_grad():
        for method in [args.profile] if args.profile else args.methods:
            for batch in args.batches[:1] if args.profile else args.batches:
                packed.taps, packed.graphs = Taps(), graphs.GraphRunner(packed)
                steps = Steps(packed, method, batch, 2 * args.steps + 100)
                with steps.decoder.active():
                    row = {"method": method, "batch": batch, **measure(steps, fixed, args.steps)}
                    found.append(row)
                    print(
                        f"{method:16} {batch:5} {row['microseconds']:10.0f} {row['operations']:10.1f} {row['uploads']:8.1f}",
                        flush=True,
                    )
                    if args.profile:
                        with cProfile.Profile() as profile:
                            for _ in range(args.steps // 2):
                                steps.step()
                        pstats.Stats(profile).sort_stats(args.sort).print_stats(60)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": device, "torch": torch.__version__, "rows": found}, file, indent=1)


if __name__ == "__main__":
    main()
