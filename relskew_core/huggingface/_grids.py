"""The drop-ins for the encoders of SAM, ViTDet and SegGPT: tables by height and by width, of images and windows."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from relskew_core._functions.grid import relative_logits_2d
from relskew_core._functions.grid_attention import relative_attention_2d
from relskew_core.huggingface._attend import DropIn, join, refuse_weights, split

HELD = 2**24
"""The most entries of a matrix by query and key, as in BEiT; in chunks, products with the tables are computed again."""


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
    wanted: ClassVar[str] = "use_rel_pos"
    dropout = 0.0

    rel_pos_h: nn.Parameter
    rel_pos_w: nn.Parameter

    @classmethod
    def serves(cls, original: Any) -> bool:
        return super().serves(original) and bool(getattr(original, cls.wanted, False))

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        if "Sdpa" in self.kind.__name__:
            self.dropout = 0.0  # they drop no weights, even if the configuration does

    def forward(self, hidden_states: Tensor, output_attentions: bool | None = False) -> tuple[Tensor, None]:
        """Attend on a grid, ``(batch, height, width, channels)``."""
        return self._on_grid(hidden_states, output_attentions), None

    def _on_grid(self, x: Tensor, output_attentions: bool | None) -> Tensor:
        refuse_weights(output_attentions)
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
        y: Tensor = getattr(self, self.projections[3])(join(out).unflatten(1, grid))
        return y

    def _held(self, q: Tensor) -> bool:
        """Whether the products with the tables are materialised for all pairs: if they are few, or with dropout."""
        if torch.compiler.is_exporting() or (self.training and self.dropout > 0):
            return True
        return q.shape[0] * q.shape[1] * q.shape[2] ** 2 <= HELD


class SegGptRelativeAttention(SamRelativeAttention):
    """``SegGptAttention``, which has no dropout of weights."""

    replaces = ("SegGptAttention",)
    wanted = "use_relative_position_embeddings"


class VitDetRelativeAttention(SamRelativeAttention):
    """``VitDetAttention``, which has no dropout of weights."""

    replaces = ("VitDetAttention",)
    heads = "num_heads"
    wanted = "use_relative_position_embeddings"

    def forward(self, hidden_state: Tensor, output_attentions: bool | None = False) -> tuple[Tensor]:  # type: ignore[override]
        """Attend on a grid, ``(batch, height, width, channels)``."""
        return (self._on_grid(hidden_state, output_attentions),)


def _resized(table: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return rows by ``key - query`` for a grid of ``size`` cells, from rows by ``query - key`` for any grid."""
    rows = interpolate(table.mT[None], size=2 * size - 1, mode="linear")[0].mT
    return rows.flip(0).to(dtype)
