"""JAX arrays whose types say how they are split over devices, ``AxisType.Explicit``.

Such types would have to be said of every array that the loops make. Only what goes in and what comes out has them:
between the two the compiler finds the splits by itself, as it does for ``AxisType.Auto``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def split_by_compiler(function: Callable[..., Any], like: Any, *arrays: Any) -> Any:
    """Return ``function(*arrays)``, with each result split like the first axes of the array that it is ``like``."""
    mesh = _mesh(arrays)
    if mesh is None:
        return function(*arrays)
    shardings = jax.tree.map(lambda like: NamedSharding(mesh, PartitionSpec(*jax.typeof(like).sharding.spec)), like)
    return jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=shardings)(*arrays)


def explicitly_split(arrays: Any) -> bool:
    """Whether the type of an array says how it is split."""
    return _mesh(arrays) is not None


def _mesh(arrays: Any) -> Any:
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)
