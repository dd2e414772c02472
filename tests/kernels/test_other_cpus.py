"""What is promised bit for bit holds on other processors: their libraries' code, chosen by variables, in processes of their own.

Code for AVX-512 is tried where the machine has it. What a setting does not concern runs as on this machine.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from paths import TESTS

OLD = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41",
       "OPENBLAS_CORETYPE": "Nehalem"}  # fmt: skip
SETTINGS = [
    # With AMX torch's own attention in bfloat16 raises, unless oneDNN is kept from it too.
    {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"OPENBLAS_CORETYPE": "Haswell"},
    {"OPENBLAS_CORETYPE": "Zen"},
    {"OPENBLAS_CORETYPE": "Sandybridge"},
]
WITH_AVX512 = [
    {"ATEN_CPU_CAPABILITY": "avx512"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"},
    {"OPENBLAS_CORETYPE": "SkylakeX"},
]


def holds_under(setting: dict[str, str], tests: dict[str, str], deselected: str = "not slow") -> None:
    """Run those of each file whose names fit an expression in a process with these variables; all must pass."""
    for file, names in tests.items():
        if "triton" in file and importlib.util.find_spec("triton") is None:
            continue
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        variables |= {**setting, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1" if "triton" in file else "0"}
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", deselected]
        done = subprocess.run(
            [*command, str(next(TESTS.rglob(file))), "-k", names],
            env=variables,
            capture_output=True,
            text=True,
            timeout=550,
        )
        assert done.returncode == 0 and " passed" in done.stdout, (setting, done.stdout[-4000:], done.stderr[-2000:])


def test_on_an_old_processor():
    holds_under(OLD, {"test_deterministic.py": "test_linear or (batch and Mistral)"})


@pytest.mark.slow
@pytest.mark.parametrize("setting", [OLD, *SETTINGS, *WITH_AVX512], ids=lambda each: "-".join(each.values()))
def test_everything(setting):
    if setting in WITH_AVX512 and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has no AVX-512")
    holds_under(
        setting,
        {
            # What shows that bits do differ without the mode does not hold for code without vectors.
            "test_deterministic.py": "not without_the_mode",
            "test_triton_attention.py": "bit_for_bit",
            "test_triton_invariant.py": "linear or product or reductions",
        },
    )
