"""Relative-position attention for every array library, written once against the array API standard."""

from relskew_core._attention import merge_attention, relative_attention
from relskew_core._block import attention_block, init_weights
from relskew_core._logits import relative_logits, relative_values
from relskew_core._skew import skew, unskew
from relskew_core._span import Span
from relskew_core._spec import BlockSpec

__version__ = "0.1.0"

__all__ = [
    "BlockSpec",
    "Span",
    "attention_block",
    "init_weights",
    "merge_attention",
    "relative_attention",
    "relative_logits",
    "relative_values",
    "skew",
    "unskew",
]
