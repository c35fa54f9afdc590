"""Calls of a split sequence on devices of JAX, four in one process: ``python -m split.jax_calls AXIS_TYPE``."""

import os
import sys

DEVICES = 4
# JAX reads this when it is imported, so that the imports come later (E402).
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

from dense import Case  # noqa: E402
from relskew_core import Span, relative_attention  # noqa: E402
from relskew_core.distributed._layout import runs  # noqa: E402
from relskew_core.distributed.jax import ring_attention  # noqa: E402
from split.calls import axis_of, case, made  # noqa: E402

CASES = {
    "contiguous": case("contiguous", kv_heads=2, own_tables=True, by_head="sinks",
                       options={"causal": True, "softcap": 3.0, "segments": "pair"}),
    "zigzag": case("zigzag", span=Span.clipped(3), tables="rel_v", mask="additive",
                   options={"causal": True, "window": (7, None)}),
    "striped": case("striped", span=Span(9, 2, "zero"), tables="rel_k rel_bias", own_tables=True, by_head="scale",
                    options={"causal": True}),
}  # fmt: skip
SINKS = case("sinks", by_head="sinks", by_query=True, options={"causal": True})
FAR = case("far", tables="", mask="additive", options={"causal": True, "far": True})
CROSS = case("cross", n=8, span=Span.clipped(4), tables="rel_k key_table", rel_q_width=4, options={"offset": 3})


class Order:
    """The positions of a whole in the order of the devices."""

    def __init__(self, layout: Any, arrays: dict[str, Any]) -> None:
        self.layout = layout
        self.queries, self.keys = (self.of(arrays[name].shape[-2]) for name in "qk")

    def of(self, length: int) -> Any:
        parts = [run for index in range(DEVICES) for run in runs(self.layout, DEVICES, index, length // DEVICES)]
        return np.concatenate([np.arange(length)[run.positions] for run in parts])

    def moved(self, name: str, x: Any) -> Any:
        axis = axis_of(name, x)
        if axis is None:
            return x
        if name == "segments" and isinstance(x, tuple):
            return x[0][self.queries], x[1][self.keys]
        return jnp.take(x, self.keys if name in ("k", "v", "segments") else self.queries, axis)


def spec(name: str, x: Any) -> Any:
    axis = axis_of(name, x)
    return jax.tree.map(lambda x: PartitionSpec(*[None] * (x.ndim + axis), "ring") if axis else PartitionSpec(), x)


def differentiated(function: Any, d_out: Any, d_lse: Any) -> Any:
    def total(arrays: Any) -> Any:
        out, lse = function(arrays)
        seen = jnp.isfinite(lse)
        of_lse = jnp.where(seen, jnp.where(seen, lse, 0) * d_lse, 0)
        return (out * d_out).sum() + of_lse.sum(), (out, lse)

    return jax.jit(jax.grad(total, has_aux=True))


def agrees(layout: Any, case: Case, mesh: Any) -> None:
    torch.manual_seed(0)
    given, options = made(4 * DEVICES, case)
    arrays = {name: jnp.asarray(x.detach().numpy()) for name, x in given.items()}
    order, random = Order(layout, arrays), np.random.default_rng(0)
    segments: dict[str, Any] = {}
    if "segments" in options:
        segments["segments"] = jax.tree.map(lambda x: jnp.asarray(x.numpy()), options.pop("segments"))
    d_out, d_lse = (jnp.asarray(random.standard_normal(arrays["q"].shape[:axes])) for axes in (4, 3))

    def whole(arrays: dict[str, Any]) -> Any:
        return relative_attention(**arrays, **segments, **options, return_lse=True)

    def part(arrays: dict[str, Any]) -> Any:
        return ring_attention(**arrays, **options, axis_name="ring", layout=layout, return_lse=True)

    expected, (out, lse) = differentiated(whole, d_out, d_lse)(arrays)
    specs = {name: spec(name, x) for name, x in (arrays | segments).items()}
    results = (PartitionSpec(None, None, "ring"),) * 2
    mapped = jax.shard_map(part, mesh=mesh, in_specs=(specs,), out_specs=results)

    def put(x: Any, spec: Any) -> Any:
        return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), x, spec)

    placed = {name: put(order.moved(name, x), specs[name]) for name, x in (arrays | segments).items()}
    labels = {name: placed.pop(name) for name in segments}
    cotangents = put((d_out[..., order.queries, :], d_lse[..., order.queries]), results)
    found, (own, own_lse) = differentiated(lambda arrays: mapped(arrays | labels), *cotangents)(placed)
    np.testing.assert_allclose(own, out[..., order.queries, :], rtol=0, atol=1e-12)
    np.testing.assert_allclose(own_lse, lse[..., order.queries], rtol=0, atol=1e-12)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, order.moved(name, expected[name]), rtol=0, atol=1e-11, err_msg=name)


def sends_no_more_than_a_ring(mesh: Any) -> None:
    """Keys and values once in a loop, gradients once more; nothing is gathered, and a window's far keys never sent."""
    split = PartitionSpec(None, "ring")
    x = jax.device_put(jnp.zeros((2, 8 * DEVICES, 4)), NamedSharding(mesh, split))
    table = jax.device_put(jnp.zeros((8 * DEVICES, 4)), NamedSharding(mesh, PartitionSpec()))

    def count(window: Any) -> list[int]:
        def part(q: Any, k: Any, v: Any, table: Any) -> Any:
            return ring_attention(q, k, v, table, causal=True, window=window, axis_name="ring")

        specs = (split, split, split, PartitionSpec())
        mapped = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=split)
        text = jax.jit(mapped).lower(x, x, x, table).compile().as_text() or ""
        return [
            text.count(f"{name}(") for name in ("collective-permute", "all-gather", "all-reduce", "all-to-all", "while")
        ]

    assert count(None) == [2, 0, 0, 0, 1]
    assert count((8, None)) == [2, 0, 0, 0, 0]
    assert count((0, None)) == [0, 0, 0, 0, 0]


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    devices = jax.make_mesh((DEVICES,), ("ring",), axis_types=(AxisType[sys.argv[1]],))
    for layout, one in [*CASES.items(), ("contiguous", CROSS), ("zigzag", FAR), ("striped", SINKS)]:
        agrees(layout, one, devices)
    sends_no_more_than_a_ring(devices)
    print("all agree")
