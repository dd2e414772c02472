"""Our Triton kernels compile for GPUs that are not here, and what they spill stays small."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

if importlib.util.find_spec("triton") is not None:
    from kernel_cases import all_cases

SPILL_BOUND = 128  # bytes per thread; a tile's worth of spills is thousands
OURS = ["llama-8b", "gemma-2", "gpt-oss", "phi-3", "bloom", "t5", "mla", "float32", "merge", "rotate and write", "move"]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module", params=["once", pytest.param("all", marks=pytest.mark.slow)])
def resources(request, tmp_path_factory):
    """What `benchmarks/kernel_resources.py` writes, from a process where Triton compiles, for sm_80 and sm_90: the first case of
    each kernel, or (slow) every case."""
    out = tmp_path_factory.mktemp("resources") / "resources.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "benchmarks" / "kernel_resources.py"), "--json", str(out)]
    command += ["--once", "80", "90"] if request.param != "all" else []
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    if table := os.environ.get("HF_SPECDEC_KERNEL_TABLE"):  # `.ci/run` prints it
        Path(table).write_text(done.stdout, encoding="utf-8")
    return json.loads(out.read_text())


def test_every_kernel_compiles_for_both_architectures(resources, request):
    cases = all_cases()
    names = {a: [each["name"] for each in resources if each["architecture"] == a] for a in (80, 90)}
    assert names[80] == names[90]
    if "all" in request.node.callspec.id:
        assert sorted(names[90]) == sorted(case.name for case in cases)
        assert all(any(part in name for name in names[90]) for part in OURS)
    else:
        assert {case.kernel for case in cases if case.name in names[90]} == {case.kernel for case in cases}


def test_little_is_spilled(resources):
    too_much = [
        (each["name"], each["architecture"], each["spill_stores"], each["spill_loads"])
        for each in resources
        if max(each["spill_stores"], each["spill_loads"]) > SPILL_BOUND
    ]
    assert too_much == []


def test_shared_memory_fits(resources):
    """What a block may have: 163 KB on sm_80, 227 KB on sm_90. Tiles are chosen for the latter."""
    assert all(each["shared_memory"] <= 227 * 1024 for each in resources)


def test_attention_uses_tensor_cores_and_asynchronous_copies(resources):
    for each in resources:
        found = each["instructions"]
        is_exact = each["name"].startswith("verify float32") or each["name"].endswith(", float32")
        if not is_exact and any(
            each["name"].startswith(word) for word in ("decode", "verify tree", "verify mla", "prompt")
        ):
            assert found["mma.sync"] + found["wgmma.mma_async"] > 0 and found["cp.async.cg"] > 0, each
        if is_exact:  # no tf32
            assert found["mma.sync"] + found["wgmma.mma_async"] == 0, each
        if each["name"] == "move":
            assert found["ld.global.v4"] > 0 and found["st.global.v4"] > 0, each
