"""Counter-based noise: the published test vectors, Triton's generator, independence of the batch, the right distributions."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hf_specdec.kernels.native import library
from hf_specdec.kernels.random_bits import native
from hf_specdec.kernels.random_bits import reference as rb

needs_library = pytest.mark.skipif(library() is None, reason="the native library is not installed")

# Random123's kat_vectors for philox4x32-10: counter (4 words), key (2), result (4).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter, key, result):
    out = rb.philox4x32(*(torch.tensor([w]) for w in words(counter) + words(key)))
    assert [int(word) for word in out] == words(result)
    out = rb.philox4x32_of_arrays(*(np.array([w], np.uint32) for w in words(counter) + words(key)))
    assert [int(word[0]) for word in out] == words(result)


def test_other_devices_compute_the_same_words():
    """What a CPU does in numpy, others do in torch."""
    seeds, positions, steps = keys(7)
    counters = (torch.arange(5)[None], positions[:, None], steps[:, None], torch.tensor([[3]]))
    halves = ((seeds & 0xFFFFFFFF)[:, None], (seeds >> 32)[:, None])
    expected = torch.stack(torch.broadcast_tensors(*rb.philox4x32(*counters, *halves)), dim=-1).flatten(1)
    assert torch.equal(rb._random_words(seeds, positions, steps, 3, 20), expected)


def test_where_seed_position_step_and_stream_stand():
    """Counter: (token id // 4, position, step, stream), lane token id % 4; key: the seed's low and high words."""
    counter, key, result = (words(text) for text in KNOWN_ANSWERS[2])
    seed = key[1] << 32 | key[0]  # below 2**63
    block, position, step, stream = counter
    token = 6
    out = rb._random_words(torch.tensor([seed]), torch.tensor([position]), torch.tensor([step]), stream, 9)[0]
    expected = rb.philox4x32(*(torch.tensor([w]) for w in [token // 4, position, step, stream, *key]))
    assert int(out[token]) == int(expected[token % 4])
    lanes = rb.philox4x32(*(torch.tensor([w]) for w in [block, position, step, stream, key[0], key[1]]))
    assert [int(lane) for lane in lanes] == result


TRITON = """
import sys, torch, triton, triton.language as tl
sys.path.insert(0, {root!r})
from hf_specdec.kernels.random_bits import reference as rb

@triton.jit
def philox(out, seed, position, step, stream, BLOCK: tl.constexpr):
    position, step, stream = tl.to_tensor(position), tl.to_tensor(step), tl.to_tensor(stream)
    block = tl.arange(0, BLOCK).to(tl.uint32)
    zero = tl.zeros([BLOCK], tl.uint32)
    a, b, c, d = tl.philox(seed, block, zero + position.to(tl.uint32), zero + step.to(tl.uint32), zero + stream.to(tl.uint32))
    tl.store(out + tl.arange(0, BLOCK) * 4, a.to(tl.int64))
    tl.store(out + tl.arange(0, BLOCK) * 4 + 1, b.to(tl.int64))
    tl.store(out + tl.arange(0, BLOCK) * 4 + 2, c.to(tl.int64))
    tl.store(out + tl.arange(0, BLOCK) * 4 + 3, d.to(tl.int64))

@triton.jit
def randint(out, seed, BLOCK: tl.constexpr):
    a, b, c, d = tl.randint4x(seed, tl.arange(0, BLOCK).to(tl.uint32))
    tl.store(out + tl.arange(0, BLOCK) * 4, a.to(tl.uint32, bitcast=True).to(tl.int64))
    tl.store(out + tl.arange(0, BLOCK) * 4 + 1, b.to(tl.uint32, bitcast=True).to(tl.int64))
    tl.store(out + tl.arange(0, BLOCK) * 4 + 2, c.to(tl.uint32, bitcast=True).to(tl.int64))
    tl.store(out + tl.arange(0, BLOCK) * 4 + 3, d.to(tl.uint32, bitcast=True).to(tl.int64))

for seed, position, step, stream in [(0, 0, 0, 0), (2**62 + 12345, 7, 3, 2), (99, 2**31 + 5, 2**20, 1), (2**63 - 1, 1, 0, 3)]:
    out = torch.zeros(64, dtype=torch.long)
    philox[(1,)](out, seed, position, step, stream, BLOCK=16)
    ours = rb._random_words(*(torch.tensor([n]) for n in (seed, position, step)), stream, 64)[0]
    assert torch.equal(out & 0xFFFFFFFF, ours), (seed, position, out[:4], ours[:4])
    if position == step == stream == 0:
        randint[(1,)](out, seed, BLOCK=16)
        assert torch.equal(out & 0xFFFFFFFF, ours)
print("equal")
"""


@pytest.mark.slow  # tests/kernels/test_triton_verification.py compares our kernels' words
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_computes_the_same_words(tmp_path):
    script = tmp_path / "philox.py"  # triton reads kernels from their source file
    script.write_text(TRITON.format(root=str(Path(rb.__file__).parents[3])))
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-2000:]


def keys(n, seed=0):
    """n rows of random keys."""
    g = torch.Generator().manual_seed(seed)
    high = torch.randint(0, 2**31, (n,), generator=g)
    return (
        high << 32 | torch.randint(0, 2**32, (n,), generator=g),
        torch.randint(0, 5000, (n,), generator=g),
        torch.arange(n) % 7,
    )


@pytest.mark.parametrize("vocab", [1, 3, 4, 5, 63, 512, 1001])
def test_a_row_does_not_depend_on_the_batch(vocab):
    """Bit for bit: alone, permuted, in a subset, and with a longer vocabulary behind it."""
    seeds, positions, steps = keys(37)
    noise = rb.gumbel(seeds, positions, steps, rb.TOKEN_STREAM, vocab)
    assert noise.dtype == torch.float32 and tuple(noise.shape) == (37, vocab)
    for i in (0, 17, 36):
        assert torch.equal(
            rb.gumbel(seeds[i : i + 1], positions[i : i + 1], steps[i : i + 1], rb.TOKEN_STREAM, vocab)[0], noise[i]
        )
    order = torch.randperm(37)[:20]
    assert torch.equal(rb.gumbel(seeds[order], positions[order], steps[order], rb.TOKEN_STREAM, vocab), noise[order])
    assert torch.equal(rb.gumbel(seeds, positions, steps, rb.TOKEN_STREAM, vocab + 130)[:, :vocab], noise)


def test_every_part_of_the_key_matters():
    base = [12345, 10, 2, rb.TOKEN_STREAM]
    rows = {tuple(base)}
    for part, others in enumerate([(12346, 12345 + 2**32, 12345 + 2**62), (11, 9), (3, 1), (1, 2, 3)]):
        rows |= {(*base[:part], other, *base[part + 1 :]) for other in others}
    # Exchanging two parts of the key must give other numbers, too.
    rows |= {(12345, 2, 10, rb.TOKEN_STREAM), (10, 12345, 2, rb.TOKEN_STREAM)}
    noise = [rb.uniform(*(torch.tensor([k]) for k in key[:3]), key[3], 64) for key in sorted(rows)]
    for i, a in enumerate(noise):
        for b in noise[:i]:
            assert (a == b).sum() == 0


@pytest.mark.parametrize("stream", [rb.TOKEN_STREAM, rb.ACCEPT_STREAM, rb.RESIDUAL_STREAM, rb.DRAFT_STREAM])
@pytest.mark.parametrize("axis", ["token", "position", "seed", "step"])
def test_uniform_along_every_axis(axis, stream):
    """Kolmogorov–Smirnov and a chi-square of neighbouring pairs, along each part of the key: 2**18 numbers each."""
    n = 2**18
    zero, count = torch.zeros(n, dtype=torch.long), torch.arange(n)
    if axis == "token":
        u = rb.uniform(torch.tensor([7]), torch.tensor([3]), torch.tensor([0]), stream, n)[0]
    elif axis == "position":
        u = rb.uniform(zero + 7, count, zero, stream)[:, 0]
    elif axis == "seed":
        u = rb.uniform(count, zero + 3, zero, stream)[:, 0]
    else:
        u = rb.uniform(zero + 7, zero + 3, count, stream)[:, 0]
    assert float(u.min()) > 0 and float(u.max()) < 1
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    cells = (u[::2] * 16).long() * 16 + (u[1::2] * 16).long()
    assert stats.chisquare(torch.bincount(cells, minlength=256).numpy()).pvalue > 1e-3


def test_gumbel_moments_and_tails():
    noise = rb.gumbel(*keys(512), rb.TOKEN_STREAM, 2048).double().flatten()
    assert torch.isfinite(noise).all()
    n, euler = noise.numel(), 0.5772156649015329
    deviation = (torch.pi**2 / 6) ** 0.5
    assert abs(noise.mean() - euler) < 4 * deviation / n**0.5
    assert abs(noise.std() - deviation) < 5 * 1.1 * deviation / n**0.5  # the kurtosis of Gumbel(0, 1) is 5.4
    assert stats.kstest(noise[:200_000].numpy(), "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize("word", [0, 7, 8, 2**31, 2**32 - 1])
def test_gumbel_at_the_ends_of_the_words(monkeypatch, word):
    """The least and the largest word give finite noise: -log(-log) is fed with neither 0 nor 1."""
    monkeypatch.setattr(rb, "_random_words", lambda *args: torch.full((1, args[-1]), word))
    noise = rb.gumbel(*(torch.tensor([0]),) * 3, 0, rb.GROUP)[0]
    assert torch.isfinite(noise).all() and int(noise.argmax()) == word % rb.GROUP
    if word < 8:  # the resolution a rare token needs
        assert abs(float(noise.max()) - 33 * math.log(2)) < 1e-4


def independence(noise):
    """p-values of what must hold for i.i.d. Gumbel noise [R, V], drawn by groups of 8: marginals, pairs, minima."""
    e = (-noise.double()).exp().unflatten(1, (-1, rb.GROUP))  # [R, groups, 8] exponential numbers
    u = -torch.expm1(-e)
    flat = u.flatten(0, 1)
    yield "all", stats.kstest(flat.flatten()[::3].numpy(), "uniform").pvalue
    cells = lambda x, y, n=8: torch.bincount(  # noqa: E731
        ((x * n).long() * n + (y * n).long()).flatten(), minlength=n * n
    ).numpy()
    for i in range(rb.GROUP):
        yield f"id {i}", stats.kstest(flat[:, i].numpy(), "uniform").pvalue
        for j in range(i):
            yield f"ids {i} and {j}", stats.chisquare(cells(flat[:, i], flat[:, j])).pvalue
    least, which = e.min(2)
    lowest = -torch.expm1(-rb.GROUP * least)
    yield "minima", stats.kstest(lowest.flatten().numpy(), "uniform").pvalue
    yield "argmin", stats.chisquare(torch.bincount(which.flatten(), minlength=rb.GROUP).numpy()).pvalue
    yield "minimum and argmin", stats.chisquare(cells(lowest, (which + 0.5) / rb.GROUP)).pvalue
    above = -torch.expm1(-(e - least[:, :, None]))
    second = above.scatter(2, which[:, :, None], 2.0).min(2).values
    yield "minimum and the next", stats.chisquare(cells(lowest, 1 - (1 - second) ** (rb.GROUP - 1))).pvalue
    for apart in (1, 32, 96):  # neighbours; words of one counter
        yield f"minima {apart} apart", stats.chisquare(cells(lowest[:, :-apart], lowest[:, apart:])).pvalue
        yield (
            f"argmins {apart} apart",
            stats.chisquare(cells((which[:, :-apart] + 0.5) / 8, (which[:, apart:] + 0.5) / 8)).pvalue,
        )


def noise_of_groups():
    return rb.gumbel(*keys(1024), rb.TOKEN_STREAM, 1024)


def test_noise_of_a_group_is_independent():
    """131,072 groups: the 47 tests hold at 1e-4 each; what they reject see below."""
    found = dict(independence(noise_of_groups()))
    assert len(found) == 47 and min(found.values()) > 1e-4, sorted(found.items(), key=lambda each: each[1])[:5]


@pytest.mark.parametrize("wrong", ["rate", "id", "no memory", "repeated"])
def test_wrong_noise_of_a_group_is_rejected(monkeypatch, wrong):
    """Power: minima 3 % too large (11 standard errors of their mean), an id 4 % too often the least, others that do not exceed
    the minimum, and minima that 4 of 128 groups share with those of another word."""
    minima, uniform = rb.minima, rb.uniform

    def changed(*args):
        u, which = minima(*args)
        if wrong == "rate":
            u = -torch.expm1(1.03 * torch.log1p(-u))
        elif wrong == "id":
            moved = torch.rand(which.shape, generator=torch.Generator().manual_seed(0)) < 0.04
            which = torch.where(moved & (which == 3), 5, which)
        elif wrong == "repeated":
            u[:, 32:64:8] = u[:, :32:8]
        return u, which

    if wrong == "no memory":
        forgetful = lambda *args: uniform(*args).mul_(0.97)  # noqa: E731
        monkeypatch.setattr(rb, "uniform", forgetful)
    else:
        monkeypatch.setattr(rb, "minima", changed)
    assert min(p for _, p in independence(noise_of_groups())) < 1e-6


def test_argmax_draws_from_the_distribution():
    p = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.02, 0.005])
    n = 200_000
    zero = torch.zeros(n, dtype=torch.long)
    drawn = (p.log() + rb.gumbel(torch.arange(n), zero + 11, zero, rb.TOKEN_STREAM, len(p))).argmax(1)
    assert stats.chisquare(torch.bincount(drawn, minlength=len(p)).numpy(), (p * n).numpy() * 1.0).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_noise_does_not_depend_on_the_logits_dtype(dtype):
    """The noise is float32 whatever the logits are; adding it does not round it to their precision."""
    from hf_specdec.kernels.sampling.reference import choose_tokens

    n = 400
    logits = torch.randn(33).to(dtype).expand(n, -1)
    seeds, do_sample = [i // 2 for i in range(n)], [i % 4 > 0 for i in range(n)]
    positions = [2 + i % 2 for i in range(n)]
    noise = rb.gumbel(
        torch.tensor(seeds), torch.tensor(positions), torch.zeros(n, dtype=torch.long), rb.TOKEN_STREAM, 33
    )
    expected = (logits.float() + noise * torch.tensor(do_sample)[:, None]).argmax(1)
    assert torch.equal(choose_tokens(logits, seeds, positions, do_sample, rb.TOKEN_STREAM), expected)
    assert len(expected.unique()) > 10


@needs_library
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_rows=st.integers(0, 5),
    vocab=st.sampled_from([1, 7, 8, 255, 257, 3000]),
    spread=st.sampled_from([0.0, 1e-3, 3.0, 1e4]),
    removed=st.sampled_from([0.0, 0.9, 0.999]),
)
def test_an_argmax_with_noise_that_is_not_drawn(seed, num_rows, vocab, spread, removed):
    """The native library gives the very token that all noise gives."""
    g = torch.Generator().manual_seed(seed)
    scores = (torch.randn(num_rows, vocab, generator=g) * spread).masked_fill(
        torch.rand(num_rows, vocab, generator=g) < removed, float("-inf")
    )
    scores[:1, vocab // 2 :: 3] = float("inf") if seed % 7 == 0 else 2.5  # equals
    noise, rows = keys(3, seed), torch.randint(0, 3, (num_rows,), generator=g)
    assert torch.equal(
        native.noisy_argmax(scores, *noise, rb.DRAFT_STREAM, rows),
        rb.noisy_argmax(scores, *noise, rb.DRAFT_STREAM, rows),
    )


@needs_library
def test_an_argmax_of_a_large_vocabulary_and_of_nan():
    """Several spans of groups, and NaN, which is the greatest number to torch, too."""
    scores, noise = torch.randn(20, 32003) * 2, keys(20)
    scores[0, 700], scores[1, 900:902] = math.nan, math.inf
    expected = (scores + rb.gumbel(*noise, rb.TOKEN_STREAM, 32003)).argmax(1)
    assert torch.equal(native.noisy_argmax(scores, *noise, rb.TOKEN_STREAM), expected)
    assert expected[0] == 700
    assert len(expected.unique()) > 10
