"""Sampling limits against `FusedSamplingLogitsWarper`, in the interpreter."""

import pytest
import torch
from combinations import covering
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import DEVICE, RUNS_HERE, needs_triton

from hf_specdec.sampling import FusedSamplingLogitsWarper

if RUNS_HERE:
    from hf_specdec.kernels.sampling.triton import sampling_scores, sampling_thresholds

# temperature, top-k, top-p, min-p
PARAMETERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.8, 40, 0.95, 0.02),
    (2.0, 1, 0.5, 1.0),
    (1.0, 10**6, 0.999, 0.0),
    (0.01, 0, 1e-6, 0.0),
    (1.0, 7, 0.3, 0.3),
]


def run(logits, parameters, owners=None, block=512):
    """Limits and masked scores, from poisoned outputs."""
    temperature, top_k, top_p, min_p = zip(*parameters, strict=True)
    rows = logits.shape[0]
    own = None if owners is None else owners.to(DEVICE)
    temperature = torch.tensor(temperature, device=DEVICE)
    limits = sampling_thresholds(
        logits.to(DEVICE), own, temperature, torch.tensor(top_k, dtype=torch.int32, device=DEVICE),
        torch.tensor(top_p, device=DEVICE), torch.tensor(min_p, device=DEVICE), block=block,
        out=(torch.full((rows,), float("nan"), device=DEVICE), torch.full((rows,), -9, dtype=torch.int32, device=DEVICE)),
    )  # fmt: skip
    out = torch.full(logits.shape, float("nan"), device=DEVICE)
    return limits, sampling_scores(logits.to(DEVICE), limits, own, temperature, out=out, block=block).cpu()


def definition(logits, parameters):
    """Ties by a stable sort: torch's default one orders equals as it likes (vectorised on some CPUs)."""
    plain = torch.Tensor.sort
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sort", lambda scores, **how: plain(scores, **{**how, "stable": True}))
        return _definition(logits, parameters)


def _definition(logits, parameters):
    rows = [
        FusedSamplingLogitsWarper(*p)(None, row[None].float())[0] for p, row in zip(parameters, logits, strict=True)
    ]
    return torch.stack(rows)


def doubtful(scores, expected, parameter):
    """bool [V]: tokens whose mass or probability lies within float32 rounding of a boundary."""
    temperature, top_k, top_p, min_p = parameter
    wide = scores.double() / temperature
    if top_k:
        wide = wide.masked_fill(wide < wide.topk(min(top_k, len(wide))).values[-1], float("-inf"))
    values, order = wide.sort(stable=True)
    probs = values.softmax(0)
    near = (probs.cumsum(0) - (1 - top_p)).abs() < 3e-6 if top_p < 1 else torch.zeros_like(probs, dtype=torch.bool)
    near |= (min_p > 0) & ((probs / probs[-1] - min_p).abs() < 3e-6)
    return torch.zeros_like(near).scatter(0, order, near)


def assert_kept(ours, logits, parameters, most=None):
    """Every row keeps what the definition keeps, but for tokens on a boundary, of which `most` may differ."""
    expected = definition(logits, parameters)
    for i, parameter in enumerate(parameters):
        differs = (ours[i] != expected[i]).nonzero().flatten()
        on_boundary = doubtful(logits[i].float(), expected[i], parameter)[differs]
        assert bool(on_boundary.all()) and (most is None or len(differs) <= most), (parameter, differs)


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "vocab"), covering([torch.float32, torch.bfloat16, torch.float16], [1, 37, 512, 1300])
)
def test_keeps_what_the_definition_keeps(dtype, vocab):
    g = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(len(PARAMETERS), vocab, generator=g) * 3).to(dtype)
    if vocab > 30:
        logits[:, 3] = float("-inf")
    _, ours = run(logits, PARAMETERS)
    assert_kept(ours, logits, PARAMETERS, most=1)


@needs_triton
@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 300),
    spread=st.sampled_from([0.1, 1.0, 6.0]),
    parameters=st.lists(
        st.tuples(
            st.sampled_from([0.3, 1.0, 2.0]),
            st.integers(0, 400),
            st.floats(0.01, 1.0),
            st.sampled_from([0.0, 0.1, 0.9]),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_any_parameters(seed, vocab, spread, parameters):
    logits = torch.randn(len(parameters), vocab, generator=torch.Generator().manual_seed(seed)) * spread
    _, ours = run(logits, parameters, block=128)
    assert_kept(ours, logits, parameters)


@needs_triton
@pytest.mark.parametrize("block", [pytest.param(64, marks=pytest.mark.slow), 256])
def test_ties(block):
    """Rounded logits: hundreds of equals at the boundary, both zeros among them, across blocks."""
    logits = (torch.randn(len(PARAMETERS), 600, generator=torch.Generator().manual_seed(0)) * 1.5).round()
    logits[:, ::7] *= -1.0
    assert ((logits == 0) & torch.signbit(logits)).any()
    _, ours = run(logits, PARAMETERS, block=block)
    assert_kept(ours, logits, PARAMETERS)


@needs_triton
def test_all_equal_and_exact_masses():
    """Powers of two have exact masses: of 8 equal tokens top-p 0.5 keeps the last four, and an all but empty one the last."""
    logits = torch.zeros(4, 8)
    parameters = [(1.0, 0, 0.5, 0.0), (1.0, 0, 1e-6, 0.0), (1.0, 3, 1.0, 0.0), (1.0, 0, 0.75, 0.5)]
    _, ours = run(logits, parameters)
    assert torch.equal(ours, definition(logits, parameters))
    assert torch.isfinite(ours).sum(1).tolist() == [4, 1, 8, 6]


@needs_triton
def test_more_candidates_than_there_is_room_for(monkeypatch):
    """Flat rows are searched whole, peaked ones by their likeliest tokens: both keep what the definition keeps."""
    from hf_specdec.kernels.sampling import triton as sampling

    logits = torch.randn(len(PARAMETERS), 700, generator=torch.Generator().manual_seed(3))
    logits[::2] *= 4
    counts = []
    original = sampling.thresholds_kernel

    class Watched:
        def __getitem__(self, grid):
            def launch(*args, **flags):
                counts.append(args[7].cpu())
                return original[grid](*args, **flags)

            return launch

    monkeypatch.setattr(sampling, "thresholds_kernel", Watched())
    temperature, top_k, top_p, min_p = (torch.tensor(each) for each in zip(*PARAMETERS, strict=True))
    on = [each.to(DEVICE) for each in (temperature, top_k.int(), top_p, min_p)]
    limits = sampling.sampling_thresholds(logits.to(DEVICE), None, *on, block=128, capacity=64)
    ours = sampling_scores(logits.to(DEVICE), limits, None, on[0]).cpu()
    assert ((counts[0] > 0) & (counts[0] <= 64)).sum() >= 2 and (counts[0] < 0).sum() >= 3
    assert_kept(ours, logits, PARAMETERS, most=1)


@needs_triton
def test_owners_and_rows_left_alone():
    """Parameters of another table than the logits' rows; rows with everything off keep all."""
    logits = torch.randn(6, 90, generator=torch.Generator().manual_seed(2))
    owners = torch.tensor([1, 1, 0, 4, 4, 8])
    limits, ours = run(logits, PARAMETERS, owners)
    expected = definition(logits, [PARAMETERS[i] for i in owners])
    assert torch.equal(ours, expected)
    assert limits[0][2].item() == float("-inf") and limits[1][2].item() == 0


# ---- rows with noise ------------------------------------------------------------------------------------------------


def sampled_rows(do_sample):
    """Sequences with parameters of their own, as a drafter hands them on."""
    from test_sampling_rows import row

    own = [(0.7, 5), (), (1.2, 0, 0.9), (1.0, 0, 1.0, 0.05)]
    rows = [
        row(2**40 + i, *each, do_sample=do, length=3 + i)
        for i, (each, do) in enumerate(zip(own, do_sample, strict=True))
    ]
    for i, seq in enumerate(rows):
        seq.num_steps = 3 * i
    return rows


@needs_triton
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("count", "do_sample", "dtype"),
    [
        pytest.param(1, (True,) * 4, torch.float32, marks=pytest.mark.slow),
        (3, (True, False, True, True), torch.bfloat16),
    ],
)
def test_rows_that_sample(monkeypatch, count, do_sample, dtype, shared):
    """Scores, noisy scores and choices by the kernels: what the definitions give."""
    from hf_specdec.kernels import random_bits
    from hf_specdec.sampling.parameters import SamplingBuffers, SamplingKind

    rows = sampled_rows(do_sample)
    kind = SamplingKind.of(rows, True)
    stream = random_bits.TOKEN_STREAM if shared else random_bits.DRAFT_STREAM
    logits = (torch.randn(4, count, 700, generator=torch.Generator().manual_seed(count)) * 3).to(dtype)
    index = torch.tensor([3, 1])

    def everything(device):
        sampling = SamplingBuffers.of(rows, kind, torch.device(device))
        given, some = logits.to(device), index.to(device)
        scores = sampling.scores(given)
        out = [
            scores, sampling.noisy(given, 2, stream, shared), sampling.noisy(scores, 2, stream, shared, applied=True),
            sampling.scores(given[some], some), sampling.noisy(given[some], 2, stream, shared, some),
            sampling.choices(given, 2), sampling.choices(given[some], 2, some),
        ]  # fmt: skip
        return [each.cpu() for each in out]

    monkeypatch.setenv("HF_SPECDEC_KERNELS", "reference")
    expected = everything("cpu")
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    for found, wanted in zip(everything(DEVICE), expected, strict=True):
        if wanted.dtype == torch.long:
            assert torch.equal(found, wanted)
            continue
        assert found.dtype == torch.float32
        assert torch.equal(found.isinf(), wanted.isinf())
        torch.testing.assert_close(found, wanted.float(), rtol=2e-6, atol=5e-6)


@needs_triton
def test_noise_is_in_vocabularies_of_any_size():
    """Blocks of which the last is not full, fewer ids than a block, one id."""
    from hf_specdec.kernels import random_bits
    from hf_specdec.kernels.sampling.triton import Noise

    for vocab in (1, 5, 64, 1030):
        seeds, positions, steps = (torch.tensor([i, 2**33 + i]) for i in range(3))
        keys = [each.to(DEVICE) for each in (seeds, positions, steps)]
        noise = Noise(*keys, torch.tensor([True, True], device=DEVICE), random_bits.DRAFT_STREAM)
        out = torch.full((2, vocab), float("nan"), device=DEVICE)
        sampling_scores(torch.zeros(2, vocab, device=DEVICE), noise=noise, out=out, block=1024)
        expected = random_bits.gumbel(seeds, positions, steps, random_bits.DRAFT_STREAM, vocab)
        torch.testing.assert_close(out.cpu(), expected, rtol=2e-6, atol=5e-6)
