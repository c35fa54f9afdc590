"""Calls that the compiled kernels serve, and how close to float64 they come."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from dense import CASES as DENSE
from dense import Case, each
from libraries import GATES
from relskew_core import Span, backends
from relskew_core._kernel.call import Arguments
from relskew_core._kernel.problem import problem
from relskew_core.backends import _compiled
from relskew_core.backends._numpy import compiled as of_numpy
from relskew_core.backends._torch.cpu import compiled as of_torch

GATE = 2e-5  # of float32, beside the largest number of a result

DTYPES = ("float32", "float64")


def narrow(x: Any, dtype: str = "float32") -> Any:
    return each(lambda x: x.astype(dtype) if getattr(x, "dtype", None) == np.float64 else x, x)


def as_torch(x: Any) -> Any:
    return each(lambda x: torch.from_numpy(x.copy()), x)


STAMPS = tuple(np.cumsum(np.random.default_rng(n).integers(0, 4, (2, n)), -1).tolist() for n in (110, 600))
"""Where 110 queries and 600 keys of two items stand, one not before the other."""

ANYWHERE = tuple(np.random.default_rng(n).integers(-50, 90, n).tolist() for n in (60, 1100))
DOCUMENTS = tuple(np.sort(np.random.default_rng(n).integers(-2, 7, (2, n)), -1).tolist() for n in (110, 600))
MIXED = tuple(np.random.default_rng(n).integers(0, 3, n).tolist() for n in (2, 700))

LONG: list[Case] = [
    Case("blocks of queries and of keys", n=110, m=600, d=24, dv=40, heads=4, kv_heads=2, span=Span(40, 700, "clip"),
         tables="rel_k rel_v rel_bias", options={"offset": 300}),
    Case("causal and long", n=300, m=300, d=64, lead=(1,), span=Span.causal(300), tables="rel_k rel_v",
         options={"causal": True}),
    Case("window beyond the table", n=130, m=130, d=16, span=Span(5, 3, "zero"), tables="rel_k rel_v rel_bias",
         options={"window": (60, 9)}),
    Case("local blocks", n=200, m=200, d=8, span=Span(5, 3, "clip"), tables="rel_k rel_v rel_bias",
         options={"block_size": 37, "blocks_before": 2}),
    Case("softcap and mask", n=100, m=150, d=32, span=Span(149, 149), mask="boolean", options={"softcap": 2.0}),
    Case("queries that meet the table", n=60, m=560, d=32, rel_q_width=20, span=Span(700, 700, "clip"), tables="rel_k",
         options={"rel_scale": 0.5}),
    Case("all beyond the table", n=5, m=100, d=24, span=Span(1, 1, "clip"), tables="rel_k rel_v rel_bias",
         options={"offset": -16, "window": (29, 77), "softcap": 3.0}),
    Case("keys that meet a table", n=130, m=300, d=24, heads=4, kv_heads=2, span=Span(90, 40, "clip"),
         tables="rel_k key_table", options={"offset": 100, "rel_scale": 0.3}),
    Case("keys that meet a short table", n=50, m=50, d=16, span=Span(3, 0, "zero"), tables="key_table",
         options={"window": (9, 9)}),
    Case("keys beyond the end of a table, all of them", n=50, m=60, d=16, heads=4, kv_heads=2, span=Span(5, 2, "zero"),
         tables="rel_k key_table", own_tables=False, options={"offset": 70}),
    Case("keys far ahead of a table", n=50, m=60, d=16, span=Span(0, 9, "clip"), tables="rel_k key_table",
         options={"offset": -25}),
    Case("few queries, keys that meet a table", n=2, m=90, d=16, span=Span(20, 9, "clip"), tables="key_table rel_v",
         options={"offset": 40}),
    Case("few queries and a short table, which keys meet", n=3, m=60, d=20, span=Span(5, 2, "zero"),
         tables="rel_k key_table", options={"offset": 30}),
    Case("few queries, blocks of keys", n=2, m=1300, d=16, dv=24, span=Span(600, 900, "clip"),
         tables="rel_k rel_v rel_bias", options={"offset": 500}),
    Case("dropout of many", n=100, m=530, d=32, span=Span(30, 20, "clip"), tables="rel_k rel_v",
         options={"dropout": 0.3, "seed": 5, "offset": 400}),
    Case("time stamps, causal", n=110, m=600, d=24, dv=40, heads=4, kv_heads=2, span=Span(40, 70, "clip"),
         tables="rel_k rel_v rel_bias", labels={"positions": STAMPS}, options={"causal": True}),
    Case("positions anywhere", n=60, m=1100, d=16, rel_q_width=20, span=Span(9, 70, "zero"), tables="rel_k rel_v",
         labels={"positions": ANYWHERE}, options={"softcap": 4.0, "rel_scale": 0.5}),
    Case("positions anywhere, in blocks", n=60, m=1100, d=8, span=Span(200, 200), mask="boolean",
         labels={"positions": ANYWHERE}, options={"block_size": 30, "blocks_before": 1}),
    Case("positions of which a window leaves one", n=60, m=1100, d=8, span=Span(3, 3, "clip"), tables="rel_v",
         labels={"positions": ANYWHERE}, options={"window": (0, 0)}),
    Case("time stamps, keys with a table", n=110, m=600, d=24, heads=4, kv_heads=2, span=Span(40, 70, "clip"),
         tables="rel_k rel_bias key_table", labels={"positions": STAMPS}, options={"causal": True, "rel_scale": 0.3}),
    Case("time stamps, wide keys with a table", n=110, m=600, d=70, dv=66, span=Span(40, 70, "clip"),
         tables="rel_k rel_v key_table", labels={"positions": STAMPS}),
    Case("positions anywhere, keys with a table", n=60, m=1100, d=16, span=Span(9, 70, "zero"),
         tables="key_table rel_v", mask="additive", labels={"positions": ANYWHERE}, options={"softcap": 4.0}),
    Case("positions anywhere, in blocks, keys with a table", n=60, m=1100, d=8, span=Span(200, 200),
         tables="key_table", own_tables=False, labels={"positions": ANYWHERE},
         options={"block_size": 30, "blocks_before": 1}),
    Case("positions of which a window leaves one, keys with a table", n=60, m=1100, d=8, span=Span(3, 3, "clip"),
         tables="key_table", labels={"positions": ANYWHERE}, options={"window": (0, 0)}),
    Case("one query of stamps and documents, keys with a table", n=1, m=600, d=16, span=Span(30, 9, "clip"),
         tables="rel_k key_table", labels={"positions": ([70], STAMPS[1]), "segments": ([3], DOCUMENTS[1])}),
    Case("documents", n=110, m=600, d=24, heads=4, kv_heads=2, span=Span(40, 70, "clip"),
         tables="rel_k rel_v rel_bias", labels={"segments": DOCUMENTS}, options={"offset": 5, "causal": True}),
    Case("documents in a window, keys that meet a table", n=110, m=600, d=24, span=Span(90, 70, "zero"),
         tables="key_table", labels={"segments": DOCUMENTS}, options={"offset": 77, "window": (300, 3)}),
    Case("documents in a window that begins amid a vector", n=110, m=600, d=16, span=Span(30, 9, "clip"),
         labels={"segments": DOCUMENTS}, options={"offset": 301, "window": (20, 3)}),
    Case("few queries of documents in any order", n=2, m=700, d=16, span=Span(9, 9, "clip"), tables="rel_k rel_v",
         labels={"segments": MIXED}, options={"offset": 350, "dropout": 0.2, "seed": 3}),
    Case("stamps and documents", n=110, m=600, d=16, span=Span(30, 0, "zero"), tables="rel_k rel_v",
         labels={"positions": STAMPS, "segments": DOCUMENTS}),
    Case("nothing seen by some", n=70, m=30, span=Span(9, 9, "clip"), tables="rel_k", options={"window": (3, 3)}),
]  # fmt: skip


def is_served(case: Case) -> bool:
    call = problem(Arguments(**{name: narrow(x) for name, x in case.arrays().items()}, **case.call()))
    return call.ragged is None and _compiled.serves(call.operands(), call.options)


CASES = [case for case in [*DENSE, *LONG] if is_served(case)]


def close(found: Any, expected: Any, what: str = "") -> None:
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(found), finite, err_msg=what)
    if found.dtype == np.float64:
        size = max(1.0, float(np.linalg.norm(expected[finite])))
        assert np.linalg.norm(found[finite] - expected[finite]) <= GATES["float64"] * size, what
        return
    scale = max(1.0, np.abs(expected[finite]).max(initial=0))
    np.testing.assert_allclose(found[finite], expected[finite], rtol=0, atol=GATE * scale, err_msg=what)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Work on so many threads, however little there is to do."""
    before = torch.get_num_threads()
    backends.set_numpy_threads(count)
    torch.set_num_threads(count)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(of_numpy, "NUMPY", of_numpy.NUMPY._replace(shared=0))
            patch.setattr(of_torch, "TORCH", of_torch.TORCH._replace(shared=0))
            yield
            assert torch.get_num_threads() == count
    finally:
        backends.set_numpy_threads(None)
        torch.set_num_threads(before)
