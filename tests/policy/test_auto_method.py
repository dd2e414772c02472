"""The policy of method "auto" in simulated worlds: near the best fixed drafter and length, never much slower than plain."""

import itertools
import json
import operator
from dataclasses import dataclass, field

import numpy as np
import pytest
from combinations import covering

from hf_specdec.candidate_generators.auto.memory import AutoMemory
from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.sequence import Sequence
from hf_specdec.policy import DraftedStep, Fastest
from hf_specdec.policy import Drafter as KnownDrafter
from hf_specdec.policy.acceptance import Acceptance

LONGEST = 8


@dataclass
class Drafter:
    """Finds a draft in a share of the steps; each of its tokens is right with a probability, which differs between rows."""

    chances: list[float]
    found: float = 1.0
    has_weights: bool = False


class SlowChoices:
    """A clock on which a choice, with what is learnt from it, takes two times `tick` seconds."""

    def __init__(self, tick):
        self.tick, self.now = tick, 0.0

    def __call__(self):
        self.now += self.tick
        return self.now


def read(policy):
    """What the policy's clock shows, without its ticking."""
    return getattr(policy.clock, "now", 0.0) if policy is not None else 0.0


@dataclass
class World:
    """Rows that write random tokens, drafters that guess them, and what a step costs."""

    drafters: dict[str, Drafter]
    target: object
    noise: float = 0.0
    seed: int = 0
    per_depth: float = 0.001
    lookup_seconds: float = 20e-6
    hidden_seconds: float = 0.0  # by which asking look-ups makes the rest of a step slower
    behind: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)
        lookups = {name: each for name, each in self.drafters.items() if not each.has_weights}
        models = {name: each for name, each in self.drafters.items() if each.has_weights}
        self.drafters = {**lookups, **models}
        self.names, self.num_lookups = list(self.drafters), len(lookups)
        self.num_rows = len(next(iter(self.drafters.values())).chances)
        self.sequences = [Sequence([1] * 16, 10**9) for _ in range(self.num_rows)]
        self.behind = [16] * self.num_rows
        self.future = [list(self.random.integers(10, 1000, 2 * LONGEST)) for _ in self.sequences]
        self.begun = False

    def policy(self, memory=None, clock=None):
        """A policy that knows nothing but what the memory holds."""
        known = [
            KnownDrafter(name, LONGEST, not each.has_weights, each.has_weights, 0.6 if each.has_weights else 0.4)
            for name, each in self.drafters.items()
        ]
        policy = Fastest(known, LONGEST, clock, when_idle=memory and memory.keep)
        if memory is not None:
            memory.restore(policy)
        return policy

    def guess(self, name, row, depth):
        """A draft of the drafter for the row."""
        drafter = self.drafters[name]
        if self.random.random() >= drafter.found:
            return []
        right = self.random.random(depth) < drafter.chances[row]
        first_wrong = depth if right.all() else int((~right).argmax())
        return [int(self.future[row][d]) if d < first_wrong else 1 for d in range(depth)]

    def jitter(self):
        return float(np.exp(self.noise * self.random.standard_normal()))

    def step(self, policy, forced=None, scores=None):
        """One step; returns (tokens, true seconds). `forced`: (drafter, depth) of all rows in place of the policy's choice."""
        began = read(policy)
        limits = [LONGEST] * self.num_rows if forced else policy.limits(self.sequences, [LONGEST] * self.num_rows)
        drafts, drafting, lookups, hidden = [[] for _ in self.sequences], 0.0, 0.0, 0.0
        if any(limits):
            awake = [forced is not None or policy.is_awake(index) for index in range(self.num_lookups)]
            offers = [
                DraftTrees.from_lists([self.guess(name, row, LONGEST) if asked else [] for row in range(self.num_rows)])
                for name, asked in zip(self.names, awake, strict=False)
            ]
            seconds = [self.lookup_seconds * asked for asked in awake]
            lookups, hidden = sum(seconds), self.hidden_seconds * any(awake)
            if forced:
                which, depth = np.full(self.num_rows, self.names.index(forced[0])), np.full(self.num_rows, forced[1])
            else:
                choice = policy.choose(
                    self.sequences,
                    limits,
                    offers,
                    [each * self.jitter() for each in seconds],
                    scores or [None] * len(offers),
                )
                which, depth = choice.drafter, choice.depth
            asked = [row for row in range(self.num_rows) if depth[row] and which[row] >= self.num_lookups]
            for row in range(self.num_rows):
                if depth[row] and which[row] < self.num_lookups:
                    offer = offers[which[row]]
                    drafts[row] = offer.tokens[row, : min(offer.lengths[row], depth[row])].tolist()
                elif depth[row]:
                    drafts[row] = self.guess(self.names[which[row]], row, int(depth[row]))
            drafting = 5e-5 * sum(self.behind[row] for row in asked)
            for index in {which[row] for row in asked}:
                drafting += self.per_depth * max(depth[row] for row in asked if which[row] == index)
            for row in asked:
                self.behind[row] = 0
        accepted = []
        for row, seq in enumerate(self.sequences):
            path = next((d for d, token in enumerate(drafts[row]) if token != self.future[row][d]), len(drafts[row]))
            accepted.append(path)
            seq.tokens += [int(token) for token in self.future[row][: path + 1]]
            self.behind[row] += path + 1
            self.future[row] = self.future[row][path + 1 :] + list(self.random.integers(10, 1000, path + 1))
        lengths = np.array([len(draft) for draft in drafts])
        nodes = (np.arange(LONGEST) < lengths[:, None]).astype(np.int64)
        seconds = self.target(self.num_rows, self.num_rows + int(lengths.sum())) + hidden
        new = [path + 1 for path in accepted]
        if not forced:
            shown = (drafting + lookups) * self.jitter() + read(policy) - began
            whole = seconds * self.jitter() + shown if self.begun else None
            if policy.holds and any(limits):
                policy.observe_held(int(lengths[0]), accepted[0])
            elif any(limits):
                policy.observe(DraftedStep(self.sequences, limits, nodes, accepted, new, whole, shown))
            else:
                policy.observe_plain(self.sequences, whole if policy.wants_plain_time() else None)
        self.begun = True
        return sum(new), seconds + drafting + lookups

    def rate(self, policy, num_steps, forced=None):
        """Tokens per second."""
        steps = [self.step(policy, forced) for _ in range(num_steps)]
        return sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps)

    def plain(self):
        return self.num_rows / self.target(self.num_rows, self.num_rows)


def cpu(num_rows, num_tokens):
    """Each token costs something."""
    return 0.02 + 0.0005 * num_rows + 0.002 * num_tokens


def gpu(num_rows, num_tokens):
    """64 tokens cost as much as one."""
    return 0.01 + 0.0001 * max(0, num_tokens - 64)


def drafters(lookup, model, found=1.0):
    return {
        "ngram": Drafter(lookup, found),
        "suffix": Drafter([0.1] * len(lookup)),
        "head": Drafter(model, has_weights=True),
    }


TEXTS = {
    "a head": drafters([0.0], [0.8]),
    "copies": drafters([0.95], [0.5]),
    "copies now and then": drafters([0.95], [0.6], found=0.3),
    "eight rows": drafters([0.0] * 8, [0.7] * 8),
    "rows of two kinds": drafters([0.95] * 4 + [0.0] * 4, [0.4] * 4 + [0.8] * 4),
    "no head": {"ngram": Drafter([0.8] * 2, found=0.5), "suffix": Drafter([0.3] * 2)},
}


@pytest.mark.parametrize(("machine", "text", "noise"), covering([cpu, gpu], list(TEXTS), [0.0, 0.1], strength=1))
def test_near_the_best_fixed_drafter_and_length(machine, text, noise):
    """At least 0.95 of the best of all drafters and lengths, each used for all rows in every step."""
    ratios = []
    for seed in range(4):
        world = World(TEXTS[text], machine, noise, seed)
        policy = world.policy()
        world.rate(policy, 150)
        found = world.rate(policy, 500)
        fixed = [
            World(TEXTS[text], machine, 0.0, seed).rate(None, 500, forced)
            for forced in itertools.product(world.names, (1, 2, 4, 8))
        ]
        ratios.append(found / max(*fixed, world.plain()))
    assert np.mean(ratios) > 0.95, ratios


@pytest.mark.parametrize(
    ("text", "tick", "least"),
    [
        ("copies", 0.004, 0.9), ("copies now and then", 0.004, 0.85), ("a head", 0.004, 0.85),
        ("copies", 0.0002, 0.95), ("copies now and then", 0.0002, 0.9), ("a head", 0.0002, 0.9),
    ],
)  # fmt: skip
def test_choices_that_take_time_are_made_as_seldom_as_they_are_dear(text, tick, least):
    """If they take a third of a step, one in every step would lose a fifth of the speed of the best fixed drafter. If they take a
    fiftieth, one is made in every step, and the step's time shows the price of tokens nevertheless."""
    ratios = []
    for seed in range(2):
        world, clock = World(TEXTS[text], cpu, 0.05, seed), SlowChoices(tick)
        policy = world.policy(clock=clock)
        world.rate(policy, 150)
        began, steps = clock.now, [world.step(policy) for _ in range(400)]
        found = sum(tokens for tokens, _ in steps) / (sum(seconds for _, seconds in steps) + clock.now - began)
        fixed = [
            World(TEXTS[text], cpu, 0.0, seed).rate(None, 400, forced)
            for forced in itertools.product(world.names, (1, 2, 4, 8))
        ]
        ratios.append(found / max(*fixed, world.plain()))
    assert np.mean(ratios) > least, ratios


@pytest.mark.parametrize(("found", "hidden", "least"), [(0.3, 0.0, 1.06), (0.17, 0.4, 0.96)])
def test_look_ups_are_asked_by_what_whole_steps_take(found, hidden, least):
    """One finds a draft in some of the steps. Asking takes a tenth of a plain step, and may make the rest of the step slower, too."""
    plain = gpu(1, 1)
    world = World(
        {"ngram": Drafter([0.5], found=found)}, gpu, lookup_seconds=0.1 * plain, hidden_seconds=hidden * plain
    )
    policy = world.policy()
    world.rate(policy, 200)
    speed = world.rate(policy, 800) / world.plain()
    assert speed > least, speed


def test_a_single_drafter_is_tried_though_its_depth_is_asked_for_twice():
    """By `limits`, which returns it, and by `choose`, as method "auto" does with a single part."""
    world = World({"small": Drafter([0.9], has_weights=True)}, gpu)
    policy = world.policy()
    world.rate(policy, 100)
    assert world.rate(policy, 100) > 2.0 * world.plain()


def test_plain_steps_are_timed_only_after_plain_ones():
    """Drafting leaves other things in the machine's caches. Where a step takes long besides, that does not matter."""
    for tick, is_clean in ((0.004, True), (0.0, False)):
        world = World({"ngram": Drafter([0.9])}, cpu)
        policy = world.policy(clock=SlowChoices(tick))
        world.rate(policy, 100)
        policy._plain_due, after_drafts = {}, policy.wants_plain_time()
        world.step(policy)
        assert after_drafts != is_clean and (policy.wants_plain_time() or not is_clean)


def test_a_small_model_has_read_the_text_that_it_drafted_for_from_the_table():
    """Else what was written since the last choice would look like tokens to catch up with."""
    known = [KnownDrafter("ngram", LONGEST, is_lookup=True), KnownDrafter("small", LONGEST)]
    policy = Fastest(known, LONGEST, SlowChoices(0.004))
    world, held = World({"ngram": Drafter([0.0]), "small": Drafter([0.9], has_weights=True)}, cpu), 0
    for _ in range(120):
        start = len(world.sequences[0].tokens)
        world.step(policy)
        if policy.holds and policy._drafted_at[1] == policy.num_steps - 1:
            assert policy.acceptance.read_up_to[0, 1] >= start
            held += 1
    assert held > 30


def test_a_head_that_has_let_go_is_not_chosen_from_the_table():
    world = World(TEXTS["a head"], cpu)
    policy = world.policy(clock=SlowChoices(0.004))
    while not (policy.holds and policy._drafted_at[2] == policy.num_steps - 1):
        world.step(policy)
    empty = [DraftTrees.empty(1, "cpu")] * 2
    policy.limits(world.sequences, [LONGEST])
    choice = policy.choose(
        world.sequences, [LONGEST], empty, [0.0] * 2, [None] * 2, np.array([[True], [True], [False]])
    )
    assert choice.depth[0] == 0


def test_a_drafter_that_looked_slow_at_first_is_tried_again():
    """Its first draft took long, because it had to catch up; meanwhile another drafter, which is worse, drafts."""
    world = World(TEXTS["eight rows"], gpu)
    policy = world.policy()
    world.rate(policy, 250)
    assert world.rate(policy, 100) > 0.9 * World(TEXTS["eight rows"], gpu).rate(None, 100, ("head", 4))


def test_models_that_are_tried_in_one_step_share_its_time():
    """If each were charged all of it, the better one would look too slow to be used, wherever a draft takes long."""
    chances = {
        "ngram": Drafter([0.0] * 8),
        "a": Drafter([0.6] * 8, has_weights=True),
        "b": Drafter([0.9] * 8, has_weights=True),
    }
    for seed in (0, 2):
        world = World(chances, gpu, 0.05, seed, per_depth=0.003)
        policy = world.policy()
        world.rate(policy, 100)
        found, fixed = (
            world.rate(policy, 150),
            World(chances, gpu, 0.0, seed, per_depth=0.003).rate(None, 150, ("b", 8)),
        )
        assert found > 0.9 * fixed > world.plain(), (found, fixed)


def test_noise_does_not_end_drafting():
    """A few long steps are no reason to stop a head that gains a sixth."""
    ratios = []
    for seed in (1, 7):  # whose first steps with drafts are long
        world = World(TEXTS["eight rows"], cpu, 0.1, seed)
        policy = world.policy()
        world.rate(policy, 150)
        ratios.append(world.rate(policy, 500) / world.plain())
    assert min(ratios) > 1.1, ratios


def test_better_than_any_fixed_drafter_where_rows_differ():
    world = World(TEXTS["rows of two kinds"], cpu, 0.05)
    policy = world.policy()
    world.rate(policy, 150)
    found = world.rate(policy, 300)
    fixed = [
        World(TEXTS["rows of two kinds"], cpu).rate(None, 150, (name, k)) for name in world.names for k in (2, 4, 8)
    ]
    assert found > 1.1 * max(fixed)
    assert policy.steps["ngram"] > 500 and policy.steps["head"] > 500


@pytest.mark.parametrize(("machine", "num_rows", "noise"), covering([cpu, gpu], [1, 8], [0.0, 0.1], strength=2))
def test_costs_little_where_nothing_is_accepted(machine, num_rows, noise):
    """At least 0.97 of plain decoding in a first call of 40 tokens, and 0.98 in longer texts."""
    for num_steps in (40, 128, 600):
        rates = []
        for seed in range(4):
            world = World(drafters([0.0] * num_rows, [0.0] * num_rows), machine, noise, seed)
            world.drafters["suffix"].chances = [0.0] * num_rows
            policy = world.policy()
            for seq in world.sequences:
                seq.max_length = len(seq.tokens) + num_steps + 1
            world.step(policy)  # reads the prompts
            rates.append(world.rate(policy, num_steps) / world.plain())
            assert sum(policy.steps.values()) > 0, "it never tried"
        assert np.mean(rates) >= (0.969 if num_steps == 40 else 0.98), (num_steps, rates)


def texts(policy, chance, count, num_rows, lookup_seconds=0.3 * (0.02 + 0.0025 * 8)):
    """The speed over plain decoding of `count` calls of 64 steps, in which asking a look-up takes a third of a plain step."""
    tokens = seconds = 0.0
    for seed in range(count):
        world = World({"ngram": Drafter([chance] * num_rows)}, cpu, seed=seed, lookup_seconds=lookup_seconds)
        for seq in world.sequences:
            seq.max_length = len(seq.tokens) + 1000
        policy.begin_batch()
        steps = [world.step(policy) for _ in range(64)]
        tokens, seconds = tokens + sum(new for new, _ in steps), seconds + sum(taken for _, taken in steps)
        for seq in world.sequences:
            policy.forget(seq)
    return tokens / seconds / world.plain()


@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_look_up_that_never_pays_is_seldom_asked_until_it_pays(num_rows):
    """Else every text would ask it some times, for a third of a step; later texts may be of another kind all the same."""
    policy = World({"ngram": Drafter([0.0] * num_rows)}, cpu).policy()
    assert texts(policy, 0.0, 20, num_rows) > 0.97
    assert texts(policy, 0.0, 40, num_rows) > 0.992
    texts(policy, 0.97, 20, num_rows)  # until it is due, and pays
    assert texts(policy, 0.97, 10, num_rows) > 1.2


def test_a_text_that_changes_half_way():
    """From what a head knows to what is copied, and back."""
    world = World(drafters([0.0], [0.8]), cpu, 0.05)
    policy = world.policy()
    world.rate(policy, 150)
    for lookup, head, expected in (([0.95], [0.0], "ngram"), ([0.0], [0.8], "head")):
        world.drafters["ngram"].chances, world.drafters["head"].chances = lookup, head
        world.rate(policy, 200)
        before = policy.steps.copy()
        world.rate(policy, 100)
        used = policy.steps - before
        assert used[expected] > 0.8 * sum(used.values()) > 0, used


def test_kinds_of_promising_drafts():
    acceptance = Acceptance(np.array([0.5]), 8)
    rates, lengths = np.array([0.3, 0.55, 0.9, 1.0, 0.9]), np.array([1, 4, 8, 8, 20])
    scores = np.array(
        [sum(rate**depth for depth in range(1, n + 1)) for rate, n in zip(rates, np.minimum(lengths, 8), strict=True)]
    )
    assert acceptance.promised_kinds(scores, lengths).tolist() == acceptance.kind(rates).tolist()


def test_a_look_up_that_says_what_it_expects_is_believed_as_far_as_it_was_right():
    """The first draft of a new row goes as deep as the look-up is sure; one that promises too much is cut."""
    for truth, deep in ((0.95, True), (0.1, False)):
        world = World({"suffix": Drafter([truth])}, cpu)
        policy = world.policy()
        honest, chosen = policy.choose, []

        def choose(sequences, limits, offers, seconds, _, honest=honest, chosen=chosen):
            scores = [[sum(0.95**d for d in range(1, n + 1)) for n in offer.lengths] for offer in offers]
            found = honest(sequences, limits, offers, seconds, scores)
            chosen.append(int(found.depth[0]))
            return found

        policy.choose = choose
        world.rate(policy, 60)
        assert (np.mean(chosen[-20:]) > 6) == deep and (max(chosen[:8]) > 6 or not deep), chosen


def test_a_new_text_wakes_look_ups():
    world = World({"ngram": Drafter([0.0]), "head": Drafter([0.8], has_weights=True)}, cpu)
    policy = world.policy()
    world.rate(policy, 60)
    assert not policy.is_awake(0)
    policy.limits([*world.sequences, Sequence([1, 2, 3], 100)], [8, 8])
    assert policy.is_awake(0)


def test_heads_rest_while_following_costs_more_than_they_bring():
    """They let go of a text that they do not serve, follow the next one, and after some such texts do not follow new ones at once."""
    world = World(drafters([0.0], [0.0]), cpu)
    world.drafters["suffix"].chances = [0.0]
    policy = world.policy()
    world.step(policy)
    plain, spent, tokens, followed = 1.0 / world.plain(), 0.0, 0, []
    for _ in range(12):
        begins = policy.heads_follow(None)
        steps = []
        for _ in range(60):
            new, seconds = world.step(policy)
            follows = begins and policy.heads_follow(world.sequences[0]) and (not steps or steps[-1])
            if follows:
                policy.followed(0.04 * plain, 1)
            steps.append(follows)
            spent, tokens = spent + seconds + 0.04 * plain * follows, tokens + new
        followed.append(sum(steps))
        policy.forget(world.sequences[0])
        world.sequences = [Sequence([1] * 16, 10**9)]
        world.behind = [16]
    assert 0 < followed[0] < 60 and followed[-1] <= followed[0] and spent <= 1.03 * tokens * plain, (
        followed,
        spent / plain / tokens,
    )


@pytest.mark.parametrize(("share", "head"), [(0.001, 0.0), (0.04, 0.8)], ids=["cheap", "useful"])
def test_heads_that_are_cheap_or_useful_follow_always(share, head):
    world = World(drafters([0.0], [head]), cpu)
    policy = world.policy()
    world.step(policy)
    for _ in range(300):
        world.step(policy)
        policy.followed(share / world.plain(), 1)
        assert policy.heads_follow(world.sequences[0])


def test_rows_that_leave_free_their_estimates():
    world = World(TEXTS["eight rows"], cpu)
    policy = world.policy()
    world.rate(policy, 20)
    for seq in world.sequences:
        policy.forget(seq)
    assert not policy.acceptance.num_rows


# ---- what is kept from process to process ---------------------------------------------------------------------------


def test_what_was_learnt_is_used_from_the_first_step(tmp_path):
    """A new policy with the file of an earlier one is as fast in its first steps as that one in the end; without, it is slower."""
    rates: dict[str, list[float]] = {"nothing": [], "memory": []}
    heads = {f"bad {i}": Drafter([0.05], has_weights=True) for i in range(3)} | {
        "good": Drafter([0.8], has_weights=True)
    }
    for seed, begin in itertools.product(range(12), rates):
        world = World(heads | {"ngram": Drafter([0.0])}, cpu, 0.05, seed=seed)
        policy = world.policy(AutoMemory(tmp_path / f"{seed}") if begin == "memory" else None)
        world.step(policy)
        rates[begin].append(world.rate(policy, 10))
        if begin == "nothing":
            world.rate(policy, 300)
            AutoMemory(tmp_path / f"{seed}").keep(policy)
    assert np.mean(rates["memory"]) > 1.2 * np.mean(rates["nothing"]), rates


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"drafting": 1, "looking_up": [0, 0]}', "[" * 10**5, "of other drafters", "of no numbers", "without times",
        "endless", "too large", "too long", "before it began",
    ],
)  # fmt: skip
def test_a_memory_that_holds_something_else_is_passed_over(tmp_path, caplog, content):
    world = World(TEXTS["a head"], cpu, 0.05)
    policy = world.policy()
    world.rate(policy, 60)
    state = policy.state()
    changes = {
        "of other drafters": lambda: state["acceptance"].update(counts=[[[[1.0]]], [[[1.0]]]]),
        "of no numbers": lambda: operator.setitem(state["target"][0], 1, float("nan")),
        "without times": lambda: state.pop("following"),
        "endless": lambda: operator.setitem(state["target"][0], 0, [0, 1, float("inf")]),
        "too large": lambda: state.update(following=10**400),
        "too long": lambda: state.update(overhead=1e308),
        "before it began": lambda: operator.setitem(state["looking_up"], 0, -1.0),
    }
    if content in changes:
        changes[content]()
        content = json.dumps(state)
    path = tmp_path / "it.json"
    path.write_text(content)
    policy = world.policy(AutoMemory(path))
    assert not policy.cost.target and "measuring anew" in caplog.text
    fresh = world.policy()
    assert policy.acceptance.state() == fresh.acceptance.state()  # nothing of it is taken over
    assert [bool(cost) for cost in policy.drafting] == [bool(cost) for cost in fresh.drafting]
    assert world.rate(policy, 60) > 0.8 * world.plain()


def test_a_memory_that_cannot_be_written_ends_with_the_process(tmp_path, caplog):
    world = World(TEXTS["a head"], cpu, 0.05)
    (tmp_path / "file").write_text("")
    memory = AutoMemory(tmp_path / "file" / "it.json")
    policy = world.policy(memory)
    world.rate(policy, 30)
    memory.keep(policy)
    assert "cannot be written" in caplog.text


def test_a_row_that_writes_something_else_now():
    """After a run of drafts that are wrong from the first token, what the row showed before does not count."""
    acceptance = Acceptance(np.array([0.5]), LONGEST)
    seq, kinds = Sequence([1], 100), np.full((1, 1), 6)
    slots = acceptance.slots([seq], 0)
    first = []
    for now in range(60):
        right = 8 if now < 50 else 0
        acceptance.observe(slots, kinds, np.array([[8]]), np.array([[right]]), np.array([9 if right else 1]), now)
        first.append(float(acceptance.survival(slots, kinds, now)[0, 0, 0]))
    assert first[49] > 0.95 and first[54] < 0.7 and first[59] < 0.5, first[48:]
