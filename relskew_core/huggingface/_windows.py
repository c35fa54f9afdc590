"""The drop-ins for Swin's attention: a bias by relative cell, within windows, each of which is a short sequence.

Transformers', timm's, torchvision's and the authors' own.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import dropout, normalize, pad

from relskew_core.huggingface._attend import DropIn, join, refuse_weights, split

COSINES = "relative_coords_table logit_scale window_size"
"""The attributes of version 2."""


class SwinRelativeAttention(DropIn):
    """``SwinAttention``."""

    replaces = ("SwinAttention",)
    reads = "relative_position_bias"
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    heads = "num_attention_heads"
    drops = "attention_dropout"

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend inside windows, ``(batch · windows, cells, width)``; the mask is ``(windows, cells, cells)``."""
        refuse_weights(kwargs.get("output_attentions"))
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
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool | None = False
    ) -> tuple[Tensor]:
        """Attend inside windows, ``(batch · windows, cells, width)``; the mask is ``(windows, cells, cells)``."""
        refuse_weights(output_attentions)
        return (join(self.inside(hidden_states, attention_mask)),)

    def inside(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the heads of the output."""
        bias = by_cell(self.relative_position_bias_table, self.window_size)
        return self.attend(*self.project(x), mask=_of_windows(bias, mask, x.shape[0]))


class Swinv2RelativeAttention(SwinSelfRelativeAttention):
    """``Swinv2SelfAttention``, and Swin2SR's: cosines, scaled by head, and a bias that a small network computes."""

    replaces = ("Swinv2SelfAttention", "Swin2SRSelfAttention")
    reads = f"continuous_position_bias_mlp {COSINES}"

    def inside(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the heads of the output."""
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

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend inside windows, ``(batch · windows, cells, width)``; the mask is ``(windows, cells, cells)``."""
        y: Tensor = self.proj_drop(self.inside(x, mask))
        return y

    def set_window_size(self, window_size: Any) -> None:
        """Let timm change the windows."""
        self.kind.set_window_size(self, window_size)

    def _make_pair_wise_relative_positions(self, **options: Any) -> Any:
        """Compute the buffers of version 2 for its windows."""
        return self.kind._make_pair_wise_relative_positions(self, **options)

    def inside(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attend, and project the output."""
        q, k, v = (split(y, self.num_heads) for y in self.fused(x).chunk(3, dim=-1))
        if hasattr(self, "cpb_mlp"):
            both = _of_windows(_by_network(self.cpb_mlp, self), mask, x.shape[0])
            return self.finish(self.attend(*_cosines(q, k, v, self), mask=both, scale=1.0))
        bias = by_cell(self.relative_position_bias_table, self.window_size)
        bias = bias[:, : x.shape[-2], : x.shape[-2]]  # MONAI has fewer cells where the whole image is smaller
        mask = _of_windows(bias, mask, x.shape[0])
        return self.finish(self.attend(q, k, v, mask=mask, scale=getattr(self, "scale", None)))

    def fused(self, x: Tensor) -> Tensor:
        """Return queries, keys and values in one tensor. The layer of version 2 has no bias for keys."""
        y: Tensor = self.qkv(x)
        if getattr(self, "q_bias", None) is None:
            return y
        return y + torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])


class ShiftedWindowRelativeAttention(WindowRelativeAttention):
    """``ShiftedWindowAttention`` of torchvision, versions 1 and 2, which cuts the windows itself."""

    replaces = ("ShiftedWindowAttention", "ShiftedWindowAttentionV2")
    drops = "attention_dropout"
    reads = "qkv window_size shift_size dropout"

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Attend inside windows of images, ``(batch, height, width, channels)``."""
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
        """Return queries, keys and values in one tensor, with keys without the layer's bias."""
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
    """Return the bias of every pair of cells in version 2, which a small network computes from their distances."""
    cells = network(attention.relative_coords_table).flatten(0, -2)
    return by_cell(16 * torch.sigmoid(cells), attention.window_size)


def _cosines(q: Tensor, k: Tensor, v: Tensor, attention: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys of unit length, multiplied by the scale of their head."""
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


def _of_windows(bias: Tensor, mask: Tensor | None, count: int) -> Tensor:
    """Add the mask of each window to the shared bias, and repeat it for every image."""
    if mask is None:
        return bias
    both = bias + mask[:, None]
    windows = mask.shape[0]
    return both if windows == count else both.repeat(count // windows, 1, 1, 1)
