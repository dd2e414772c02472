"""Which kernels serve a device when nobody says."""

import pytest
import torch

from hf_specdec.kernels import dispatch


@pytest.mark.parametrize(("capability", "served"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_by_default_gpus_that_triton_serves(monkeypatch, capability, served):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: object())
    dispatch._is_served.cache_clear()
    assert dispatch.uses_triton(torch.device("cuda", 0)) is served
    assert not dispatch.uses_triton(torch.device("cpu"))
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert not dispatch.uses_triton(torch.device("cuda", 0))
    dispatch._is_served.cache_clear()


def test_without_triton_gpus_have_the_definitions(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    dispatch._is_served.cache_clear()
    assert not dispatch.uses_triton(torch.device("cuda", 0))
    dispatch._is_served.cache_clear()
