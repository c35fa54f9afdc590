"""Relative-position attention for every array library, written once against the array API standard."""

import typing as _typing

from relskew_core import _folders as _folders  # before any import that needs the folders
from relskew_core._block.block import attention_block
from relskew_core._block.spec import BlockSpec
from relskew_core._block.weights import init_weights
from relskew_core._functions.attention import relative_attention, relative_attention_vjp
from relskew_core._functions.bias import toeplitz
from relskew_core._functions.buckets import alibi_bias, deberta_buckets, proximal_bias, t5_buckets
from relskew_core._functions.grid import relative_logits_2d, relative_logits_nd, toeplitz_2d, toeplitz_nd
from relskew_core._functions.grid_attention import relative_attention_2d, relative_attention_nd
from relskew_core._functions.logits import relative_logits, relative_values
from relskew_core._functions.paged import paged_attention
from relskew_core._functions.tables import resize_table, sinusoidal_table
from relskew_core._functions.weights import attention_weights, merge_attention
from relskew_core._positions.skew import skew, unskew
from relskew_core._positions.span import Span

__version__ = "0.1.0"

__all__ = [
    "BlockSpec", "Span", "alibi_bias", "attention_block", "attention_weights", "deberta_buckets", "init_weights",
    "merge_attention", "paged_attention", "proximal_bias", "relative_attention", "relative_attention_2d",
    "relative_attention_nd", "relative_attention_vjp", "relative_logits", "relative_logits_2d",
    "relative_logits_nd", "relative_values", "resize_table", "sinusoidal_table", "skew", "t5_buckets", "toeplitz",
    "toeplitz_2d", "toeplitz_nd", "unskew",
]  # fmt: skip

if _typing.TYPE_CHECKING:
    from relskew_core import backends as backends
    from relskew_core import conventions as conventions
    from relskew_core import distributed as distributed
    from relskew_core import draw as draw
    from relskew_core import export as export
    from relskew_core import huggingface as huggingface
    from relskew_core import layers as layers
    from relskew_core import papers as papers
else:

    def __getattr__(name: str):
        """Import a part of the package that needs optional dependencies when it is first used."""
        from importlib import import_module

        if name in ("conventions", "distributed", "draw", "export", "huggingface", "layers", "papers"):
            return import_module(f"relskew_core.{name}")
        raise AttributeError(f"module 'relskew_core' has no attribute {name!r}")
