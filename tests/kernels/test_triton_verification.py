"""Triton verification in the interpreter: random numbers bit for bit, greedy, coupled and rejection against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import DEVICE, RUNS_HERE, needs_triton

from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.kernels.random_bits import reference as random_bits
from hf_specdec.kernels.rejection.reference import rejection_walk
from hf_specdec.kernels.verification import reference

if RUNS_HERE:
    import triton
    import triton.language as tl

    from hf_specdec.kernels.random_bits.triton import exponential_of_uniform, gumbel_block, uniform_at, uniform_of_words
    from hf_specdec.kernels.rejection.triton import verify_rejection
    from hf_specdec.kernels.verification import triton as verification
    from hf_specdec.kernels.verification.triton import (
        empty_verdict,
        target_choices,
        verify_choices,
        walk_kernel,
    )

    @triton.jit
    def _numbers(out, noise, alone, seeds, positions, steps, first, STREAM: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        seed, position, step = tl.load(seeds + row), tl.load(positions + row), tl.load(steps + row)
        lanes = row * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + lanes, uniform_at(seed, position, step, STREAM, first + tl.arange(0, BLOCK)))
        tl.store(noise + lanes, gumbel_block(seed, position, step, STREAM, first, BLOCK))
        tl.store(alone + row, uniform_at(seed, position, step, STREAM, first + row))

    @triton.jit
    def _of_words(words, out, noise, BLOCK: tl.constexpr):
        u = uniform_of_words(tl.load(words + tl.arange(0, BLOCK)).to(tl.uint32))
        tl.store(out + tl.arange(0, BLOCK), u)
        tl.store(noise + tl.arange(0, BLOCK), -tl.log(exponential_of_uniform(u)))


STREAMS = (random_bits.TOKEN_STREAM, random_bits.ACCEPT_STREAM, random_bits.RESIDUAL_STREAM, random_bits.DRAFT_STREAM)


def make_keys(n, generator):
    seeds = torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator)
    positions = torch.randint(0, 2**33, (n,), generator=generator)
    return seeds, positions, torch.randint(0, 5000, (n,), generator=generator)


@needs_triton
@pytest.mark.parametrize("stream", STREAMS)
def test_numbers_are_those_of_the_definition(stream):
    rows, block, first = 6, 2048, 3072
    keys = make_keys(rows, torch.Generator().manual_seed(stream))
    keys[0][0], keys[1][0], keys[2][0] = 2**63 - 1, 2**32 - 1, 0
    out, noise = (torch.full((rows, block), float("nan"), device=DEVICE) for _ in range(2))
    alone = torch.full((rows,), float("nan"), device=DEVICE)
    _numbers[(rows,)](out, noise, alone, *(k.to(DEVICE) for k in keys), first, STREAM=stream, BLOCK=block)
    expected = random_bits.uniform(*keys, stream, first + block)
    assert torch.equal(out.cpu(), expected[:, first:])
    assert torch.equal(alone.cpu(), expected[range(rows), range(first, first + rows)])
    gap = noise.cpu().double() - random_bits.gumbel(*keys, stream, first + block)[:, first:].double()
    assert gap.abs().max() < 1e-6


@needs_triton
def test_uniform_rounds_once(monkeypatch):
    """Around every power of two and at random: the rounding of 33 bits to 24 is that of the float64 definition."""
    edges = [(1 << b) + d for b in range(33) for d in range(-9, 10)]
    words = torch.tensor([w for w in edges if 0 <= w < 2**32])
    random = torch.randint(0, 2**32, (8192 - len(words),), generator=torch.Generator().manual_seed(1))
    words = torch.cat([words, random])
    monkeypatch.setattr(random_bits, "_random_words", lambda *args: words[None])
    out, noise = (torch.full((8192,), float("nan"), device=DEVICE) for _ in range(2))
    _of_words[(1,)](words.to(DEVICE), out, noise, BLOCK=8192)
    assert torch.equal(out.cpu(), random_bits.uniform(*(torch.tensor([0]),) * 3, 0, 8192)[0])
    exact = -torch.log(-torch.log1p(-out.cpu().double()))
    assert (noise.cpu().double() - exact).abs().max() < 1.5e-6  # half a rounding at 23 is 1e-6


class Case:
    """Random drafts whose tokens the target often chooses, with padding rows, repeated siblings and ties."""

    def __init__(self, seed, batch, width, vocab, chain, dtype=torch.float32, ties=False, spread=2.0, points=True):
        g = torch.Generator().manual_seed(seed)
        self.batch, self.width, self.vocab = batch, width, vocab
        lengths = torch.randint(0, width + 1, (batch,), generator=g)
        lengths[0] = width
        self.valid = torch.arange(width)[None] < lengths[:, None]
        chain_parents = torch.arange(-1, width - 1).expand(batch, -1).contiguous()
        below = torch.rand(batch, width, generator=g) * (torch.arange(width) + 1)
        self.parents = chain_parents if chain else torch.minimum(below.long() - 1, chain_parents)
        rows = batch * (width + 1) + 3
        self.index = torch.randperm(rows, generator=g)[: batch * (width + 1)].view(batch, width + 1).contiguous()
        logits = torch.randn(rows, vocab, generator=g) * spread
        if ties:
            logits = logits.round()
        self.logits = logits.to(dtype)
        self.temperature = torch.tensor([1.0, 0.7, 1.3, 2.5])[torch.randint(0, 4, (batch,), generator=g)]
        self.seeds, self.positions, self.steps = make_keys(batch, g)
        self.do_sample = torch.rand(batch, generator=g) < 0.6
        self.generator, self.chain = g, chain
        self.tokens = torch.randint(0, vocab, (batch, width), generator=g)

    def scores(self):
        """Float32 [B, N + 1, V] after temperature."""
        return self.logits.float()[self.index] / self.temperature[:, None, None]

    def depths(self):
        depth = torch.zeros(self.batch, self.width + 1, dtype=torch.long)
        for node in range(self.width):
            depth[:, node + 1] = depth.gather(1, self.parents[:, node : node + 1] + 1).squeeze(1) + 1
        return depth

    def choices(self):
        """The definition: argmax, with noise where rows sample; also the gap between the two best scores."""
        scores, depth = self.scores(), self.depths()
        for row in range(self.batch):
            if self.do_sample[row]:
                n = self.width + 1
                keys = self.seeds[row].expand(n), self.positions[row] + depth[row], torch.zeros(n, dtype=torch.long)
                scores[row] += random_bits.gumbel(*keys, random_bits.TOKEN_STREAM, self.vocab)
        best = scores.topk(min(2, self.vocab), dim=2).values
        return scores.argmax(2), best[:, :, 0] - best[:, :, -1]

    def follow(self, choices, chance=0.7):
        """Draft what the target chooses, most of the time."""
        follows = torch.rand(self.batch, self.width, generator=self.generator) < chance
        self.tokens = torch.where(follows, choices.gather(1, self.parents + 1), self.tokens)

    def on(self, name):
        value = getattr(self, name)
        return value.to(DEVICE)

    def tree(self):
        return None if self.chain else self.on("parents")


def poisoned(case):
    return (
        torch.ones(case.batch, case.width, dtype=torch.bool, device=DEVICE),
        torch.full((case.batch,), -77, dtype=torch.int32, device=DEVICE),
        torch.full((case.batch,), -77, dtype=torch.long, device=DEVICE),
    )


CHOICE_CASES = [
    # seed, rows, nodes, vocabulary, chain, dtype, ties
    (0, 3, 3, 300, True, torch.float32, False),
    (1, 1, 4, 1100, False, torch.bfloat16, False),
    (2, 2, 9, 64, False, torch.float16, True),
    (3, 1, 1, 5, True, torch.float32, True),
    (4, 3, 0, 129, True, torch.float32, False),
    (5, 1, 3, 2100, False, torch.float32, True),
]


@needs_triton
@pytest.mark.parametrize("case", CHOICE_CASES, ids=str)
@pytest.mark.parametrize("sampled", [False, True])
def test_choices_and_walk(case, sampled):
    """Greedy equals the definition exactly, ties included; sampled choices may differ only where two scores nearly tie."""
    compare_choices(Case(*case), sampled)


@needs_triton
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    width=st.integers(0, 7),
    vocab=st.integers(1, 1500),
    chain=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    ties=st.booleans(),
    sampled=st.booleans(),
)
def test_choices_of_any_shape(seed, batch, width, vocab, chain, dtype, ties, sampled):
    compare_choices(Case(seed, batch, width, vocab, chain, dtype, ties), sampled)


def compare_choices(case, sampled):
    if not sampled:
        case.do_sample[:] = False
    choices, gap = case.choices()
    case.follow(choices)
    noise = dict(seeds=case.on("seeds"), positions=case.on("positions"), do_sample=case.on("do_sample"))
    arguments = dict(parents=case.tree(), temperature=case.on("temperature"), block=1024, **(noise if sampled else {}))
    ours = target_choices(case.on("logits"), case.on("index"), case.on("valid"), **arguments).cpu()
    exists = torch.cat([torch.ones(case.batch, 1, dtype=torch.bool), case.valid], dim=1)
    differs = exists & (ours != choices)
    assert not (differs & ~(case.do_sample[:, None] & (gap < 1e-5))).any()
    choices = torch.where(exists, ours, choices)
    path, lengths, following = verify_choices(
        case.on("logits"), case.on("index"), case.on("tokens"), case.on("valid"), out=poisoned(case), **arguments
    )
    expected = reference.accepted_nodes(case.tokens, case.valid, case.parents, ancestors_of(case.parents), choices)
    last = (expected * torch.arange(1, case.width + 1)).amax(1) if case.width else torch.zeros(case.batch).long()
    assert torch.equal(path.cpu(), expected)
    assert torch.equal(lengths.cpu().long(), expected.sum(1))
    assert torch.equal(following.cpu(), choices.gather(1, last[:, None]).squeeze(1))


@needs_triton
def test_noise_is_drawn_wherever_it_may_matter():
    """Ids in reach of the best by noise: all, next to none, of one 8 lanes, infinitely likely ones, a single one left."""
    flat = torch.zeros(8, 1500)
    flat[1, 1::3] = 40.0
    flat[2, :256] = 30.0  # the groups of 8 lanes 32 apart, whose bounds all count
    flat[3] = -1e30
    flat[4, [77, 1400]] = float("inf")  # the lower id
    flat[5] = float("-inf")
    flat[5, 1234] = -3.0
    flat[6] = float("-inf")
    flat[6, 1025:1036] = 1e5
    flat[7] = torch.linspace(-1e4, 1e4, 1500)
    seeds, positions, _ = make_keys(8, torch.Generator().manual_seed(4))
    noisy = flat + random_bits.gumbel(seeds, positions, torch.zeros_like(seeds), random_bits.TOKEN_STREAM, 1500)
    for block in (1024, 2048):
        found = target_choices(
            flat.to(DEVICE), torch.arange(8, device=DEVICE)[:, None], torch.ones(8, 0, dtype=torch.bool, device=DEVICE),
            seeds=seeds.to(DEVICE), positions=positions.to(DEVICE), block=block,
            do_sample=torch.ones(8, dtype=torch.bool, device=DEVICE),
        )  # fmt: skip
        ours = noisy.gather(1, found.cpu())
        near = 1e-5 * ours.abs().clamp(1, 1e35)
        assert (ours >= noisy.max(1, keepdim=True).values - near).all(), block
        assert found[4] == 77 and found[5] == 1234


def ancestors_of(parents):
    trees = DraftTrees(torch.zeros_like(parents), [parents.shape[1]] * len(parents), parents.numpy())
    return torch.from_numpy(trees.ancestors)


def accepted_path(tokens, valid, parents, choices):
    """Walk each tree along given choices int64 [B, N + 1]; results as of `verify_choices`."""
    out = empty_verdict(tokens)
    walk_kernel[(len(tokens),)](
        None, choices, tokens, parents, valid.view(torch.uint8), torch.empty_like(choices), out[0].view(torch.uint8), *out[1:],
        tokens.shape[1], SPLITS=1, BLOCK_N=8, num_warps=4,
    )  # fmt: skip
    return out


@needs_triton
def test_repeated_siblings_and_the_deepest_path():
    """Siblings that repeat a token are both reached: the first of the deepest nodes ends the path."""
    tokens = torch.tensor([[5, 5, 7, 7, 8, 9], [5, 5, 7, 7, 8, 9], [1, 2, 3, 4, 5, 6]])
    parents = torch.tensor([[-1, -1, 1, 1, 3, 0], [-1, -1, 0, 1, 2, 3], [-1, 0, 1, 2, 3, 4]])
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[2, 4:] = False
    choices = torch.tensor([[5, 7, 7, 0, 8, 1, 2], [5, 7, 7, 8, 9, 3, 4], [1, 2, 3, 4, 5, 6, 0]])
    path, lengths, following = (
        t.cpu() for t in accepted_path(*(t.to(DEVICE) for t in (tokens, valid, parents, choices)))
    )
    expected = reference.accepted_nodes(tokens, valid, parents, ancestors_of(parents), choices)
    assert torch.equal(path, expected) and lengths.tolist() == [3, 3, 4] and following.tolist() == [1, 3, 5]


@needs_triton
def test_ties_go_to_the_lowest_id_across_blocks_and_splits():
    logits = torch.zeros(3, 5000)
    logits[1, [1700, 1701, 2000, 4999]] = 3.0
    logits[2] = float("-inf")
    index, valid = torch.arange(3)[:, None].contiguous(), torch.zeros(3, 0, dtype=torch.bool)
    ours = target_choices(logits.to(DEVICE), index.to(DEVICE), valid.to(DEVICE), block=1024)
    assert ours.flatten().tolist() == [0, 1700, 0]


@needs_triton
def test_removed_tokens_are_never_chosen():
    """Limits applied on the fly: greater scores stay, equal ones from an id on."""
    logits = torch.randn(4, 200).round()
    limits, ids = torch.tensor([0.0, 1.0, 2.0, -9.0]), torch.tensor([0, 100, 50, 0], dtype=torch.int32)
    at = torch.arange(200)
    kept = (logits > limits[:, None]) | ((logits == limits[:, None]) & (at >= ids[:, None]))
    masked = logits.masked_fill(~kept, float("-inf"))
    keys = torch.arange(4), torch.arange(4) + 9, torch.zeros(4, dtype=torch.long)
    expected = (masked + random_bits.gumbel(*keys, random_bits.TOKEN_STREAM, 200)).argmax(1)
    index, valid = torch.arange(4)[:, None].contiguous(), torch.zeros(4, 0, dtype=torch.bool)
    ours = target_choices(
        logits.to(DEVICE), index.to(DEVICE), valid.to(DEVICE), seeds=keys[0].to(DEVICE), positions=keys[1].to(DEVICE),
        do_sample=torch.ones(4, dtype=torch.bool, device=DEVICE), thresholds=(limits.to(DEVICE), ids.to(DEVICE)), block=1024,
    )  # fmt: skip
    assert ours.flatten().tolist() == expected.tolist()


def rejection_definition(case, probs, prob_index):
    """`rejection_walk`, and rows [B] where it hangs on rounding: float64 and numbers 2e-6 off decide otherwise."""
    scores = case.scores()
    rows = torch.arange(case.batch)

    def residual_gumbel(depth):
        return random_bits.gumbel(
            case.seeds, case.positions + depth, case.steps, random_bits.RESIDUAL_STREAM, case.vocab
        )

    uniform = random_bits.uniform(case.seeds, case.positions, case.steps, random_bits.ACCEPT_STREAM, max(case.width, 1))
    arguments = (case.tokens, case.valid, case.parents, probs, prob_index)
    outcome = rejection_walk(*arguments, lambda node: torch.softmax(scores[rows, node], -1), uniform, residual_gumbel)
    wide = scores.double()
    near = torch.zeros(case.batch, dtype=torch.bool)
    for factor in (1 - 2e-6, 1 + 2e-6):
        other = rejection_walk(
            *arguments, lambda node: torch.softmax(wide[rows, node], -1), uniform.double() * factor, residual_gumbel
        )
        near |= (other[0] != outcome[0]).any(1) | (other[1] != outcome[1])
    return *outcome, near


def run_rejection(case, probs, prob_index, block=1024, **arguments):
    keys = (case.on("seeds"), case.on("positions"), case.on("steps"))
    given = {} if probs is None else dict(probs=probs.to(DEVICE), prob_index=prob_index.to(DEVICE))
    return verify_rejection(
        case.on("logits"), case.on("index"), case.on("tokens"), case.on("valid"), *keys, parents=case.tree(),
        temperature=case.on("temperature"), out=poisoned(case), block=block, **given, **arguments,
    )  # fmt: skip


def draw_drafts(case):
    """Draft distributions near the target's, tokens drawn from them; siblings without replacement."""
    g = case.generator
    scores = case.scores()
    noisy = scores + 0.7 * torch.randn(scores.shape, generator=g)
    noisy = torch.where(torch.rand(scores.shape, generator=g) < 0.1, float("-inf"), noisy)
    probs = torch.softmax(noisy, -1)
    prob_index = case.parents + 1
    for row in range(case.batch):
        for slot in range(case.width + 1):
            children = (case.parents[row] + 1 == slot).nonzero().flatten()
            drawn = torch.multinomial(probs[row, slot], max(len(children), 1), generator=g)
            case.tokens[row, children] = drawn[: len(children)]
    return probs.contiguous(), prob_index.contiguous()


def compare_rejection(points, chain, dtype, seeds, batch):
    """Numbers of (rows, disagreements, accepted tokens); disagreements must be near ties."""
    total = wrong = accepted = 0
    for seed in seeds:
        case = Case(seed, batch, 1 + seed % 6, 1100, chain, dtype, spread=3.0 + seed % 3)
        probs, prob_index = draw_drafts(case)
        if points:
            probs = prob_index = None
            case.follow(case.scores().argmax(2))
        path, token, near = rejection_definition(case, probs, prob_index)
        ours = [t.cpu() for t in run_rejection(case, probs, prob_index)]
        same = (ours[0] == path).all(1) & (ours[2] == token) & (ours[1] == path.sum(1))
        assert (same | near).all(), (seed, (~(same | near)).nonzero().flatten().tolist())
        total, wrong, accepted = total + len(same), wrong + int((~same).sum()), accepted + int(path.sum())
    return total, wrong, accepted


@needs_triton
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), points=st.booleans(), chain=st.booleans(), batch=st.integers(1, 3))
def test_rejection_of_any_shape(seed, points, chain, batch):
    total, wrong, _ = compare_rejection(points, chain, torch.float32, (seed,), batch)
    assert total == batch and wrong <= 1


@needs_triton
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_programs_of_several_steps(monkeypatch, dtype):
    """What large batches get; drafts with half of the mass, of which what is left without them is drawn where they are rejected."""
    monkeypatch.setattr(verification, "_PROGRAMS", 1)
    assert [verification.split_vocabulary(8, vocab, 1024) for vocab in (5000, 1500)] == [(2, 4), (1, 2)]
    compare_choices(Case(6, 2, 0, 5000, True, dtype), True)
    case = Case(6, 8, 1, 1500, True, dtype, spread=0.1)
    case.valid[:], case.temperature[:] = True, 1.0
    case.tokens[:, 0] = torch.arange(8) * 129
    case.logits[case.index[:, 0], case.tokens[:, 0]] = 7.3
    path, token, near = rejection_definition(case, None, None)
    ours = [t.cpu() for t in run_rejection(case, None, None)]
    same = (ours[0] == path).all(1) & (ours[2] == token)
    assert (same | near).all() and 2 <= int(path.sum()) <= 6


@needs_triton
@pytest.mark.parametrize("points", [True, False])
@pytest.mark.parametrize(("chain", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_rejection(points, chain, dtype):
    """The definition's path and token."""
    total, wrong, accepted = compare_rejection(points, chain, dtype, (2, 5), 3)
    assert total == 6 and wrong <= 1 and accepted >= 2, (total, wrong, accepted)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("points", [True, False])
@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rejection_over_many_seeds(points, chain, dtype):
    """Disagreements must be few, too."""
    total, wrong, accepted = compare_rejection(points, chain, dtype, range(8), 24)
    assert total == 192 and wrong <= 1 and accepted > 20, (total, wrong, accepted)


@needs_triton
def test_rejection_of_wide_and_deep_trees():
    """Many siblings, all tried: what each leaves over matters to the next."""
    for seed, points in ((0, True), (1, True), (2, False)):
        case = Case(seed, 3, 12, 40, False, spread=3.0)
        case.parents = torch.where(torch.rand(case.parents.shape, generator=case.generator) < 0.6, -1, case.parents)
        probs, prob_index = draw_drafts(case)
        if points:
            probs = prob_index = None
            case.tokens[:, 5] = case.tokens[:, 3]  # repeated siblings
        path, token, near = rejection_definition(case, probs, prob_index)
        ours = [t.cpu() for t in run_rejection(case, probs, prob_index)]
        same = (ours[0] == path).all(1) & (ours[2] == token)
        assert (same | near).all() and near.sum() <= 1


@needs_triton
def test_rejection_of_the_target_by_itself():
    """The drafter is the target: all is accepted, whatever rounding does."""
    case = Case(3, 8, 4, 100, True)
    probs = torch.softmax(case.scores(), -1)
    index = case.parents + 1
    for node in range(4):
        case.tokens[:, node] = torch.multinomial(probs[:, node], 1, generator=case.generator).squeeze(1)
    path, _, near = rejection_definition(case, probs, index)
    ours = run_rejection(case, probs.contiguous(), index.contiguous())
    assert ((ours[0].cpu() == path).all(1) | near).all() and (ours[2].cpu() >= 0).all()


@needs_triton
def test_rejection_where_one_token_has_almost_everything():
    """Its rejection leaves 1 - p, which has few digits in float32: the sums, not 1 - p, must test the later siblings."""
    case = Case(5, 6, 3, 60, False, spread=1.0)
    case.parents, case.valid = torch.full_like(case.parents, -1), torch.ones_like(case.valid)
    case.temperature[:] = 1.0
    case.logits[case.index[:, 0], 7] = 15.0  # 1 - p is about 3e-5
    case.logits[case.index[:, 0], 9] = 3.0  # and a fifth of that is token 9's
    case.tokens[:] = torch.tensor([7, 9, 7])
    # Search each row's seed for a first number that rejects token 7, and take the second as it comes.
    seeds = torch.arange(2**18)
    zero = torch.zeros_like(seeds)
    u = random_bits.uniform(seeds, zero + 5, zero, random_bits.ACCEPT_STREAM, 1)[:, 0]
    case.seeds = seeds[u.topk(case.batch).indices]
    case.positions, case.steps = torch.full_like(case.seeds, 5), torch.zeros_like(case.seeds)
    path, token, near = rejection_definition(case, None, None)
    assert (~path[:, 0]).any()
    ours = [t.cpu() for t in run_rejection(case, None, None)]
    assert (((ours[0] == path).all(1) & (ours[2] == token)) | near).all()
