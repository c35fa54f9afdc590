"""Calls of a split sequence on several devices of JAX, in one process: ``python -m split.jax_calls DEVICES AXIS_TYPE``."""

from __future__ import annotations

import os
import sys

DEVICES = int(sys.argv[1]) if __name__ == "__main__" else 1
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from jax.sharding import AxisType, PartitionSpec  # noqa: E402

from relskew_core import relative_attention  # noqa: E402
from relskew_core.distributed._layout import runs  # noqa: E402
from relskew_core.distributed.jax import ring_attention  # noqa: E402
from split.calls import CASES, LAYOUTS, SEQUENCES, made  # noqa: E402


def order(layout: Any, length: int) -> Any:
    """Return the positions of the whole in the order of the devices."""
    parts = [run for index in range(DEVICES) for run in runs(layout, DEVICES, index, length // DEVICES)]
    return np.concatenate([np.arange(length)[run.positions] for run in parts])


def agrees(name: str, case: dict[str, Any], layout: Any, kind: Any) -> None:
    torch.manual_seed(0)
    arrays, options = made(6 * DEVICES, case)
    arrays = {key: jnp.asarray(x.detach().numpy()) for key, x in arrays.items()}
    labels = {
        key: jax.tree.map(lambda x: jnp.asarray(x.numpy()), options.pop(key))
        for key in ("segments", "mask")
        if key in options
    }
    cotangents = [
        jnp.asarray(np.random.default_rng(0).standard_normal(shape))
        for shape in (arrays["q"].shape, arrays["q"].shape[:-1])
    ]

    def whole(arrays: dict[str, Any]) -> Any:
        return relative_attention(**arrays, **labels, **options, return_lse=True)

    def loss(function: Any, cotangents: Any) -> Any:
        def total(arrays: Any) -> Any:
            out, lse = function(arrays)
            seen = jnp.isfinite(lse)
            return (out * cotangents[0]).sum() + jnp.where(seen, jnp.where(seen, lse, 0) * cotangents[1], 0).sum(), (
                out,
                lse,
            )

        return jax.jit(jax.grad(total, has_aux=True))

    gradients, (out, lse) = loss(whole, cotangents)(arrays)
    mesh = jax.make_mesh((DEVICES,), ("ring",), axis_types=(kind,))
    of_q, of_k = (order(layout, arrays[key].shape[-2]) for key in "qk")

    def moved(key: str, x: Any) -> Any:
        if key == "segments":
            return (x[0][of_q], x[1][of_k]) if isinstance(x, tuple) else x[of_k]
        if key in SEQUENCES or key == "mask":
            return x[..., of_k if key in "kv" else of_q, :]
        return x

    def spec(key: str, x: Any) -> Any:
        if key == "segments":
            return jax.tree.map(lambda _: PartitionSpec("ring"), x)
        if key in SEQUENCES or key == "mask":
            return PartitionSpec(*[None] * (x.ndim - 2), "ring")
        return PartitionSpec()

    def split(given: Any) -> Any:
        return ring_attention(**given, **options, axis_name="ring", layout=layout, return_lse=True)

    specs = {key: spec(key, x) for key, x in {**arrays, **labels}.items()}
    results = (PartitionSpec(None, None, "ring"),) * 2
    mapped = jax.shard_map(split, mesh=mesh, in_specs=(specs,), out_specs=results)
    others = {key: moved(key, x) for key, x in labels.items()}
    given = {key: moved(key, x) for key, x in arrays.items()}
    parts = cotangents[0][..., of_q, :], cotangents[1][..., of_q]
    found, (part, part_lse) = loss(lambda arrays: mapped({**arrays, **others}), parts)(given)
    np.testing.assert_allclose(part, out[..., of_q, :], rtol=0, atol=1e-12)
    np.testing.assert_allclose(part_lse, lse[..., of_q], rtol=0, atol=1e-12)
    for key, gradient in found.items():
        np.testing.assert_allclose(gradient, moved(key, gradients[key]), rtol=0, atol=1e-11, err_msg=key)


def main(kind: str) -> None:
    jax.config.update("jax_enable_x64", True)
    tried = 0
    for index, (name, case) in enumerate(CASES.items()):
        if "dropout" in case:
            continue
        try:
            agrees(name, case, LAYOUTS[index % 3], AxisType[kind])
        except BaseException as error:
            error.add_note(f"{name}, {LAYOUTS[index % 3]}")
            raise
        tried += 1
    print(f"{tried} calls agree")


if __name__ == "__main__":
    main(sys.argv[2])
