"""``RelativeMultiheadAttention``: the attention block as a module that calls its projections."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, overload

import array_api_compat.torch as xp
import torch
from torch import Tensor, nn

from relskew_core._array.checks import describe, explains
from relskew_core._array.precision import autocast
from relskew_core._array.typing import Impl, Namespace
from relskew_core._block.block import Past, Seen, apply_block, check_inputs
from relskew_core._block.cache import Growing
from relskew_core._block.module import CalledBlock
from relskew_core._block.spec import PROJECTIONS, BlockSpec
from relskew_core._block.weights import starts_at_zero, uniform_bound
from relskew_core._positions.span import Span
from relskew_core.layers.torch._attention import TableAttention, check_tensor, fill
from relskew_core.layers.torch._caches import FixedCache, SlidingCache, by_item

Cache = Growing | FixedCache | SlidingCache


class RelativeMultiheadAttention(TableAttention, CalledBlock[FixedCache, SlidingCache]):
    """Multi-head attention with relative positions: :func:`relskew_core.attention_block` as a torch module.

    Its ``state_dict`` is a weights mapping: ``load_state_dict(init_weights(spec, seed=0, xp=torch))`` loads one, and
    ``attention_block(x, module.state_dict(), spec)`` computes the same. In training, memory grows linearly with the
    length, with dropout too. The projections are called as modules, so adapters, quantised layers, hooks and shards
    that replace or wrap them take effect.

    Parameters
    ----------
    spec : BlockSpec
        The block.
    dropout : float, default 0.0
        Fraction of the attention weights that is set to zero in training, ``0 <= dropout < 1``; the others are scaled
        up.
    impl : {"auto", "portable", "native"}, default "auto"
        As in :func:`relskew_core.relative_attention`.
    chunk_size : int, optional
        As in :func:`relskew_core.relative_attention`.
    device, dtype : optional
        Of the parameters, as in torch's own modules.

    Notes
    -----
    Shaw et al. 2018, "Self-Attention with Relative Position Representations", and Huang et al. 2018, "Music
    Transformer". :meth:`reset_parameters` draws projections as Glorot and Bengio 2010, equation 16, and tables with
    rows of unit expected length.

    Examples
    --------
    >>> import torch
    >>> from relskew_core import BlockSpec, Span
    >>> attention = RelativeMultiheadAttention(
    ...     BlockSpec(16, 4, Span.causal(32), causal=True), dropout=0.1
    ... )
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

    Token by token, with a cache of keys and values:

    >>> x, cache = torch.randn(2, 7, 16), attention.eval().empty_cache(2)
    >>> for step in x.split(1, dim=1):
    ...     y, cache = attention(step, past=cache)
    >>> torch.allclose(y, attention(x)[:, -1:], atol=1e-5)
    True

    The weights of every head, for a plot:

    >>> attention.attention_weights(x).shape
    torch.Size([2, 4, 7, 7])
    """

    xp: ClassVar[Namespace] = xp
    caches: ClassVar[tuple[type[Any], type[Any]]] = (FixedCache, SlidingCache)

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module

    if TYPE_CHECKING:  # torch declares that calls return Any

        @overload
        def __call__(
            self, x: Tensor, memory: Tensor | None = None, *, past: None = None, **options: Unpack[Seen]
        ) -> Tensor: ...
        @overload
        def __call__(
            self, x: Tensor, memory: Tensor | None = None, *, past: Past, **options: Unpack[Seen]
        ) -> tuple[Tensor, Past]: ...
        def __call__(self, *inputs: Any, **options: Any) -> Any: ...

    @explains(hint="a module is made of a spec, as in RelativeMultiheadAttention(BlockSpec(64, 4, Span.clipped(8)))")
    def __init__(
        self,
        spec: BlockSpec,
        *,
        dropout: float = 0.0,
        impl: Impl = "auto",
        chunk_size: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(spec, dropout=dropout, impl=impl, chunk_size=chunk_size, device=device, dtype=dtype)
        shapes = spec.weight_shapes()
        for name in PROJECTIONS:
            width, source = shapes[f"{name}.weight"]
            self.add_module(name, nn.Linear(source, width, bias=spec.bias, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def from_multihead(cls, attention: nn.MultiheadAttention, span: Span, **options: Any) -> RelativeMultiheadAttention:
        """Return a module with the weights of an ``nn.MultiheadAttention``, and with tables of zeros.

        Parameters
        ----------
        attention : torch.nn.MultiheadAttention
            Its dropout, device, dtype and training mode are taken over as well. Not modified.
        span : Span
            Relative positions of the tables. The tables start at zero, so the new module gives the outputs of the old
            one until it is trained.
        **options
            Of :class:`relskew_core.BlockSpec`: ``causal``, ``cross``, ``window``, ``shared_table`` …

        Raises
        ------
        ValueError, TypeError
            If the module has ``kdim``, ``vdim``, ``add_bias_kv`` or ``add_zero_attn``, which a block does not support;
            if ``sinks`` are requested, because sinks of zero would change the outputs.

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
        if options.get("sinks"):
            raise ValueError(
                "`sinks` must be False: no finite sinks leave the outputs of `attention` unchanged, got True"
            )
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
            for table in module.table_parameters():
                table.zero_()
        return module

    def reset_parameters(self) -> None:
        """Draw new weights from torch's generator, in the bounds of :func:`relskew_core.init_weights`.

        Parametrised weights are set to what was drawn, or their originals are drawn if that is not possible.
        """
        for key in sorted(self.spec.weight_shapes(), key=lambda key: "." in key):
            path, _, name = key.rpartition(".")
            owner = self.get_submodule(path)
            bound = 0.0 if starts_at_zero(key) else uniform_bound(self.spec, key)
            if getattr(owner, name, None) is not None or path:
                fill(owner, name, partial(nn.init.uniform_, a=-bound, b=bound) if bound else nn.init.zeros_)

    @explains(
        hint="a module is called as module(x), and module(x, memory) where `spec.cross`; "
        "MultiheadAttention takes queries, keys and values"
    )
    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        past: tuple[Tensor, Tensor] | Cache | None = None,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        offset: int | Sequence[int] | Tensor | None = None,
        segments: Tensor | tuple[Tensor, Tensor] | None = None,
        positions: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """Project, attend with relative positions, project back.

        Parameters
        ----------
        x : Tensor, shape (..., Lq, E)
            Input of the queries, and of the keys and values unless ``spec.cross``. A nested tensor is attended to
            item by item.
        memory : Tensor, shape (..., Lk, E), optional
            Input of the keys and values; required if ``spec.cross``, and an error otherwise.
        past : cache, optional
            The cache that :meth:`empty_cache` or the previous call returned, or a pair of keys and values
            ``(..., Hkv, P, D)``; the queries then have the positions ``P … P + Lq - 1``.
        mask : Tensor, optional
            Boolean (``True`` = may attend) or additive, broadcasting to ``(..., H, Lq, Lk)``. With ``past``, the keys
            are the cached ones and the new ones, or all positions of a cache with a ``length``.
        key_padding_mask : Tensor, shape (..., Lk), optional
            Boolean, ``True`` for keys that are padding and not attended to, as in ``nn.MultiheadAttention``.
        offset : int, or ints of the leading axes, optional
            Position of query 0, with key 0 at position 0, for all items or for each; 0 by default. A cache provides it.
        segments : Tensor of integers, shape (..., L) or (L,), or a pair of them, optional
            Packed documents: a query sees the keys of its document. Pass a pair for queries and keys; with ``past``,
            the second contains all keys, as a mask does.
        positions : pair of Tensor of integers, shapes (..., Lq) and (..., Lk), optional
            The positions of queries and keys, in any order. Not allowed with ``past``, which sets them.

        Returns
        -------
        y : Tensor, shape (..., Lq, E)
        present : cache
            Only with ``past``, and of the same kind: pass it as ``past`` to the next call.

        Examples
        --------
        >>> import torch
        >>> from relskew_core import BlockSpec, Span
        >>> attention = RelativeMultiheadAttention(
        ...     BlockSpec(8, 2, Span.causal(16), causal=True)
        ... )
        >>> x = torch.randn(1, 3, 8)
        >>> past, steps = attention.empty_cache(1), []
        >>> for position in range(3):  # one token at a time
        ...     y, past = attention(x[:, position : position + 1], past=past)
        ...     steps.append(y)
        >>> torch.allclose(torch.cat(steps, dim=1), attention(x), atol=1e-6)
        True
        """
        if isinstance(x, Tensor) and x.is_nested:
            inputs = {"x": x} if memory is None else {"x": x, "memory": memory}
            refused = {"past": past, "mask": mask, "key_padding_mask": key_padding_mask, "offset": offset}
            return by_item(self.forward, inputs, {**refused, "segments": segments, "positions": positions})
        check_inputs(x, memory, self.spec)
        for name, given in (("x", x), ("memory", memory))[: 2 if self.spec.cross else 1]:
            check_tensor(name, given)
        cache, attend = self._attention(past, mask, key_padding_mask, offset, segments, positions)
        y, present = apply_block(x, self.spec, self._project, memory=memory, cache=cache, attend=attend, xp=xp)
        return y if present is None else (y, present)

    def _room(self, shape: tuple[int, ...], dtype: Any) -> tuple[Tensor, Tensor, Tensor]:
        weight = getattr(self.k_proj, "weight", None)  # in quantised projections it is a method, or integers
        weights = (weight, *self.table_parameters(), *self.parameters())
        quantised = torch.empty(0, dtype=torch.float32, device="cpu")  # without parameters
        like = next((x for x in weights if isinstance(x, Tensor) and x.is_floating_point()), quantised)
        new = torch.empty(0, dtype=like.dtype if dtype is None else dtype, device=like.device)
        new = autocast({"new": new})["new"]
        *lead, heads, length, width = shape
        keys, values = (new.new_zeros((*lead, heads // self.processes, length, width)) for _ in "kv")
        return keys, values, torch.zeros((), dtype=torch.int64, device=new.device)
