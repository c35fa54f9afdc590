"""``relskew_attention`` of relskew.h with keys, values and tables in int8, called through its structures."""

import _ctypes
import ctypes
import re
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oracles
from libraries import GATES
from operator_runs import needs_library
from relskew_core import Span
from relskew_core.export import custom_ops_library

pytestmark = needs_library

HEADER = Path(__file__).parents[2] / "backends/_compiled/include/relskew.h"
C_TYPES = {"size_t": ctypes.c_size_t, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "double": ctypes.c_double}


class Array(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("axes", ctypes.c_int32), ("sizes", ctypes.c_int64 * 4),
        ("steps", ctypes.c_int64 * 4),
    )  # fmt: skip


@cache
def call_type() -> type[ctypes.Structure]:
    """Return the structure of a call as the header declares it."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    (body,) = re.findall(r"typedef struct relskew_call \{(.*?)\}", text, re.DOTALL)
    types = {**C_TYPES, "relskew_array": Array}
    fields = [
        (name.strip(), types[kind]) for kind, names in re.findall(r"(\w+) ([^;]+);", body) for name in names.split(",")
    ]
    return type("Call", (ctypes.Structure,), {"_fields_": fields})


def view(x: Any) -> Array:
    steps = [stride // x.itemsize for stride in x.strides]
    return Array(x.ctypes.data, x.ndim, (ctypes.c_int64 * 4)(*x.shape), (ctypes.c_int64 * 4)(*steps))


def attend(views: dict[str, Array], library: ctypes.CDLL | None = None, **numbers: Any) -> str:
    """Make a causal call, and return its error."""
    made: Any = call_type()(type=1, window_left=-1, window_right=-1, blocks_before=-1, causal=1, **numbers, **views)
    made.size, made.scale, made.rel_scale = ctypes.sizeof(made), np.nan, np.nan
    error = ctypes.create_string_buffer(200)
    function = (library or ctypes.CDLL(str(custom_ops_library()))).relskew_attention
    assert function(ctypes.byref(made), error, ctypes.c_size_t(200)) == bool(error.value)
    return error.value.decode()


def arrays(queries: int, keys: int, width: int) -> dict[str, Any]:
    """Return a call in int8, with heads side by side, rows that lie apart, and scales by position."""
    draw = np.random.default_rng(0)
    k, v = (draw.integers(-127, 128, (2, keys, 2, width + 3), np.int8)[..., :width] for _ in range(2))
    k_scale, v_scale = (draw.random((2, keys, 2), np.float32) / 64 for _ in range(2))
    return {
        "q": draw.standard_normal((2, 4, queries, width), np.float32),
        "k": k.swapaxes(1, 2), "v": v.swapaxes(1, 2),
        "k_scale": k_scale.swapaxes(1, 2), "v_scale": v_scale.swapaxes(1, 2),
        "rel_k": draw.standard_normal((4, keys, width), np.float32),
        "key_table": draw.standard_normal((1, keys, width), np.float32),
        "out": np.zeros((2, 4, queries, width), np.float32),
    }  # fmt: skip


@pytest.mark.parametrize("width", [16, 21])
@pytest.mark.parametrize("queries", [1, 70])
def test_arrays_in_int8_may_have_any_strides(queries: int, width: int) -> None:
    given, keys = arrays(queries, 600, width), 600
    assert not attend({name: view(x) for name, x in given.items()}, left=keys - 1, offset=keys - queries, threads=2)
    out = given.pop("out")
    for name in "kv":
        given[name] = given[name] * given.pop(f"{name}_scale")[..., None]
    expected = oracles.relative_attention(**given, span=Span.causal(keys), causal=True, offset=keys - queries).out
    assert oracles.relative_error(out, expected) < GATES["float32"]


def tables(rows: int, width: int) -> dict[str, Any]:
    """Return tables in int8, with rows that lie apart, one for each head and one for all."""
    draw = np.random.default_rng(1)
    rel_k, rel_v = (draw.integers(-127, 128, (heads, rows, width + 3), np.int8)[..., :width] for heads in (4, 1))
    scales = (draw.random((heads, rows), np.float32) / 64 for heads in (4, 1))
    return {"rel_k": rel_k, "rel_v": rel_v, **dict(zip(("rel_k_scale", "rel_v_scale"), scales, strict=True))}


@pytest.mark.parametrize("width", [16, 21])
@pytest.mark.parametrize("rows", [600, 40], ids=["whole", "clipped"])
@pytest.mark.parametrize("queries", [1, 70])
@pytest.mark.parametrize("of_keys", [False, True], ids=["", "and keys"])
def test_tables_in_int8_are_the_tables_that_they_round_to(
    queries: int, rows: int, width: int, *, of_keys: bool
) -> None:
    given, keys = {**arrays(queries, 600, width), **tables(rows, width)}, 600
    del given["key_table"]
    for name in () if of_keys else "kv":
        given[name] = given[name] * given.pop(f"{name}_scale")[..., None]
    views, offset = {name: view(x) for name, x in given.items()}, keys - queries
    assert not attend(views, left=rows - 1, beyond=1, offset=offset, threads=2)
    out = given.pop("out")
    for name in ("rel_k", "rel_v", *("kv" if of_keys else ())):
        given[name] = given[name] * given.pop(f"{name}_scale")[..., None]
    expected = oracles.relative_attention(**given, span=Span.causal(rows, "clip"), causal=True, offset=offset).out
    assert oracles.relative_error(out, expected) < GATES["float32"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_library_stays_for_threads_that_begin_after_it_is_closed(tmp_path: Path) -> None:
    copy = shutil.copy(custom_ops_library(), tmp_path)
    library = ctypes.CDLL(str(copy))
    given = arrays(70, 600, 16)
    assert not attend({name: view(x) for name, x in given.items()}, library, left=599, offset=530, threads=8)
    _ctypes.dlclose(library._handle)
    assert str(copy) in Path("/proc/self/maps").read_text()


def resized(array: Array, axis: int, size: int) -> None:
    array.sizes[axis] = size


WRONG: list[tuple[str, Callable[[Array], object], str]] = [
    ("k_scale", lambda x: setattr(x, "data", None), "`k_scale` is missing"),
    ("v_scale", lambda x: setattr(x, "data", None), "`v_scale` is missing"),
    ("k", lambda x: setattr(x, "data", None), "`k` is missing"),
    ("v", lambda x: setattr(x, "data", None), "`v` is missing"),
    ("k_scale", lambda x: setattr(x, "data", x.data + 1), "`k_scale` must be aligned"),
    ("k_scale", lambda x: setattr(x, "axes", 5), "`k_scale` must have up to 4 axes, got 5"),
    ("v_scale", lambda x: setattr(x, "axes", -1), "`v_scale` must have up to 4 axes, got -1"),
    ("k_scale", lambda x: resized(x, 2, 59), "`k_scale` has a different size"),
    ("v_scale", lambda x: resized(x, 1, 4), "`v_scale` has a different size"),
    ("v", lambda x: resized(x, 2, 61), "`v` has a different size"),
    ("rel_k", lambda x: setattr(x, "data", None), "`rel_k` is missing"),
    ("rel_v", lambda x: resized(x, 1, 59), "`rel_v` has a different size"),
    ("rel_k_scale", lambda x: resized(x, 1, 59), "`rel_k_scale` has a different size"),
    ("rel_v_scale", lambda x: resized(x, 0, 3), "`rel_v_scale` has a different size"),
    ("k", lambda x: resized(x, 3, 17), "`k` has a different size"),
    ("k", lambda x: x.steps.__setitem__(3, 2), "`k` must be contiguous along its last axis"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), WRONG, ids=[f"{name}: {message}" for name, _, message in WRONG])
def test_wrong_arrays_in_int8_are_refused(name: str, spoil: Callable[[Array], object], message: str) -> None:
    given = {**arrays(2, 60, 16), **tables(60, 16)}
    views = {own: view(x) for own, x in given.items()}
    spoil(views[name])
    assert message in attend(views, left=59, offset=58)
    assert not given["out"].any()
