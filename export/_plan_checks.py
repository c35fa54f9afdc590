"""Checks of an export: arguments that exclude each other, or that a block does not support."""

from __future__ import annotations

from typing import Any

from relskew_core._block.spec import BlockSpec


def check_in_place(spec: BlockSpec, profile: Any, past: Any, chunk_size: Any) -> None:
    """Refuse arguments that exclude caches written in place."""
    if not spec.causal:
        raise ValueError("`in_place=True` requires `spec.causal`, got causal=False")
    if past is not True:
        raise ValueError(f"`in_place=True` requires `past=True`, got past={past!r}")
    if profile != "ort":
        raise ValueError(f"`in_place=True` requires `profile='ort'`, which alone has TensorScatter, got {profile!r}")
    if chunk_size not in (None, "auto"):
        raise ValueError(f"`in_place=True` excludes `chunk_size`, got chunk_size={chunk_size!r}")


def check_past(spec: BlockSpec) -> None:
    """Refuse blocks that cannot have a past."""
    if spec.cross:
        raise ValueError("`past=True` excludes `spec.cross`: a memory does not grow, got cross=True")
    if not spec.causal and spec.block_size is None:
        raise ValueError("`past=True` requires `spec.causal` or `spec.blocks_before`, got causal=False")
