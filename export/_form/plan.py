"""The decisions before a graph's first node: the stored rows, the masks, and the form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from relskew_core._array.checks import check_bool, check_choice, check_int
from relskew_core._block.spec import ENDLESS, BlockSpec
from relskew_core._positions.span import Span
from relskew_core._positions.visibility import FURTHEST


def check_in_place(spec: BlockSpec, profile: Any, past: Any, chunk_size: Any) -> None:
    if not spec.causal:
        raise ValueError("`in_place=True` requires `spec.causal`, got causal=False")
    if past is not True:
        raise ValueError(f"`in_place=True` requires `past=True`, got past={past!r}")
    if profile != "ort":
        raise ValueError(f"`in_place=True` requires `profile='ort'`, which alone has TensorScatter, got {profile!r}")
    if chunk_size not in (None, "auto"):
        raise ValueError(f"`in_place=True` excludes `chunk_size`, got chunk_size={chunk_size!r}")


def check_past(spec: BlockSpec) -> None:
    if spec.cross:
        raise ValueError("`past=True` excludes `spec.cross`: a memory does not grow, got cross=True")
    if not spec.causal and spec.block_size is None:
        raise ValueError("`past=True` requires `spec.causal` or `spec.blocks_before`, got causal=False")


ProfileName = Literal["ort", "portable", "trt"]
DEVICES = ("cpu", "cuda")
"""The devices that a graph may be written for."""


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    opset: int
    fused: bool = False  # one Attention node; else separate nodes
    slice_window: bool = False  # the window of the table by Slice, its edges by Pad; else by Gather, Expand, Concat
    causal_attribute: bool = False  # Attention's is_causal; else causality in the mask
    cache_inputs: bool = False  # Attention's past_key and past_value; else Concat
    branches: bool = False  # an If between inputs of one chunk and longer ones; else a loop even for one chunk
    by_head: bool = False  # chunks of one key head at a time; else of all heads at once


PROFILES = {
    "ort": Profile(
        "ort", 23, fused=True, slice_window=True, causal_attribute=True, cache_inputs=True, branches=True, by_head=True
    ),
    "portable": Profile("portable", 18),
    "trt": Profile("trt", 23, fused=True),
}

NEWEST_OPSET = 28
EXPORTER_OPSET = 24  # the newest opset that torch's exporter writes; its nodes are the same up to NEWEST_OPSET
IN_PLACE_OPSET = 24  # the first opset with TensorScatter
IR_VERSIONS = {18: 8, 19: 9, 20: 9}  # of the releases that introduced these opsets; later opsets need at most 10


def checked_opset(opset: object, newest: int = NEWEST_OPSET) -> int:
    oldest, chosen = PROFILES["portable"].opset, check_int("opset", opset)
    if not oldest <= chosen <= newest:
        raise ValueError(f"`opset` must be {oldest} … {newest}, got {chosen}")
    return chosen


LONGEST = 2**31  # longer than any input: a window of this size hides nothing
MOST_ROWS = 2**24  # the most rows to which a table is extended
AUTO_CHUNK = 256
"""Queries of a turn where the exporter chooses: shorter inputs are as fast as without, longer ones faster."""

MOST_BLOCKS = 8
"""The most preceding blocks that are copied for each block: beyond it, a dense attention makes fewer copies."""


class TableEnd(NamedTuple):
    """One end of the table: the rows stored beyond ``r = 0``, and the treatment of positions past them.

    ``limited``: nothing, a longer input must fail. ``clip``: the edge row. ``zero``: no contribution. ``hidden``:
    positions that no query may see. ``endless``: no row is stored, and the formula of the bias goes on.
    """

    rows: int
    past_edge: Literal["limited", "clip", "zero", "hidden", "endless"]


@dataclass(frozen=True, slots=True)
class GraphPlan:
    spec: BlockSpec
    profile: Profile
    opset: int
    dtype: np.dtype[Any]
    max_length: int | None
    past: bool
    mask: bool
    left: TableEnd
    right: TableEnd
    local: bool  # blocks are folded into the batch; else one dense attention
    chunk_size: int | None  # queries per turn of a loop; None: all at once
    projections: bool  # the whole block from x to y; else attention of q, k and v
    in_place: bool  # caches have a fixed length, and are written at the end of each row of the batch
    guarded: bool  # lengths are checked before the tables are read, so that no window has to check them
    looped: bool  # attention loops over chunks of chunk_size; false in the branch for short inputs
    segments: bool = False  # a query sees the keys of its segment
    branches: bool = True  # branches may choose between forms
    in_parts: bool = False  # softcap or the log-sum-exp is required, which Attention does not support

    @property
    def ir_version(self) -> int:
        return IR_VERSIONS.get(self.opset, 10)

    @property
    def one_sided(self) -> bool:
        """Whether the table's columns end at ``r = 0``, where ``right`` then is hidden: causal self-attention."""
        return self.spec.causal and not self.spec.cross

    @property
    def lead(self) -> int:
        return self.left.rows + self.spare_rows[0]

    @property
    def endless(self) -> bool:
        return "endless" in (self.left.past_edge, self.right.past_edge)

    @property
    def columns(self) -> int:
        return self.lead + 1 + self.right.rows + self.spare_rows[1]

    @property
    def blocks_before(self) -> int:
        return 1 if self.spec.blocks_before is None else min(self.spec.blocks_before, FURTHEST)

    @property
    def kept_rows(self) -> tuple[int, int]:
        span = self.spec.span
        return max(0, span.left - self.left.rows), span.left + 1 + min(span.right, self.right.rows)

    @property
    def added_rows(self) -> tuple[int, int]:
        """How many rows extend the table at each end to the length of the window."""
        span = self.spec.span
        return max(0, self.left.rows - span.left), max(0, self.right.rows - span.right)

    @property
    def spare_rows(self) -> tuple[int, int]:
        """How many columns of zeros are before the rows, and after them, where a limited end needs none."""
        after = not self.one_sided and self.right.past_edge in ("zero", "hidden")
        return int(self.left.past_edge != "clip"), int(after)

    @property
    def reach(self) -> str:
        """The end of the name of the node that fails past a table: runtimes show it in their errors."""
        sides = ((self.left, "back"), (self.right, "ahead"))
        ends = [f"{side.rows}_{way}" for side, way in sides if side.past_edge == "limited"]
        table = "rel_k" if self.spec.rel_keys else "rel_bias" if self.spec.rel_bias else "rel_v"
        return f"/{table}_reaches_{'_and_'.join(ends)}" if ends else ""

    @property
    def dead_rows(self) -> bool:
        """Whether some query may see no key at all, so that its weights must be zero.

        With sinks nothing is left of them, unless the unskew moves the ones of hidden keys into the next query's row.
        """
        if self.spec.sinks and not self.spec.rel_values:
            return False
        return self.mask or (self.spec.cross and self.left.past_edge == "hidden")

    @property
    def fused(self) -> bool:
        # Attention in double has a float32 scale and does not load with is_causal.
        apart = self.looped or self.in_parts or self.spec.sinks or self.spec.rel_values or self.dtype == np.float64
        return self.profile.fused and not apart

    @property
    def causal_attribute(self) -> bool:
        """Whether Attention's ``is_causal`` is used: for self-attention only, where runtimes agree on it."""
        # With a cache of fixed length the operator cannot determine the positions of the queries; and which queries see
        # no key must be computed outside it.
        square = self.one_sided and not self.local and not self.in_place and not self.dead_rows
        return self.fused and self.profile.causal_attribute and square

    @property
    def masked_value(self) -> float:
        if self.fused and self.dead_rows:  # a mask cannot lower other keys as far
            return -np.inf
        return -65504.0 if self.dtype == np.float16 else -1e30


def make_plan(
    spec: Any, dtype: np.dtype[Any], *, profile: Any = "ort", opset: Any = None, max_length: Any = None,
    past: Any = False, mask: Any = False, chunk_size: Any = None, projections: Any = True, in_place: Any = False,
    segments: Any = False,
) -> GraphPlan:  # fmt: skip
    check_choice("profile", profile, tuple(PROFILES))
    form = PROFILES[profile]
    oldest = form.opset
    if check_bool("in_place", in_place):
        check_in_place(spec, profile, past, chunk_size)
        oldest = IN_PLACE_OPSET
    chosen = oldest if opset is None else check_int("opset", opset)
    if not oldest <= chosen <= NEWEST_OPSET:
        wanted = f"profile={profile!r}" + (", in_place=True" if in_place else "")
        raise ValueError(f"`opset` must be {oldest} … {NEWEST_OPSET} for {wanted}, got {chosen}")
    if max_length is not None:
        max_length = check_int("max_length", max_length, minimum=1)
    check_bool("mask", mask)
    if check_bool("segments", segments) and spec.cross:
        raise ValueError("`segments=True` excludes `spec.cross`: queries and keys are not one sequence, got cross=True")
    if check_bool("past", past):
        check_past(spec)
    chunk_size = checked_chunk(chunk_size)
    branches = chunk_size is not None
    if chunk_size not in (None, "auto") and spec.block_size is not None:
        raise ValueError(
            f"`chunk_size` excludes `spec.block_size`, which bounds memory itself, got block_size={spec.block_size}"
        )
    if not (spec.has_tables or spec.rel_bias):  # positions have no effect, however far
        spec = replace(spec, span=Span.full(ENDLESS))
    spec = _with_window_of_lengths(spec)
    window_left, window_right = spec.window or (None, None)
    of_blocks = _reach_of_blocks(spec)
    farthest_left = _smallest(window_left, of_blocks[0])
    farthest_right = _smallest(window_right, 0 if spec.causal else of_blocks[1])
    left = _table_end(spec, "past", spec.span.left, farthest_left, window_left, max_length)
    right = _table_end(spec, "future", spec.span.right, farthest_right, window_right, max_length)
    if past and not spec.causal and right.past_edge == "limited":
        raise ValueError(
            f"`past=True` without `spec.causal` requires a table that reaches {farthest_right} into the future, as far "
            f"as blocks do, got one that reaches {right.rows}: make it, or `max_length`, longer"
        )
    # If the table or max_length is short, only lengths run whose blocks are entirely visible, so there is nothing to
    # fold. A mask is as large as dense attention anyway, and with a cache there are few queries.
    limited = "limited" in (left.past_edge, right.past_edge)
    few = spec.blocks_before is None or spec.blocks_before <= MOST_BLOCKS
    local = spec.block_size is not None and few and not (limited or mask or past)
    if chunk_size == "auto":
        # In self-attention what a table reaches bounds the queries; a past has few of them after the first call.
        ends = [] if spec.cross else [end.rows + 1 for end in (left, right) if end.past_edge == "limited"]
        longest = min([LONGEST if max_length is None else max_length, *ends])
        whole = longest <= AUTO_CHUNK or past or spec.block_size is not None or not form.branches
        chunk_size = None if whole else AUTO_CHUNK
    return GraphPlan(
        spec, form, chosen, dtype, max_length, past, mask, left, right, local, chunk_size, projections, in_place,
        chunk_size is not None, chunk_size is not None, segments, branches,
    )  # fmt: skip


def checked_chunk(chunk_size: Any, device: Any = None) -> Any:
    """Check a chunk size; on CUDA, where a loop takes many times as long, ``"auto"`` is no loop."""
    if device is not None:
        check_choice("device", device, DEVICES)
    if device == "cuda" and isinstance(chunk_size, str) and chunk_size == "auto":
        return None
    if chunk_size is None or (isinstance(chunk_size, str) and chunk_size == "auto"):
        return chunk_size
    if isinstance(chunk_size, str):
        raise ValueError(f"`chunk_size` must be an int, 'auto' or None, got {chunk_size!r}")
    return check_int("chunk_size", chunk_size, minimum=1)


def _with_window_of_lengths(spec: BlockSpec) -> BlockSpec:
    if spec.window is None:
        return spec
    left, right = (None if side is None or side >= LONGEST else side for side in spec.window)
    return spec if (left, right) == spec.window else replace(spec, window=(left, right))


def _reach_of_blocks(spec: BlockSpec) -> tuple[int | None, int | None]:
    """Return how far the last query of a block sees back, and the first one ahead."""
    if spec.block_size is None:
        return None, None
    before = 1 if spec.blocks_before is None else spec.blocks_before
    return (before + 1) * spec.block_size - 1, spec.block_size - 1


def _smallest(*bounds: int | None) -> int | None:
    given = [bound for bound in bounds if bound is not None]
    return min(given) if given else None


def _table_end(
    spec: BlockSpec, name: str, reach: int, farthest: int | None, window: int | None, max_length: int | None
) -> TableEnd:
    """Choose one end of the table: ``reach`` rows exist, and no query sees further than ``farthest`` or ``window``."""
    limit = None if max_length is None else max_length - 1
    if farthest is not None and farthest <= (reach if limit is None else min(reach, limit)):
        return TableEnd(farthest, "hidden")
    if limit is None and not spec.has_tables and reach >= ENDLESS - 1:
        return TableEnd(0, "endless") if farthest is None else TableEnd(farthest, "hidden")
    if spec.span.beyond == "error":
        if limit is not None and limit > reach:
            raise ValueError(
                f"`max_length` must be at most {reach + 1}, as far as the span reaches into the {name}, got "
                f"{max_length}; "
                "make the table longer or choose beyond='clip' or 'zero'"
            )
        return TableEnd(reach if limit is None else limit, "limited")
    if limit is not None and limit < reach:
        return TableEnd(limit, "limited")
    if window is not None and window == farthest:
        if window > MOST_ROWS:
            raise ValueError(
                f"`spec.window` must be at most {MOST_ROWS} with beyond='clip' or 'zero', because tables are stored "
                f"as long as the window, or be None, got {spec.window}"
            )
        return TableEnd(window, "hidden")  # the table is extended to the window, so that its end can hide the rest
    return TableEnd(reach, spec.span.beyond)
