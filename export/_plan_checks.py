"""Checks of an export: arguments that exclude each other, or that a block does not support."""

from __future__ import annotations

from typing import Any

import numpy as np

from relskew_core._block.spec import BlockSpec


def check_in_place(spec: BlockSpec, profile: Any, past: Any, chunk_size: Any) -> None:
    """Refuse arguments that exclude caches written in place."""
    if not spec.causal:
        raise ValueError("`in_place=True` requires `spec.causal`, got causal=False")
    if past is not True:
        raise ValueError(f"`in_place=True` requires `past=True`, got past={past!r}")
    if profile not in ("ort", "ort-contrib"):
        raise ValueError(
            f"`in_place=True` requires `profile='ort'` or 'ort-contrib': only these have TensorScatter, got {profile!r}"
        )
    if chunk_size not in (None, "auto"):
        raise ValueError(f"`in_place=True` excludes `chunk_size`, got chunk_size={chunk_size!r}")


def check_contrib(spec: BlockSpec, dtype: np.dtype[Any], mask: bool, chunk_size: Any) -> None:
    """Refuse arguments that GroupQueryAttention does not support."""
    wanted = "`profile='ort-contrib'`, which is made of GroupQueryAttention,"
    if not spec.causal or spec.cross:
        raise ValueError(
            f"{wanted} requires causal self-attention, got causal={spec.causal} and cross={spec.cross} in `spec`"
        )
    refused = {
        "spec.rel_values": spec.rel_values,
        "spec.sinks": spec.sinks,
        "spec.block_size": spec.block_size,
        "mask": mask,
        "chunk_size": None if chunk_size == "auto" else chunk_size,
    }
    for name, given in refused.items():
        if given is not None and given is not False:
            raise ValueError(f"{wanted} excludes `{name}`, got {given!r}")
    if dtype == np.float64:
        raise ValueError(f"{wanted} excludes `dtype` float64")
    if spec.head_dim % 8:
        raise ValueError(f"{wanted} requires a `spec.head_dim` that is a multiple of 8, got {spec.head_dim}")


def check_past(spec: BlockSpec) -> None:
    """Refuse blocks that cannot have a past."""
    if spec.cross:
        raise ValueError("`past=True` excludes `spec.cross`: a memory does not grow, got cross=True")
    if not spec.causal and spec.block_size is None:
        raise ValueError("`past=True` requires `spec.causal` or `spec.blocks_before`, got causal=False")
