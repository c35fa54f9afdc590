"""torch: relative attention as a module, for models made of modules.

``from relskew_core.layers.torch import RelativeMultiheadAttention``; nothing else here imports torch on its own.
"""

from __future__ import annotations

import math
from functools import partial
from operator import attrgetter
from typing import Any

from relskew_core._array.extras import needs_extra

try:
    import array_api_compat.torch as xp
    import torch
    from torch import Tensor, nn
except ModuleNotFoundError as error:
    raise needs_extra("relskew_core.layers.torch", "torch", error) from error

from relskew_core._array.autocast import autocast
from relskew_core._array.checks import check_real, describe
from relskew_core._block.block import apply_block
from relskew_core._block.spec import PROJECTIONS, BlockSpec
from relskew_core._block.weights import starts_at_zero, uniform_bound
from relskew_core._functions.attention import relative_attention
from relskew_core._kernel.problem import check_mask
from relskew_core._positions.span import Span

__all__ = ["RelativeMultiheadAttention"]


class RelativeMultiheadAttention(nn.Module):
    """Multi-head attention with relative positions: :func:`relskew_core.attention_block` as a torch module.

    Its ``state_dict`` is a weights mapping: ``load_state_dict(init_weights(spec, seed=0, xp=torch))`` loads one, and
    ``attention_block(x, module.state_dict(), spec)`` computes the same. Trains in memory that grows with the length
    and not with its square, dropout included.

    Parameters
    ----------
    spec : BlockSpec
        The block.
    dropout : float, default 0.0
        Share of the attention weights that is zeroed in training, ``0 <= dropout < 1``; the others are scaled up.
    device, dtype : optional
        Of the parameters, as in torch's own modules.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit; the message names it.

    Notes
    -----
    Shaw et al. 2018, "Self-Attention with Relative Position Representations", and Huang et al. 2018, "Music
    Transformer". :meth:`reset_parameters` draws projections as Glorot and Bengio 2010, equation 16, and tables with
    rows of unit expected length.

    Examples
    --------
    >>> import torch
    >>> from relskew_core import BlockSpec, Span
    >>> attention = RelativeMultiheadAttention(BlockSpec(16, 4, Span.causal(32), causal=True), dropout=0.1)
    >>> attention(torch.randn(2, 7, 16)).shape
    torch.Size([2, 7, 16])
    >>> attention
    RelativeMultiheadAttention(
      embed_dim=16, num_heads=4, span=Span(left=31, right=0, beyond='error'), causal=True, dropout=0.1
      (q_proj): Linear(in_features=16, out_features=16, bias=True)
      (k_proj): Linear(in_features=16, out_features=16, bias=True)
      (v_proj): Linear(in_features=16, out_features=16, bias=True)
      (out_proj): Linear(in_features=16, out_features=16, bias=True)
    )
    """

    rel_k: nn.Parameter
    rel_v: nn.Parameter | None
    rel_bias: nn.Parameter | None
    sinks: nn.Parameter | None

    def __init__(
        self,
        spec: BlockSpec,
        *,
        dropout: float = 0.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(spec, BlockSpec):
            raise TypeError(f"`spec` must be a BlockSpec, got {describe(spec)}")
        dropout = check_real("dropout", dropout)
        if not 0 <= dropout < 1:
            raise ValueError(f"`dropout` must be at least 0 and less than 1, got {dropout}")
        self.spec = spec
        self.dropout = dropout
        shapes = spec.weight_shapes()
        for name in PROJECTIONS:
            width, source = shapes[f"{name}.weight"]
            self.add_module(name, nn.Linear(source, width, bias=spec.bias, device=device, dtype=dtype))
        for name in ("rel_k", "rel_v", "rel_bias", "sinks"):
            empty = torch.empty(shapes[name], device=device, dtype=dtype) if name in shapes else None
            self.register_parameter(name, None if empty is None else nn.Parameter(empty))
        self.reset_parameters()

    @classmethod
    def from_multihead(cls, attention: nn.MultiheadAttention, span: Span, **options: Any) -> RelativeMultiheadAttention:
        """Return the module that takes over from an ``nn.MultiheadAttention``: its weights, and tables of zeros.

        Parameters
        ----------
        attention : torch.nn.MultiheadAttention
            Its dropout, device, dtype and training mode are taken over as well. Not modified.
        span : Span
            Of the tables. As they start at zero, the new module computes what the old one did until it is trained.
        **options
            Of :class:`relskew_core.BlockSpec`: ``causal``, ``cross``, ``window``, ``shared_table`` …

        Raises
        ------
        ValueError, TypeError
            If the module has what a block has not: ``kdim``, ``vdim``, ``add_bias_kv`` or ``add_zero_attn``.

        Examples
        --------
        >>> import torch
        >>> from relskew_core import Span
        >>> old = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> new = RelativeMultiheadAttention.from_multihead(old, Span.clipped(8))
        >>> x = torch.randn(2, 7, 16)
        >>> torch.allclose(new(x), old(x, x, x)[0], atol=1e-6)
        True
        """
        if not isinstance(attention, nn.MultiheadAttention):
            raise TypeError(f"`attention` must be a torch.nn.MultiheadAttention, got {describe(attention)}")
        unlike = {
            "kdim": attention.kdim != attention.embed_dim,
            "vdim": attention.vdim != attention.embed_dim,
            "add_bias_kv": attention.bias_k is not None,
            "add_zero_attn": attention.add_zero_attn,
        }
        if any(unlike.values()):
            found = ", ".join(name for name, here in unlike.items() if here)
            raise ValueError(f"`attention` must have one width and no extra keys, got one made with {found}")
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
        spec = BlockSpec(attention.embed_dim, attention.num_heads, span, bias=bias is not None, **options)
        module = cls(spec, dropout=attention.dropout, device=weight.device, dtype=weight.dtype)
        module.train(attention.training)
        with torch.no_grad():
            for name, part in zip(PROJECTIONS, (*weight.chunk(3), attention.out_proj.weight), strict=True):
                module.get_parameter(f"{name}.weight").copy_(part)
            if bias is not None:
                for name, part in zip(PROJECTIONS, (*bias.chunk(3), attention.out_proj.bias), strict=True):
                    module.get_parameter(f"{name}.bias").copy_(part)
            for table in (module.rel_k, module.rel_v, module.rel_bias):
                if table is not None:
                    table.zero_()
        return module

    def reset_parameters(self) -> None:
        """Draw new weights from torch's generator, in the bounds of :func:`relskew_core.init_weights`."""
        for key, parameter in self.named_parameters():
            if starts_at_zero(key):
                nn.init.zeros_(parameter)
            else:
                bound = uniform_bound(self.spec, key)
                nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        past: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
        """Project, attend with relative positions, project back.

        Parameters
        ----------
        x : Tensor, shape (..., Lq, E)
            Input of the queries, and of the keys and values unless ``spec.cross``.
        memory : Tensor, shape (..., Lk, E), optional
            Input of the keys and values; required if ``spec.cross``, refused otherwise.
        past : (Tensor, Tensor), optional
            Cached keys and values ``(..., Hkv, P, D)``; the queries then stand at positions ``P … P + Lq - 1``.
        mask : Tensor, optional
            Boolean (``True`` = may attend) or additive, broadcasting to ``(..., H, Lq, Lk)``.
        key_padding_mask : Tensor, shape (..., Lk), optional
            Boolean, ``True`` for keys that are padding and not attended to, as in ``nn.MultiheadAttention``; with
            ``past`` the keys are the cached ones and the new ones.

        Returns
        -------
        y : Tensor, shape (..., Lq, E)
        present : (Tensor, Tensor)
            Only with ``past``: all keys and values so far, ``(..., Hkv, P + Lq, D)``, the next call's ``past``.

        Raises
        ------
        ValueError, TypeError
            If an argument does not fit; the message names it.

        Examples
        --------
        >>> import torch
        >>> from relskew_core import BlockSpec, Span
        >>> attention = RelativeMultiheadAttention(BlockSpec(8, 2, Span.causal(16), causal=True))
        >>> x = torch.randn(1, 3, 8)
        >>> past = torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 0, 4)
        >>> steps = []
        >>> for position in range(3):  # one token at a time
        ...     y, past = attention(x[:, position : position + 1], past=past)
        ...     steps.append(y)
        >>> torch.allclose(torch.cat(steps, dim=1), attention(x), atol=1e-6)
        True
        """
        # By attribute, so that what torch puts there (parametrizations, pruning) takes part.
        weights = {key: attrgetter(key)(self) for key in self.spec.weight_shapes()}
        attend: Any = relative_attention
        if self.training and self.dropout:
            seed = torch.randint(2**31, (), device=x.device)
            attend = partial(relative_attention, dropout=self.dropout, seed=seed)
        if key_padding_mask is not None:
            attend = partial(_attend_without_padding, attend, key_padding_mask)
        return apply_block(x, weights, self.spec, memory=memory, past=past, mask=mask, attend=attend)

    def extra_repr(self) -> str:
        """Return what the spec says other than by default."""
        spec = self.spec
        usual = BlockSpec(spec.embed_dim, spec.num_heads, spec.span, head_dim=spec.head_dim, causal=spec.causal)
        shown = [f"embed_dim={spec.embed_dim}, num_heads={spec.num_heads}, span={spec.span}, causal={spec.causal}"]
        if spec.head_dim * spec.num_heads != spec.embed_dim:
            shown.append(f"head_dim={spec.head_dim}")
        tables = ("shared_table", "rel_values", "rel_keys", "rel_bias")
        for name in ("num_kv_heads", "cross", "window", "block_size", "blocks_before", *tables, "sinks", "bias"):
            if getattr(spec, name) != getattr(usual, name):
                shown.append(f"{name}={getattr(spec, name)}")
        return ", ".join((*shown, f"dropout={self.dropout}"))


def _attend_without_padding(
    attend: Any, padding: Tensor, q: Tensor, k: Tensor, *arrays: Any, mask: Tensor | None, **options: Any
) -> Any:
    """Attend with the keys that are padding hidden from all heads and queries, (..., 1, 1, Lk)."""
    shape = (*k.shape[:-3], k.shape[-2])
    if not isinstance(padding, Tensor) or padding.dtype != torch.bool or padding.shape != shape:
        raise ValueError(
            f"`key_padding_mask` must be a boolean tensor of shape {tuple(shape)}, True where a key is padding, "
            f"got {describe(padding)}"
        )
    hidden = padding[..., None, None, :]
    if mask is None:
        mask = ~hidden
    else:
        mask = check_mask(autocast({"mask": mask})["mask"], q, k, xp=xp)
        mask = mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, -math.inf)
    return attend(q, k, *arrays, mask=mask, **options)
