"""How rows sample, on the device: what their own processors and noise give, for rows that differ in everything."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from hf_specdec.core.sequence import Sequence
from hf_specdec.kernels import random_bits
from hf_specdec.kernels.native import library
from hf_specdec.kernels.sampling import reference
from hf_specdec.kernels.sampling.reference import DRAWS_PER_ROUND, choose_tokens, sampling_scores
from hf_specdec.sampling import FusedSamplingLogitsWarper
from hf_specdec.sampling.logits import process_logits
from hf_specdec.sampling.parameters import SamplingBuffers, SamplingKind
from hf_specdec.sampling.processors import NodeProcessors

VOCAB = 50
CPU = torch.device("cpu")
parameters = st.tuples(
    st.sampled_from([1.0, 0.5, 1.7]),
    st.sampled_from([0, 1, 7, VOCAB, 10**6]),
    st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
    st.sampled_from([0.0, 0.05, 1.0]),
)


def row(seed, *sampling, do_sample=True, length=3):
    seq = Sequence(list(range(1, 1 + length)), 100, do_sample=do_sample, seed=seed)
    if sampling:
        warpers = LogitsProcessorList([FusedSamplingLogitsWarper(*sampling)])
        seq.processors = NodeProcessors(warpers, torch.tensor([seq.tokens]), None)
    return seq


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.one_of(parameters, st.just(())), min_size=1, max_size=5),
    count=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_scores_are_those_of_the_rows_processors(rows, count, seed):
    sequences = [row(i, *each) for i, each in enumerate(rows)]
    logits = torch.randn(len(rows), count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    sampling = SamplingBuffers.of(sequences, SamplingKind.of(sequences, False), CPU)
    owners = [seq for seq in sequences for _ in range(count)]
    expected = process_logits(owners, None, logits.flatten(0, 1)).view(logits.shape)
    found = sampling.scores(logits)
    off = (found != expected).nonzero()  # 1 - top_p in float32 may round a token's mass to the other side of it
    assert len(off) <= 1, off
    index = torch.arange(len(rows)).flip(0)
    assert torch.equal(sampling.scores(logits[index], index), found[index])


@pytest.mark.parametrize("sample", [[True, True, True], [True, False, True]])
def test_shared_noise_is_that_of_the_loop(sample):
    sequences = [row(10 + i, do_sample=do, length=3 + i) for i, do in enumerate(sample)]
    sampling = SamplingBuffers.of(sequences, SamplingKind.of(sequences, True), CPU)
    logits = torch.randn(3, 2, VOCAB, generator=torch.Generator().manual_seed(0))
    noisy = sampling.noisy(logits, 4, random_bits.TOKEN_STREAM, shared=True)
    owners = [seq for seq in sequences for _ in range(2)]
    positions = [len(seq.tokens) + 4 for seq in owners]
    keys = torch.tensor([seq.seed for seq in owners]), torch.tensor(positions), torch.zeros(6, dtype=torch.long)
    noise = (
        random_bits.gumbel(*keys, random_bits.TOKEN_STREAM, VOCAB)
        * torch.tensor([s.do_sample for s in owners])[:, None]
    )
    assert torch.equal(noisy.flatten(0, 1), logits.flatten(0, 1) + noise)
    assert torch.equal(sampling.choices(logits, 4), noisy.argmax(2))
    seeds, do_sample = [seq.seed for seq in owners], [seq.do_sample for seq in owners]
    chosen = choose_tokens(logits.flatten(0, 1), seeds, positions, do_sample, random_bits.TOKEN_STREAM)
    assert torch.equal(chosen, noisy.argmax(2).flatten())
    index = torch.tensor([2, 0])
    assert torch.equal(sampling.noisy(logits[index], 4, random_bits.TOKEN_STREAM, True, index), noisy[index])
    assert torch.equal(sampling.choices(logits[index], 4, index), noisy[index].argmax(2))


@pytest.mark.skipif(library() is None, reason="the native library is not installed")
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.one_of(parameters, st.just(())), st.booleans()), min_size=1, max_size=5),
    vocab=st.sampled_from([1, 30, 257, 5000]),
    spread=st.sampled_from([0.1, 3.0]),
    equals=st.booleans(),
    seed=st.integers(0, 99),
)
def test_native_choices_are_those_of_the_definition(rows, vocab, spread, equals, seed):
    sequences = [row(seed + i, *each, do_sample=do) for i, (each, do) in enumerate(rows)]
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 3, vocab, generator=g) * spread
    logits = logits.round(decimals=1) if equals else logits
    logits[:, :, vocab // 2 :: 3] = float("-inf") if seed % 2 else -0.0
    sampling = SamplingBuffers.of(sequences, SamplingKind.of(sequences, True), CPU)
    found = sampling.choices(logits, 2)
    with pytest.MonkeyPatch.context() as patch:  # torch's sort removes any of equal tokens
        patch.setattr(torch.Tensor, "sort", functools.partialmethod(torch.Tensor.sort, stable=True))
        expected = reference.choices(logits, sampling.parameters, 2)
    assert torch.equal(found, expected)
    index = torch.arange(len(rows)).flip(0)
    assert torch.equal(sampling.choices(logits[index], 2, index), found[index])


@pytest.mark.skipif(library() is None, reason="the native library is not installed")
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_native_top_p_keeps_the_same_tokens(top_p):
    """With noise of many positions every token that is kept is drawn at times, and no other."""
    sequences = [row(3, 1.0, 0, top_p, 0.0)]
    sampling = SamplingBuffers.of(sequences, SamplingKind.of(sequences, True), CPU)
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(8))
    kept = sampling_scores(logits, top_p=top_p)[0].isfinite().nonzero().flatten()
    drawn = {int(sampling.choices(logits[:, None], ahead)) for ahead in range(30 * len(kept) ** 2)}
    assert drawn == set(kept.tolist())


def test_own_noise_differs_between_draws_and_rounds():
    sequences = [row(5), row(5), row(6)]
    sequences[1].num_steps = 1
    sampling = SamplingBuffers.of(sequences, SamplingKind.of(sequences, True), CPU)
    noise = sampling.noisy(torch.zeros(3, 4, VOCAB), 2, random_bits.DRAFT_STREAM, shared=False)
    flat = noise.flatten(0, 1)
    assert len({tuple(each.tolist()) for each in flat}) == 12
    steps = torch.tensor([DRAWS_PER_ROUND + 2])
    expected = random_bits.gumbel(torch.tensor([5]), torch.tensor([5]), steps, random_bits.DRAFT_STREAM, VOCAB)
    assert torch.equal(noise[1, 2], expected[0])


def test_parameters_that_are_applied_are_not_applied_again():
    sequences = [row(1, 0.5, 10)]
    sampling = SamplingBuffers.of(sequences, SamplingKind.of(sequences, True), CPU)
    logits = torch.randn(1, 2, VOCAB, generator=torch.Generator().manual_seed(1))
    scores = sampling.scores(logits)
    assert torch.equal(
        sampling.noisy(scores, 0, random_bits.DRAFT_STREAM, False, applied=True),
        sampling.noisy(logits, 0, random_bits.DRAFT_STREAM, False),
    )


def test_buffers_stay_where_they_are():
    """Fewer rows may be put in later; what they left behind is off."""
    kind = SamplingKind(noise=True, temperature=True, top_k=True)
    sampling = SamplingBuffers(4, kind, CPU)
    held = sampling.parameters
    places = [
        each.data_ptr()
        for each in (
            held.seeds,
            held.do_sample,
            held.temperature,
            held.top_k,
        )
    ]
    assert held.top_p is None and held.min_p is None
    sampling.fill([row(i, 0.5, 3) for i in range(4)])
    assert held.temperature.tolist() == [0.5] * 4 and held.do_sample.all()
    sampling.fill([row(2**62 + 1, 2.0, 0, do_sample=False, length=7)])
    assert held.temperature.tolist() == [2.0, 1.0, 1.0, 1.0] and held.top_k.tolist() == [0] * 4
    assert int(held.seeds[0]) == 2**62 + 1 and int(held.positions[0]) == 7 and not held.do_sample[0]
    assert places == [
        each.data_ptr()
        for each in (
            held.seeds,
            held.do_sample,
            held.temperature,
            held.top_k,
        )
    ]


def test_kinds():
    sequences = [row(0, 0.7), row(1), row(2, 1.0, 0, 0.9)]
    assert SamplingKind.of(sequences, True) == SamplingKind(True, temperature=True, top_p=True)
    assert SamplingKind.of(sequences[1:2], False) == SamplingKind() == SamplingKind.of([], False)
    assert not any(SamplingKind())


def test_numbers_and_tensors_mean_the_same():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4)) * 2
    numbers = (0.8, 9, 0.75, 0.05)  # 1 - 0.75 is exact
    tensors = [torch.full((3,), each, dtype=torch.int32 if i == 1 else torch.float32) for i, each in enumerate(numbers)]
    assert torch.equal(sampling_scores(logits, *numbers), sampling_scores(logits, *tensors))
