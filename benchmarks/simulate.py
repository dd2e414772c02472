"""A discrete-event model of replicas: which draft length at which load, how many replicas, when prefill apart pays.

    python benchmarks/simulate.py --json benchmarks/results/simulate-cpu.json

The real engine runs a load in its own time: its clock is the CPU time of its steps, so that other programs do not disturb it, and requests
arrive by that clock. From these steps come the costs (`policy.cost`) and the acceptance. The model replays other loads with them.
At one and two replicas it must give the engine's throughput and time per token within 15 % before it says more. Costs are those of
this machine: what is said about 64 replicas is about their ratio, not about a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_specdec import LLM, SamplingParams
from hf_specdec.policy.cost import DraftingCost, StepCost

SENTENCES = [
    "Once upon a time, there was a little girl named Lily.", "The dog ran to the park.", "Tom and his mom went to the shop.",
    "One day, a big bear came to the river.", "She loved to play with her red ball.",
]  # fmt: skip
MOST_ROWS, MOST_TOKENS = 16, 2048
LINK = 1e9  # bytes per second between a prefill and a decode replica


@dataclass
class Job:
    """A request: when it comes, tokens of its prompt, tokens it writes; then when its first and last token came."""

    arrival: float
    prompt: int
    output: int
    text: str = ""
    ready: float = 0.0  # when the replica that it waits for has it
    read: int = 0
    written: int = 0
    first: float = 0.0
    last: float = 0.0


def jobs_of(rate, count, seed, repeats=(1, 12), outputs=(8, 64)):
    """Poisson arrivals, `rate` a second. Prompts repeat sentences."""
    draw, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        text = " ".join(draw.choice(SENTENCES) for _ in range(draw.randint(*repeats)))
        found.append(Job(now, 0, draw.randint(*outputs), text))
    return found


def figures(jobs):
    """Tokens per second, mean milliseconds per token after the first, and 50 % and 95 % of the times to the first token."""
    span = max(job.last for job in jobs) - min(job.arrival for job in jobs)
    first = np.array([job.first - job.arrival for job in jobs])
    return {
        "tokens_per_second": sum(job.written for job in jobs) / span,
        "tpot_ms": 1e3 * float(np.mean([(job.last - job.first) / (job.written - 1) for job in jobs if job.written > 1])),
        "ttft_ms_p50": 1e3 * float(np.median(first)), "ttft_ms_p95": 1e3 * float(np.quantile(first, 0.95)),
    }  # fmt: skip


@dataclass
class Measured:
    """What steps cost, and how many drafts are accepted."""

    cost: StepCost = field(default_factory=StepCost)
    drafting: DraftingCost = field(default_factory=DraftingCost)
    accepted: list[int] = field(default_factory=list)  # of drafts of full length
    bytes_per_token: int = 0
    steps: list[tuple] = field(default_factory=list)  # arguments of `seconds`, and what was measured
    scale: float = 1.0  # medians leave out the slow steps, which take time all the same

    def seconds(self, rows, packed, drafting, length, unread):
        drafted = self.drafting.of_draft(length * (drafting > 0), drafting * length, unread)
        return self.scale * float(self.cost.of_target(rows, packed) + drafted)

    def settle(self):
        self.scale = 1.0
        self.scale = sum(step[-1] for step in self.steps) / sum(self.seconds(*step[:-1]) for step in self.steps)


def engine_of(length):
    config = (
        {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": length} if length else {"method": "none"}
    )
    return LLM("tiny", dtype="float32", speculative_config=config, max_model_len=512, max_num_seqs=MOST_ROWS,
               max_num_batched_tokens=MOST_TOKENS, kv_cache_memory_bytes=256 << 20)  # fmt: skip


def run_engine(llm, jobs, length, measured=None):
    """Serve jobs with the real engine; its clock is the CPU time of its steps."""
    engine, decoder, now = llm.engine, llm.engine.decoder, 0.0
    engine.decoder.forget_prefixes()
    waiting, running = deque(jobs), {}
    propose, drafting = decoder.generator.propose, 0.0

    def timed(sequences, limits):
        nonlocal drafting
        began = time.thread_time()
        trees = propose(sequences, limits)
        drafting = time.thread_time() - began
        return trees

    decoder.generator.propose = timed
    with decoder.active():
        while waiting or running:
            if not running and waiting[0].arrival > now:
                now = waiting[0].arrival
            while waiting and waiting[0].arrival <= now:
                job = waiting.popleft()
                ids = llm.tokenizer(job.text)["input_ids"]
                job.prompt = len(ids)
                params = SamplingParams(temperature=0, max_tokens=job.output, ignore_eos=True)
                running[id(job)] = job, engine.add(str(id(job)), None, ids, params)
            drafting = 0.0
            began = time.thread_time()
            engine.step()
            seconds = time.thread_time() - began
            now += seconds
            rows, packed, drafted, unread = 0, 0, 0, 0
            for job, request in list(running.values()):
                output, seq = request.choices[0].output, request.choices[0].sequence
                new = len(output.token_ids) - job.written
                steps: Any = decoder.statistics.get(seq.id) or (request.statistics or [None])[0]
                if new:
                    nodes, depth, _, accepted = steps.steps[-1]
                    own = job.prompt if not job.written else 1
                    rows, packed, drafted = rows + 1, packed + own + nodes, drafted + (nodes > 0)
                    # The head reads the prompt with its first draft.
                    unread += job.prompt if nodes and job.written == 1 else 0
                    if measured is not None and depth == length and length and new > accepted:
                        measured.accepted.append(accepted)
                    job.first = job.first or now
                    job.written, job.last = len(output.token_ids), now
                if output.finished():
                    del running[id(job)]
            if measured is not None and rows:
                measured.steps.append((rows, packed, drafted, length, unread, seconds))
                measured.cost.observe_target(rows, packed, seconds - drafting)
                if drafted:  # as the decoder counts: a head cannot draft in the step that reads the prompt
                    measured.drafting.observe_draft(length, drafted * length, unread, drafting)
    decoder.generator.propose = propose
    return jobs


class Replica:
    """An engine of which only the clock is kept.

    Args:
        length: draft tokens a row; "auto": by the number of rows, the fastest by cost and acceptance.
        decodes: it writes, too; otherwise it only reads prompts.
    """

    def __init__(self, measured, length, draw, decodes=True):
        self.measured, self.length, self.draw, self.decodes = measured, length, draw, decodes
        self.now, self.waiting, self.running = 0.0, deque(), []
        self.longest, self.best = max(measured.accepted, default=0), {}

    def speed(self, rows, length):
        won = np.minimum(self.measured.accepted, length).mean() if length else 0.0
        return (1 + won) / self.measured.seconds(rows, rows * (1 + length), rows, length, 0)

    def length_for(self, rows):
        if self.length == "auto" and rows not in self.best:
            self.best[rows] = max(range(self.longest + 1), key=lambda length: self.speed(rows, length))
        return self.best[rows] if self.length == "auto" else self.length

    def step(self):
        """One step. Returns jobs that have been read here and are to be written elsewhere."""
        while self.waiting and self.waiting[0].ready <= self.now and len(self.running) < MOST_ROWS:
            self.running.append(self.waiting.popleft())
        reading = [job for job in self.running if job.read < job.prompt]
        writing = [job for job in self.running if job.read == job.prompt]
        length, budget = self.length_for(len(writing)) if writing else 0, MOST_TOKENS - len(writing)
        drafts = [min(length, job.output - job.written - 1) for job in writing]
        chosen = []
        for job in reading:
            if budget >= job.prompt:
                budget -= job.prompt
                chosen.append(job)
        packed = len(writing) + sum(drafts) + sum(job.prompt for job in chosen)
        drafting = sum(count > 0 for count in drafts)
        unread = sum(job.prompt for job, count in zip(writing, drafts, strict=True) if count and job.written == 1)
        self.now += self.measured.seconds(len(writing) + len(chosen), packed, drafting, length, unread)
        for job, count in zip(writing, drafts, strict=True):
            accepted = min(self.draw.choice(self.measured.accepted), count) if count and self.measured.accepted else 0
            job.written, job.last = job.written + 1 + accepted, self.now
        for job in chosen:
            job.read, job.written, job.first, job.last = job.prompt, 1, self.now, self.now
        handed = [] if self.decodes else chosen
        self.running = [job for job in self.running if job.written < job.output and job not in handed]
        return handed


def load_of(replica):
    return len(replica.waiting) + len(replica.running)


def simulate(measured, jobs, length, num=1, router="turns", prefill=0, seed=0):
    """Serve jobs with `num` modelled replicas, of which `prefill` only read prompts."""
    draw = random.Random(seed)
    readers = [Replica(measured, length, draw, decodes=False) for _ in range(prefill)]
    writers = [Replica(measured, length, draw) for _ in range(num - prefill)]
    doors, turn = readers or writers, 0
    events = deque(sorted(jobs, key=lambda job: job.arrival))
    while events or any(load_of(each) for each in (*readers, *writers)):
        busy = [each for each in (*readers, *writers) if load_of(each)]
        for each in busy:
            if not each.running:
                each.now = max(each.now, each.waiting[0].ready)
        first = min(busy, key=lambda each: each.now, default=None)
        if events and (first is None or events[0].arrival <= first.now):
            job = events.popleft()
            chosen = min(doors, key=load_of) if router == "least" else doors[turn % len(doors)]
            turn += 1
            job.ready = job.arrival
            chosen.waiting.append(job)
            continue
        assert first is not None
        for job in first.step():
            if job.written < job.output:
                job.ready = first.now + job.prompt * measured.bytes_per_token / LINK
                min(writers, key=load_of).waiting.append(job)
    return jobs


def compared(measured, jobs, length, rate, num):
    """Real and modelled figures for jobs that the engine has served and that were not measured."""
    model = simulate(measured, [Job(job.arrival, job.prompt, job.output) for job in jobs], length, num)
    own, said = figures(jobs), figures(model)
    errors = {key: said[key] / own[key] - 1 for key in ("tokens_per_second", "tpot_ms")}
    return {"replicas": num, "rate": rate, "real": own, "model": said, "errors": errors}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=3, help="draft tokens a row (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    llm, measured = engine_of(args.length), Measured()
    measured.bytes_per_token = llm.engine.decoder.target.bytes_per_token()
    run_engine(llm, jobs_of(1e9, 12, 1), args.length)  # warm
    capacity = figures(run_engine(llm, jobs_of(1e9, args.requests, 7), args.length))["tokens_per_second"] / 36
    served = []
    # in turns, since the machine is not always as fast
    for seed, (share, num) in enumerate([(0.4, 1), (0.4, 2), (0.8, 1), (0.8, 2)]):
        for rate in (0.1 * capacity, 0.7 * capacity, 1e9):
            run_engine(llm, jobs_of(rate, args.requests // 3, seed), args.length, measured)
        jobs = jobs_of(share * capacity * num, args.requests * num, seed=100 + num)
        served.append((jobs, args.length, share * capacity * num, num))
        for part in range(num):
            run_engine(llm, jobs[part::num], args.length)
    measured.settle()
    checks = [compared(measured, *each) for each in served]
    worst = max(abs(error) for row in checks for error in row["errors"].values())
    report = {"capacity_requests_per_second": capacity, "checks": checks, "worst_error": worst}
    for row in report["checks"]:
        print(f"{row['replicas']} replicas, {row['rate']:.1f} requests/s:")
        for key, error in row["errors"].items():
            print(f"  {key} {row['real'][key]:.1f} real, {row['model'][key]:.1f} modelled ({error:+.0%})")
    if worst <= 0.15:
        report["studies"] = studies(measured, capacity)
        print(json.dumps(report["studies"], indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if worst > 0.15:
        sys.exit(f"The model is off by {worst:.0%}: it says nothing about more replicas.")


def studies(measured, capacity):
    """What the model is for: draft length by load, replicas by load, prefill apart."""

    def run(share, num=8, length: Any = 3, router="least", prefill=0, repeats=(1, 12)):
        jobs = jobs_of(share * capacity * num, 60 * num, 5, repeats)
        for job in jobs:
            job.prompt = 2 + len(job.text) // 4
        found = simulate(measured, jobs, length, num, router, prefill)
        return figures(found)

    shares = (0.1, 0.3, 0.5, 0.7, 0.9, 1.1)
    return {
        "by_length": {str(k): {share: run(share, length=k) for share in shares} for k in (0, 1, 3, "auto")},
        "by_router": {name: {share: run(share, router=name) for share in shares} for name in ("turns", "least")},
        "by_replicas": {num: run(0.7, num) for num in (1, 2, 8, 64)},
        "prefill_apart": {
            f"{what}, {prefill} of 8 read prompts": run(0.7, prefill=prefill, repeats=repeats)
            for what, repeats in (("short prompts", (1, 4)), ("long prompts", (12, 30))) for prefill in (0, 1, 2, 4)
        },
    }  # fmt: skip


if __name__ == "__main__":
    main()
