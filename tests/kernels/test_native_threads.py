"""The native library runs in the threads that torch runs in: two sets of threads would wait for each other's cores."""

import os
import subprocess
import sys

import pytest

from hf_specdec.kernels.native import library

pytestmark = [
    pytest.mark.skipif(library() is None, reason="the native library is not compiled"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc, and forks"),
]

PRODUCT = """
import ctypes, os, threading, torch
from hf_specdec.kernels.native import Linear, library

x, weight = torch.randn(8, 1024), torch.randn(4096, 1024)

def product():
    y = torch.empty(8, 4096)
    call = Linear(x=x.data_ptr(), w=weight.data_ptr(), y=y.data_ptr(), rows=8, n=4096, k=1024, ldx=1024, ldw=1024, ldy=4096)
    library().specdec_linear(ctypes.byref(call), torch.get_num_threads())
    return y

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(1)
alone, before = product(), threads()
torch.testing.assert_close(alone, x @ weight.T, atol=1e-3, rtol=1e-3)
torch.set_num_threads(3)
"""


def run(script):
    """The lines that a new process prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRODUCT + script],
        env={**os.environ, "OMP_NUM_THREADS": "3"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_call_uses_torchs_threads_and_starts_no_others():
    script = """
for _ in range(20):
    assert torch.equal(product(), alone)
print(threads() - before)
torch.randn(1 << 20).exp()
assert torch.equal(product(), alone)
print(threads() - before)
"""
    assert run(script) == ["2", "2"]


def test_a_call_beside_another_and_a_call_of_a_forked_process_give_the_same():
    script = """
assert torch.equal(product(), alone)
others = [threading.Thread(target=lambda: [product() for _ in range(50)]) for _ in range(2)]
for other in others:
    other.start()
for _ in range(50):
    assert torch.equal(product(), alone)
for other in others:
    other.join()
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(product(), alone) else 2)
print(os.waitpid(child, 0)[1], torch.equal(product(), alone))
"""
    assert run(script) == ["0", "True"]


def test_a_forked_process_that_loads_the_library_itself_has_no_threads_either():
    """They are its parent's, in which torch ran before: the runtime would wait for them without end."""
    script = """
import signal
torch.randn(1 << 20).exp()
library.cache_clear()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if torch.equal(product(), alone) else 2)
print(os.waitpid(child, 0)[1])
"""
    assert run(script) == ["0"]


def test_without_an_openmp_runtime_one_thread_does_the_work_and_a_warning_says_so():
    script = """
import logging
from hf_specdec.kernels import native

seen = []
native.logger.addFilter(lambda record: seen.append(record.getMessage()) or True)
native._OPENMP = ("no_such_function",) * 4
native.library.cache_clear()
assert torch.equal(product(), alone)
print(threads() - before, sum("one thread" in message for message in seen))
"""
    assert run(script) == ["0", "1"]
