"""The drop-ins for MPNet: T5's bias, which its encoder makes once for all layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, refuse_weights, t5_rows

SPAN = Span.clipped(128)


class MPNetRelativeEncoder(DropIn):
    """``MPNetEncoder``, whose bias is by position, ``(heads, rows)``."""

    replaces = ("MPNetEncoder",)
    needs = "MPNetSelfAttention"
    projections, heads, drops = (), "", ""
    reads = "relative_attention_bias"
    local = True

    relative_attention_bias: nn.Embedding

    def attends_to_itself(self) -> bool:
        return False  # its layers add them

    def forward(self, *given: Any, **options: Any) -> Any:
        """Run the encoder."""
        return self.kind.forward(self, *given, **options)

    def compute_position_bias(self, x: Tensor) -> Tensor:
        """Return the bias of each relative position."""
        rows = t5_rows(SPAN, 32, x)  # whichever number its configuration has
        bias: Tensor = self.relative_attention_bias(rows).mT.contiguous()
        return bias


class MPNetRelativeAttention(DropIn):
    """``MPNetSelfAttention``."""

    replaces = ("MPNetSelfAttention",)
    needs = "MPNetEncoder"
    projections = ("q", "k", "v", "o")
    heads = "num_attention_heads"
    local = True
    masks = ("MPNetModel",)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor]:
        """Attend from ``(batch, length, width)`` to itself, like the original module."""
        refuse_weights(output_attentions)
        q, k, v = self.project(hidden_states)
        return (self.finish(self.attend(q, k, v, rel_bias=position_bias, span=SPAN, mask=attention_mask)),)
