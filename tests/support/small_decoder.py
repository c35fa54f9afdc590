"""A decoder that onnx alone makes and NumPy alone repeats: for what runs decoders, whoever made them."""

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from relskew_core.export import caches_in_place

VOCABULARY, HEADS, WIDTH, LAYERS = 30, 2, 4, 2
_RANDOM = np.random.default_rng(0)
EMBEDDING = _RANDOM.standard_normal((VOCABULARY, HEADS * WIDTH)).astype(np.float32)
HEAD = _RANDOM.standard_normal((HEADS * WIDTH, VOCABULARY)).astype(np.float32)
CACHES = [f"{layer}.{kind}" for layer in range(LAYERS) for kind in ("key", "value")]


def growing(dtype: Any = np.float32, **metadata: str) -> onnx.ModelProto:
    """Return a decoder whose layers add up, for every token, what the tokens up to it have left in the caches."""
    kind = {"float16": "float16", "float32": "float", "float64": "double"}[np.dtype(dtype).name]
    pasts, presents = (
        ", ".join(f'{kind}[batch,{HEADS},{length},{WIDTH}] "{time}.{cache}"' for cache in CACHES)
        for time, length in (("past_key_values", "past_length"), ("present", "total_length"))
    )
    layers = "".join(
        f"""
        apart{n} = Reshape(x{n}, apart) heads{n} = Transpose<perm = [0, 2, 1, 3]>(apart{n})
        twice{n} = Add(heads{n}, heads{n})
        "present.{n}.key" = Concat<axis = 2>("past_key_values.{n}.key", heads{n})
        "present.{n}.value" = Concat<axis = 2>("past_key_values.{n}.value", twice{n})
        both{n} = Mul("present.{n}.key", "present.{n}.value") sums{n} = CumSum(both{n}, axis)
        own{n} = Slice(sums{n}, first, end, last_axis) back{n} = Transpose<perm = [0, 2, 1, 3]>(own{n})
        flat{n} = Reshape(back{n}, joined) sum{n} = Add(x{n}, flat{n}) x{n + 1} = Sin(sum{n})"""
        for n in range(LAYERS)
    )
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 24]> decoder (int64[batch,length] input_ids, {pasts})
        => ({kind}[batch,length,{VOCABULARY}] logits, {presents})
        {{x0 = Gather(embedding, input_ids) length = Shape<start = 1, end = 2>(input_ids) first = Neg(length)
        {layers} logits = MatMul(x{LAYERS}, head)}}
    """)
    arrays = {
        "embedding": EMBEDDING.astype(dtype), "head": HEAD.astype(dtype), "axis": np.array(2),
        "apart": np.array([0, 0, HEADS, WIDTH]), "joined": np.array([0, 0, -1]), "end": np.array([2**62]),
        "last_axis": np.array([2]),
    }  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    for node in model.graph.node:
        node.name = node.output[0]
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
