"""The description of a block in its graph: a sentence, a digest of its weights, and metadata."""

from __future__ import annotations

import hashlib
import json

import onnx

from relskew_core import __version__
from relskew_core._block.spec import BlockSpec
from relskew_core.export._graph.emitter import CONSTANT
from relskew_core.export._plan import GraphPlan


def metadata(spec: BlockSpec, plan: GraphPlan) -> dict[str, str]:
    """Return the metadata from which ``validate`` reads how the graph of ``spec`` was made."""
    found = {
        "relskew.version": __version__,
        "relskew.spec": json.dumps(spec.to_dict(), sort_keys=True),
        "relskew.profile": plan.profile.name,
        "relskew.dtype": plan.dtype.name,
        "relskew.max_length": "" if plan.max_length is None else str(plan.max_length),
    }
    if plan.chunk_size is not None:
        found["relskew.chunk_size"] = str(plan.chunk_size)
    if plan.in_place:
        found["relskew.in_place"] = "true"
    if plan.segments:
        found["relskew.segments"] = "true"
    if not plan.projections:
        found["relskew.projections"] = "false"
    return found


def summary(plan: GraphPlan) -> str:
    """Return a sentence about the reach of a block's table."""
    sides = {
        "limited": "a longer input fails",
        "clip": "its edge row serves what lies further",
        "zero": "what lies further contributes nothing",
        "hidden": "nothing further is visible",
        "endless": "its bias goes on",
    }
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
