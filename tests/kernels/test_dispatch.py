"""Which kernels serve a device when nobody says."""

from types import SimpleNamespace

import pytest
import torch

from hf_specdec.kernels import dispatch, native
from hf_specdec.kernels.norms import reference, rms_norm


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


def test_the_native_library_serves_cpus_where_it_is(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setattr(dispatch, "library", lambda: object())
    assert dispatch.uses_native(torch.device("cpu")) and not dispatch.uses_native(torch.device("cuda", 0))
    for choice, used in (("native", True), ("reference", False), ("triton", False)):
        monkeypatch.setenv(dispatch.VARIABLE, choice)
        assert dispatch.uses_native(torch.device("cpu")) is used
    monkeypatch.setattr(dispatch, "library", lambda: None)
    monkeypatch.setattr(dispatch, "why_not_loaded", lambda: "it was not compiled")
    monkeypatch.setenv(dispatch.VARIABLE, "native")
    with pytest.raises(ImportError, match="HF_SPECDEC_KERNELS=native: it was not compiled"):
        dispatch.uses_native(torch.device("cpu"))
    monkeypatch.delenv(dispatch.VARIABLE)
    assert not dispatch.uses_native(torch.device("cpu"))


def test_a_library_that_does_not_fit_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "PATH", tmp_path / "library.so")
    assert "not compiled" in native.why_not_loaded()
    (tmp_path / "library.so").write_bytes(b"no library")
    assert "does not load" in native.why_not_loaded()
    native.library.cache_clear()
    assert native.library() is None and "is not used" in native.description()
    native.library.cache_clear()


def test_an_operation_is_what_serves_its_tensors(monkeypatch):
    monkeypatch.setitem(rms_norm._modules, "triton", SimpleNamespace(rms_norm=lambda *args: "kernel"))
    lines, weight = torch.randn(2, 4), torch.randn(4)
    monkeypatch.setattr(dispatch, "uses_triton", lambda device: False)
    assert torch.equal(rms_norm(lines, weight, 1e-6), reference.rms_norm(lines, weight, 1e-6))
    monkeypatch.setattr(dispatch, "uses_triton", lambda device: True)
    assert rms_norm(lines, weight, 1e-6) == rms_norm.on(lines.device)(lines, weight, 1e-6) == "kernel"
    too_wide = torch.ones(1, reference.MOST_WIDTH + 1)  # for the kernel
    assert torch.equal(rms_norm(too_wide, too_wide[0], 0.0), too_wide)
    with pytest.raises(TypeError, match="rms_norm needs a tensor"):
        rms_norm(1, 2, 3)
