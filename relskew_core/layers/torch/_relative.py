"""``RelativeMultiheadAttention``: the attention block as a module that calls its projections."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, overload

import array_api_compat.torch as xp
import torch
from torch import Tensor, nn

from relskew_core._array.checks import explains
from relskew_core._array.precision import autocast
from relskew_core._array.typing import Impl
from relskew_core._block.block import Past, Seen, apply_block, check_inputs
from relskew_core._block.cache import Growing, SlidingCache
from relskew_core._block.module import CalledBlock, called
from relskew_core._block.spec import PROJECTIONS, BlockSpec
from relskew_core._block.weights import uniform_bound
from relskew_core._positions.span import Span
from relskew_core.layers.torch._attention import TableAttention, check_multihead, check_tensor, fill
from relskew_core.layers.torch._caches import Appended, FixedCache, by_item

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
        Fraction of the attention weights that is set to zero in training, below 1; the others are scaled up.
    impl, chunk_size : optional
        As in :func:`relskew_core.relative_attention`.
    device, dtype : optional
        Of the parameters, as in torch's own modules.

    Notes
    -----
    Shaw et al. 2018, "Self-Attention with Relative Position Representations", and Huang et al. 2018, "Music
    Transformer". ``reset_parameters`` draws projections as Glorot and Bengio 2010, equation 16, and tables with
    rows of unit expected length.

    Examples
    --------
    >>> import torch
    >>> from relskew_core import BlockSpec, Span
    >>> spec = BlockSpec(16, 4, Span.causal(32), causal=True)
    >>> attention = RelativeMultiheadAttention(spec, dropout=0.1)
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

    caches: ClassVar[tuple[type[Any], type[Any]]] = (FixedCache, SlidingCache)
    _growing: ClassVar[type[Growing]] = Appended

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module

    if TYPE_CHECKING:  # torch declares that calls return Any

        @overload
        def __call__(self, x: Tensor, memory: Tensor | None = None, **options: Unpack[Seen]) -> Tensor: ...
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
        check_multihead(attention, "one width and no extra keys", "kdim", "vdim", "add_bias_kv", "add_zero_attn")
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
            bound = uniform_bound(self.spec, key)
            if getattr(owner, name, None) is not None or path:
                fill(owner, name, partial(nn.init.uniform_, a=-bound, b=bound) if bound else nn.init.zeros_)

    @called(others="; MultiheadAttention takes queries, keys and values")
    def forward(
        self, x: Tensor, memory: Tensor | None = None, *, past: tuple[Tensor, Tensor] | Cache | None = None, **seen: Any
    ) -> Tensor | tuple[Tensor, Any]:
        if isinstance(x, Tensor) and x.is_nested:
            inputs = {"x": x} if memory is None else {"x": x, "memory": memory}
            return by_item(self.forward, inputs, {"past": past, **seen})
        check_inputs(x, memory, self.spec)
        for name, given in (("x", x), ("memory", memory))[: 2 if self.spec.cross else 1]:
            check_tensor(name, given)
        cache, attend = self._attention(past, {**seen, **self.dropped(x)})
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
