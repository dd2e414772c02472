"""The tests that need Triton, on a machine without a GPU: in the interpreter, a few files per process.

A process imports torch and transformers once for all its files. Groups take about equally long.
"""

import pytest
from paths import TESTS
from triton_interpreter import run_interpreted

pytestmark = pytest.mark.ci
GROUPS = {
    "attention": ("test_triton_attention", "test_triton_sampling", "test_gpu_checks"),
    "others": (
        "test_triton_verification",
        "test_triton_cache_ops",
        "test_triton_draft_ops",
        "test_triton_layers",
        "test_triton_recurrent",
        "test_triton_generate",
        "test_triton_invariant",
        "test_graphs",
    ),
}


@pytest.mark.parametrize("group", GROUPS)
def test_interpreted(group):
    run_interpreted([str(next(TESTS.rglob(f"{name}.py"))) for name in GROUPS[group]])


def test_every_file_is_in_one_group():
    need = {path.stem for path in TESTS.rglob("test_*.py") if "\n@needs_triton\n" in path.read_text(encoding="utf-8")}
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(need)
