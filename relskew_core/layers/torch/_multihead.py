"""``MultiheadAttention``: torch's own module of that name, with tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import array_api_compat.torch as xp
import torch
from torch import Tensor, nn
from torch.nn import functional

from relskew_core._array.checks import check_bool, check_int, describe, explains
from relskew_core._array.softmax import joint
from relskew_core._array.typing import Impl
from relskew_core._block.block import weights_alone
from relskew_core._block.spec import TABLES, CallSpec
from relskew_core._positions.span import Span
from relskew_core.layers.torch._attention import TableAttention, check_multihead, check_tensor, fill
from relskew_core.layers.torch._caches import attention_mask, by_item, padding_mask

SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
"""torch's names for the weights of inputs that differ in width."""


class MultiheadAttention(TableAttention):
    """``torch.nn.MultiheadAttention`` with relative positions: its arguments, masks, returns and parameters' names.

    Use it as ``self_attn`` or ``multihead_attn`` of torch's transformer layers. Tables start at zero: a checkpoint of
    torch's module loads with ``strict=False`` and gives the same outputs until the tables are trained.

    Parameters
    ----------
    embed_dim, num_heads : int
        As in torch.
    span : Span
        Relative positions of the tables.
    dropout, bias, kdim, vdim, batch_first : optional
        As in torch; ``batch_first`` is False by default.
    rel_keys, rel_values, rel_bias, num_buckets, max_distance, shared_table, window : optional
        The tables or biases, and which keys a query sees, as in :class:`relskew_core.BlockSpec`.
    impl, chunk_size : optional
        As in :func:`relskew_core.relative_attention`.
    device, dtype : optional
        As in torch.

    Examples
    --------
    >>> import torch
    >>> from relskew_core import Span
    >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    >>> layer.self_attn = MultiheadAttention(16, 4, Span.clipped(8), batch_first=True)
    >>> layer(torch.randn(2, 7, 16)).shape
    torch.Size([2, 7, 16])

    The weights of torch's module, which give the same outputs until the tables are trained:

    >>> old = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    >>> new = MultiheadAttention(16, 4, Span.clipped(8), batch_first=True)
    >>> new.load_state_dict(old.state_dict(), strict=False).missing_keys
    ['rel_k']
    >>> x = torch.randn(2, 7, 16)
    >>> torch.allclose(new(x, x, x)[0], old(x, x, x)[0], atol=1e-6)
    True

    A causal call, which also returns the weights of each head:

    >>> hidden = torch.nn.Transformer.generate_square_subsequent_mask(7)
    >>> causal = {"attn_mask": hidden, "is_causal": True}
    >>> _, weights = new(x, x, x, **causal, average_attn_weights=False)
    >>> weights.shape, bool((weights.triu(1) == 0).all())
    (torch.Size([2, 4, 7, 7]), True)
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None

    # torch's layers read it: True would let their "fast path" compute attention without this module and its tables.
    _qkv_same_embed_dim = False

    if TYPE_CHECKING:  # torch declares that calls return Any

        def __call__(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            key_padding_mask: Tensor | None = None,
            need_weights: bool = True,
            attn_mask: Tensor | None = None,
            average_attn_weights: bool = True,
            is_causal: bool = False,
        ) -> tuple[Tensor, Tensor | Any]: ...

    @explains
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        span: Span,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        rel_keys: bool = True,
        rel_values: bool = False,
        rel_bias: bool | str = False,
        num_buckets: int | None = None,
        max_distance: int | None = None,
        shared_table: bool = False,
        window: tuple[int | None, int | None] | None = None,
        impl: Impl = "auto",
        chunk_size: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        spec = CallSpec(
            embed_dim, num_heads, span, window=window, shared_table=shared_table, rel_values=rel_values,
            rel_keys=rel_keys, rel_bias=rel_bias, num_buckets=num_buckets, max_distance=max_distance, bias=bias,
        )  # fmt: skip
        super().__init__(spec, dropout=dropout, impl=impl, chunk_size=chunk_size, device=device, dtype=dtype)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, spec.head_dim
        self.kdim = embed_dim if kdim is None else check_int("kdim", kdim, minimum=1)
        self.vdim = embed_dim if vdim is None else check_int("vdim", vdim, minimum=1)
        self.batch_first = check_bool("batch_first", batch_first)
        shapes: dict[str, tuple[int, ...] | None] = dict.fromkeys((*SEPARATE, "in_proj_weight", "in_proj_bias"))
        if self.kdim == self.vdim == embed_dim:
            shapes["in_proj_weight"] = (3 * embed_dim, embed_dim)
        else:
            shapes.update(
                {name: (embed_dim, n) for name, n in zip(SEPARATE, (embed_dim, self.kdim, self.vdim), strict=True)}
            )
        if bias:
            shapes["in_proj_bias"] = (3 * embed_dim,)
        for name, shape in shapes.items():
            empty = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, empty)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    @classmethod
    def from_multihead(cls, attention: nn.MultiheadAttention, span: Span, **options: Any) -> MultiheadAttention:
        """Return a module with the weights of an ``nn.MultiheadAttention``, and with tables of zeros.

        Parameters
        ----------
        attention : torch.nn.MultiheadAttention
            Its sizes, dropout, layout, device, dtype and training mode are taken over as well. Not modified.
        span : Span
            Of the tables.
        **options
            Others of this class: ``rel_values``, ``shared_table``, ``window`` …

        Raises
        ------
        ValueError, TypeError
            If the module was created with ``add_bias_kv`` or ``add_zero_attn``, which add keys without a position.

        Examples
        --------
        >>> import torch
        >>> from relskew_core import Span
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> encoder, span = torch.nn.TransformerEncoder(layer, 2).eval(), Span.clipped(8)
        >>> x = torch.randn(2, 7, 16)
        >>> before = encoder(x)
        >>> for layer in encoder.layers:
        ...     layer.self_attn = MultiheadAttention.from_multihead(layer.self_attn, span)
        >>> torch.allclose(encoder(x), before, atol=1e-5)
        True
        """
        check_multihead(attention, "no keys without a position", "add_bias_kv", "add_zero_attn")
        weight = attention.out_proj.weight
        module = cls(
            attention.embed_dim, attention.num_heads, span, dropout=attention.dropout, bias=attention.in_proj_bias is
            not None, kdim=attention.kdim, vdim=attention.vdim, batch_first=attention.batch_first, device=weight.device,
            dtype=weight.dtype, **options,
        )  # fmt: skip
        module.load_state_dict(attention.state_dict(), strict=False)
        return module.train(attention.training)

    def reset_parameters(self) -> None:
        """Draw the same weights as ``torch.nn.MultiheadAttention`` from the same seed; set the tables to zero."""
        for name in ("in_proj_weight", *SEPARATE):
            if getattr(self, name) is not None:
                fill(self, name, nn.init.xavier_uniform_)
        for owner, name in ((self.out_proj, "bias"), *((self, name) for name in ("in_proj_bias", *TABLES))):
            if getattr(owner, name) is not None:
                fill(owner, name, nn.init.zeros_)

    @explains
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as ``torch.nn.MultiheadAttention`` does, with relative positions.

        Parameters
        ----------
        query : Tensor, shape (L, N, E), (N, L, E) if ``batch_first``, or (L, E)
            Input of the queries. Nested tensors are attended to item by item.
        key, value : Tensor, shape (S, N, kdim or vdim), (N, S, …) if ``batch_first``, or (S, …)
            Inputs of the keys and values. Key 0 is at the position of query 0.
        key_padding_mask : Tensor, shape (N, S) or (S,), optional
            Boolean, ``True`` for keys that are not attended to, or additive.
        need_weights : bool, default True
            Also return the attention weights, without dropout. They are a matrix by query and key for each head: pass
            False if you do not need them.
        attn_mask : Tensor, shape (L, S) or (N · H, L, S), optional
            Boolean, ``True`` where a query may **not** attend, or additive.
        average_attn_weights : bool, default True
            Return the mean of the heads' weights.
        is_causal : bool, default False
            Attend causally. If ``attn_mask`` is passed as well, it must be the causal mask, and is not read.

        Returns
        -------
        y : Tensor, shaped as ``query``
            A query that may see no key gets the bias of the output projection, where torch gives NaN.
        weights : Tensor or None, shape (N, L, S), or (N, H, L, S) unless averaged
            ``None`` unless ``need_weights``. Inputs without the axis N give weights without it.
        """
        if isinstance(query, Tensor) and query.is_nested:
            if need_weights:
                raise ValueError("`need_weights` must be False for nested tensors, got True")

            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                return self.forward(query, key, value, need_weights=False, is_causal=is_causal)[0]

            refused = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
            return by_item(attend, {"query": query, "key": key, "value": value}, refused), None
        self._check_inputs(query, key, value)
        turned = query.ndim == 3 and not self.batch_first
        projected = (x.transpose(0, 1) if turned else x for x in self._project(query, key, value))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2) for x in projected)
        self._check_future(k, hidden=check_bool("is_causal", is_causal) or attn_mask is not None, alone=query is key)
        check_bool("need_weights", need_weights)
        check_bool("average_attn_weights", average_attn_weights)
        options: dict[str, Any] = {
            "causal": is_causal,
            "window": self.spec.window,
            "offset": 0,
            "mask": joint(
                None if is_causal or attn_mask is None else attention_mask(attn_mask, q, k),
                None if key_padding_mask is None else padding_mask(key_padding_mask, q, k),
                xp=xp,
            ),
        }
        heads = self.attend(q, k, v, **options, **self.dropped(q))
        y = self.out_proj(heads.transpose(-3, -2).flatten(-2))
        y = y.transpose(0, 1) if turned else y
        if not need_weights:
            return y, None
        weights = self.attend(q, k, v, function=weights_alone, **options)
        return y, weights.mean(dim=-3) if average_attn_weights else weights

    def attention_weights(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return the weights of each head, ``(N, H, L, S)``; the arguments are those of :meth:`forward`."""
        weights = self.forward(query, key, value, need_weights=True, average_attn_weights=False, **options)[1]
        assert weights is not None
        return weights

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, width), x in zip(widths.items(), (query, key, value), strict=True):
            check_tensor(name, x)
            if x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != width:
                axes = "2 axes or 3" if name == "query" else f"the {query.ndim} axes of `query`"
                raise ValueError(f"`{name}` must have {axes}, the last one {width} long, got {describe(x)}")

    def _check_future(self, k: Tensor, *, hidden: bool, alone: bool) -> None:
        """Refuse tables that end at the query if a sequence attends to itself, including its future, as a spec does."""
        span, window = self.spec.span, self.spec.window
        if hidden or not alone or not span.left > span.right == 0 or (window is not None and window[1] is not None):
            return
        if k.shape[-2] > 1:
            raise ValueError(
                "`is_causal` must be True, or `attn_mask` be given, because the tables end at the query itself, got "
                f"{span}: or give a span that reaches the future, such as Span({span.left}, {span.left}, "
                f"{span.beyond!r})"
            )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        if self.in_proj_weight is not None and query is key is value:
            return functional.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        if self.in_proj_weight is not None:
            weights: Sequence[Tensor] = self.in_proj_weight.chunk(3)
        else:
            weights = [getattr(self, name) for name in SEPARATE]
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [functional.linear(*given) for given in zip((query, key, value), weights, biases, strict=True)]

    def extra_repr(self) -> str:
        widths = [f"{name}={n}" for name, n in (("kdim", self.kdim), ("vdim", self.vdim)) if n != self.embed_dim]
        return ", ".join([super().extra_repr(), *widths, *(["batch_first=True"] if self.batch_first else [])])
