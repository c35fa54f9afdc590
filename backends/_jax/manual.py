"""JAX inside ``shard_map``: the type of an array says along which axes of the mesh its values vary.

A loop wants what it carries to vary over the same axes from its first turn on, so everything varies over all of them.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def axes_of(tree: Any) -> frozenset[str]:
    """Return the axes of the mesh along which some array varies."""
    return frozenset().union(*(_axes(x) for x in jax.tree.leaves(tree)))


def varying(tree: Any, axes: frozenset[str]) -> Any:
    """Return arrays that vary along axes of the mesh; their gradients are summed over the new ones."""
    return jax.tree.map(lambda x: _cast(x, tuple(sorted(axes - _axes(x)))), tree) if axes else tree


def _axes(x: Any) -> frozenset[str]:
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)
    # the name before JAX 0.10
    return getattr(kind, "vma", frozenset()) if manual is None else manual.varying


def _cast(x: Any, missing: tuple[str, ...]) -> Any:
    if not missing:
        return x
    names: Any = lax
    # before JAX 0.8.2
    return names.pcast(x, missing, to="varying") if hasattr(lax, "pcast") else names.pvary(x, missing)
