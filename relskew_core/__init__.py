"""Relative-position attention for every array library, written once against the array API standard."""

from relskew_core._attention import merge_attention, relative_attention, relative_attention_vjp
from relskew_core._bias import alibi_bias, deberta_buckets, proximal_bias, t5_buckets, toeplitz
from relskew_core._block import attention_block, init_weights
from relskew_core._grid import relative_logits_2d, toeplitz_2d
from relskew_core._grid_attention import relative_attention_2d
from relskew_core._logits import relative_logits, relative_values
from relskew_core._skew import skew, unskew
from relskew_core._span import Span
from relskew_core._spec import BlockSpec
from relskew_core._tables import resize_table, sinusoidal_table

__version__ = "0.1.0"

__all__ = [
    "BlockSpec",
    "Span",
    "alibi_bias",
    "attention_block",
    "deberta_buckets",
    "init_weights",
    "merge_attention",
    "proximal_bias",
    "relative_attention",
    "relative_attention_2d",
    "relative_attention_vjp",
    "relative_logits",
    "relative_logits_2d",
    "relative_values",
    "resize_table",
    "sinusoidal_table",
    "skew",
    "t5_buckets",
    "toeplitz",
    "toeplitz_2d",
    "unskew",
]
