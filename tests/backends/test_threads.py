"""The threads that share a call of the compiled kernels: they change nothing, and go with it.

What needs a process of its own, for its signals, its end or its limits, runs as a script.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dense
import kernels_built
from compiled_cases import as_torch, close, narrow, on_threads
from libraries import needs_kernels
from relskew_core import Span, relative_attention, relative_attention_vjp

pytestmark = needs_kernels

SETUP = """
import threading
import numpy as np
from relskew_core import backends, relative_attention
from relskew_core.backends._numpy import compiled

compiled.NUMPY = compiled.NUMPY._replace(shared=0)  # short calls are shared by threads, too
q, k, v, table = np.random.default_rng(0).standard_normal((4, 3, 120, 8))

def attend(threads=2):
    backends.set_numpy_threads(threads)
    return relative_attention(q, k, v, table, causal=True, impl="native")

expected = attend(1)
"""


def run(script: str, *words: str, shell: str = "") -> str:
    command = [sys.executable, "-c", script, *words]
    command = ["sh", "-c", f'{shell}; exec "$0" "$@"', *command] if shell else command
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert not ended.stderr
    assert ended.returncode == 0
    return ended.stdout


INTERRUPTED = """
import signal, sys, threading
import numpy as np, torch
from relskew_core import backends, relative_attention, relative_attention_vjp

library, threads = sys.argv[1], int(sys.argv[2])
backends.set_numpy_threads(threads)
torch.set_num_threads(threads)
to = {"numpy": np.asarray, "torch": torch.from_numpy}[library]
x = to(np.random.default_rng(0).standard_normal((1, 8, 120_000, 16), np.float32))  # would take minutes
lse, few = x[..., 0], x[:, :, :500]
signal.signal(signal.SIGALRM, signal.default_int_handler)
expected = relative_attention(few, few, few, causal=True)
for call in (
    lambda: relative_attention(x, x, x, causal=True),
    lambda: relative_attention_vjp(x, x, x, x, causal=True, out=x, lse=lse),
):
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        call()
    except KeyboardInterrupt:
        print("interrupted")
found = relative_attention(few, few, few, causal=True)
assert np.array_equal(np.asarray(found), np.asarray(expected))
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers on this system")
@pytest.mark.parametrize(("library", "threads"), [("numpy", "2"), ("torch", "1")])
def test_an_interrupt_ends_a_call_in_its_middle(library: str, threads: str) -> None:
    assert run(INTERRUPTED, library, threads) == "interrupted\n" * 2


FORKED = """
import multiprocessing, sys, warnings, torch
from relskew_core.backends._torch.cpu import compiled

warnings.simplefilter("ignore")  # of processes with several threads that fork
compiled.TORCH = compiled.TORCH._replace(shared=0)
torch.set_num_threads(2)
if sys.argv[1] == "torch":
    q, k, v, table = map(torch.from_numpy, (q, k, v, table))
expected = attend()  # starts the workers that a child does not have
context = multiprocessing.get_context("fork")

def child(queue):
    queue.put(float(abs(attend() - expected).max()))

def fork():
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    process.join(60)
    assert process.exitcode == 0, process.exitcode
    assert queue.get() < 1e-12

def calls():
    while not stop.is_set():
        attend()

class Outputs(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return attend()

fork()
if sys.argv[1] == "torch":
    for out in torch.utils.data.DataLoader(Outputs(), num_workers=2, multiprocessing_context="fork"):
        assert torch.allclose(out[0], expected, rtol=0, atol=1e-12)
else:  # in the middle of a call
    stop = threading.Event()
    busy = threading.Thread(target=calls)
    busy.start()
    try:
        for _ in range(3):
            fork()
    finally:
        stop.set()
        busy.join()
assert np.array_equal(attend(), expected)
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_forked_processes_and_data_loaders_may_call_it(library: str) -> None:
    assert run(SETUP + FORKED, library) == "done\n"


CUT = [
    dense.Case("causal, grouped", n=700, m=700, heads=4, kv_heads=2, d=16, span=Span.causal(700), tables="rel_k rel_v",
               options={"causal": True}),
    dense.Case("window", n=1500, m=1500, heads=1, d=8, span=Span(40, 40, "clip"), tables="rel_k rel_bias",
               options={"window": (400, 400)}),
    dense.Case("keys with a table", n=600, m=600, heads=1, d=8, span=Span(99, 99, "clip"), tables="rel_k key_table",
               mask="additive", mask_shape=(1, 1, 600, 600), options={"causal": True}),
    dense.Case("one mask of the keys", n=900, m=900, heads=2, d=8, span=Span(9, 9, "clip"), tables="rel_v",
               mask="additive", mask_shape=(1, 1, 1, 900)),
    dense.Case("a mask of queries", n=900, m=900, heads=2, d=8, span=Span(9, 9, "clip"), tables="rel_v",
               mask="additive", mask_shape=(1, 2, 900, 1), options={"dropout": 0.2, "seed": 1}),
    dense.Case("few queries", n=3, m=9000, heads=9, kv_heads=3, d=8, span=Span(50, 3, "clip"), tables="rel_k rel_v",
               options={"offset": 8990}),
]  # fmt: skip
"""Calls whose work is cut within heads, between queries and between keys."""


@pytest.mark.parametrize("case", CUT, ids=str)
def test_results_are_the_same_to_the_bit_on_any_number_of_threads_of_any_library(case: dense.Case) -> None:
    wide = relative_attention_vjp(case.d_out(), **case.arrays(), **case.call(), impl="portable")
    expected = {name: x for name, x in wide._asdict().items() if x is not None}
    found = []
    ways: tuple[tuple[Any, int], ...] = ((np.asarray, 1), (np.asarray, 5), (as_torch, 2))
    for library, threads in ways:
        given = {name: library(narrow(x)) for name, x in case.arrays().items()}
        d_out = library(narrow(case.d_out()))
        with on_threads(threads):
            out, lse = relative_attention(**given, **case.call(), return_lse=True)
            alone = relative_attention(**given, **case.call())
            gradients = relative_attention_vjp(d_out, **given, **case.call(), impl="native")
            of_names = {name: x for name, x in gradients._asdict().items() if x is not None}
            found.append({"out": out, "lse": lse, "alone": alone, **of_names})
    assert expected.keys() <= found[0].keys()
    for name, x in found[0].items():
        for other in found[1:]:
            np.testing.assert_array_equal(np.asarray(x), np.asarray(other[name]), name)
    for name, x in expected.items():
        close(np.asarray(found[0][name]), x, name)


def test_after_the_end_of_the_main_thread_calls_still_work() -> None:
    script = """
import atexit

def late(who):
    for _ in range(3):
        assert np.array_equal(attend(), expected)
    print(who)

def thread():
    threading.main_thread().join()
    late("thread")

atexit.register(late, "atexit")
threading.Thread(target=thread).start()
"""
    assert run(SETUP + script) == "thread\natexit\n"


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are no limits of threads elsewhere")
def test_where_no_thread_can_be_started_the_caller_does_it_all() -> None:
    script = """
import resource
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, -1))
try:
    threading.Thread(target=print).start()
except RuntimeError:
    assert np.array_equal(attend(), expected)
    print("alone")
"""
    assert run(SETUP + script, shell="ulimit -s 1048576") == "alone\n"  # KiB of each thread's stack


@pytest.mark.skipif(not kernels_built.COMPILER, reason="no compiler of C++ is here")
def test_threads_that_begin_late_delay_no_call() -> None:
    sources = [Path(__file__).parents[1] / "support" / "late_threads.cpp", kernels_built.SOURCE / "threads.cpp"]
    what = [*kernels_built.FLAGS, f"-I{kernels_built.SOURCE}", *map(str, sources), "-lpthread"]
    program = kernels_built.made("late_threads", what, [*sources, kernels_built.SOURCE / "threads.hpp"])
    ended = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_many_calls_take_neither_threads_nor_memory() -> None:
    script = """
import resource, time
from pathlib import Path

threads_before = len([*Path("/proc/self/task").iterdir()])

def taken():
    for _ in range(1000):  # threads end a moment after the call
        if len([*Path("/proc/self/task").iterdir()]) == threads_before:
            break
        time.sleep(0.01)
    size = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
    return len([*Path("/proc/self/task").iterdir()]), size

for threads in range(1, 33):
    attend(threads)
before = taken()
for _ in range(3000):
    attend()
after = taken()
assert after[0] == before[0] == threads_before, (before, after)
assert after[1] - before[1] < 2**21, (before, after)
print("done")
"""
    # `make sanitize` keeps freed memory for a while, which here would be all of it.
    kept_back = "export ASAN_OPTIONS=$ASAN_OPTIONS:quarantine_size_mb=0:thread_local_quarantine_size_kb=0"
    assert run(SETUP + script, shell=kept_back) == "done\n"
