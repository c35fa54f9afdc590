"""The drop-in for ``XLNetRelativeAttention``: one or two streams of queries, with a memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, refuse_weights


class XLNetRelativeSkew(DropIn):
    """``XLNetRelativeAttention``. Its axes are ``(length, batch, …)``."""

    replaces = ("XLNetRelativeAttention",)
    projections = ("q", "k", "v", "o")
    heads = "n_head"
    reads = "r r_w_bias r_r_bias r_s_bias seg_embed scale layer_norm"

    q: nn.Parameter
    k: nn.Parameter
    v: nn.Parameter
    o: nn.Parameter
    r: nn.Parameter

    def forward(
        self,
        h: Tensor,
        g: Tensor | None,
        attn_mask_h: Tensor | None,
        attn_mask_g: Tensor | None,
        r: Tensor,
        seg_mat: Tensor | None,
        mems: Tensor | None = None,
        target_mapping: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from the contents ``h``, and from the queries ``g`` if there are any, to the memory and to ``h``."""
        refuse_weights(output_attentions)
        seen = h if mems is None or mems.dim() < 2 else torch.cat([mems, h])
        k, v = _heads(seen, self.k), _heads(seen, self.v)
        if r.stride(1) == 0:  # the same rows for all items
            r = r[:, :1]
        rel_k = _heads(r.to(self.r.dtype), self.r)
        rel_k = rel_k[0] if rel_k.shape[0] == 1 else rel_k

        def stream(x: Tensor, mask: Tensor | None, mapping: Tensor | None) -> Tensor:
            q = _heads(x, self.q)
            if mapping is not None:
                q = torch.einsum("bhmd,mlb->bhld", q, mapping)
            out = self._attend(q, k, v, rel_k, seg_mat, mask)
            if mapping is not None:
                out = torch.einsum("bhld,mlb->bhmd", out, mapping)
            y = self.dropout(torch.einsum("bhld,ehd->lbe", out, self.o))
            normed: Tensor = self.layer_norm(y + x)
            return normed

        return stream(h, attn_mask_h, None), None if g is None else stream(g, attn_mask_g, target_mapping)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, rel_k: Tensor, seg_mat: Tensor | None, hidden: Tensor | None
    ) -> Tensor:
        """Attend with rows for ``r = -keys …``; ``hidden`` is 1 at hidden keys, ``(n, m, batch, 1)``."""
        keys = k.shape[-2]
        mask = None
        if seg_mat is not None:  # whether query and key are in the same segment
            by_kind = (q + self.r_s_bias[:, None]) @ self.seg_embed.permute(1, 2, 0) * self.scale
            mask = torch.einsum("ijbs,bhis->bhij", seg_mat, by_kind)
        if hidden is not None:
            nothing = hidden.permute(2, 3, 0, 1) * (-65500 if hidden.dtype == torch.float16 else -1e30)
            mask = nothing if mask is None else mask + nothing
        return self.attend(
            q + self.r_w_bias[:, None], k, v, rel_k=rel_k, rel_q=q + self.r_r_bias[:, None],
            span=Span(keys, rel_k.shape[-2] - keys - 1), offset=keys - q.shape[-2], mask=mask, scale=self.scale,
        )  # fmt: skip


def _heads(x: Tensor, weight: Tensor) -> Tensor:
    """``(length, batch, width)`` to ``(batch, heads, length, D)``."""
    return torch.einsum("lbe,ehd->bhld", x, weight)
