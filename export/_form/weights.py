"""Weights of any array library as NumPy arrays of the graph's element type, and their layout in the graph."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from relskew_core._array.checks import describe
from relskew_core._array.namespace import check_plain
from relskew_core._block.spec import BlockSpec
from relskew_core._functions.buckets import alibi_slopes
from relskew_core.export._form.plan import GraphPlan

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}  # fmt: skip

SCALED = "(in, out), scaled by head_dim**-0.5"
ROWS = 256
TENSOR_LIMIT = 2**31 - 2**16  # one protobuf message, less some space for the tensor's name and shape


def read_weights(spec: BlockSpec, weights: Any, *, projections: bool) -> dict[str, np.ndarray]:
    spec.check_weights(weights, projections=projections)
    return {key: to_numpy(key, weights[key]) for key in spec.weight_shapes(projections=projections)}


def resolve_dtype(dtype: Any, weights: Mapping[str, np.ndarray]) -> np.dtype[Any]:
    """Return the requested element type, or the one that all weights share; float32 if there are none."""
    if dtype is not None:
        return DTYPES[check_dtype(dtype)]
    if not weights:
        return DTYPES["float32"]
    (first_key, first), *others = weights.items()
    for key, array in others:
        if array.dtype != first.dtype:
            raise ValueError(
                f"`weights[{key!r}]` must have the dtype of `weights[{first_key!r}]`, {first.dtype}, "
                f"unless `dtype` is given, got {array.dtype}"
            )
    return first.dtype


def check_dtype(dtype: Any) -> str:
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(map(repr, DTYPES))}, string or dtype, got {dtype!r}")
    return name


def dtype_name(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype
    if str(dtype).startswith("torch."):
        return str(dtype).removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return str(dtype)


class StoredWeight(NamedTuple):
    key: str
    array: np.ndarray
    doc: str


def round_weight(key: str, array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Round a finite weight to ``dtype``; errors for NaN, inf and overflow name the key."""
    if not np.all(np.isfinite(array)):
        raise ValueError(f"`weights[{key!r}]` must be finite, got NaN or inf in {array.dtype} of {array.shape}")
    with np.errstate(over="ignore", under="ignore"):
        rounded = array.astype(dtype, copy=False)
    if not np.all(np.isfinite(rounded)):
        largest = float(np.max(np.abs(array.astype(np.float64))))
        raise ValueError(f"`weights[{key!r}]` must fit into {dtype.name}, got a magnitude of {largest:.6g}")
    return rounded


def graph_layout(plan: GraphPlan, weights: Iterable[tuple[str, np.ndarray]]) -> Iterator[StoredWeight]:
    """Yield each weight as the graph stores it, one at a time, so that copies of all of them are never held at once."""
    for weight in _laid_out(plan, weights):
        if weight.array.nbytes > TENSOR_LIMIT:
            raise ValueError(
                f"`weights[{weight.key!r}]` must be at most 2 GiB as stored, what one ONNX tensor holds, "
                f"got {weight.array.nbytes / 2**30:.2f} GiB of {weight.array.dtype.name}"
            )
        yield weight
        del weight  # free it before the next one is made


def _laid_out(plan: GraphPlan, weights: Iterable[tuple[str, np.ndarray]]) -> Iterator[StoredWeight]:
    spec = plan.spec
    start, stop = plan.kept_rows
    where = f"relative position 0 is at {plan.lead}"
    if spec.rel_bias == "alibi":
        slopes = np.asarray(alibi_slopes(spec.num_heads), np.float64)[:, None]
        if plan.endless:  # at least float32, like distances: half precision cannot represent all of them
            dtype = np.dtype(np.float32) if plan.dtype.itemsize == 2 else plan.dtype
            yield StoredWeight(
                "rel_bias", -slopes.astype(dtype), "(head, 1), minus the slope, which distances multiply"
            )
        else:
            distances = np.abs(np.arange(start, stop, dtype=np.int64) - spec.span.left)
            rows = _with_ends(plan, (-slopes * distances).astype(plan.dtype)[..., None])[..., 0]
            yield StoredWeight("rel_bias", rows, f"(head, position); {where}")
    for key, array in weights:
        if key in ("rel_k", "rel_v"):
            yield StoredWeight(key, _with_ends(plan, array[..., start:stop, :]), f"(position, head_dim); {where}")
        elif key == "rel_bias":
            bias = array[list(spec.buckets())].T if spec.rel_bias == "t5" else np.atleast_2d(array)
            rows = _with_ends(plan, bias[:, start:stop, None])[..., 0]
            yield StoredWeight(key, rows, f"(head, position); {where}")
        elif key == "sinks":
            yield StoredWeight(key, array[:, None, None], "(head, 1, 1)")
        elif key.startswith("q_proj"):
            yield StoredWeight(key, _scaled(array, spec.head_dim**-0.5, plan.dtype).T, SCALED)
        else:
            yield StoredWeight(key, array.T, "(in, out)")


def _scaled(array: np.ndarray, factor: float, dtype: np.dtype[Any]) -> np.ndarray:
    scaled = np.empty(array.shape, dtype)
    for start in range(0, len(array), ROWS):
        scaled[start : start + ROWS] = (array[start : start + ROWS].astype(np.float64) * factor).astype(dtype)
    return scaled


def _with_ends(plan: GraphPlan, rows: np.ndarray) -> np.ndarray:
    edge = int(plan.spec.span.beyond == "clip")
    longer = [
        np.repeat(end, count, axis=-2) * rows.dtype.type(edge)
        for end, count in zip((rows[..., :1, :], rows[..., -1:, :]), plan.added_rows, strict=True)
    ]
    head, tail = (np.zeros_like(rows[..., :1, :]).repeat(count, axis=-2) for count in plan.spare_rows)
    return np.concatenate([head, longer[0], rows, longer[1], tail], axis=-2)


def to_numpy(key: str, given: Any) -> np.ndarray:
    check_plain(f"weights[{key!r}]", given, converted=True)
    array: np.ndarray = _host_copy(given) if hasattr(given, "dtype") else given
    if not hasattr(array, "dtype") or dtype_name(array.dtype) not in DTYPES:
        raise TypeError(f"`weights[{key!r}]` must have one of the dtypes {', '.join(DTYPES)}, got {describe(array)}")
    return array


def _host_copy(array: Any) -> Any:
    for step in ("detach", "cpu"):  # torch
        if hasattr(array, step):
            array = getattr(array, step)()
    if dtype_name(array.dtype) == "bfloat16" and hasattr(array, "float"):  # NumPy has no bfloat16 for torch
        return array.view(sys.modules["torch"].int16).numpy().view(DTYPES["bfloat16"])
    if hasattr(array, "__cuda_array_interface__"):  # CuPy
        return array.get()
    try:
        return np.asarray(array)
    except (TypeError, ValueError, RuntimeError):
        return np.from_dlpack(array)
