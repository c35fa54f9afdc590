"""Thousands of calls leave no memory behind, in any way of calling."""

import subprocess
import sys
import textwrap

import pytest

from libraries import NATIVE

SETUP = """
import faulthandler
import numpy as np
import psutil
from relskew_core import Span, relative_attention, relative_attention_vjp

faulthandler.dump_traceback_later(100, exit=True)
arrays = [np.ones(shape) for shape in ((2, 3, 4), (2, 5, 4), (2, 5, 4), (4, 4))]  # q, k, v, table
options = {"span": Span.causal(4, beyond="clip"), "causal": True}
"""
CALLS = """
for offset in range(1000):
    call(offset)
process, grown = psutil.Process(), []
for start in range(0, 6_000, 1_500):
    before = process.memory_info().rss
    for offset in range(start, start + 1_500):  # another one in every call: nothing may be remembered for each
        call(offset)
    grown.append(process.memory_info().rss - before)
print(min(grown))
"""
WAYS = {
    "numpy, portable": "call = lambda offset: relative_attention(*arrays, offset=offset, impl='portable', **options)",
    "numpy, native": f"call = lambda offset: relative_attention(*arrays, offset=offset, impl={NATIVE!r}, **options)",
    "numpy, gradients": "call = lambda offset: relative_attention_vjp(arrays[0], *arrays, offset=offset, **options)",
    "numpy, gradients of more queries": """
        more = arrays[1], *arrays[1:]
        call = lambda offset: relative_attention_vjp(arrays[1], *more, offset=offset, **options)""",
    "torch": """
        import torch
        tensors = [torch.from_numpy(x) for x in arrays]
        call = lambda offset: relative_attention(*tensors, offset=offset, **options)""",
    "jax": """
        import jax
        call = jax.jit(lambda offset: relative_attention(*map(jax.numpy.asarray, arrays), offset=offset, **options))""",
}


@pytest.mark.no_cover
@pytest.mark.parametrize("way", WAYS)
def test_thousands_of_calls_leave_no_memory_behind(way: str) -> None:
    pytest.importorskip(way.partition(",")[0])
    script = SETUP + textwrap.dedent(WAYS[way]) + CALLS
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # A library or its allocator may keep a little; a leak in each round would be 1,500 small objects.
    assert int(done.stdout) < 2**17
