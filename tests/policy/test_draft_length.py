"""Draft lengths: per batch size, and "auto": near the best fixed lengths, never much slower than plain, and without a say in
what is written."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from combinations import covering
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import PAD, ragged, tiny_llama
from replayed_graphs import CaptureInPython

import hf_specdec
from hf_specdec import SpeculativeConfigError, integration, parse_config
from hf_specdec.candidate_generators import generator_class
from hf_specdec.candidate_generators.base import DrafterContext
from hf_specdec.core import clock
from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.sequence import Sequence
from hf_specdec.decoding import SpeculativeDecoder
from hf_specdec.model import captures
from hf_specdec.model.prepare import prepare
from hf_specdec.policy import DraftedStep, Drafter, DraftLengthPolicy, Fastest, LengthPerBatchSize, make_policy
from hf_specdec.policy import cost as policy_cost
from hf_specdec.policy.cost import DraftingCost, FittedCost, StepCost
from hf_specdec.policy.fastest import Menu

TABLE = "num_speculative_tokens_per_batch_size"


def error(**values):
    with pytest.raises(SpeculativeConfigError) as caught:
        parse_config({"method": "ngram", **values})
    return str(caught.value)


# ---- configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table",
    [
        [[1, 4, 5], [5, 16, 2], [17, 17, 0]],
        ((5, 16, 2), (1, 4, 5), (17, 17, 0)),
        [["1", "4", "5"], [5, "16", 2], [17, 17, "0"]],
        {1: 5, 5: 2, 17: 0},
        {"17": "0", "5": 2, "1": 5},
    ],
    ids=str,
)
def test_forms_of_the_table(table):
    config = parse_config({"method": "ngram", TABLE: table})
    assert config.num_speculative_tokens_per_batch_size == [[1, 4, 5], [5, 16, 2], [17, 17, 0]]
    assert config.num_speculative_tokens == 5, "the longest of the table"
    assert parse_config(config.to_json()) == config


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "at least one batch size"),
        ({}, "at least one batch size"),
        (5, "list of [first, last, K]"),
        ("5", "list of [first, last, K]"),
        ([[1, 2]], "list of [first, last, K]"),
        ([[1, 2, 2.5]], "list of [first, last, K]"),
        ([[1, True, 2]], "list of [first, last, K]"),
        ({"one": 2}, "list of [first, last, K]"),
        ([[2, 3, 1]], "begins at 1"),
        ([[1, 3, 1], [5, 8, 0]], "begins at 4"),
        ([[1, 3, 1], [3, 8, 0]], "begins at 4"),
        ([[1, 3, -1]], "begins at 1"),
        ([[1, 3, 2], [4, 3, 0]], "begins at 4"),
    ],
    ids=str,
)
def test_tables_that_make_no_sense(table, message):
    assert message in error(**{TABLE: table}) and TABLE in error(**{TABLE: table})


def test_values_that_contradict_each_other():
    assert "wants 6 draft tokens for 1 to 2 rows" in error(**{TABLE: [[1, 2, 6]]}, num_speculative_tokens=5)
    assert "choose one" in error(**{TABLE: [[1, 2, 6]]}, num_speculative_tokens="auto")
    assert "'draft_length'" in error(draft_length="automatic") and "did you mean 'auto'" in error(draft_length="aut")
    assert "'fixed'" in error(draft_length="fixed", num_speculative_tokens="auto")
    assert "not 'Auto'" in error(num_speculative_tokens="Auto")


@pytest.mark.parametrize(
    ("values", "longest"),
    [
        ({"method": "ngram", "num_speculative_tokens": "auto"}, 8),
        ({"method": "ngram", "draft_length": "auto"}, 8),
        ({"method": "ngram", "draft_length": "auto", "num_speculative_tokens": 3}, 3),
        ({"method": "suffix", "num_speculative_tokens": "auto"}, 24),
        ({"method": "draft_model", "num_speculative_tokens": "auto", "branching_factors": [3, 2, 1]}, 3),
    ],
    ids=str,
)
def test_auto_has_a_longest_draft(values, longest):
    config = parse_config(values)
    assert config.draft_length == "auto" and config.num_speculative_tokens == longest
    assert parse_config(config.to_dict()) == config and parse_config(config.to_json()) == config
    policy = make_policy(config)
    assert isinstance(policy, Fastest) and policy.acceptance.longest == longest


def test_fixed_is_the_default():
    assert type(make_policy(parse_config({"method": "ngram"}))) is DraftLengthPolicy
    assert type(available("ngram")(num_speculative_tokens="auto").num_speculative_tokens) is int


def available(method):
    return hf_specdec.available_methods()[method]


# ---- by batch size --------------------------------------------------------------------------------------------------


def rows(count, prompt=10):
    return [Sequence([0] * prompt, max_length=10**9) for _ in range(count)]


def test_lengths_by_batch_size():
    policy = LengthPerBatchSize([[1, 2, 5], [3, 8, 2], [9, 16, 0]])
    expected = {1: 5, 2: 5, 3: 2, 8: 2, 9: 0, 16: 0, 17: 0, 500: 0}
    for count, k in expected.items():
        assert policy.limits(rows(count), [7] * count) == [k] * count
    assert policy.limits(rows(3), [0, 1, 7]) == [0, 1, 2]
    assert policy.limits([], []) == []


def test_k_follows_the_batch_as_rows_leave(monkeypatch):
    """Five rows that stop one after the other: K = 0, then 2, then 4; the drafter is not even asked at K = 0."""
    model = tiny_llama()
    config = parse_config(
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2, TABLE: {"1": 4, "3": 2, "5": 0}}
    )
    target = prepare(model)
    generator = generator_class("ngram")(config, target, DrafterContext())
    decoder = SpeculativeDecoder(generator)
    asked, propose = [], generator.propose
    monkeypatch.setattr(
        generator, "propose", lambda seqs, limits: asked.append((len(seqs), max(limits))) or propose(seqs, limits)
    )
    inputs = ragged([6, 6, 6, 6, 6])
    running = [Sequence(r.tolist(), max_length=16 + 12 * i, row=i) for i, r in enumerate(inputs["input_ids"])]
    sequences, counts = list(running), []
    decoder.allocate(1000, 5)
    with decoder.active():
        for seq in running:
            decoder.add(seq)
        while running:
            counts.append(len(running))
            decoder.step(running)
            for seq in [seq for seq in running if seq.finished]:
                running.remove(seq)
                decoder.remove(seq)
    assert set(counts) == {1, 2, 3, 4, 5}
    assert {(count, min(k, 2)) for count, k in asked} >= {(4, 2), (3, 2), (2, 2), (1, 2)}
    assert all(count < 5 and k <= (2 if count > 2 else 4) for count, k in asked)
    assert any(k == 4 for _, k in asked)
    for seq, prompt in zip(sequences, inputs["input_ids"], strict=True):
        plain = model.generate(prompt[None], max_new_tokens=seq.max_length - 6, do_sample=False, pad_token_id=PAD)
        assert seq.tokens == plain[0].tolist()


# ---- auto, in a world of known costs and acceptance -----------------------------------------------------------------


def learnt(longest):
    """A policy of learnt lengths that knows nothing."""
    return Fastest([Drafter("drafter", longest, guess=0.6)], longest)


def tell(policy, step):
    """Let the policy learn from a step, as the decoder does."""
    if any(step.limits):
        policy.observe(step)
    else:
        policy.observe_plain(step.sequences, step.seconds if policy.wants_plain_time() else None)


@dataclasses.dataclass
class World:
    """Rows whose draft tokens are accepted with known probability, on a machine of known speed.

    Attributes:
        chances: per row, P(a draft token is accepted | its parent was).
        target: seconds of the target, by rows and packed tokens.
        drafting: seconds of drafting, by depth, tokens asked for and tokens to catch up with.
        noise: standard deviation of the measured times' logarithm; one in fifty is four times as long besides.
        offers: per row, P(the drafter finds anything).
    """

    chances: list[float]
    target: object
    drafting: object
    noise: float = 0.0
    seed: int = 0
    longest: int = 8
    offers: list[float] | None = None
    prompt: int = 50

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)
        self.sequences = rows(len(self.chances), self.prompt)
        self.behind = [self.prompt] * len(self.chances)
        self.begun = False

    def jitter(self):
        if not self.noise:
            return 1.0
        return math.exp(self.noise * self.random.standard_normal()) * (4 if self.random.random() < 0.02 else 1)

    def step(self, limits):
        """(what a policy would see, true seconds). The first step reads prompts: its time is not shown."""
        nodes, accepted = np.zeros((len(limits), self.longest), dtype=np.int64), []
        for i, (limit, chance) in enumerate(zip(limits, self.chances, strict=True)):
            found = limit if self.offers is None or self.random.random() < self.offers[i] else 0
            nodes[i, :found] = 1
            wrong = np.flatnonzero(self.random.random(found) >= chance)
            accepted.append(int(wrong[0]) if len(wrong) else found)
        missed = sum(b for b, limit in zip(self.behind, limits, strict=True) if limit)
        drafting = self.drafting(max(limits), sum(limits), missed) if any(limits) else 0.0
        seconds = self.target(len(limits), len(limits) + int(nodes.sum()))
        for i, seq in enumerate(self.sequences):
            seq.tokens += [0] * (accepted[i] + 1)
            self.behind[i] = 0 if limits[i] else self.behind[i] + accepted[i] + 1
        shown = drafting * self.jitter()
        whole = seconds * self.jitter() + shown if self.begun else None
        self.begun = True
        new = [a + 1 for a in accepted]
        return DraftedStep(self.sequences, limits, nodes, accepted, new, whole, shown), seconds + drafting

    def run(self, policy, num_steps):
        """Tokens per second over so many steps, and the limits of each."""
        tokens = seconds = 0
        history = []
        for _ in range(num_steps):
            limits = policy.limits(self.sequences, [self.longest] * len(self.chances))
            seen, took = self.step(limits)
            tell(policy, seen)
            tokens, seconds = tokens + sum(seen.num_new), seconds + took
            history.append(limits)
        return tokens / seconds, history

    def plain(self):
        return len(self.chances) / self.target(len(self.chances), len(self.chances))

    def best(self):
        """The most tokens per second with fixed lengths, by trying all of them (equal rows get equal lengths)."""
        kinds, best = sorted(set(self.chances)), (0.0, [])
        for lengths in itertools.product(range(self.longest + 1), repeat=len(kinds)):
            limits = [lengths[kinds.index(chance)] for chance in self.chances]
            pairs = list(zip(self.chances, limits, strict=True))
            tokens = sum(sum(chance**depth for depth in range(limit + 1)) for chance, limit in pairs)
            seconds = self.target(len(limits), len(limits) + sum(limits))
            seconds += self.drafting(max(limits), sum(limits), 0) if any(limits) else 0.0
            best = max(best, (tokens / seconds, limits))
        return best


def cpu(num_rows, num_tokens):
    """Each token costs something, the first few more."""
    return 0.02 + 0.0005 * num_rows + (0.003 * (num_tokens - 1) if num_tokens < 4 else 0.002 * num_tokens + 0.001)


def gpu(num_rows, num_tokens):
    """64 tokens cost as much as one."""
    return 0.01 + 0.0001 * max(0, num_tokens - 64)


def lookup(depth, num_asked, backlog):
    return 30e-6


def model(depth, num_asked, backlog):
    return 0.001 * depth + 0.0001 * num_asked + 0.00005 * backlog


MACHINES = {"cpu": cpu, "gpu": gpu}
DRAFTERS = {"lookup": lookup, "model": model}
EASY_AND_HARD = {
    "one easy": [0.85],
    "one middling": [0.4],
    "all easy": [0.8] * 8,
    "half and half": [0.9] * 4 + [0.05] * 4,
    "all sorts": [0.9, 0.7, 0.4, 0.0] * 2,
}


def test_near_the_best_fixed_lengths():
    """0.95 of the best lengths once settled, measurements as noisy as on a busy machine; in no kind of batch less than 0.85."""
    worlds = list(itertools.product(MACHINES.values(), DRAFTERS.values(), EASY_AND_HARD.values()))
    ratios = np.zeros((len(worlds), 2))
    for (i, (machine, drafter, chances)), seed in itertools.product(enumerate(worlds), range(2)):
        world = World(chances, machine, drafter, noise=0.1, seed=seed)
        policy = learnt(world.longest)
        world.run(policy, 100)
        ratios[i, seed] = world.run(policy, 300)[0] / world.best()[0]
    assert ratios.mean() > 0.95 and ratios.mean(1).min() > 0.85, ratios.round(2)


def test_most_quiet_steps_are_not_timed():
    """Where no draft pays, one step in 16 is timed, so that a machine that becomes slower is noticed."""
    world, policy = World([0.0] * 8, cpu, model), learnt(8)
    world.run(policy, 200)
    held = []
    for _ in range(128):
        world.run(policy, 1)
        held.append(policy.holds)
    assert 100 <= sum(held) <= 122, sum(held)


def test_easy_rows_draft_long_beside_hard_rows_that_do_not():
    world = World([0.9] * 4 + [0.0] * 4, cpu, model, noise=0.05)
    policy = learnt(8)
    world.run(policy, 100)
    history = np.array(world.run(policy, 200)[1]).mean(0)
    best = world.best()[1]
    assert best[:4] == [4] * 4 and best[4:] == [0] * 4
    assert (history[:4] > 3).all() and (history[4:] < 0.1).all(), history


@pytest.mark.parametrize(
    ("num_rows", "drafter", "machine", "noise"),
    covering([1, 8], list(DRAFTERS), list(MACHINES), [0.0, 0.1], strength=2),
)
def test_costs_little_where_nothing_is_accepted(machine, drafter, num_rows, noise):
    """At least 0.98 of plain decoding, from a policy that knows nothing; 0.965 in a first call of 40 tokens."""
    for num_steps, least in ((40, 0.965), (128, 0.98), (1000, 0.98)):
        rates = []
        for seed in range(3):
            world = World([0.0] * num_rows, MACHINES[machine], DRAFTERS[drafter], noise, seed)
            policy = learnt(8)
            for seq in world.sequences:
                seq.max_length = len(seq.tokens) + num_steps + 1
            world.step(limits := policy.limits(world.sequences, [8] * num_rows))
            assert max(limits) <= 1
            rate, history = world.run(policy, num_steps)
            assert np.sum(history) > 0, "it never tried"
            rates.append(rate / world.plain())
        assert np.mean(rates) >= least, (num_steps, rates)


def test_a_policy_that_always_drafts_would_fail_that():
    """The bound above can be missed."""
    world = World([0.0] * 8, cpu, model)
    assert world.run(DraftLengthPolicy(), 128)[0] < world.plain() / 1.5


class StaticBatch(World):
    """A world whose rows all end at `length` tokens, and nothing takes their place."""

    def seconds_to_end(self, policy, length):
        """Seconds until the last row has `length` tokens."""
        policy.begin_batch()
        for seq in self.sequences:
            seq.max_length = length
        seconds = 0.0
        while self.sequences:
            caps = [max(min(self.longest, length - len(seq.tokens) - 1), 0) for seq in self.sequences]
            seen, took = self.step(policy.limits(self.sequences, caps))
            tell(policy, seen)
            seconds += took
            running = [i for i, seq in enumerate(self.sequences) if len(seq.tokens) < length]
            for name in ("sequences", "chances", "behind"):
                setattr(self, name, [getattr(self, name)[i] for i in running])
        return seconds


@pytest.mark.parametrize(("machine", "drafter"), list(itertools.product(MACHINES, DRAFTERS)))
def test_a_static_batch_is_never_slower_than_its_slowest_row(machine, drafter):
    """Easy rows that finish early end nothing sooner: drafts for them must not slow down the hard row beside them."""
    for seed in range(3):
        world = StaticBatch([0.9] * 7 + [0.0], MACHINES[machine], DRAFTERS[drafter], noise=0.05, seed=seed)
        policy = learnt(8)
        length = len(world.sequences[0].tokens) + 512
        plain = 512 * world.target(8, 8)
        assert world.seconds_to_end(policy, length) <= 1.03 * plain


def test_a_static_batch_of_easy_rows_ends_sooner():
    world = StaticBatch([0.9] * 8, cpu, lookup, noise=0.05)
    length = len(world.sequences[0].tokens) + 512
    plain = 512 * cpu(8, 8)
    assert world.seconds_to_end(learnt(8), length) < 0.75 * plain


def test_the_soonest_end_is_the_best_of_all_lengths():
    """`_soonest` against every choice of lengths, for exact costs."""
    random, num_rows, longest = np.random.default_rng(0), 3, 4
    for _ in range(40):
        policy = learnt(longest)
        policy.cost.target.observe((1, 1), np.eye(len(policy.cost.target.prior))[0], 0.02)  # the first is dropped
        for tokens in (1, 2, 4, 8, 16) * 3:
            policy.cost.observe_target(num_rows, tokens, cpu(num_rows, tokens))
        gains = random.random((num_rows, 1)) ** np.arange(1, longest + 1)
        nodes, backlogs = np.ones((num_rows, longest)), np.zeros(num_rows, dtype=np.int64)
        left, room = random.integers(20, 40, num_rows), np.full(num_rows, longest)
        policy.drafting[0].load([[[1, 1, 0], 1e-9, [0.0, 0.0, 0.0, 1.0]]])  # drafting takes no time

        def time(depths, gains=gains, left=left, policy=policy):
            won = np.array([gains[i, :d].sum() for i, d in enumerate(depths)])
            extra = policy._extra(
                num_rows, num_rows + sum(depths), policy._of_drafting(0, num_rows, max(depths), sum(depths))
            )
            return float((1 + extra) * (left / (1 + won)).max())

        best = min(time(depths) for depths in itertools.product(range(longest + 1), repeat=num_rows))
        assert (
            time(policy._soonest(Menu(gains, nodes, backlogs, room, np.ones(num_rows, dtype=bool)), left)[0])
            <= 1.001 * best
        )


def test_steps_larger_than_any_seen_cost_what_their_tokens_cost():
    cost = StepCost()
    cost.look_at(8, 800)
    for num_tokens in (8, 9, 10, 16) * 3:
        cost.observe_target(8, num_tokens, 0.010 + 0.001 * num_tokens)
    for num_tokens in (24, 64, 300):
        assert cost.of_target(8, num_tokens) == pytest.approx(0.010 + 0.001 * num_tokens, rel=0.1)


@pytest.mark.parametrize("machine", MACHINES)
def test_prompts_show_what_many_tokens_cost(machine):
    """A batch of wide trees is not to be tried to learn that. Where tokens are cheap, prompts show that, too."""
    cost, seconds = StepCost(), MACHINES[machine]
    cost.look_at(8, 800)
    for _ in range(3):
        cost.observe_target(8, 8, seconds(8, 8))
    before = cost.of_target(8, 200)
    cost.observe_prompts(20, 60 * seconds(8, 8))  # too few to show anything
    assert cost.of_target(8, 200) == before
    cost.observe_prompts(600, 9 * seconds(8, 600))  # the first time is longer
    cost.observe_prompts(400, seconds(8, 400))
    assert [cost.of_target(8, count) for count in (64, 200)] == pytest.approx(
        [seconds(8, count) for count in (64, 200)], rel=0.75
    )
    assert machine == "gpu" or before < seconds(8, 200) / 2


NO_PROMPTS = SimpleNamespace(run=lambda *_: None, captures=SimpleNamespace(clear=lambda: None))


@pytest.mark.parametrize("graphs", [None, NO_PROMPTS], ids=["eager", "graphs"])
def test_a_decoder_tells_its_policy_what_prompts_took_and_how_wide_its_trees_are(graphs):
    """Not if steps are graphs: long prompts, which are none, then take longer in any case, and would make all drafts look dear."""
    model = tiny_llama()
    config = parse_config({"method": "token_recycling", "draft_length": "auto"})
    generator = generator_class("token_recycling")(config, prepare(model), DrafterContext())
    decoder, told = SpeculativeDecoder(generator), []
    assert decoder.policy.acceptance.offered[1].sum() == pytest.approx(len(generator.tree.parents))
    decoder.policy.cost.observe_prompts = lambda num_tokens, seconds: told.append((num_tokens, seconds > 0))
    sequences = [Sequence(list(range(3, 3 + length)), max_length=100, row=row) for row, length in enumerate((40, 7))]
    decoder.target.graphs = graphs
    decoder.allocate(1000, 2)
    with decoder.active():
        for seq in sequences:
            decoder.add(seq)
        for _ in range(3):
            decoder.step(sequences)
    assert told == ([] if graphs else [(47, True)])


def test_rows_of_a_static_batch_count_on_what_earlier_rows_did():
    """Only where rows write all that they may does the slowest one decide when the batch ends."""
    policy, left = learnt(4), np.array([60, 40])
    assert not policy._reach_their_ends(left)  # others may take the place of those that end
    policy.begin_batch()
    assert policy._reach_their_ends(left) and not policy._reach_their_ends(40 * left)
    for _ in range(100):
        row = Sequence([0] * 4, 104)
        row.accept([9] * 20)
        row.finished = True
        policy.forget(row)
    assert not policy._reach_their_ends(left) and policy._reach_their_ends(np.array([9, 9]))


def test_rows_that_turn_easy_are_noticed_and_rows_that_turn_hard_cost_little():
    world = World([0.0] * 4, cpu, lookup, noise=0.05)
    policy = learnt(8)
    world.run(policy, 400)
    world.chances = [0.9] * 4
    world.run(policy, 150)
    assert world.run(policy, 200)[0] > 0.93 * world.best()[0]
    world.chances = [0.0] * 4
    assert world.run(policy, 1000)[0] > world.plain() / 1.03


@pytest.mark.parametrize("from_to", [(100, 8000), (8000, 100)], ids=str)
@pytest.mark.parametrize(
    ("machine", "chances"),
    [("cpu", [0.6]), ("cpu", [0.8] * 8), ("few rows", [0.8] * 8), ("few rows", [0.3] * 8)],
    ids=str,
)
def test_lengths_follow_the_length_of_the_texts(machine, chances, from_to):
    """Texts that become much longer, or give way to much shorter ones: what was measured before says little about a step now, and
    lengths are soon the best again."""
    context = from_to[0]
    target = {
        "cpu": lambda rows, tokens: 0.02 + 0.0005 * rows + (0.0025 + 2e-6 * context) * tokens,
        "few rows": lambda rows, tokens: 0.01 + 0.0002 * max(0, tokens - 16) + 1e-6 * context * rows,
    }[machine]
    ratios = []
    for seed in range(3):
        context = from_to[0]
        world = World(chances, target, lookup, noise=0.05, seed=seed, prompt=context)
        policy = learnt(8)
        world.run(policy, 200)
        context = from_to[1]
        for seq in world.sequences:
            seq.tokens[:] = [0] * context
        world.run(policy, 100)
        ratios.append(world.run(policy, 200)[0] / world.best()[0])
    assert np.mean(ratios) > 0.9, ratios


def test_a_step_that_only_reads_prompts():
    assert learnt(8).limits([], []) == []


def test_a_drafter_that_finds_nothing_is_no_evidence_of_rejection():
    """A row offered a draft now and then, always right, is drafted for as long as one that always gets one."""
    world = World([0.95, 0.95], gpu, lookup, offers=[0.1, 1.0])
    policy = learnt(8)
    world.run(policy, 300)
    assert np.array(world.run(policy, 100)[1]).mean(0).min() > 6


@pytest.mark.parametrize("slow", ["first", "fifth"])
def test_one_step_that_compiled_something_does_not_end_drafting(slow):
    world = World([0.9] * 2, gpu, model)
    policy = learnt(8)
    drafts = 0
    for _ in range(200):
        seen, _ = world.step(policy.limits(world.sequences, [8, 8]))
        drafts += any(seen.limits)
        if any(seen.limits) and drafts == (1 if slow == "first" else 5):
            seen.drafting_seconds, seen.seconds = 5.0, None if seen.seconds is None else 5.0 + seen.seconds
        tell(policy, seen)
    assert world.run(policy, 200)[0] > 0.93 * world.best()[0]


def test_catching_up_is_part_of_the_cost():
    """A drafter that must read all it missed is not asked by a row about to end; one that has missed nothing is."""
    policy = learnt(8)
    world = World([0.7], gpu, lambda depth, asked, behind: 0.0005 * depth + 0.02 * behind)
    world.run(policy, 200)
    seq = world.sequences[0]
    place = policy.acceptance.slots([seq], policy.num_steps)
    policy.drafting[0].load([[[1, 1, 0], 0.0005, [1.0, 1.0, 1.0, 0.0]], [[1, 1, 9], 8.0, [1.0, 1.0, 1.0, 6.25]]])
    policy._quiet_until, policy._plain_due = 0, {0: 10**6}
    for behind, drafts in ((0, True), (400, False)):
        policy.acceptance.read_up_to[place], policy._table = len(seq.tokens) - behind, None
        assert (policy.limits([seq], [8])[0] > 0) == drafts


# ---- auto: properties -----------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 6), min_size=4, max_size=4), st.booleans()),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_limits_stay_within_caps_and_follow_from_what_was_observed(steps):
    """Any outcomes, caps and times, rows that come and go: two policies that saw the same say the same, as often as asked."""
    policies = learnt(5), learnt(5)
    sequences = rows(4, 20)
    for seed, caps, leaves in steps:
        random = np.random.default_rng(seed)
        limits = policies[0].limits(sequences, caps)
        assert limits == policies[0].limits(sequences, caps) == policies[1].limits(sequences, caps)
        assert all(type(n) is int and 0 <= n <= min(cap, 5) for n, cap in zip(limits, caps, strict=True))
        found = [int(random.integers(0, n + 1)) for n in limits]
        accepted = [int(random.integers(0, n + 1)) for n in found]
        for seq, n in zip(sequences, accepted, strict=True):
            seq.tokens += [0] * (n + 1)
        nodes = (np.arange(max(found)) < np.array(found)[:, None]).astype(np.int64)
        seconds = None if random.random() < 0.2 else float(random.exponential())
        drafting = 0.0 if seconds is None else float(random.random()) * seconds
        new = [n + 1 for n in accepted]
        for policy in policies:
            tell(policy, DraftedStep(sequences, limits, nodes, accepted, new, seconds, drafting))
        if leaves:
            for policy in policies:
                policy.forget(sequences[0])
            sequences = sequences[1:] + rows(1, 20)
    acceptance = policies[0].acceptance
    survival = acceptance.survival(acceptance.slots(sequences, 99), np.full((1, 4), 4), 99)
    assert (survival >= 0).all() and (survival < 1).all() and (np.diff(survival) <= 0).all()
    assert (acceptance.share_of_rows > 0).all() and (acceptance.share_of_rows < 1).all()


def test_rows_that_leave_are_forgotten():
    policy = learnt(4)
    for _ in range(30):
        batch = rows(40)
        policy.acceptance.slots(batch, 0)
        for seq in batch:
            policy.forget(seq)
    assert not policy.acceptance.num_rows and len(policy.acceptance._rows) <= 64
    policy.forget(rows(1)[0])  # never seen: it drafted nothing


def test_nodes_by_depth():
    chains = DraftTrees.from_lists([[1, 2, 3], [], [4]])
    assert chains.nodes_by_depth.tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    trees = DraftTrees.from_lists([[1, 2, 3, 4, 5], [], [6]], [[-1, -1, 0, 0, 2], [], [-1]])
    assert trees.nodes_by_depth.tolist() == [[2, 2, 1], [0, 0, 0], [1, 0, 0]]
    assert DraftTrees.empty(2).nodes_by_depth.shape == (2, 0)


# ---- costs ----------------------------------------------------------------------------------------------------------


def test_costs_are_learnt_from_noisy_measurements():
    random, cost, drafting = np.random.default_rng(0), StepCost(), DraftingCost()
    for _ in range(300):
        num_tokens = int(random.integers(1, 33))
        noise = math.exp(0.05 * random.standard_normal()) * (5 if random.random() < 0.05 else 1)
        cost.observe_target(1, num_tokens, cpu(1, num_tokens) * noise)
        depth, behind = int(random.integers(1, 9)), int(random.choice([0, 0, 0, 100]))
        drafting.observe_draft(depth, depth, behind, model(depth, depth, behind) * noise)
    for num_tokens in (1, 2, 4, 8, 16, 32):
        assert cost.of_target(1, num_tokens) == pytest.approx(cpu(1, num_tokens), rel=0.1)
    for depth, behind in itertools.product((1, 4, 8), (0, 100)):
        assert drafting.of_draft(depth, depth, behind) == pytest.approx(model(depth, depth, behind), rel=0.15)
    assert drafting.of_draft(0, 0, 100) == 0


def test_short_backlogs_do_not_show_what_reading_a_long_one_costs():
    """One draft of 8 tokens took 35 ms, with 3 tokens to catch up with: a draft of one token with 120 of them is not 40 times as slow."""
    cost = DraftingCost()
    for _ in range(2):
        cost.observe_draft(8, 8, 3, 0.035)
    assert cost.of_draft(8, 8, 3) == pytest.approx(0.035, rel=0.05)
    assert cost.of_draft(1, 1, 120) < 0.035
    for backlog in (100, 200) * 3:
        cost.observe_draft(8, 8, backlog, 0.035 + 0.001 * backlog)
    assert cost.of_draft(1, 1, 120) == pytest.approx(0.13, rel=0.15)


def test_drafts_are_short_until_one_was_timed():
    world, policy = World([0.9] * 4, gpu, model), learnt(8)
    history = world.run(policy, 40)[1]
    drafts = [max(limits) for limits in history if any(limits)]
    assert drafts[:2] == [1, 1] and max(drafts) > 6


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-6, 10)), min_size=1, max_size=40))
def test_more_tokens_never_cost_less(measurements):
    cost = StepCost()
    for num_tokens, seconds in measurements:
        cost.observe_target(1, num_tokens, seconds)
    curve = cost.of_target(1, np.arange(1, 2000))
    assert (np.diff(curve) >= 0).all() and (curve >= 0).all()


def test_least_squares_without_negative_coefficients():
    scipy = pytest.importorskip("scipy.optimize")
    random = np.random.default_rng(0)
    for _ in range(50):
        matrix = random.random((12, 4))
        values = matrix @ np.maximum(random.standard_normal(4), 0) + 0.01 * random.standard_normal(12)
        own = policy_cost.non_negative_solution(matrix.T @ matrix, matrix.T @ values)
        assert (own >= 0).all()
        best = scipy.nnls(matrix, values)[1]
        assert np.linalg.norm(matrix @ own - values) <= 1.2 * best + 1e-6


def test_the_first_measurement_is_not_used():
    fitted = FittedCost(np.zeros(1))
    fitted.observe((1,), np.ones(1), 100.0)
    assert not fitted and fitted.coefficients.tolist() == [0.0]
    fitted.observe((1,), np.ones(1), 1.0)
    assert fitted and fitted.coefficients == pytest.approx(1.0, rel=1e-2)


def test_the_timer_reads_the_stream_on_cuda(monkeypatch):
    """Drafting that the host has queued but the device not done is drafting all the same; no event is waited for."""

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        def elapsed_time(self, other):
            return 250.0  # milliseconds

    times = iter([10.0, 10.1, 11.0, 20.0, 20.4, 21.0, 30.0, 30.0, 30.2])
    monkeypatch.setattr(clock, "clock_for", lambda device: lambda: next(times))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer, expected = clock.StepTimer(torch.device("cuda")), [(1.0, 0.25), (1.0, 0.4), (0.2, 0.2)]
    for total, drafting in expected:
        timer.start()
        timer.proposed()
        assert timer.stop() == (pytest.approx(total), pytest.approx(drafting))


def test_a_step_in_which_a_graph_is_captured_does_not_count(monkeypatch):
    monkeypatch.setattr(captures, "CudaGraphCapture", CaptureInPython)
    timer = clock.StepTimer(torch.device("cpu"))
    timer.start()
    assert timer.stop() is not None
    timer.start()
    captures.Captures("a model", list).get(1, (), lambda: (None, lambda: torch.zeros(1)))
    assert timer.stop() is None
    timer.start()
    assert timer.stop() is not None


def test_one_short_draft_does_not_make_a_large_one_dear():
    cost = DraftingCost()
    for _ in range(2):  # the first is dropped
        cost.observe_draft(1, 1, 0, 0.0004)
    assert float(cost.of_draft(1, 1)) == pytest.approx(0.0004, rel=0.05)
    assert float(cost.of_draft(1, 32)) < 2.1 * 0.0004


@pytest.mark.parametrize("is_head", [True, False])
def test_a_head_has_nothing_to_catch_up_with(is_head):
    """It follows long texts, so its first draft costs no more there; another drafter would have to read them."""
    policy = Fastest([Drafter("drafter", 4, is_head=is_head)], 4)
    rows = [Sequence([5] * 3000, 3112) for _ in range(8)]
    for _ in range(4):
        policy.observe_plain(rows, 0.01)
    assert policy.choose(rows, [4] * 8, [], [], []).depth.any() == is_head


def test_the_first_choice_is_not_the_usual_one():
    """It is slow: what it loads, later ones have."""
    times = itertools.chain([0.0, 1.0, 1.0, 1.0], itertools.count(2.0, 0.001))
    policy = Fastest([Drafter("head", 4, is_head=True)], 4, lambda: next(times))
    rows = [Sequence([5] * 30, 142) for _ in range(4)]
    for _ in range(4):
        policy.observe_plain(rows, 0.01)
    for _ in range(2):
        policy.choose(rows, [4] * 4, [], [], [])
        nodes, none = np.zeros((4, 4), dtype=np.int64), [0] * 4
        policy.observe(DraftedStep(rows, [4] * 4, nodes, none, [1] * 4, None, 0.0))
    assert 0 < policy.state()["overhead"] < 0.01


@pytest.mark.parametrize("slow", [1, 2, 8])
def test_a_choice_that_takes_long_once_does_not_end_choosing(slow):
    """The machine may have slept meanwhile, or another thread worked. Rows that do not draft are looked at again all the same."""
    world, times, choices = World([0.0] * 4, cpu, lookup), itertools.count(), []

    def clock():
        return next(times) * 1e-5 + (len(choices) > slow)  # one choice takes a second more

    policy = Fastest([Drafter("head", 8, is_head=True, guess=0.6)], 8, clock)
    choose, pauses = policy._best, []
    policy._best = lambda *args: (choices.append(policy.num_steps), choose(*args))[1]
    world.run(policy, 8000)
    pauses = np.diff([*choices, policy.num_steps])
    assert len(choices) > slow + 2 and pauses.max() <= 1100, pauses


# ---- end to end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "batch_size"), covering(["ngram", "draft_model"], [1, 8]))
def test_greedy_text_is_that_of_plain_generate(tiny_model, tiny_draft, tiny_tokenizer, method, batch_size, monkeypatch):
    prompts = [
        "Once upon a time there was a dog. The dog",
        "a b c a b c a b c",
        "def add(a, b):\n    return a + b\n\ndef add(",
        "1 2 3 4 5 6",
    ]
    inputs = tiny_tokenizer((prompts * 2)[:batch_size], return_tensors="pt", padding=True, return_token_type_ids=False)
    hf_specdec.release(tiny_model)  # all tests share this model, which keeps their decoders
    plain = tiny_model.generate(**inputs, max_new_tokens=60, do_sample=False)
    config = {"method": method, "num_speculative_tokens": "auto"}
    if method == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    seen, drafted, plain_times = [], [], []
    observe, observe_plain = Fastest.observe, Fastest.observe_plain

    def observed(self, step):
        seen.append(step)
        if all(
            seq.num_generated > new for seq, new in zip(step.sequences, step.num_new, strict=True)
        ):  # no prompt was read
            drafted.append(step)
        observe(self, step)

    monkeypatch.setattr(Fastest, "observe", observed)
    monkeypatch.setattr(
        Fastest, "observe_plain", lambda self, rows, time: plain_times.append(time) or observe_plain(self, rows, time)
    )
    extra = {"assistant_model": tiny_draft} if method == "draft_model" else {}
    for _ in range(2):  # the second call starts from what the first one learnt
        out = tiny_model.generate(
            **inputs,
            max_new_tokens=60,
            do_sample=False,
            return_dict_in_generate=True,
            speculative_config=config,
            **extra,
        )
        assert out.sequences.tolist() == plain.tolist()
    assert plain_times[0] is None, "a step that reads prompts is not timed"
    assert drafted and all(0 <= step.drafting_seconds <= step.seconds for step in drafted), (
        "a step with drafts was not timed"
    )
    assert 0 < sum(time is not None for time in plain_times) < len(plain_times), "plain steps are timed now and then"
    (decoder,) = integration.kept_decoders(tiny_model)
    assert not decoder.policy.acceptance.num_rows, "rows that left are still known"
    hf_specdec.release(tiny_model)


def test_a_rows_own_length_bounds_auto(tiny_model):
    decoder_config = parse_config({"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": "auto"})
    target = prepare(tiny_model)
    generator = generator_class("ngram")(decoder_config, target, DrafterContext())
    decoder = SpeculativeDecoder(generator)
    decoder.policy = DraftLengthPolicy()
    own = [None, 0, 2, 20]
    sequences = [Sequence([5, 6, 7] * 4, max_length=60, num_speculative_tokens=k) for k in own]
    assert decoder._draft_limits(sequences) == [8, 0, 2, 8]
    sequences[0].max_length = len(sequences[0].tokens) + 3
    assert decoder._draft_limits(sequences)[0] == 2, "one token is the step's own"
