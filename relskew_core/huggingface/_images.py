"""The drop-ins for images: Swin's windows, BEiT's bias by cell, the tables by height and width of SAM and ViTDet."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, interpolate, normalize, pad

from relskew_core._functions.grid import relative_logits_2d
from relskew_core._functions.grid_attention import relative_attention_2d
from relskew_core.huggingface._attend import DropIn, Maybe, join, split

COSINES = "relative_coords_table logit_scale window_size"
"""The attributes of version 2."""


class SwinRelativeAttention(DropIn):
    replaces = ("SwinAttention",)
    reads = "relative_position_bias"
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    heads = "num_attention_heads"
    drops = "attention_dropout"

    def forward(self, hidden_states: Tensor, attention_mask: Maybe = None, **kwargs: Any) -> tuple[Tensor, None]:
        mask = _of_windows(self.relative_position_bias()[0], attention_mask, hidden_states.shape[0])
        return self.finish(self.attend(*self.project(hidden_states), mask=mask)), None


class SwinSelfRelativeAttention(DropIn):
    """Swin in Donut, MaskFormer and CLAP: the attention contains the table, and another module the last projection."""

    replaces: ClassVar[tuple[str, ...]] = (
        "DonutSwinSelfAttention", "MaskFormerSwinSelfAttention", "ClapAudioSelfAttention",
    )  # fmt: skip
    projections = ("query", "key", "value", "")
    heads = "num_attention_heads"
    reads = "relative_position_bias_table window_size"

    def forward(
        self, hidden_states: Tensor, attention_mask: Maybe = None, output_attentions: bool | None = False
    ) -> tuple[Tensor]:
        return (join(self.inside(hidden_states, attention_mask)),)

    def inside(self, x: Tensor, mask: Maybe) -> Tensor:
        bias = by_cell(self.relative_position_bias_table, self.window_size)
        return self.attend(*self.project(x), mask=_of_windows(bias, mask, x.shape[0]))


class Swinv2RelativeAttention(SwinSelfRelativeAttention):
    """``Swinv2SelfAttention``, and Swin2SR's: cosines, scaled by head, and a bias that a small network computes."""

    replaces = ("Swinv2SelfAttention", "Swin2SRSelfAttention")
    reads = f"continuous_position_bias_mlp {COSINES}"

    def inside(self, x: Tensor, mask: Maybe) -> Tensor:
        doubled = None if mask is None else 2 * mask  # the model adds the mask twice
        both = _of_windows(_by_network(self.continuous_position_bias_mlp, self), doubled, x.shape[0])
        return self.attend(*_cosines(*self.project(x), self), mask=both, scale=1.0)


class WindowRelativeAttention(DropIn):
    """``WindowAttention`` of timm and of Swin's authors, versions 1 and 2: one layer for queries, keys and values."""

    replaces: ClassVar[tuple[str, ...]] = ("WindowAttention",)
    projections = ("", "", "", "proj")
    drops = "attn_drop"
    reads = "qkv window_size proj_drop"

    @classmethod
    def serves(cls, original: Any) -> bool:
        if not super().serves(original) or len(original.window_size) != 2:  # MONAI's and Video Swin's may have three
            return False
        wanted = COSINES if hasattr(original, "cpb_mlp") else "relative_position_bias_table"
        return all(hasattr(original, name) for name in wanted.split())

    def forward(self, x: Tensor, mask: Maybe = None) -> Tensor:
        return self.proj_drop(self.inside(x, mask))

    def set_window_size(self, window_size: Any) -> None:
        self.kind.set_window_size(self, window_size)

    def _make_pair_wise_relative_positions(self, **options: Any) -> Any:
        return self.kind._make_pair_wise_relative_positions(self, **options)

    def inside(self, x: Tensor, mask: Maybe) -> Tensor:
        q, k, v = (split(y, self.num_heads) for y in self.fused(x).chunk(3, dim=-1))
        if hasattr(self, "cpb_mlp"):
            both = _of_windows(_by_network(self.cpb_mlp, self), mask, x.shape[0])
            return self.finish(self.attend(*_cosines(q, k, v, self), mask=both, scale=1.0))
        bias = by_cell(self.relative_position_bias_table, self.window_size)
        bias = bias[:, : x.shape[-2], : x.shape[-2]]  # MONAI has fewer cells where the whole image is smaller
        mask = _of_windows(bias, mask, x.shape[0])
        return self.finish(self.attend(q, k, v, mask=mask, scale=getattr(self, "scale", None)))

    def fused(self, x: Tensor) -> Tensor:
        y: Tensor = self.qkv(x)
        if getattr(self, "q_bias", None) is None:
            return y
        return y + torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])


class ShiftedWindowRelativeAttention(WindowRelativeAttention):
    """``ShiftedWindowAttention`` of torchvision, versions 1 and 2, which cuts the windows itself."""

    replaces = ("ShiftedWindowAttention", "ShiftedWindowAttentionV2")
    drops = "attention_dropout"
    reads = "qkv window_size shift_size dropout"

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # the original's arguments
        size, windows = x.shape[1:3], self.window_size
        x = pad(x, (0, 0, 0, -size[1] % windows[1], 0, -size[0] % windows[0]))
        padded, mask = x.shape[1:3], None
        shift = [s if side < whole else 0 for s, side, whole in zip(self.shift_size, windows, padded, strict=True)]
        if any(shift):
            x = x.roll((-shift[0], -shift[1]), (1, 2))
            rows, columns = (_regions(*axis, x.device) for axis in zip(padded, windows, shift, strict=True))
            regions = _cut((3 * rows[:, None] + columns)[None, ..., None], windows)[..., 0]
            mask = torch.where(regions[:, :, None] == regions[:, None], 0.0, -100.0).to(x.dtype)
        out = dropout(self.inside(_cut(x, windows), mask), self.dropout, self.training)
        counts = [whole // side for whole, side in zip(padded, windows, strict=True)]
        out = out.unflatten(1, tuple(windows)).unflatten(0, (-1, *counts)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return out.roll((shift[0], shift[1]), (1, 2))[:, : size[0], : size[1]].contiguous()

    def fused(self, x: Tensor) -> Tensor:
        y: Tensor = self.qkv(x)
        if not hasattr(self, "cpb_mlp"):
            return y
        (bias,) = self.qkv(x.new_zeros(1, x.shape[-1]))  # works for any layer that has replaced it
        keys = torch.arange(3, dtype=torch.int64, device=x.device).repeat_interleave(bias.shape[0] // 3) == 1
        return y - bias * keys


def by_cell(table: Tensor, window: tuple[int, int]) -> Tensor:
    """Return the bias of all pairs of cells, ``(heads, cells, cells)``, from a table by ``query - key``."""
    h, w = window
    grid = table.mT.unflatten(-1, (2 * h - 1, 2 * w - 1))
    pairs = grid.unfold(1, h, 1).unfold(2, w, 1).flip(3, 4)  # (heads, height and width of queries, of keys)
    return pairs.reshape(-1, h * w, h * w)


def _by_network(network: Any, attention: Any) -> Tensor:
    cells = network(attention.relative_coords_table).flatten(0, -2)
    return by_cell(16 * torch.sigmoid(cells), attention.window_size)


def _cosines(q: Tensor, k: Tensor, v: Tensor, attention: Any) -> tuple[Tensor, Tensor, Tensor]:
    scale = attention.logit_scale.clamp(max=math.log(100)).exp()
    return normalize(q, dim=-1) * scale, normalize(k, dim=-1), v


def _cut(x: Tensor, sides: Any) -> Tensor:
    """``(batch, height, width, channels)`` to ``(batch · windows, cells, channels)``."""
    cells = x.unflatten(1, (-1, sides[0])).unflatten(3, (-1, sides[1])).transpose(2, 3)
    return cells.flatten(3, 4).flatten(0, 2)


def _regions(size: int, side: int, shift: int, device: torch.device) -> Tensor:
    """Return which rows of a shifted image are adjacent in the image: 0, 1 or 2 for each row."""
    rows = torch.arange(size, dtype=torch.int64, device=device)
    return (rows >= size - side).long() + (rows >= size - shift) if shift else torch.zeros_like(rows)


def _of_windows(bias: Tensor, mask: Maybe, count: int) -> Tensor:
    """Add the mask of each window to the shared bias, and repeat it for every image."""
    if mask is None:
        return bias
    both = bias + mask[:, None]
    windows = mask.shape[0]
    return both if windows == count else both.repeat(count // windows, 1, 1, 1)


HELD = 2**24
"""The most entries of a matrix by query and key. In chunks it is made again for each: slower, with less memory."""


@dataclass(frozen=True)
class GridBias:
    """The placeholder of the bias as a matrix, to which models add masks and other biases."""

    table: Tensor  # (heads, 2 · height - 1, 2 · width - 1), by query - key
    outside: Tensor  # (heads, 3): from a cell to the class token, from the class token to a cell, and to itself
    grid: tuple[int, int]
    mask: Maybe = None
    held: list[Tensor] = field(default_factory=list)  # a cached property would break torch.compile's graph

    def __add__(self, other: GridBias | Tensor) -> GridBias:
        if isinstance(other, GridBias):
            both = GridBias(self.table + other.table, self.outside + other.outside, self.grid, self.mask)
            return both if other.mask is None else both + other.mask
        return GridBias(self.table, self.outside, self.grid, other if self.mask is None else self.mask + other)

    def matrix(self) -> Tensor:
        """Return the bias by query and key, made once: ``(heads, cells + 1, cells + 1)``, or with items of masks."""
        if self.held:
            return self.held[0]
        cells = by_cell(self.table.flatten(1).mT, self.grid)
        matrix = pad(cells, (1, 0, 1, 0))
        matrix[:, 1:, 0], matrix[:, 0, 1:] = self.outside[:, :1], self.outside[:, 1:2]
        matrix[:, 0, 0] = self.outside[:, 2]
        self.held.append(matrix if self.mask is None else matrix + self.mask)
        return self.held[0]


class BeitRelativeBias(DropIn):
    replaces = ("BeitRelativePositionBias",)
    needs = "BeitAttention"
    projections, heads, drops = (), "", ""
    reads = "relative_position_bias_table window_size"

    def forward(
        self, window_size: tuple[int, int], interpolate_pos_encoding: bool = False, dim_size: int | None = None
    ) -> GridBias:
        h, w = (2 * size - 1 for size in self.window_size)
        rows = self.relative_position_bias_table
        # transformers reads tables of oblong windows as width by height when it resizes them, and models were trained
        # with that.
        table = rows[:-3].mT.reshape(1, -1, w, h)
        size = (2 * window_size[0] - 1, 2 * window_size[1] - 1)
        table = interpolate(table, size=size, mode="bilinear")[0]
        return GridBias(table, rows[-3:].mT[:, [1, 0, 2]], window_size)


class BeitRelativeAttention(DropIn):
    """``BeitAttention``, which also accepts a :class:`GridBias` as its mask."""

    replaces: ClassVar[tuple[str, ...]] = ("BeitAttention",)
    needs = "BeitRelativePositionBias"
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    heads = "num_attention_heads"
    drops = "attention_dropout"

    def forward(
        self, hidden_states: Tensor, attention_mask: GridBias | Maybe = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        return self.finish(self._with_bias(hidden_states, attention_mask)), None

    def _with_bias(self, hidden_states: Tensor, bias: GridBias | Maybe) -> Tensor:
        q, k, v = self.project(hidden_states)
        held = q.shape[1] * q.shape[2] ** 2 <= HELD or (self.training and self.share_dropped() > 0)
        if isinstance(bias, GridBias) and not held:
            mask = None if bias.mask is None else bias.mask.to(q.dtype)
            out: Any = relative_attention_2d(
                q, k, v, rel_bias=bias.table.flip(1, 2).to(q.dtype), prefix_bias=bias.outside.to(q.dtype),
                prefix=(1, 1), q_grid=bias.grid, k_grid=bias.grid, mask=mask,
            )  # fmt: skip
        else:
            out = self.attend(q, k, v, mask=bias.matrix() if isinstance(bias, GridBias) else bias)
        return out


class Data2VecVisionRelativeBias(BeitRelativeBias):
    replaces = ("Data2VecVisionRelativePositionBias",)
    needs = "Data2VecVisionSelfOutput"


class Data2VecVisionRelativeAttention(BeitRelativeAttention):
    """``Data2VecVisionSelfAttention``, which contains its bias; another module has the last projection."""

    replaces = ("Data2VecVisionSelfAttention", "Data2VecVisionSdpaSelfAttention")
    needs = "Data2VecVisionRelativePositionBias"
    projections = ("query", "key", "value", "")
    drops = "dropout"
    reads = "has_relative_position_bias config.patch_size"

    def forward(  # type: ignore[override]  # the original's arguments
        self,
        hidden_states: Tensor,
        output_attentions: bool = False,
        relative_position_bias: GridBias | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] = (0, 0),
    ) -> tuple[Tensor]:
        bias = relative_position_bias
        if self.has_relative_position_bias:
            h, w = (size // self.config.patch_size for size in resolution)
            own: GridBias = self.relative_position_bias((h, w))
            bias = own if bias is None else own + bias
        return (join(self._with_bias(hidden_states, bias)),)


class SamRelativeAttention(DropIn):
    """The attention of SAM's image encoder, and of models that reuse it."""

    replaces: ClassVar[tuple[str, ...]] = (
        "SamVisionAttention", "SamVisionSdpaAttention", "SamHQVisionAttention", "SamHQVisionSdpaAttention",
        "GotOcr2VisionAttention", "DeepseekOcr2SamVisionAttention", "DeepseekOcr2SamVisionSdpaAttention",
        "SLANeXtVisionAttention", "PPFormulaNetVisionAttention", "UnlimitedOcrSamVisionAttention",
        "UnlimitedOcrSamVisionSdpaAttention",
    )  # fmt: skip
    projections = ("", "", "", "proj")
    heads = "num_attention_heads"
    reads = "qkv rel_pos_h rel_pos_w"
    wants: ClassVar[dict[str, Any]] = {"use_rel_pos": True}
    dropout = 0.0

    rel_pos_h: nn.Parameter
    rel_pos_w: nn.Parameter

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        if "Sdpa" in self.kind.__name__:
            self.dropout = 0.0  # they drop no weights, even if the configuration does

    def forward(self, hidden_states: Tensor, output_attentions: bool | None = False) -> tuple[Tensor, None]:
        return self._on_grid(hidden_states), None

    def _on_grid(self, x: Tensor) -> Tensor:
        heads, grid = getattr(self, self.heads), (x.shape[1], x.shape[2])
        q, k, v = (split(y, heads) for y in self.qkv(x.flatten(1, 2)).chunk(3, dim=-1))
        tables = [
            _resized(table, size, q.dtype) for table, size in zip((self.rel_pos_h, self.rel_pos_w), grid, strict=True)
        ]
        if self._held(q):
            bias = relative_logits_2d(q, *tables, q_grid=grid, k_grid=grid)
            out: Any = self.attend(q, k, v, mask=bias)
        else:
            out = relative_attention_2d(q, k, v, *tables, q_grid=grid, k_grid=grid, rel_scale=1.0)
        return getattr(self, self.projections[3])(join(out).unflatten(1, grid))

    def _held(self, q: Tensor) -> bool:
        """Whether the products with the tables are materialised for all pairs: if they are few, or with dropout."""
        if torch.compiler.is_exporting() or (self.training and self.dropout > 0):
            return True
        return q.shape[0] * q.shape[1] * q.shape[2] ** 2 <= HELD


class SegGptRelativeAttention(SamRelativeAttention):
    replaces = ("SegGptAttention",)
    wants: ClassVar[dict[str, Any]] = {"use_relative_position_embeddings": True}


class VitDetRelativeAttention(SamRelativeAttention):
    replaces = ("VitDetAttention",)
    heads = "num_heads"
    wants: ClassVar[dict[str, Any]] = {"use_relative_position_embeddings": True}

    def forward(self, hidden_state: Tensor, output_attentions: bool | None = False) -> tuple[Tensor]:  # type: ignore[override]  # the original's arguments
        return (self._on_grid(hidden_state),)


def _resized(table: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return rows by ``key - query`` for a grid of ``size`` cells, from rows by ``query - key`` for any grid."""
    rows = interpolate(table.mT[None], size=2 * size - 1, mode="linear")[0].mT
    return rows.flip(0).to(dtype)
