"""Policies: who drafts for which row in a step, and how deep.

The measured policy, `Fastest`, maximizes expected tokens per second. Its unit is the plain step: one forward of B rows without drafts,
which writes B tokens. With

* t(B, n, c), seconds of a forward of B rows with n tokens and texts of c tokens: a non-negative combination of features, piecewise linear
  in n, fitted to the medians of recent measurements; for numbers of tokens that no step had yet, to forwards that read prompts
  (`cost.StepCost`);
* d(k, m, b), seconds of a drafter for depth k, m tokens in all, and b tokens to catch up with (`cost.DraftingCost`), and o, seconds of
  choosing and of learning from the choice;
* s(i, k), probability that the first k tokens of a draft for row i are accepted: a drafter's rates over all texts, times a row's factor,
  both with forgetting (`acceptance.Acceptance`);

a step that gives row i a draft of depth k_i has the speed

    [1 + mean_i sum_{j <= k_i} s(i, j)] * t(B, B, c) / [t(B, B + sum_i k_i, c) + d + o],

and the choice is the fastest one over drafters and depths. In a static batch whose rows are expected to reach
their greatest lengths, it is the choice with which the row that ends last ends soonest: until then, other rows' tokens save no time.

A trial of a drafter that does not seem to pay is worth P * H * g tokens: P is the chance that the drafter pays on the row (the share of
rows on which it paid, times the likelihood of its failures there, which ages), g what it would gain in a step, H the tokens for which the
text is expected to stay as it is. A trial is made if that is more than its price, what it takes less what it is expected to gain at once,
and if the price is small against what the rows may still write. So trials become rare by themselves where nothing is accepted.

Choosing takes time, too. A single row chooses from a table of what is fastest for every drafter, kind of draft and length, which is made
anew as often as `Fastest.CHOOSING` of the time allows. What was offered and drafted meanwhile is learnt from when the next one is made.
Steps with drafts take longer than their parts, since drafting leaves other things in the machine's caches: the extra time is multiplied by
what timed steps showed. Plain steps are timed only after plain ones, for the same reason.

Look-ups take time in every step in which they are asked, and heads in every step in which they follow. They rest while what they add, or
the hope of it, is less than what they take. While nothing is chosen and nobody may wake, no choice is made at all.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import SpeculativeConfig
from .fastest import Choice, Drafter, Fastest
from .lengths import DraftedStep, DraftLengthPolicy, LengthPerBatchSize

__all__ = [
    "Choice", "DraftLengthPolicy", "DraftedStep", "Drafter", "Fastest", "LengthPerBatchSize", "make_policy",
]  # fmt: skip


def make_policy(
    config: SpeculativeConfig,
    clock: Callable[[], float] | None = None,
    measured: Fastest | None = None,
    is_head: bool = False,
    most_nodes: int = 1,
) -> DraftLengthPolicy:
    """The policy of draft lengths that a configuration asks for.

    Args:
        clock: see Fastest.
        measured: the policy that a drafter made of several has for them.
        is_head, most_nodes: see Drafter.
    """
    if measured is not None:
        return measured
    if config.num_speculative_tokens_per_batch_size is not None:
        return LengthPerBatchSize(config.num_speculative_tokens_per_batch_size)
    longest = config.longest_draft or 1
    if config.draft_length == "auto":
        return Fastest(
            [Drafter(config.method, longest, is_head=is_head, guess=0.6, most_nodes=most_nodes)], longest, clock
        )
    return DraftLengthPolicy()
