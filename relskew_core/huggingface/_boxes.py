"""The drop-ins for LayoutLMv3 and UDOP: biases by the boxes of words, which are made and added once.

They go by two or three coordinates at the same time, so the bias is a matrix. What the originals make of it in every
layer is not held: sums, weights, and their shares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, additive, join, refuse_weights, t5_rows
from relskew_core.huggingface._t5 import T5RelativeAttention


class LayoutLMv3RelativeEncoder(DropIn):
    """``LayoutLMv3Encoder``, which adds the bias of all layers to the mask."""

    replaces = ("LayoutLMv3Encoder",)
    needs = "LayoutLMv3SelfAttention"
    projections, heads, drops = (), "", ""
    reads = "has_relative_attention_bias has_spatial_attention_bias layer"

    @classmethod
    def serves(cls, original: Any) -> bool:
        return super().serves(original) and bool(original.has_relative_attention_bias)

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.far = {"rel_pos_bias": original.max_rel_pos}
        if original.has_spatial_attention_bias:
            self.far |= dict.fromkeys(("rel_pos_x_bias", "rel_pos_y_bias"), original.max_rel_2d_pos)

    def forward(
        self,
        hidden_states: Tensor,
        bbox: Any = None,
        attention_mask: Tensor | None = None,
        position_ids: Any = None,
        **options: Any,
    ) -> Any:
        """Run the encoder with all biases in the mask."""
        places = {"rel_pos_bias": position_ids}
        if len(self.far) > 1:
            places |= {"rel_pos_x_bias": bbox[..., 0], "rel_pos_y_bias": bbox[..., 3]}
        with torch.no_grad():  # the model does not train them
            bias = sum(self._by_pair(name, where) for name, where in places.items())
        bias = bias / self.layer[0].attention.self.attention_head_size ** 0.5
        if attention_mask is not None:
            bias = bias + additive(attention_mask, bias.dtype)
        return self.kind.forward(self, hidden_states, bbox, bias, position_ids, **options)

    def _by_pair(self, name: str, places: Tensor) -> Tensor:
        """Return the bias of each pair of positions, ``(batch, heads, length, length)``."""
        far, layer = self.far[name], getattr(self, name)
        rows = t5_rows(Span.clipped(far), layer.in_features, places)
        dtype = next(self.layer[0].parameters()).dtype
        table = layer(one_hot(rows, layer.in_features).to(dtype)).mT
        relative = places[..., None, :] - places[..., :, None]
        return table[:, relative.clamp(-far, far) + far].transpose(0, 1)

    def _compute_position_bias(self, position_ids: Any, bbox: Any) -> None:
        return None

    # before transformers 5.24
    def _cal_1d_pos_emb(self, position_ids: Any) -> None:
        return None

    def _cal_2d_pos_emb(self, bbox: Any) -> None:
        return None


class LayoutLMv3RelativeAttention(DropIn):
    """``LayoutLMv3SelfAttention``."""

    replaces = ("LayoutLMv3SelfAttention",)
    needs = "LayoutLMv3Encoder"
    projections = ("query", "key", "value", "")
    heads = "num_attention_heads"

    @classmethod
    def serves(cls, original: Any) -> bool:
        of = getattr(original, "config", original)  # transformers 5.24 leaves it to the configuration
        return super().serves(original) and bool(getattr(of, "has_relative_attention_bias", False))

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *biases: None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend from ``(batch, length, width)`` to itself; the mask contains all biases."""
        refuse_weights(kwargs.get("output_attentions"))
        return join(self.attend(*self.project(hidden_states), mask=attention_mask)), None


class UdopRelativeBias(DropIn):
    """``RelativePositionBiasAggregated``, which also hides padding."""

    replaces = ("RelativePositionBiasAggregated",)
    needs = "UdopAttention"
    projections, heads, drops = (), "", ""
    reads = "biases"

    def forward(self, attention_mask: Tensor, bbox: Tensor | None = None) -> Tensor:
        """Return the sum of biases, ``(batch, heads, length, length)``."""
        bias: Tensor = self.kind.forward(self, attention_mask, bbox)
        return bias.masked_fill(attention_mask[:, None, None, :] == 0, torch.finfo(bias.dtype).min)


class UdopRelativeAttention(T5RelativeAttention):
    """``UdopAttention``: T5's in the decoder, and with the bias by pairs of boxes in the encoder."""

    replaces = ("UdopAttention",)
    local = False
    masks = ()

    def added(self, position_bias: Tensor) -> dict[str, Any]:
        """Return the options of a bias; that by pairs already hides padding."""
        return {"mask": position_bias} if position_bias.ndim == 4 else super().added(position_bias)
