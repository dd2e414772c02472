"""SpeculativeDecoder: propose, forward, verify, commit, observe. The one place where tokens are produced."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import torch

from ..cache import OutOfBlocks
from ..candidate_generators import CandidateGenerator
from ..candidate_generators.auto import ChoosingGenerator
from ..candidate_generators.base import MayRest
from ..candidate_generators.prediction import LONGEST
from ..core.clock import StepTimer, clock_for
from ..core.draft_trees import DraftTrees
from ..core.outcome import StepOutcome
from ..core.sequence import Sequence
from ..model.adapters import RowAdapters
from ..model.image_layers import keep_images
from ..model.onward_rows import NO_ROWS
from ..model.prompt import ReadPrompt
from ..policy import DraftedStep, DraftLengthPolicy, make_policy
from ..sampling.grammar import MOST_FORCED, along_grammars
from ..sampling.logits import calls_in_order, needs_prefix
from ..verification.verify import begin_verification
from . import profile
from .outputs import Counts
from .running import RunningSequences
from .step import FedRows, PendingStep, StepResult, StepTensors, node_scores
from .trace import Tracer


class SpeculativeDecoder(RunningSequences):
    """Decodes sequences that join and leave between steps.

    `add` a sequence, `step` any selection of sequences any number of times, `remove` a sequence when it has finished or was
    cancelled, `preempt` it to take back its memory for a while. Plain decoding uses a generator that proposes nothing.

    Args:
        generator: the drafter. The output follows the distribution of its `target`.
    """

    agree_on_verdict: Callable[[torch.Tensor], torch.Tensor] | None = None  # see `ranked`

    def __init__(self, generator: CandidateGenerator):
        target, config = generator.target, generator.config
        self._most_nodes = generator.max_draft_nodes
        measured = generator.policy if isinstance(generator, ChoosingGenerator) else None
        policy = DraftLengthPolicy()
        if self._most_nodes:
            policy = make_policy(
                config, clock_for(target.device), measured, generator.taps.whole_text, self._most_nodes
            )
        super().__init__(generator, policy)
        limits = [limit for limit in (target.max_positions, config.max_model_len) if limit]
        self._max_drafted = min(limits, default=None)
        self._rests = generator if isinstance(generator, MayRest) else None
        self._observes = type(generator).observe is not CandidateGenerator.observe
        self.timer = StepTimer(target.device)
        self.tracer: Tracer | None = None

    def begin_batch(self) -> None:
        """Begin a static batch: policies that start anew do, and the steps are traced if the configuration says so."""
        self.policy.begin_batch()
        self.tracer = Tracer(self.target.device, self._name_of_last_draft) if self.config.trace else None

    def _name_of_last_draft(self, seq: Sequence) -> str | None:
        statistics = self.statistics[seq.id]
        return next(iter(statistics.shares[-1])) if statistics.steps[-1][0] else None

    def step(self, sequences: list[Sequence], num_tokens: list[int] | None = None) -> list[StepResult]:
        """One round for some of the running sequences, in one target forward: `begin`, then `finish`. A row whose prompt the model itself
        must read is alone in its step."""
        if self.needs_model(sequences[0]):
            return self.finish(self._begin_alone(sequences[0]))
        return self.finish(self.begin(sequences, num_tokens))

    def needs_model(self, seq: Sequence) -> bool:
        """True if the model itself must read the sequence's prompt next."""
        return seq.image_prompt is not None and not (seq.id in self.cache.tables and self.cache.tables[seq.id].length)

    def _begin_alone(self, seq: Sequence) -> PendingStep:
        """Let the model read a prompt in its own way, and begin the step that chooses the token after it, if there is none yet."""
        self._reserve(seq, seq.prompt_length)  # before the model works for nothing
        self._models.close()
        try:
            with contextlib.nullcontext() if seq.adapter is None else RowAdapters(self.target.model).alone(seq.adapter):
                prompt = seq.image_prompt.read(self.target)
        finally:
            self._activate()
        (seq.position_offset,) = prompt.offsets
        pending = self.begin_with([seq], prompt)
        self._reserve(seq, seq.prompt_length)
        return pending

    def can_begin_after(self, sequences: list[Sequence], pending: PendingStep) -> bool:
        """True if the next step of these rows can launch before `pending` finishes: it needs only one token per row, already on the
        device."""
        if self.policy.needs_observations or not pending.is_plain or needs_prefix(sequences):
            return False
        if any(map(brings_drafts, sequences)):
            return False
        if not {seq.id for seq in sequences} <= pending.next_tokens.keys():
            return False
        with pending.as_if_finished():
            return not any(self._draft_limits(sequences))

    def begin(
        self, sequences: list[Sequence], num_tokens: list[int] | None = None, after: PendingStep | None = None
    ) -> PendingStep:
        """Propose, forward and verify, without waiting for the device. Call inside `active()`.

        The step is then pending: `finish` it or `cancel` it. Until then sequences may be removed but not preempted.

        Args:
            sequences: unfinished rows, in order of priority. Rows for which no block is left wait: they get no result.
            num_tokens: per row, the most tokens of its own text to feed (prompt chunks); None: all of them.
            after: a step that is still pending, if `can_begin_after` allows it. A row that the pending step turns out to finish
                gets nothing from this step.

        Raises:
            OutOfBlocks: not even the first row fits. Nothing was done; preempt another sequence.
        """
        if after is None:
            return self._begin(sequences, num_tokens, {})
        if self._observes:
            after.tensors.output = after.tensors.output.copied()
        for seq in sequences:
            self.cache.tables[seq.id].length = len(seq.tokens)
        with after.as_if_finished():
            return self._begin(sequences, num_tokens, after.next_tokens)

    def _begin(
        self, sequences: list[Sequence], num_tokens: list[int] | None, next_tokens: dict[int, torch.Tensor]
    ) -> PendingStep:
        """`begin`. `next_tokens`: sequence id → its last token [1], on the device, where the host does not know it yet."""
        tracer = self.tracer or profile.phases
        tracer.begin(first=True)
        rows = [] if next_tokens else self._go_on(sequences)
        num_onward = len(rows)
        self._admit(sequences, num_tokens, rows)
        others = rows[num_onward:]
        num_own = [1] * num_onward + [end - self.cache.tables[seq.id].length for seq, end in others]
        decoding = sequences[:num_onward] + [seq for seq, end in others if end == len(seq.tokens)]
        # Where rows wait for blocks, fewer rows are left than `can_begin_after` was asked about, which might draft. But what a draft would
        # follow is not known.
        limits = [0] * len(decoding) if next_tokens else self._draft_limits(decoding)
        trees = proposed = DraftTrees.empty(len(decoding), self.target.device)
        num_drafted = trees.lengths
        if not next_tokens:
            trees, proposed, num_drafted = self._propose(decoding, limits)
        if self.policy.needs_observations and any(limits):
            self.timer.proposed()
        tracer.end("propose")
        onward = self._onward
        if any(trees.lengths) or not num_onward:
            onward, others = NO_ROWS, rows
        fed = FedRows.of(others, [self.cache.tables[seq.id].length for seq, _ in others], trees, next_tokens, onward)
        rests = self._rests is not None and self._rests.rests
        tapped = not rests or self.learner is not None
        tensors = fed.results(self.target.forward(fed.inputs, self.cache, self._all_hidden_states, tapped))
        tracer.end("forward")
        # while the drafter called a row's processors, they may have shown that they must be called in order
        if any(trees.lengths) and any(map(calls_in_order, decoding)):
            trees, tensors = tensors.without_drafts(trees)
        tensors.processed, tensors.sampling = node_scores(
            decoding, trees, tensors.processed, self.config, tensors.failed
        )
        if any(trees.lengths) and any(map(calls_in_order, decoding)):  # or in these calls, which are then undone
            trees, tensors = tensors.without_drafts(trees)
            tensors.failed.clear()
            tensors.processed, tensors.sampling = node_scores(decoding, trees, tensors.processed, self.config)
        verdict = None
        if decoding:
            verdict = begin_verification(
                trees, tensors.processed, decoding, self.config, tensors.sampling, self.agree_on_verdict
            )
        tracer.end("verify")
        unseen, is_held = rests and not any(limits), self.policy.holds
        return PendingStep(
            rows, num_own, decoding, limits, trees, proposed, num_drafted, tensors, verdict, unseen, is_held, self._num_passed > 0,
        )  # fmt: skip

    def begin_with(self, sequences: list[Sequence], prompt: ReadPrompt) -> PendingStep:
        """Begin a step whose forward the model itself has run: choose the token after each prompt, unless the rows have begun before.
        Call inside `active()`.

        The rows' keys and values wait outside the pool until the rows are next scheduled.
        """
        self.timer.start(counts=False)  # the model has read the prompts already
        images = prompt.images or []
        num_blocks = sum(-(-part.num_keys // self.cache.block_size) for part in images)
        for seq, part in zip(sequences, images, strict=bool(images)):
            most = num_blocks if seq.image_prompt is None else seq.image_prompt.num_blocks
            keep_images(self.target.model, self.cache, seq.id, part, most)
        for i, (seq, layers) in enumerate(zip(sequences, prompt.keys_values, strict=True)):
            self.keep_outside(seq, layers)
            if prompt.states is not None:
                assert self.cache.states is not None
                self.cache.states.load(seq.id, prompt.states[i], self.cache.tables[seq.id].length)
        decoding = [seq for seq in sequences if not seq.num_generated]
        trees = DraftTrees.empty(len(decoding), self.target.device)
        output, ends = prompt.output, np.cumsum(prompt.counts)
        scores, sampling, verdict = output.logits, None, None
        if decoding:
            scores, sampling = node_scores(decoding, trees, output.logits, self.config)
            verdict = begin_verification(trees, scores, decoding, self.config, sampling, self.agree_on_verdict)
        starts = {seq.id: int(end) - count for seq, end, count in zip(sequences, ends, prompt.counts, strict=True)}
        tensors = StepTensors(output, scores, sampling, ends - 1, starts)
        rows = [(seq, seq.prompt_length) for seq in sequences]
        none = trees.lengths
        return PendingStep(rows, prompt.counts, decoding, none, trees, trees, none, tensors, verdict)

    def finish(self, pending: PendingStep) -> list[StepResult]:
        """Wait for the verdict, keep the KV of accepted tokens, append the tokens, count them, and tell the drafter. Call inside
        `active()`.

        Sequences that were finished or removed in the meantime get nothing.
        """
        tracer = self.tracer or profile.phases
        tracer.begin()
        results, outcome = self._appended(pending) or self._committed(pending)
        outcome.output, outcome.cache = pending.tensors.output, self.cache
        self.last = pending.tensors
        tracer.end("verify")
        seen, proposed = _as_seen_by_drafter(outcome, pending)
        if outcome.chunks and not pending.unseen:
            self.generator.observe(seen)
        tracer.end("observe")
        tracer.record(outcome)
        if self.policy.needs_observations and outcome.sequences and not pending.is_still:
            whole = len(outcome.sequences) == len(pending.rows) == sum(pending.num_own)
            self._inform_policy(seen, proposed, pending, timed=whole)
        if self.learner is not None:
            if outcome.chunks:
                self.learner.observe(outcome)
            self.learner.between_steps()
        return results

    def cancel(self, pending: PendingStep) -> None:
        """Wait for a pending step and discard it. The caller removes its sequences."""
        if pending.verdict is not None:
            pending.verdict.wait()

    def _admit(self, sequences: list[Sequence], num_tokens: list[int] | None, rows: list[tuple[Sequence, int]]) -> None:
        """Append to `rows`, which are the first ones, the others that fit, as (sequence, end): this step feeds the sequence's tokens up to
        `end`."""
        for i, seq in enumerate(sequences[len(rows) :], len(rows)):
            table = self.cache.tables[seq.id]
            matched = 0
            if not table.blocks and seq.is_text and seq.id not in self.outside:
                if seq.num_generated or not seq.wants_prompt_logits:
                    matched = self.share_prefix(seq)
                if matched and not seq.num_generated:
                    self.statistics[seq.id].num_cached_tokens = matched
            end = len(seq.tokens) if num_tokens is None else min(len(seq.tokens), table.length + num_tokens[i])
            if table.branch:
                end = self.cache.end_of_part(seq.id, end)
            if end < seq.prompt_length and self.target.recurrent is not None:
                end = self.target.recurrent.cut(table.length, end)
            if end <= table.length:
                raise ValueError(f"Sequence {seq.id} was scheduled with no token to feed.")
            try:
                self._ready(seq, table, end)
            except OutOfBlocks:
                if matched:  # do not hold a shared prefix while waiting
                    self.preempt(seq)
                if not rows:
                    raise
                break
            rows.append((seq, end))

    def is_plain(self, sequences: list[Sequence]) -> bool:
        """True if a step of these rows will not draft, whatever their caps."""
        if self._num_still > 0 and sequences == self._still:
            return True
        most = self.config.disable_by_batch_size
        return not self._most_nodes or (most is not None and len(sequences) > most) or self.policy.is_plain(sequences)

    def most_nodes(self, seq: Sequence, is_plain: bool = False) -> int:
        """Maximum number of nodes of a row's draft, in a step in which the drafter drafts or not (`is_plain`)."""
        return (0 if is_plain else self._most_nodes) + self._most_brought(seq)

    def _most_brought(self, seq: Sequence) -> int:
        """How many tokens a row may draft itself. Recurrent layers keep states for as many drafted tokens as the method has."""
        most = LONGEST if seq.prediction is not None else MOST_FORCED if brings_drafts(seq) else 0
        return most if self.target.recurrent is None else min(most, self.config.longest_draft)

    def _draft_limits(self, sequences: list[Sequence]) -> list[int]:
        """Draft depth of each row: the policy's choice, capped by what the row can use. Starts the clock if the policy uses the time.

        In most steps of rows that do not draft, the policy is not asked: in a real loop that takes 10 µs, as the model empties the caches.
        """
        if self._num_still > 0 and sequences == self._still:
            self._num_still -= 1
            self._num_passed += 1
            return [0] * len(sequences)
        self.policy.pass_by(self._num_passed)
        self._num_still = self._num_passed = 0
        is_plain = self.is_plain(sequences)
        if self.policy.needs_observations and not self.policy.holds:
            self.timer.start(counts=not is_plain or self.policy.wants_plain_time())
        elif is_plain:
            self._still, self._num_still = sequences, self.policy.num_still()
        if is_plain:
            return [0] * len(sequences)
        return self.policy.limits(sequences, [self._draft_limit(seq) for seq in sequences])

    def _inform_policy(self, seen: StepOutcome, proposed: DraftTrees, pending: PendingStep, timed: bool) -> None:
        """Tell the policy the results of its draft lengths. The time of a step that also read prompts says only what many tokens take.
        Where steps are CUDA graphs it does not say even that, because long prompts run without graphs.

        A row whose prompt ended in this step and that has no draft counts as not asked to draft: a drafter that reads hidden states could
        not draft yet.
        """
        if pending.is_held:
            if any(pending.limits):
                deepest = 0 if seen.sequences[0].finished else proposed.row_depths[0]
                self.policy.observe_held(deepest, len(seen.accepted[0]))
            else:
                self.policy.observe_plain(seen.sequences, None)
            return
        seconds, drafting_seconds = self.timer.stop() or (None, 0.0)
        if not timed and seconds is not None and not any(pending.limits) and self.target.graphs is None:
            self.policy.observe_prompts(sum(pending.num_own), seconds)
        if not any(pending.limits):
            self.policy.observe_plain(seen.sequences, seconds if timed and pending.is_plain else None)
            return
        nodes, accepted = proposed.nodes_by_depth, [len(path) for path in seen.accepted]
        num_new = [len(new) for new in seen.new_tokens]
        chosen = dict(zip([seq.id for seq in pending.decoding], pending.limits, strict=True))
        read = {seq.id for (seq, _), count in zip(pending.rows, pending.num_own, strict=True) if count > 1}
        limits = [
            chosen[seq.id] if count or seq.id not in read else 0
            for seq, count in zip(seen.sequences, proposed.lengths, strict=True)
        ]
        more = seen.trees.num_nodes - proposed.num_nodes
        self.policy.observe(
            DraftedStep(
                seen.sequences, limits, nodes, accepted, num_new, seconds if timed else None, drafting_seconds, more
            )
        )

    def _propose(self, sequences: list[Sequence], limits: list[int]) -> tuple[DraftTrees, DraftTrees, list[int]]:
        """The drafts to verify, what the drafter proposed of them, and per row, how many of the first nodes no grammar has forced."""
        trees, proposed, num_drafted = self._drafted(sequences, limits)
        return self._with_slots(sequences, trees), proposed, num_drafted

    def _drafted(self, sequences: list[Sequence], limits: list[int]) -> tuple[DraftTrees, DraftTrees, list[int]]:
        """The same, whether or not there are slots."""
        trees = proposed = DraftTrees.empty(len(sequences), self.target.device)
        if any(limits):
            trees = proposed = self.generator.propose(sequences, limits)
        if any(map(brings_drafts, sequences)):
            rooms = self._rooms(sequences)
            predicted = [
                seq.prediction.continuation(seq, room) if seq.prediction is not None and room else []
                for seq, room in zip(sequences, rooms, strict=True)
            ]
            trees = trees.extended(predicted) if any(predicted) else trees
            trees, num_drafted = along_grammars(sequences, trees, rooms)
            return trees, proposed, num_drafted
        return trees, proposed, trees.lengths

    def _rooms(self, sequences: list[Sequence]) -> list[int]:
        """Per row, how many tokens its prediction or grammar may draft: none in a step whose plain time is to be measured, or in which
        the configuration forbids drafts."""
        most, policy = self.config.disable_by_batch_size, self.policy
        if (most is not None and len(sequences) > most) or policy.needs_plain_step():
            return [0] * len(sequences)
        rooms = [min(self._most_brought(seq), self._draft_room(seq)) for seq in sequences]
        return rooms if policy.needs_observations else policy.limits(sequences, rooms)

    def _with_slots(self, sequences: list[Sequence], trees: DraftTrees) -> DraftTrees:
        """The drafts, as far as the rows have room and blocks are left for their nodes."""
        if not any(trees.lengths):
            return trees
        fitting = [self._lookahead(seq, n) if n else 0 for seq, n in zip(sequences, trees.lengths, strict=True)]
        return trees if fitting == trees.lengths else dataclasses.replace(trees, lengths=fitting)

    def _draft_limit(self, seq: Sequence) -> int:
        """The deepest useful draft of the drafter, at most its K; none where the row's prediction drafts."""
        if seq.prediction is not None and seq.prediction.continuation(seq, 1):
            return 0
        return min(self.config.longest_draft, self._draft_room(seq))

    def _draft_room(self, seq: Sequence) -> int:
        """How many tokens a path of the row's draft may have: at most the row's K, the tokens left to write, and the model's positions."""
        if calls_in_order(seq):
            return 0
        room = seq.max_length - len(seq.tokens) - 1
        for most in (seq.num_speculative_tokens, seq.draft_room):
            room = room if most is None else min(room, most)
        if self._max_drafted is not None:
            room = min(room, self._max_drafted - len(seq.tokens))
        return max(room, 0)

    def _lookahead(self, seq: Sequence, num_nodes: int) -> int:
        """Reserve slots for a draft's nodes. Returns how many nodes fit; a draft never preempts another row."""
        if seq.draft_room is not None:
            num_nodes = min(num_nodes, seq.draft_room)
        try:
            self.cache.reserve(seq.id, len(seq.tokens) + num_nodes)
        except OutOfBlocks:
            return min(num_nodes, len(self.cache.tables[seq.id].slots) - len(seq.tokens))
        return num_nodes

    def _committed(self, pending: PendingStep) -> tuple[list[StepResult], StepOutcome]:
        """What a step did for each of its rows, and for the drafter; rows that were finished or removed in the meantime got nothing."""
        results = {seq.id: StepResult(seq) for seq, _ in pending.rows}
        present = [i for i, (seq, _) in enumerate(pending.rows) if not seq.finished and seq.id in self.statistics]
        outcome = self._commit(pending, {pending.rows[i][0].id for i in present}, results)
        outcome.chunks = [pending.rows[i] for i in present]
        outcome.num_own = [pending.num_own[i] for i in present]
        outcome.starts = [pending.tensors.starts[seq.id] for seq, _ in outcome.chunks]
        return list(results.values()), outcome

    def _commit(self, pending: PendingStep, present_ids: set[int], results: dict[int, StepResult]) -> StepOutcome:
        """Keep the KV of accepted tokens, append the tokens and count them, for the sequences whose ids are in `present_ids`."""
        trees, present = pending.trees, [i for i, seq in enumerate(pending.decoding) if seq.id in present_ids]
        sequences = [pending.decoding[i] for i in present]
        kept, paths, emitted, first_logits = [], [], [], []
        if pending.verdict is not None:
            verdict = pending.verdict.wait()
            # each row's first score row
            root_rows = list(itertools.accumulate(trees.lengths, lambda row, n: row + n + 1, initial=0))
            accepted, next_tokens = trees.paths(verdict.accepted), verdict.next_tokens.tolist()
            deepest = trees.row_depths
            for i, seq in zip(present, sequences, strict=True):
                path, first, new = accepted[i], root_rows[i], [next_tokens[i]]
                if path:
                    new = [*verdict.tokens[i, path].tolist(), *new]
                    failed = (k for k, node in enumerate(path) if first + 1 + node in pending.tensors.failed)
                    # What follows such a token has no scores: the next step asks again, as plain decoding does.
                    path = path[: next(failed, None)]
                    new = new[: len(path) + 1]
                kept.append((seq.id, len(seq.tokens), path))
                new = seq.accept(new)
                path = path[: len(new)]
                seq.num_steps += 1
                counts = trees.lengths[i], deepest[i], len(new), len(path)
                statistics, result = self.statistics[seq.id], results[seq.id]
                statistics.steps.append(counts)
                if counts[0]:
                    statistics.shares.append(self._shares(pending, i, path, counts))
                result.new_tokens, result.nodes = new, [first, *[first + 1 + node for node in path]][: len(new)]
                paths.append(path)
                emitted.append(new)
                first_logits.append(first)
        reading = []
        if len(pending.decoding) < len(pending.rows):
            decoding = {seq.id for seq in sequences}
            reading = [(seq, end) for seq, end in pending.rows if seq.id in present_ids - decoding]
            kept += [(seq.id, end, []) for seq, end in reading]
        self.cache.commit(kept)
        for seq, end in reading if self.cache.prefix_states is not None else []:
            if seq.is_text and end < seq.prompt_length:
                self.cache.keep_states(seq.id, end)
        trees = trees if len(present) == len(pending.decoding) else trees.select(present)
        return StepOutcome(sequences, trees, paths, emitted, root_rows=first_logits)

    def _shares(self, pending: PendingStep, row: int, path: list[int], counts: Counts) -> dict[str | None, Counts]:
        """What of a verified row is whose, by the drafter's name. The tokens that a grammar forces after a draft are the grammar's."""
        (num_nodes, _, num_new, num_accepted), seq = counts, pending.decoding[row]
        predicted = seq.prediction is not None and not pending.proposed.lengths[row]
        name = "prediction" if predicted else self.drafter_of(seq)
        num_drafted = pending.num_drafted[row]
        if num_nodes <= num_drafted:
            return {name: counts}
        num_forced, shares = num_nodes - num_drafted, {}
        if num_drafted:
            depth, accepted = (
                int(pending.trees.depths[row, :num_drafted].max()),
                sum(node < num_drafted for node in path),
            )
            written = accepted if accepted < num_accepted else num_new  # the rest follows forced tokens
            shares[name] = num_drafted, depth, written, accepted
            num_new, num_accepted = num_new - written, num_accepted - accepted
        return {**shares, "grammar": (num_forced, num_forced, num_new, num_accepted)}


def brings_drafts(seq: Sequence) -> bool:
    """True if a row may have drafts of its own, whatever the method: it has a prediction or a grammar."""
    return seq.prediction is not None or (seq.processors is not None and seq.processors.grammar is not None)


def _as_seen_by_drafter(outcome: StepOutcome, pending: PendingStep) -> tuple[StepOutcome, DraftTrees]:
    """The outcome of the drafter's own proposal: its tokens that became text count as accepted, whatever was verified; and its trees."""
    proposed = pending.proposed
    others = any(pending.trees.lengths) and any(map(brings_drafts, outcome.sequences))
    if proposed.tokens is pending.trees.tokens and not others:
        return outcome, outcome.trees  # it was verified, as far as there were slots
    rows = {seq.id: i for i, seq in enumerate(pending.decoding)}
    proposed = proposed.select([rows[seq.id] for seq in outcome.sequences])
    accepted = [proposed.matching_path(i, new[:-1]) for i, new in enumerate(outcome.new_tokens)]
    return outcome.for_proposal(accepted), proposed
