"""Fingerprints tell contents apart that addresses, versions, sums and samples do not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.model.options import fingerprints as module
from hf_specdec.model.options.fingerprints import fingerprints

WAYS = {"cpu": lambda tensor: fingerprints([tensor])[0], "device": module._on_device}


@pytest.fixture(params=WAYS)
def hashed(request, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(module, "_WIDTH", 8)
    return WAYS[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (40, 17)])
def test_equal_contents_have_equal_hashes(hashed, dtype, shape):
    tensor = torch.randn(shape).mul(50).to(dtype)
    assert hashed(tensor) == hashed(tensor.clone()) == hashed(tensor.detach())


def test_layout_is_no_content(hashed):
    tensor = torch.randn(6, 10)
    assert hashed(tensor) == hashed(tensor.T.contiguous().T)


def test_every_single_bit_counts(hashed):
    tensor = torch.randn(5, 7)
    before, bits = hashed(tensor), tensor.view(torch.int32).numpy()
    for place in ((0, 0), (2, 3), (4, 6)):
        for bit in range(31):
            bits[place] ^= 1 << bit
            assert hashed(tensor) != before
            bits[place] ^= 1 << bit
    assert hashed(tensor) == before


@given(st.integers(0, 99), st.integers(0, 99))
def test_swapped_entries_are_noticed(first, second):
    tensor = torch.arange(100, dtype=torch.float32)
    swapped = tensor.clone()
    swapped[[first, second]] = swapped[[second, first]]
    for way in WAYS.values():
        assert (way(tensor) == way(swapped)) == (first == second)


def test_many_tensors_at_once(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    tensors = [torch.randn(n) for n in (1, 100, 0, 33)]
    assert fingerprints(tensors) == [fingerprints([tensor])[0] for tensor in tensors]
    assert len(set(fingerprints(tensors))) == len(tensors)
