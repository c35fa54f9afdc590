"""The description of a block in its graph: its inputs, a sentence, a digest of its weights, and metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import onnx

from relskew_core import __version__
from relskew_core._block.spec import BlockSpec
from relskew_core.export._form.plan import PROFILES, GraphPlan
from relskew_core.export._nodes.emitter import BOOL, CONSTANT, INT64, Shape
from relskew_core.export._nodes.functions import metadata_of


class GraphInput(NamedTuple):
    name: str
    shape: Shape
    doc: str
    dtype: np.dtype[Any]


def inputs_of(plan: GraphPlan) -> Iterator[GraphInput]:
    spec, dtype = plan.spec, plan.dtype
    length, so_far = ("cache_length",) * 2 if plan.in_place else ("past_length", "total_length")
    if plan.projections:
        yield GraphInput("x", ("batch", "query_length", spec.embed_dim), "input of the queries", dtype)
        if spec.cross:
            shape: Shape = ("batch", "memory_length", spec.embed_dim)
            yield GraphInput("memory", shape, "input of the keys and values", dtype)
    else:
        shape = ("batch", spec.num_heads, "query_length", spec.head_dim)
        yield GraphInput("q", shape, "queries, not scaled", dtype)
        shape = ("batch", spec.num_kv_heads, "key_length" if spec.cross else "query_length", spec.head_dim)
        yield GraphInput("k", shape, "keys", dtype)
        yield GraphInput("v", shape, "values", dtype)
    if plan.mask:
        shape = ("mask_batch", "mask_heads", "mask_queries", "mask_keys")
        yield GraphInput("mask", shape, "True = may attend; broadcasts to (batch, heads, queries, keys)", BOOL)
    if plan.segments:
        doc = "segments of all keys, those of the past included: a query sees the keys of its own"
        yield GraphInput("segments", ("batch", so_far if plan.past else "query_length"), doc, INT64)
    if plan.past:
        shape = ("batch", spec.num_kv_heads, length, spec.head_dim)
        yield GraphInput("past_key", shape, "keys of the positions before the queries", dtype)
        yield GraphInput("past_value", shape, "values of the positions before the queries", dtype)
    if plan.in_place:
        doc = "how many positions of the cache count, where the queries go on; what lies behind must be finite"
        yield GraphInput("past_lengths", ("batch",), doc, INT64)


def metadata(spec: BlockSpec, plan: GraphPlan) -> dict[str, str]:
    found = {
        "relskew.version": __version__, "relskew.spec": json.dumps(spec.to_dict(), sort_keys=True),
        "relskew.profile": plan.profile.name, "relskew.dtype": plan.dtype.name,
        "relskew.max_length": "" if plan.max_length is None else str(plan.max_length),
    }  # fmt: skip
    if plan.chunk_size is not None:
        found["relskew.chunk_size"] = str(plan.chunk_size)
    found |= {f"relskew.{name}": "true" for name in ("in_place", "segments") if getattr(plan, name)}
    if not plan.projections:
        found["relskew.projections"] = "false"
    return found


class Metadata(NamedTuple):
    spec: BlockSpec | None = None
    profile: str | None = None
    max_length: int | None = None
    chunk_size: int | None = None


def read_metadata(model: onnx.ModelProto) -> tuple[Metadata, str]:
    written = metadata_of(model)
    problems: list[str] = []

    def read(name: str, parse: Callable[[str], Any]) -> Any:
        text = written.get(f"relskew.{name}") or ""
        try:
            return parse(text) if text else None
        except Exception as error:  # a file may contain anything
            problems.append(f"relskew.{name} is {text[:60]!r} ({type(error).__name__}: {str(error)[:100]})")
            return None

    found = Metadata(
        read("spec", lambda text: BlockSpec.from_dict(json.loads(text))), read("profile", _known_profile),
        read("max_length", _positive), read("chunk_size", _positive),
    )  # fmt: skip
    return found, "; ".join(problems)


def _known_profile(text: str) -> str:
    if text not in PROFILES:
        raise ValueError(f"must be one of {', '.join(PROFILES)}")
    return text


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError("must be at least 1")
    return int(text)


def summary(plan: GraphPlan) -> str:
    sides = {
        "limited": "a longer input fails", "clip": "its edge row serves what lies further",
        "zero": "what lies further contributes nothing", "hidden": "nothing further is visible",
        "endless": "its bias goes on",
    }  # fmt: skip
    return (
        "Attention with relative positions r = key position - query position. The table reaches "
        f"{plan.left.rows} into the past ({sides[plan.left.past_edge]}) and {plan.right.rows} into the future "
        f"({sides[plan.right.past_edge]})."
    )


def digest(model: onnx.ModelProto) -> str:
    """SHA-256 over the weights as stored, keys included."""
    found = hashlib.sha256()
    for tensor in model.graph.initializer:
        if not tensor.name.startswith(CONSTANT):
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            found.update(f"{tensor.name} {dtype.name} {tuple(tensor.dims)}\n".encode())
            found.update(tensor.raw_data)
    return found.hexdigest()
