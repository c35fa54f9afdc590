"""A decoder that onnx alone makes and NumPy alone repeats: for what runs decoders, whoever made them."""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from relskew_core.export import caches_in_place

VOCABULARY, HEADS, WIDTH, LAYERS = 30, 2, 4, 2
_RANDOM = np.random.default_rng(0)
EMBEDDING = _RANDOM.standard_normal((VOCABULARY, HEADS * WIDTH)).astype(np.float32)
HEAD = _RANDOM.standard_normal((HEADS * WIDTH, VOCABULARY)).astype(np.float32)
CACHES = [f"{layer}.{kind}" for layer in range(LAYERS) for kind in ("key", "value")]


def growing(dtype: Any = np.float32, **metadata: str) -> onnx.ModelProto:
    """Return a decoder whose layers add up, for every token, what the tokens up to it have left in the caches."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [helper.make_node("Gather", ["embedding", "input_ids"], ["x0"])]
    nodes.append(helper.make_node("Shape", ["input_ids"], ["length"], start=1, end=2))
    nodes.append(helper.make_node("Neg", ["length"], ["first"]))

    def node(op_type: str, inputs: str, output: str, **attributes: Any) -> None:
        nodes.append(helper.make_node(op_type, inputs.split(), [output], name=output, **attributes))

    for n in range(LAYERS):
        node("Reshape", f"x{n} apart", f"apart{n}")
        node("Transpose", f"apart{n}", f"heads{n}", perm=[0, 2, 1, 3])
        node("Add", f"heads{n} heads{n}", f"twice{n}")
        node("Concat", f"past_key_values.{n}.key heads{n}", f"present.{n}.key", axis=2)
        node("Concat", f"past_key_values.{n}.value twice{n}", f"present.{n}.value", axis=2)
        node("Mul", f"present.{n}.key present.{n}.value", f"both{n}")
        node("CumSum", f"both{n} axis", f"sums{n}")
        node("Slice", f"sums{n} first end last_axis", f"own{n}")
        node("Transpose", f"own{n}", f"back{n}", perm=[0, 2, 1, 3])
        node("Reshape", f"back{n} joined", f"flat{n}")
        node("Add", f"x{n} flat{n}", f"sum{n}")
        node("Sin", f"sum{n}", f"x{n + 1}")
    node("MatMul", f"x{LAYERS} head", "logits")
    arrays = {
        "embedding": EMBEDDING.astype(dtype), "head": HEAD.astype(dtype), "axis": np.array(2),
        "apart": np.array([0, 0, HEADS, WIDTH]), "joined": np.array([0, 0, -1]), "end": np.array([2**62]),
        "last_axis": np.array([2]),
    }  # fmt: skip
    tensor = helper.make_tensor_value_info
    pasts = [tensor(f"past_key_values.{name}", kind, ["batch", HEADS, "past_length", WIDTH]) for name in CACHES]
    presents = [tensor(f"present.{name}", kind, ["batch", HEADS, "total_length", WIDTH]) for name in CACHES]
    graph = helper.make_graph(
        nodes, "decoder", [tensor("input_ids", TensorProto.INT64, ["batch", "length"]), *pasts],
        [tensor("logits", kind, ["batch", "length", VOCABULARY]), *presents],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    helper.set_model_props(model, metadata)
    return model


def in_place(length: int | None = None, **options: Any) -> onnx.ModelProto:
    """Return the same with caches in place, of a length that the graph fixes if there is one."""
    model = caches_in_place(growing(**options))
    for value in (*model.graph.input, *model.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param == "cache_length" and length is not None:
                size.dim_value = length
    return model


def logits(tokens: Any) -> np.ndarray[Any, Any]:
    x = EMBEDDING[np.asarray(tokens)]
    for _ in range(LAYERS):
        x = np.sin(x + np.cumsum(2 * x * x, axis=1))
    return x @ HEAD


def greedy(prompt: Any, n: int) -> np.ndarray[Any, Any]:
    tokens = np.asarray(prompt)
    for _ in range(n):
        tokens = np.concatenate([tokens, logits(tokens)[:, -1:].argmax(-1)], axis=1)
    return tokens[:, tokens.shape[1] - n :]
