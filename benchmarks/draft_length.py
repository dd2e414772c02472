"""What draft_length "auto" costs where no draft is ever right, and what it wins where some rows are easy and some are hard.

    python benchmarks/draft_length.py --threads 1                        # inflated bundled target of 319M parameters, bf16
    python benchmarks/draft_length.py --target FOLDER --json out.json

Every run of "auto" starts with a policy that knows nothing, the worst case for it. Contestants take turns within each
repeat; ratios are medians over repeats of the ratio within a repeat. Beside wall-clock time, the process's CPU time is
compared, which a busy machine disturbs less (with one thread).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from decode import batches, load_target, machine
from loads import SIZES
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_specdec
from hf_specdec.candidate_generators import CandidateGenerator, generator_class, parse_config
from hf_specdec.candidate_generators.base import DrafterContext
from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.sequence import Sequence
from hf_specdec.decoding import SpeculativeDecoder
from hf_specdec.model.packed_model import PackedModel
from hf_specdec.model.prepare import prepare
from hf_specdec.policy import make_policy

LENGTHS: dict[str, dict[str, Any]] = {
    "none": {},
    "fixed K=5": {"num_speculative_tokens": 5},
    "auto": {"num_speculative_tokens": "auto"},
}
METHODS: dict[str, dict[str, Any]] = {"ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3}, "draft_model": {}}


class WrongDrafts(CandidateGenerator):
    """Drafts a token that the target never chooses, as cheaply as prompt lookup."""

    wrong_token = 0

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """Chains of the wrong token."""
        return DraftTrees.from_lists([[self.wrong_token] * limit for limit in limits], device=self.target.device)


def wrong_model(method: Any, wrong_token: int) -> type[CandidateGenerator]:
    """A drafter that does all of `method`'s work and then drafts a token that the target never chooses."""

    class Wrong(method):
        def propose(self, sequences, limits):
            trees = super().propose(sequences, limits)
            return dataclasses.replace(trees, tokens=torch.full_like(trees.tokens, wrong_token))

    return Wrong


def make_decoder(target: PackedModel, generator, method: str, length: str, drafter) -> SpeculativeDecoder:
    """A decoder with the drafter `generator` and one of LENGTHS."""
    config = parse_config(
        {"method": "none"} if length == "none" else {"method": method, **METHODS[method], **LENGTHS[length]}
    )
    make = generator_class("none") if length == "none" else generator
    return SpeculativeDecoder(make(config, target, DrafterContext(assistant_model=drafter)))


def decode(
    decoder: SpeculativeDecoder, queues: list[list[list[int]]], num_greedy: int, num_new: int, num_total: int
) -> dict[str, Any]:
    """Decode one sequence per queue at a time until `num_total` tokens are there; whoever finishes starts anew.

    Args:
        queues: prompts per row.
        num_greedy: how many rows decode greedily; the others sample.
    """
    decoder.policy = make_policy(decoder.config)  # knows nothing
    queues = [list(queue) for queue in queues]
    room = max(len(prompt) for queue in queues for prompt in queue) + num_new + 16
    decoder.allocate(room * len(queues), len(queues))
    emitted, steps, accepted, drafted = [0] * len(queues), 0, [0] * len(queues), [0] * len(queues)
    wall, cpu = time.perf_counter(), time.process_time()
    running: list[Sequence] = []

    def next_sequence(row: int) -> Sequence:
        prompt = queues[row].pop(0)
        queues[row].append(prompt)
        seq = Sequence(list(prompt), max_length=len(prompt) + num_new, row=row, do_sample=row >= num_greedy, seed=row)
        decoder.add(seq)
        return seq

    def leave(seq: Sequence) -> None:
        figures = decoder.remove(seq).summary()
        accepted[seq.row] += figures.num_accepted_tokens
        drafted[seq.row] += figures.num_draft_tokens

    with decoder.active():
        running = [next_sequence(row) for row in range(len(queues))]
        while sum(emitted) < num_total:
            for result in decoder.step(running):
                emitted[result.sequence.row] += len(result.new_tokens)
            steps += 1
            for i, seq in enumerate(running):
                if seq.finished:
                    leave(seq)
                    running[i] = next_sequence(seq.row)
        for seq in running:
            leave(seq)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    decoder.release()
    total = sum(emitted)
    return {
        "tokens_per_second": total / wall, "tokens_per_cpu_second": total / cpu, "steps": steps, "tokens": emitted,
        "drafted": drafted, "accepted": accepted,
    }  # fmt: skip


def compare(name: str, decoders: dict[str, SpeculativeDecoder], queues, num_greedy: int, args) -> dict[str, Any]:
    """All lengths on the same work, in turns."""
    runs: dict[str, list[dict[str, Any]]] = {length: [] for length in decoders}
    for decoder in decoders.values():  # warm-up
        decode(decoder, queues, num_greedy, 16, 16 * len(queues))
    for repeat in range(args.repeats):
        for length in decoders if repeat % 2 == 0 else reversed(decoders):
            num_total = args.tokens * len(queues)
            runs[length].append(decode(decoders[length], queues, num_greedy, args.max_new_tokens, num_total))
    row: dict[str, Any] = {"work": name, "rows": len(queues), "lengths": {}}
    for length, own in runs.items():
        row["lengths"][length] = {
            "tokens_per_second": statistics.median(run["tokens_per_second"] for run in own),
            "over_none_cpu_time_each": [
                a["tokens_per_cpu_second"] / b["tokens_per_cpu_second"] for a, b in zip(own, runs["none"], strict=True)
            ],
            "over_none": ratio(own, runs["none"], "tokens_per_second"),
            "over_none_cpu_time": ratio(own, runs["none"], "tokens_per_cpu_second"),
            "steps": own[0]["steps"],
            "drafted": own[0]["drafted"],
            "accepted": own[0]["accepted"],
            "tokens": own[0]["tokens"],
        }
        figures = row["lengths"][length]
        print(
            f"| {name} | {len(queues)} | {length} | {figures['tokens_per_second']:.1f} | {figures['over_none']:.3f} | "
            f"{figures['over_none_cpu_time']:.3f} | {figures['drafted']} | {figures['accepted']} |",
            flush=True,
        )
    return row


def ratio(own: list[dict], peer: list[dict], key: str) -> float:
    """Median over repeats of the ratio within a repeat."""
    return statistics.median(a[key] / b[key] for a, b in zip(own, peer, strict=True))


def prompts(tokenizer, task: str, count: int) -> list[list[int]]:
    """Chat prompts of one task as ids."""
    return [batch["input_ids"][0].tolist() for batch in batches(tokenizer, task, 1, count)]


def random_prompts(vocab_size: int, count: int, length: int = 64) -> list[list[int]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(300, vocab_size, (count, length), generator=generator).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a model instead of the inflated bundled one")
    parser.add_argument("--size", default="300m", choices=list(SIZES), help="cost of the inflated target")
    parser.add_argument("--drafter", default="tiny-draft")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--easy", default="edit", help="task of the easy rows of the mixed batch")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128, help="tokens per row and measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--works", nargs="+", default=["wrong", "wrong model", "ngram", "draft_model"])
    parser.add_argument(
        "--batch-sizes", nargs="+", type=int, default=[1, 8], help="for the drafters that are always wrong"
    )
    parser.add_argument("--lengths", nargs="+", default=list(LENGTHS), choices=list(LENGTHS))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer, _ = load_target(args, folder)
    drafter: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        hf_specdec.resolve_model(args.drafter), dtype=model.dtype
    ).eval()
    target = prepare(model)
    wrong_token = int(tokenizer.pad_token_id)
    WrongDrafts.wrong_token = wrong_token
    generators = {
        "wrong": ("ngram", WrongDrafts),
        "wrong model": ("draft_model", wrong_model(generator_class("draft_model"), wrong_token)),
        "ngram": ("ngram", generator_class("ngram")),
        "draft_model": ("draft_model", generator_class("draft_model")),
    }
    hard = [[prompt] for prompt in random_prompts(model.config.vocab_size, 8)]
    easy = [[prompt] for prompt in prompts(tokenizer, args.easy, 4)]
    print("| work | rows | length | tok/s | / none | / none, CPU time | drafted per row | accepted per row |")
    print("|---|---|---|---|---|---|---|---|")
    results = []
    for work in args.works:
        method, generator = generators[work]
        lengths = [length for length in LENGTHS if length in args.lengths]
        decoders = {length: make_decoder(target, generator, method, length, drafter) for length in lengths}
        if work.startswith("wrong"):
            for size in args.batch_sizes:
                results.append(compare(work, decoders, hard[:size], size, args))
                assert not any(map(sum, (each["accepted"] for each in results[-1]["lengths"].values())))
        else:
            results.append(compare(f"{work}, 4 easy and 4 hard rows", decoders, easy + hard[:4], 4, args))
        if args.json:
            command = " ".join(["python", *sys.argv])
            size = sum(p.numel() for p in model.parameters())
            record = {"machine": machine(), "command": command, "parameters": size, "results": results}
            args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
