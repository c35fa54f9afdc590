"""The drop-ins for Swin's attention: a bias by relative cell, inside windows that are short sequences each."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from relskew_core.huggingface._attend import DropIn, join, refuse_weights


class SwinRelativeAttention(DropIn):
    """``SwinAttention``."""

    replaces = ("SwinAttention",)
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    heads = "num_attention_heads"
    drops = "attention_dropout"

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend inside windows, ``(batch · windows, cells, width)``; the mask is ``(windows, cells, cells)``."""
        refuse_weights(kwargs.get("output_attentions"))
        positions = self.relative_position_bias
        bias = by_cell(positions.relative_position_bias_table, positions.window_size)
        mask = _of_windows(bias, attention_mask, hidden_states.shape[0])
        return self.finish(self.attend(*self.project(hidden_states), mask=mask)), None


class SwinSelfRelativeAttention(DropIn):
    """Swin as Donut, MaskFormer and CLAP have it: the table is the attention's own, the last projection another's."""

    replaces = ("DonutSwinSelfAttention", "MaskFormerSwinSelfAttention", "ClapAudioSelfAttention")
    projections = ("query", "key", "value", "")
    heads = "num_attention_heads"

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool | None = False
    ) -> tuple[Tensor]:
        """Attend inside windows, ``(batch · windows, cells, width)``; the mask is ``(windows, cells, cells)``."""
        refuse_weights(output_attentions)
        bias = by_cell(self.relative_position_bias_table, self.window_size)
        mask = _of_windows(bias, attention_mask, hidden_states.shape[0])
        return (join(self.attend(*self.project(hidden_states), mask=mask)),)


class Swinv2RelativeAttention(DropIn):
    """``Swinv2SelfAttention``, and Swin2SR's: cosines, scaled by head, and a bias that a small network gives."""

    replaces = ("Swinv2SelfAttention", "Swin2SRSelfAttention")
    projections = ("query", "key", "value", "")
    heads = "num_attention_heads"

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool | None = False
    ) -> tuple[Tensor]:
        """Attend inside windows, ``(batch · windows, cells, width)``; the mask is ``(windows, cells, cells)``."""
        refuse_weights(output_attentions)
        q, k, v = self.project(hidden_states)
        cells = self.continuous_position_bias_mlp(self.relative_coords_table).flatten(0, 2)
        bias = by_cell(16 * torch.sigmoid(cells), self.window_size)
        if attention_mask is not None:
            attention_mask = 2 * attention_mask  # as the model does, which adds it twice
        mask = _of_windows(bias, attention_mask, hidden_states.shape[0])
        q = normalize(q, dim=-1) * self.logit_scale.clamp(max=math.log(100)).exp()
        out = self.attend(q, normalize(k, dim=-1), v, mask=mask, scale=1.0)
        return (join(out),)


def by_cell(table: Tensor, window: tuple[int, int]) -> Tensor:
    """Return the bias of every pair of cells, ``(heads, cells, cells)``, of a table by ``query - key``: no index."""
    h, w = window
    grid = table.mT.unflatten(-1, (2 * h - 1, 2 * w - 1))
    pairs = grid.unfold(1, h, 1).unfold(2, w, 1).flip(3, 4)  # (heads, height and width of queries, of keys)
    return pairs.reshape(-1, h * w, h * w)


def _of_windows(bias: Tensor, mask: Tensor | None, count: int) -> Tensor:
    """Add the mask of each window to the bias of all, and repeat it for every image."""
    if mask is None:
        return bias
    both = bias + mask[:, None]
    windows = mask.shape[0]
    return both if windows == count else both.repeat(count // windows, 1, 1, 1)
