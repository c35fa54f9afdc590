"""Triton: a call as the kernels' arguments, numbers and strides, and its tiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._kernel.call import KINDS, LABELS, Operands, Options, has_tables
from relskew_core._kernel.chunk import Chunk
from relskew_core._kernel.dropout import hashes, threshold
from relskew_core._kernel.kinds import MASK, LabelKind, MaskKind, RowsKind
from relskew_core._positions.visibility import FURTHEST
from relskew_core.backends._torch.triton.kernels.shuffles import SIZE, WARPS


@dataclass(frozen=True, slots=True)
class Tile:
    """The launch configuration of a kernel: queries and keys of a tile, warps, loads in flight."""

    size: int
    warps: int
    stages: int
    shuffles: bool = False  # whether tiles are skewed by shuffles, which need the layout of products on 9.0


TILES = {
    # (half precision, width up to): forward, backward
    (True, 64): (Tile(64, 4, 3), Tile(64, 4, 2)),
    (True, 128): (Tile(64, 4, 1), Tile(64, 4, 1)),
    (True, 256): (Tile(64, 4, 1), Tile(32, 8, 2)),
    (False, 64): (Tile(32, 8, 1), Tile(32, 8, 1)),
    (False, 128): (Tile(16, 8, 1), Tile(16, 8, 1)),
}
"""The launch configurations on compute capability 9.0, whose products of 64 × 64 leave enough registers."""

ELSEWHERE = {
    **TILES,
    (True, 64): (Tile(32, 4, 2), Tile(32, 4, 2)),
    (True, 128): (Tile(32, 4, 2), Tile(32, 8, 2)),
    (True, 256): (Tile(32, 8, 2), Tile(32, 8, 2)),
}
"""Those on other devices, of which 8.0, 8.6, 8.9, 10.0 and 12.0 were compiled: those with the fewest spills."""

DECODING = {
    (True, 64): Tile(64, 4, 3),
    (True, 128): Tile(64, 8, 3),
    (True, 256): Tile(32, 4, 3),
    (False, 64): Tile(32, 4, 2),
    (False, 128): Tile(16, 8, 2),
}
"""The keys of a tile of few queries, which waits for memory: several loads are in flight."""

FEW = 16
"""The most queries whose heads share a tile, so that keys are read once for all heads of a group."""

SHARED_BYTES = {64: 160 * 2**10, 32: 96 * 2**10}
"""The shared memory for several loads in flight, by the size of a tile; devices with less have one.

With everything that a call can have, tiles of 32 take 84 KiB up to a width of 128, of 99 on 8.6, 8.9 and 12.0.
"""


class Limits(NamedTuple):
    """What a tile has to fit."""

    major: int  # of the compute capability, 0 for AMD
    shared_bytes: int  # of a program
    compiles: bool = True  # not Triton's interpreter, which has no threads
    processors: int = 132  # those that run programs


def tiles(dtype: torch.dtype, width: int, device: Limits, *, by_value: bool = False) -> tuple[Tile, Tile] | None:
    """Return the tiles of the forward and of the backward kernels, ``None`` for heads too wide."""
    half, table = dtype.itemsize == 2, TILES if device.major == 9 and not by_value else ELSEWHERE
    found = next((table[key] for key in table if key[0] == half and width <= key[1]), None)
    return None if found is None else (fitted(found[0], width, device), fitted(found[1], width, device))


def decoding_tile(dtype: torch.dtype, width: int, device: Limits) -> Tile:
    """Return the tile of few queries."""
    half = dtype.itemsize == 2
    found = next(tile for (of_half, widest), tile in DECODING.items() if of_half == half and width <= widest)
    return found if device.shared_bytes >= SHARED_BYTES[64] else replace(found, stages=found.stages - 1)


def decodes(operands: Operands, options: Options) -> bool:
    """Return whether a call has so few queries that its heads share tiles."""
    x, pattern = operands, options.visibility
    absent = x.key_table, x.q_segments, x.q_positions, x.seed, pattern.block_size
    return pattern.n_queries <= FEW and all(given is None for given in absent)


def fitted(tile: Tile, width: int, device: Limits) -> Tile:
    """Fit a tile to the shared memory of a device, and skew it by shuffles where its layout is known."""
    shuffles = device.compiles and device.major == 9 and (tile.size, tile.warps) == (SIZE, WARPS)
    fits = device.major > 0 and device.shared_bytes >= SHARED_BYTES[64 if width > 128 else max(32, tile.size)]
    return replace(tile, stages=tile.stages if fits else 1, shuffles=shuffles)


def limits(device: torch.device) -> Limits:
    """Return the limits of a device."""
    if device.type == "cuda":  # pragma: gpu only
        properties: Any = torch.cuda.get_device_properties(device)
        processors = properties.multi_processor_count
        if torch.version.hip is not None:
            return Limits(0, properties.shared_memory_per_block, processors=processors)
        return Limits(properties.major, properties.shared_memory_per_block_optin, processors=processors)
    return Limits(9, 227 * 2**10, compiles=False)  # the device that the interpreter simulates


class ColumnRange(NamedTuple):
    """A range of columns in relative layout: the position of the first, and their number."""

    first: int
    width: int


@dataclass(frozen=True, slots=True)
class TiledCall:
    """The operands with one batch axis and unit strides along their width, as keyword arguments of the kernels."""

    operands: Operands
    options: Options
    heads: int
    batch: int
    forward: Tile
    backward: Tile
    drawn: tuple[Tensor | None, Tensor | None]  # the hashes of dropout, of queries and of keys

    @classmethod
    def of(cls, operands: Operands, options: Options) -> TiledCall:
        """Flatten the leading axes; copy only arrays that no strides can describe."""
        flat = {}
        for name, x in operands._asdict().items():
            kind = KINDS[name]
            if x is not None and isinstance(kind, RowsKind | MaskKind | LabelKind):
                x = kind.flat(x, tuple(operands.q.shape[:-3]), xp=torch)
            if kind is MASK:  # of any strides
                flat[name] = x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x
            else:
                flat[name] = _rows(x)
        tiled = Operands(**flat)
        options = replace(options, visibility=options.visibility.bounded())
        by_value = options.visibility.by_value  # look-ups leave registers for small tiles alone
        found = tiles(tiled.q.dtype, widest(operands), limits(tiled.q.device), by_value=by_value)
        assert found is not None  # as choice.WIDEST says
        batch, heads, queries = tiled.q.shape[:3]
        drawn: Any = (None, None)
        if options.dropout:
            drawn = hashes(operands, options, Chunk(0, queries, 0, tiled.k.shape[2], 0, 0, 0), xp=xp)
            drawn = drawn[0].expand(*operands.q.shape[:-1], 1).contiguous(), drawn[1].contiguous()
        return cls(tiled, options, heads, batch, *found, drawn)

    @property
    def by_value(self) -> bool:
        """Whether positions are not consecutive."""
        return self.options.visibility.by_value

    @property
    def is_empty(self) -> bool:
        """Whether no query sees a key."""
        x = self.operands
        return not x.q.numel() or not x.k.shape[2] or self.options.visibility.positions() is None

    def columns(self, start: int, stop: int, *, mirrored: bool = False) -> ColumnRange:
        """Return the windows in which a chunk of queries stores gradients, in whole tiles, or one of keys if mirrored.

        With positions in any order, the columns are the table's rows.
        """
        visibility, size = self.options.visibility, self.backward.size
        if self.by_value:
            return ColumnRange(-self.options.span.left, self.options.span.rows)
        low, high = self.options.positions()
        first_part, last_part, band_low, band_high = self.parts(size)
        if first_part == 0:
            low = max(low, band_low + 2 - 2 * size)
        if last_part == 2:
            high = min(high, band_high - 2 + 2 * size)
        offset, length = visibility.offset, visibility.n_keys
        if mirrored:
            low, high, offset, length = -high, -low, -offset, visibility.n_queries
        # of key minus query, rounded to whole tiles
        low = max(low + offset, 1 - stop) // size * size
        high = max(low, min(high + offset, length - 1 - start) // size * size)
        return ColumnRange(low - offset, high - low + size)

    def parts(self, size: int) -> tuple[int, int, int, int]:
        """Return the first and the last part, depending on whether tiles fit around the band, and its ends."""
        x, span = self.operands, self.options.span
        low, high = self.options.positions()
        band_low, band_high = -span.left - (span.beyond == "zero"), span.right + (span.beyond == "zero")
        if self.by_value or span.beyond == "error" or not has_tables(x):
            return 1, 1, band_low, band_high
        return 0 if low < band_low - size else 1, 2 if high > band_high + size else 1, band_low, band_high

    @property
    def key_stages(self) -> int:
        """Return the loads in flight of the keys' gradients.

        More than one is wrong where the warps of a group multiply together: Triton 3.6 then loads the next queries
        before the last product with them has ended.
        """
        return 1 if self.backward.size == SIZE else self.backward.stages

    @property
    def query_stages(self) -> int:
        """Return those of the queries' gradients, whose products with a table of keys read a tile longest."""
        return self.backward.stages if self.operands.key_table is None else self.key_stages

    @property
    def apart(self) -> bool:
        """Return whether the products with tables have another scale, or other queries."""
        x, options = self.operands, self.options
        return x.rel_q is not None or (options.rel_scale != options.scale and not (x.rel_k is x.key_table is None))

    @property
    def precision(self) -> str:
        """Return how float32 is multiplied: exactly, unless torch itself may use TF32."""
        flags: Any = torch.backends.cuda.matmul
        # torch before 2.9 only has allow_tf32; later versions raise an error if the other flag was set
        tf32 = flags.fp32_precision == "tf32" if hasattr(flags, "fp32_precision") else flags.allow_tf32
        return "tf32" if tf32 else "ieee"

    @property
    def of_keys(self) -> bool:
        """Whether the mask is the same for all queries, so that its gradient is summed with those of the keys."""
        mask = self.operands.mask
        return mask is not None and mask.shape[2] == 1

    def arguments(self, tile: Tile) -> dict[str, Any]:
        """Return the arguments that all kernels share, as keywords."""
        # not imported with this module: it imports Triton, which need not be there
        import triton.language as tl

        from relskew_core.backends._torch.triton.kernels.tiles import Call, Numbers

        x, options = self.operands, self.options
        pattern, span, size = options.visibility, options.span, tile.size
        low, high = options.positions()
        first_part, last_part, band_low, band_high = self.parts(size)
        clip = span.beyond == "clip"
        widths = {"D": x.q.shape[-1], "DV": x.v.shape[-1], "DR": (x.q if x.rel_q is None else x.rel_q).shape[-1]}
        block_size = min(pattern.block_size or 1, self.furthest)
        before, after, behind = (min(distance, self.furthest) for distance in (
            pattern.left or 0, pattern.right or 0, pattern.whole_blocks_before * block_size))  # fmt: skip
        met_by_queries, met_by_keys = self.met(size)
        constants = {
            **widths, **{f"BLOCK_{name}": block(width) for name, width in widths.items()}, "B": size,
            "BEFORE": pattern.left is not None, "AFTER": pattern.right is not None,
            "LOCAL": pattern.block_size is not None,
            "MASK": 0 if x.mask is None else 1 if x.mask.dtype == torch.uint8 else 2, "KEY_MASK": self.of_keys,
            "SOFTCAP": options.softcap is not None, "FIRST_PART": first_part, "LAST_PART": last_part,
            "EDGES": clip, "STRICT": span.beyond == "error" and has_tables(x), "APART": self.apart,
            "PRECISION": self.precision, "SHUFFLES": tile.shuffles,
        }  # fmt: skip
        call = Call(
            **{name: rows_of(getattr(x, name))
               for name in ("q", "k", "v", "rel_q", "rel_k", "rel_v", "key_table", "mask")},
            rel_bias=None if x.rel_bias is None else rows_of(x.rel_bias[..., None]),
            **{name: None if (labels := getattr(x, name)) is None else rows_of(labels[:, None, :, None])
               for name in LABELS},
            met_by_queries=met_by_queries, met_by_keys=met_by_keys,
            q_hashes=self.drawn[0], k_hashes=self.drawn[1],
            heads=self.heads, group=self.heads // x.k.shape[1],
            before=before, after=after, block_size=block_size, behind=behind,
            span_left=span.left, table_rows=span.rows, scale=options.scale, rel_scale=options.rel_scale,
            softcap=options.softcap or 1.0, kept=1 / (1 - options.dropout),
            **{name: tl.constexpr(constant) for name, constant in constants.items()},
        )  # fmt: skip
        numbers = Numbers(
            pattern.n_queries, pattern.n_keys, pattern.offset,
            low if clip else max(low, -span.left), high if clip else min(high, span.right), band_low, band_high,
            threshold(options.dropout),
        )  # fmt: skip
        return {"x": call, **numbers._asdict(), "num_warps": tile.warps, "num_stages": tile.stages}

    def met(self, size: int) -> tuple[Any, Any]:
        """Return for each tile of queries the first and the end of the tiles of keys that its labels may let it see.

        The second result is that of the tiles of keys. Where labels ascend, as those of packed documents do, nothing
        else is visited. Without labels, both are ``None``.
        """
        x, pattern = self.operands, self.options.visibility
        may: Any = None
        if x.q_segments is not None and x.k_segments is not None:
            (low, high), (first, last) = ends(x.q_segments, size), ends(x.k_segments, size)
            may = (first[:, None] <= high[..., None]) & (low[..., None] <= last[:, None])
        if x.q_positions is not None and x.k_positions is not None:
            (low, high), (first, last) = ends(x.q_positions, size), ends(x.k_positions, size)
            may = torch.ones_like(first[:, None] <= high[..., None]) if may is None else may
            if pattern.right is not None:
                may = may & (first[:, None] <= high[..., None] + min(pattern.right, FURTHEST))
            if pattern.left is not None:
                may = may & (last[:, None] >= low[..., None] - min(pattern.left, FURTHEST))
            if pattern.block_size is not None:
                low, high, first, last = (
                    labels // min(pattern.block_size, FURTHEST) for labels in (low, high, first, last)
                )
                may = may & (first[:, None] <= high[..., None])
                may = may & (last[:, None] >= low[..., None] - min(pattern.whole_blocks_before, FURTHEST))
        return (None, None) if may is None else (run_of(may, size), run_of(may.mT, size))

    @property
    def furthest(self) -> int:
        """Return a distance that no position of a query or a key reaches; longer ones are as good as this."""
        pattern = self.options.visibility
        return FURTHEST if self.by_value else pattern.n_queries + pattern.n_keys + abs(pattern.offset)


def widest(operands: Operands) -> int:
    """Return the largest width of a call's heads."""
    return max(x.shape[-1] for x in (operands.q, operands.v, operands.rel_q) if x is not None)


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Launch kernels on a tensor's device, because Triton uses torch's current device."""
    if x.is_cuda:  # pragma: gpu only
        return torch.cuda.device(x.device)
    return nullcontext()


def block(width: int) -> int:
    """Return the power of two to which a width is padded, at least 16 for products."""
    return max(16, 1 << (width - 1).bit_length())


def _rows(x: Any) -> Any:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def rows_of(x: Tensor | None) -> Any:
    """Return an array of up to four axes as the kernels get it, with strides of zero along axes that broadcast."""
    from relskew_core.backends._torch.triton.kernels.tiles import Rows

    if x is None:
        return None
    strides = [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)]
    return Rows(x, *([0, 0, *strides][-4:]))


def ends(labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest label of each tile, of (items or 1, length)."""
    count = labels.shape[-1]
    places = torch.arange(-(-count // size) * size, dtype=torch.int64, device=labels.device).clamp(max=count - 1)
    low, high = labels[:, places].unflatten(-1, (-1, size)).aminmax(dim=-1)
    return low, high


def run_of(may: Tensor, size: int) -> Any:
    """Return the first and the end of the tiles that may be seen, of each row of (items or 1, tiles, tiles)."""
    may, count = may.to(torch.int32), may.shape[-1]
    end = (count - may.flip(-1).argmax(-1)) * size * may.amax(-1)
    found = torch.stack([may.argmax(-1) * size, end], -1)
    return rows_of(found.to(torch.int32).flatten(1)[:, None, None].contiguous())
