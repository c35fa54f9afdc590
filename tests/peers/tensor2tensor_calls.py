"""Calls of tensor2tensor in a separate process: ``python tensor2tensor_calls.py FOUND.npz``."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

CALLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    f"clipped, {n} of {m}": ("dot_product_attention_relative", {"q": n, "k": m, "hidden": True}, {
        "max_relative_position": 3, "cache": n == 1, "allow_memory": 1 < n < m,
    })
    for n, m in [(9, 9), (2, 2), (4, 9), (1, 9)]
}  # fmt: skip
"""Names of functions, their lengths of queries and keys and whether the future is hidden, and their options."""

CALLS["clipped, both ways"] = "dot_product_attention_relative", {"q": 9, "k": 9}, {"max_relative_position": 3}
for length in (2, 5, 17):
    for shared in (False, True):
        options = {
            "max_relative_position": 5, "heads_share_relative_embedding": shared, "add_relative_to_values": True,
        }  # fmt: skip
        given = {"q": length, "k": length}
        CALLS[f"causal, {length}, {shared}"] = (
            "dot_product_self_attention_relative_v2", {**given, "hidden": True}, options,
        )  # fmt: skip
        CALLS[f"unmasked, {length}, {shared}"] = "dot_product_unmasked_self_attention_relative_v2", given, options
for length in (6, 7, 17):
    local = {"block_length": 3, "add_relative_to_values": True, "name": "local"}
    CALLS[f"local, {length}"] = "masked_relative_local_attention_1d", {"q": length, "k": length, "local": True}, local
CALLS["2d"] = (
    "dot_product_unmasked_self_attention_relative_2d", {"q": (3, 4), "k": (3, 4)}, {"max_relative_position": 4},
)  # fmt: skip
CALLS["proximal"] = "attention_bias_proximal", {}, {"length": 7}


def inputs(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return random queries, which are scaled, keys and values, and the bias that hides what comes after a query."""
    if not sizes:
        return {}
    rng, (n, m) = np.random.default_rng(1), (np.atleast_1d(sizes[name]) for name in "qk")
    arrays: dict[str, Any] = {
        name: rng.standard_normal((2, 3, *length, 8)) for name, length in (("q", n), ("k", m), ("v", m))
    }
    if "local" not in sizes:
        arrays["bias"] = np.triu(np.full((n[0], m[0]), -1e9), m[0] - n[0] + 1) if "hidden" in sizes else None
    return arrays


def main(found: str) -> None:
    """Make each call with random variables, and write the results and the variables."""
    import tensorflow.compat.v1 as tf
    from peers.common import definitions

    layers = ["shape_list", "dropout_with_broadcast_dims", "cast_like", "ones_matrix_band_part"]
    made = definitions("tensor2tensor", "layers/common_layers.py", *layers, tf=tf)
    common = SimpleNamespace(should_generate_summaries=lambda: False, **dict(zip(layers, made, strict=True)))
    functions = sorted({function for function, *_ in CALLS.values()})
    attentions = definitions(
        "tensor2tensor", "layers/common_attention.py", *functions, "_generate_relative_positions_matrix",
        "_generate_relative_positions_embeddings", "_relative_attention_inner", "get_relative_embeddings_left",
        "get_relative_embeddings_left_right", "matmul_with_relative_keys", "matmul_with_relative_values",
        "_matmul_with_relative_keys_2d", "_relative_position_to_absolute_position_masked",
        "_relative_position_to_absolute_position_unmasked", "_absolute_position_to_relative_position_masked",
        "_absolute_position_to_relative_position_unmasked", "attention_bias_lower_triangle", "attention_bias_local",
        "_make_local_block", tf=tf, common_layers=common,
        expert_utils=SimpleNamespace(add_name_scope=lambda: lambda decorated: decorated),
    )  # fmt: skip
    arrays, rng = {}, np.random.default_rng(2)
    for name, (function, sizes, options) in CALLS.items():
        with tf.Graph().as_default(), tf.Session() as session:
            given = {key: None if x is None else tf.constant(x, tf.float32) for key, x in inputs(sizes).items()}
            result = attentions[functions.index(function)](**given, **options)
            for index, variable in enumerate(tf.global_variables()):
                drawn = arrays[f"{name}: table {index}"] = rng.standard_normal(variable.shape).astype("float32")
                variable.load(drawn, session)
            arrays[name] = session.run(result[0] if isinstance(result, tuple) else result)
    np.savez(found, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
