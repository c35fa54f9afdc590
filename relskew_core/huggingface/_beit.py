"""The drop-ins for BEiT: a bias by relative cell is passed to attention instead of a matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import interpolate, pad

from relskew_core._functions.grid_attention import relative_attention_2d
from relskew_core.huggingface._attend import DropIn, join, refuse_weights
from relskew_core.huggingface._windows import by_cell

HELD = 2**24
"""The most entries of a matrix by query and key. In chunks it is made again for each: slower, with less memory."""


@dataclass(frozen=True)
class GridBias:
    """The placeholder of the bias as a matrix, to which models add masks and other biases."""

    table: Tensor  # (heads, 2 · height - 1, 2 · width - 1), by query - key
    outside: Tensor  # (heads, 3): from a cell to the class token, from the class token to a cell, and to itself
    grid: tuple[int, int]
    mask: Tensor | None = None
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
    """``BeitRelativePositionBias``."""

    replaces = ("BeitRelativePositionBias",)
    needs = "BeitAttention"
    projections, heads, drops = (), "", ""
    reads = "relative_position_bias_table window_size"

    def forward(
        self, window_size: tuple[int, int], interpolate_pos_encoding: bool = False, dim_size: int | None = None
    ) -> GridBias:
        """Return the bias of a grid of cells; the table is resized if it was trained on a different grid."""
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
        self, hidden_states: Tensor, attention_mask: GridBias | Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend from ``(batch, length, width)`` to itself, like the original module."""
        refuse_weights(kwargs.get("output_attentions"))
        return self.finish(self._with_bias(hidden_states, attention_mask)), None

    def _with_bias(self, hidden_states: Tensor, bias: GridBias | Tensor | None) -> Tensor:
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
        y: Tensor = out
        return y


class Data2VecVisionRelativeBias(BeitRelativeBias):
    """``Data2VecVisionRelativePositionBias``."""

    replaces = ("Data2VecVisionRelativePositionBias",)
    needs = "Data2VecVisionSelfOutput"


class Data2VecVisionRelativeAttention(BeitRelativeAttention):
    """``Data2VecVisionSelfAttention``, which contains its bias; another module has the last projection."""

    replaces = ("Data2VecVisionSelfAttention", "Data2VecVisionSdpaSelfAttention")
    needs = "Data2VecVisionRelativePositionBias"
    projections = ("query", "key", "value", "")
    drops = "dropout"
    reads = "has_relative_position_bias config.patch_size"

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        output_attentions: bool = False,
        relative_position_bias: GridBias | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] = (0, 0),
    ) -> tuple[Tensor]:
        """Attend from ``(batch, length, width)`` to itself; ``resolution`` is that of the image."""
        refuse_weights(output_attentions)
        bias = relative_position_bias
        if self.has_relative_position_bias:
            h, w = (size // self.config.patch_size for size in resolution)
            own: GridBias = self.relative_position_bias((h, w))
            bias = own if bias is None else own + bias
        return (join(self._with_bias(hidden_states, bias)),)
