"""Decoders without generate(), and a small continuous-batching scheduler around them: what a server does in little.

First come first served, prompts fed in chunks beside running decodes, the youngest running sequence preempted when the pool is
full.
"""

import random
from typing import Any

import torch
from cache_checks import check_blocks
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec.cache import OutOfBlocks
from hf_specdec.candidate_generators import generator_class, parse_config
from hf_specdec.candidate_generators.base import DrafterContext
from hf_specdec.core.sequence import Sequence
from hf_specdec.decoding import SpeculativeDecoder
from hf_specdec.model.prepare import prepare

VOCAB = 64


def small_llama(seed: int, noise_on: LlamaForCausalLM | None = None) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.5, eos_token_id=1, bos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    if noise_on is not None:  # a drafter that is often, not always, right
        model.load_state_dict(noise_on.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def make_decoder(target, config: dict[str, Any], drafter=None) -> SpeculativeDecoder:
    """A decoder of its own, as generate() would make it."""
    settings, packed = parse_config(config), prepare(target)
    generator = generator_class(settings.method)(settings, packed, DrafterContext(assistant_model=drafter))
    return SpeculativeDecoder(generator)


class Scheduler:
    """Runs what has arrived; `chunk` prompt tokens per step are shared by the rows that read prompts."""

    def __init__(self, decoder: SpeculativeDecoder, max_rows: int, chunk: int, rng: random.Random):
        self.decoder, self.max_rows, self.chunk, self.rng = decoder, max_rows, chunk, rng
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = self.waits = self.mixed_steps = 0

    def submit(self, seq: Sequence) -> None:
        self.decoder.add(seq)
        self.waiting.append(seq)

    def cancel(self, seq: Sequence) -> None:
        (self.running if seq in self.running else self.waiting).remove(seq)
        self.decoder.remove(seq)

    def schedule(self) -> list[int]:
        while self.waiting and len(self.running) < self.max_rows:
            self.running.append(self.waiting.pop(0))
        budget, chunks = self.chunk, []
        for seq in self.running:
            pending = len(seq.tokens) - self.decoder.cache.tables[seq.id].length
            take = 1 if pending == 1 else min(pending, max(1, min(budget, self.rng.randint(1, self.chunk))))
            budget -= take
            chunks.append(take)
        return chunks

    def step(self) -> None:
        chunks = self.schedule()
        if not self.running:
            return
        try:
            results = self.decoder.step(self.running, chunks)
        except OutOfBlocks:
            victim = next(s for s in reversed(self.running[1:]) if self.decoder.cache.tables[s.id].blocks)
            self.preempt(victim)
            return
        self.waits += len(results) < len(self.running)
        kinds = {bool(result.new_tokens) for result in results}
        self.mixed_steps += len(kinds) == 2
        for seq in [seq for seq in self.running if seq.finished]:
            self.running.remove(seq)
            self.decoder.remove(seq)

    def preempt(self, seq: Sequence) -> None:
        self.preemptions += 1
        self.decoder.preempt(seq)
        self.running.remove(seq)
        self.waiting.insert(0, seq)


def run_scenario(target, drafter, method, num_requests: int = 100, vocab_size: int = VOCAB) -> None:
    """Requests arrive at random steps, share prefixes, are preempted and cancelled; every output is checked against its own
    single-request `generate()`, and nothing may be left in the pools."""
    rng = random.Random(7)
    decoder = make_decoder(target, {**method, "block_size": 4, "num_blocks": 40, "prefill_chunk_size": 16}, drafter)
    decoder.allocate(0, 0)  # num_blocks decides
    scheduler = Scheduler(decoder, max_rows=6, chunk=12, rng=rng)
    arrivals, prompts = [], []
    for _ in range(num_requests):
        shared = prompts[-1][: rng.randint(0, len(prompts[-1]))] if prompts and rng.random() < 0.4 else []
        prompts.append((shared + [rng.randrange(2, vocab_size) for _ in range(rng.randint(1, 50))])[:60])
        arrivals.append(rng.randint(0, 250))
    requests = []
    for i, prompt in enumerate(prompts):
        seq = Sequence(
            list(prompt), max_length=len(prompt) + rng.randint(1, 40), eos_token_ids=frozenset([1]),
            do_sample=i % 3 == 0, seed=i, num_speculative_tokens=rng.choice([None, None, 0, 1, 3]),
        )  # fmt: skip
        requests.append(seq)
    cancel_at = {rng.choice(requests): arrivals[i] + rng.randint(1, 20) for i in range(0, num_requests, 10)}
    cancelled, time = set(), 0
    queue = sorted(zip(arrivals, range(num_requests), requests, strict=True))
    with decoder.active():
        while queue or scheduler.waiting or scheduler.running:
            while queue and queue[0][0] <= time:
                scheduler.submit(queue.pop(0)[2])
            for seq, when in cancel_at.items():
                if when <= time and seq not in cancelled and (seq in scheduler.running or seq in scheduler.waiting):
                    scheduler.cancel(seq)
                    cancelled.add(seq)
            scheduler.step()
            check_blocks(decoder.cache.pool)
            time += 1
            assert time < 20000, "the scheduler makes no progress"
    assert decoder.cache.pool.num_used == 0 and not decoder.cache.tables and not decoder.statistics
    cache = getattr(decoder.generator, "cache", None)
    if hasattr(cache, "pool"):
        assert cache.pool.num_used == 0 and not cache.tables
        check_blocks(cache.pool)
    assert scheduler.preemptions > 0 and scheduler.waits > 0 and scheduler.mixed_steps > 0 and cancelled
    for seq, prompt in zip(requests, prompts, strict=True):
        expected = plain(target, prompt, seq)
        if seq in cancelled:
            expected = expected[: len(seq.tokens)]
        assert seq.tokens == expected


def plain(target, prompt: list[int], seq: Sequence) -> list[int]:
    """The request alone: stock `generate()` for greedy rows, our loop without drafts and paging tricks for sampled ones."""
    if not seq.do_sample:
        ids = torch.tensor([prompt])
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_length=seq.max_length,
            do_sample=False,
            eos_token_id=1,
            pad_token_id=0,
        )
        return out[0].tolist()
    decoder = make_decoder(target, {"method": "none"})
    alone = Sequence(list(prompt), seq.max_length, seq.eos_token_ids, do_sample=True, seed=seq.seed)
    decoder.allocate(seq.max_length, 1)
    with decoder.active():
        decoder.add(alone)
        while not alone.finished:
            decoder.step([alone])
        decoder.remove(alone)
    return alone.tokens
