"""The checks of benchmarks/gpu_sections find kernels that are wrong, and draw other inputs each time."""

import sys

import pytest
import torch
from paths import ROOT
from triton_interpreter import DEVICE, RUNS_HERE, needs_triton

sys.path.insert(0, str(ROOT / "benchmarks"))

if RUNS_HERE:
    from gpu_sections import (
        check_attention,
        check_cache,
        check_drafting,
        check_sampling,
        check_verification,
        correctness,
    )
    from gpu_sections.budget import Budget
    from gpu_sections.context import Context
    from gpu_sections.drafts import Drafts

    from hf_specdec.kernels.attention import triton as attention
    from hf_specdec.kernels.cache import triton as cache_ops
    from hf_specdec.kernels.drafting import triton as draft_ops
    from hf_specdec.kernels.random_bits import reference as random_bits
    from hf_specdec.kernels.rejection import triton as rejection
    from hf_specdec.kernels.sampling import triton as sampling
    from hf_specdec.kernels.verification import triton as verification


@pytest.fixture
def context():
    return Context(torch.device(DEVICE), True, Budget(600), seed=7)


def tampered(monkeypatch, module, name, change):
    """Apply `change` to what a kernel returns."""
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a, **k: change(original(*a, **k)))


@needs_triton
@pytest.mark.parametrize("case", (0, 7, 14))
def test_attention(context, monkeypatch, case):
    case = check_attention.shrunk(check_attention.CASES[case])
    problem = check_attention.Problem(case, torch.float16, context)
    assert check_attention.error_of(problem) < 2e-3
    for change, wrong in (
        (lambda out: out * 1.01, lambda error: error > 5e-3),
        (lambda out: out.index_fill(0, torch.tensor([0], device=DEVICE), float("nan")), lambda error: error != error),
        (torch.zeros_like, lambda error: error > 0.5),
    ):
        with monkeypatch.context() as patch:
            tampered(patch, attention, "paged_attention", change)
            assert wrong(check_attention.error_of(problem))


@needs_triton
def test_attention_that_writes_where_it_must_not(context, monkeypatch):
    case = check_attention.shrunk(check_attention.CASES[6])
    assert case.padding
    tampered(monkeypatch, attention, "paged_attention", lambda out: out.nan_to_num(0.0))
    assert check_attention.error_of(check_attention.Problem(case, torch.float32, context)) == float("inf")


@needs_triton
def test_inputs_are_fresh(context):
    case = check_attention.shrunk(check_attention.CASES[0])
    first, second = (check_attention.Problem(case, torch.float32, context) for _ in range(2))
    assert not torch.equal(first.query, second.query)


@needs_triton
def test_cache(context, monkeypatch):
    sizes = (context, torch.bfloat16)
    assert check_cache.write_errors(*sizes, 5, 2, 24) == 0 == check_cache.move_errors(*sizes, 3, 9, 2)
    assert check_cache.rotation_error(*sizes, 3, 32, 16) < 1e-2
    monkeypatch.setattr(cache_ops, "write_keys_values", lambda *a, **k: None)
    monkeypatch.setattr(cache_ops, "move_slots", lambda *a: None)
    assert check_cache.write_errors(*sizes, 5, 2, 24) > 0 and check_cache.move_errors(*sizes, 3, 9, 2) > 0
    error = check_cache.rotation_error(*sizes, 3, 32, 16)
    assert not error < 1e-2


@needs_triton
@pytest.mark.parametrize("chain", [pytest.param(True, marks=pytest.mark.slow), False])
def test_verification(context, monkeypatch, chain):
    def draw():
        return Drafts(context, 2, 2, 60, chain, torch.float32)

    rules = (
        lambda: check_verification.follow_errors(draw(), False),
        lambda: check_verification.follow_errors(draw(), True),
        lambda: check_verification.rejection_errors(draw(), True),
        lambda: check_verification.rejection_errors(draw(), False),
    )
    assert [rule() for rule in rules] == [0, 0, 0, 0]
    for module, name in ((verification, "verify_choices"), (rejection, "verify_rejection")):
        tampered(monkeypatch, module, name, lambda out: (out[0], out[1], out[2] + 1))
    assert all(rule() > 0 for rule in rules)


@needs_triton
def test_sampling(context, monkeypatch):
    assert check_sampling.errors(context, torch.float32, 100, True) == (0, 0)
    assert check_sampling.noise_error(context, torch.float32, 100) < 1e-5
    tampered(monkeypatch, sampling, "sampling_thresholds", lambda out: (out[0] + 0.5, out[1]))
    assert check_sampling.errors(context, torch.float32, 100, True)[0] > 0
    monkeypatch.setattr(random_bits, "MINIMA", 5)
    assert check_sampling.noise_error(context, torch.float32, 100) > 0.1


@needs_triton
def test_drafting(context, monkeypatch):
    checks = (
        lambda: check_drafting.frontier_errors(context, 2, 3, 4),
        lambda: check_drafting.prune_errors(context, 2, 20, 6),
        lambda: check_drafting.vocabulary_errors(context, torch.float32, 40),
        lambda: check_drafting.feature_errors(context, torch.bfloat16, 5, 4, 40),
    )
    assert [check() for check in checks] == [0, 0, 0, 0]
    for name in ("next_frontier", "prune_tree"):
        tampered(monkeypatch, draft_ops, name, lambda out: (out[0] + 1, *out[1:]))
    monkeypatch.setattr(draft_ops, "to_target_vocabulary", lambda *a, **k: None)
    tampered(monkeypatch, draft_ops, "gather_features", lambda out: out.flip(0))
    assert all(check() > 0 for check in checks)


@needs_triton
def test_every_module_with_kernels_has_a_check(monkeypatch):
    assert correctness.unchecked() == []
    monkeypatch.setattr(check_sampling, "MODULES", ())
    assert correctness.unchecked() == ["sampling"]
