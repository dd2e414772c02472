"""Measures what steps and drafts cost, once, when a decoder is made."""

from __future__ import annotations

import itertools

import numpy as np

from ..candidate_generators.auto.generator import ChoosingGenerator
from ..core.sequence import Sequence
from .decoder import SpeculativeDecoder

SECONDS = 0.25  # of CPU time, after which no other step is made: small heads' programs are recorded and timed in it
PROMPT, LONGEST = 16, 256  # tokens of a text, at first and at most
NUM_PLAIN = 12  # steps without drafts, of which three are timed: a step takes longer after one that was learnt from
DEPTHS = {1: (1, 7, 1, 7), 8: (3, 7)}  # by rows: the deepest are of 8 and 64 tokens, by which those of more are guessed


def measure_costs(decoder: SpeculativeDecoder) -> None:
    """Let drafters that are asked for a depth draft for texts of no meaning: for one row, for several, and for one again, so that the first
    call begins with their programs recorded and with costs known.

    Nothing is measured where measurements are kept from before, where texts have no room, on ranks, or on other devices than CPUs,
    where first steps compile kernels.
    """
    generator, target, config = decoder.generator, decoder.target, decoder.config
    if not isinstance(generator, ChoosingGenerator) or generator.chooser is not generator.policy:
        return
    policy, names = generator.policy, generator.drafters[generator.num_lookups :]
    if policy.cost.target or not names or target.device.type != "cpu" or target.family is not None:
        return
    num_rows, bounds = max(DEPTHS), [LONGEST, target.max_positions, config.max_model_len]
    longest = min(bound for bound in bounds if bound is not None)
    most = None if config.num_blocks is None else config.num_blocks * config.block_size
    if longest <= PROMPT or (most is not None and most < num_rows * longest):
        return
    ids = (np.arange(num_rows * PROMPT) % target.vocab_size).reshape(num_rows, PROMPT).tolist()
    # heads follow rows that name a drafter, whatever they gain
    rows = [Sequence(text, longest, is_shared=False, drafter=names[0]) for text in ids]
    plain = [(names[0], 0)] * NUM_PLAIN
    plans = [(count, [*plain, *itertools.product(names, depths)]) for count, depths in DEPTHS.items()]
    ends = policy.clock() + SECONDS
    with policy.only_costs(), decoder.memory_for(rows), decoder.active():
        for seq in rows:
            decoder.add(seq)
        for count, (name, depth) in [(count, step) for count, steps in [*plans, (1, plain[:1])] for step in steps]:
            if policy.clock() > ends or any(seq.finished for seq in rows):
                break
            for seq in rows[:count]:
                seq.drafter, seq.num_speculative_tokens = name, depth
            decoder.step(rows[:count])
        for seq in rows:
            decoder.remove(seq)
