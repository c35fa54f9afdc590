"""``ConformerAttention``: Transformer-XL's attention as in Conformers, offline and as a stream of chunks."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relskew_core._array.checks import check_choice, check_int, describe, explains
from relskew_core._array.typing import Impl
from relskew_core._block.cache import Growing, SlidingCache, slid
from relskew_core._block.spec import BlockSpec
from relskew_core._functions.tables import DIRECTIONS, Direction
from relskew_core._positions.span import Span
from relskew_core.layers.torch._attention import fill, rows_of_sinusoids
from relskew_core.layers.torch._caches import FixedCache
from relskew_core.layers.torch._relative import RelativeMultiheadAttention


class ChunkCache(NamedTuple):
    """The keys and values of the blocks before a chunk, of fixed length, so that each chunk costs the same.

    Parameters
    ----------
    keys, values : Tensor, shape (..., H, blocks_before * block_size, D)
        The last positions, in order; in the beginning, room in front of them.
    length : Tensor of int64, shape ()
        How many of them there are.

    Examples
    --------
    >>> import torch
    >>> from relskew_core import BlockSpec, Span
    >>> from relskew_core.layers.torch import ConformerAttention
    >>> spec = BlockSpec(8, 2, Span.full(12), block_size=4, blocks_before=2)
    >>> attention = ConformerAttention(spec)
    >>> attention.empty_cache(1).keys.shape
    torch.Size([1, 2, 8, 4])
    """

    keys: Tensor
    values: Tensor
    length: Tensor

    def extend(self, k: Tensor, v: Tensor, *, xp: Any) -> tuple[Tensor, Tensor, ChunkCache, dict[str, Any]]:
        k, v, present, seen = slid(self, k, v, xp=xp)
        del seen["window"]  # the blocks decide what is visible
        return k, v, present, seen


class ConformerAttention(RelativeMultiheadAttention):
    """Multi-head attention with projected sinusoids and two learned biases, as in Transformer-XL and Conformers.

    The logit of a query ``q`` at a key ``k`` is ``(q + u) · k + (q + w) · (pos_proj @ R_r)``, with the sinusoids ``R``
    of the relative position ``r``, so no weight depends on the length of a sequence.
    :func:`relskew_core.conventions.load_conformer` reads weights of ESPnet, NeMo, fairseq,
    ChunkFormer, SpeechBrain and transformers.

    With ``block_size`` and ``blocks_before`` it is cache-aware: a query sees its chunk and this many chunks before it.
    Chunk by chunk, with a cache from :meth:`empty_cache`, the outputs are the same as for the whole sequence at once,
    and every chunk costs the same.

    Parameters
    ----------
    spec : BlockSpec
        The block. Its span says how far relative positions may reach; there is no table. ``rel_values``, ``rel_bias``,
        ``sinks`` and ``cross`` raise an error.
    direction : {"past", "future", "both"}, default "past"
        Of the sinusoids, as in :func:`relskew_core.sinusoidal_table`: ``"both"`` for SpeechBrain's checkpoints.
    dropout, impl, chunk_size, device, dtype : optional
        As in :class:`RelativeMultiheadAttention`.

    Notes
    -----
    Dai et al. 2019, "Transformer-XL", section 3.3; Gulati et al. 2020, "Conformer", section 2.1. Chunks are those of
    Noroozi et al. 2023, "Stateful Conformer with Cache-based Inference for Streaming Automatic Speech Recognition".

    Examples
    --------
    >>> import torch
    >>> from relskew_core import BlockSpec, Span
    >>> spec = BlockSpec(8, 2, Span.full(12), block_size=4, blocks_before=2)
    >>> attention = ConformerAttention(spec).eval()
    >>> x, past, chunks = torch.randn(1, 20, 8), attention.empty_cache(1), []
    >>> with torch.no_grad():
    ...     for chunk in x.split(4, dim=1):
    ...         y, past = attention(chunk, past=past)
    ...         chunks.append(y)
    ...     torch.allclose(torch.cat(chunks, dim=1), attention(x), atol=1e-6)
    True
    """

    @explains(hint="a module is made of a spec, as in ConformerAttention(BlockSpec(64, 4, Span.full(500)))")
    def __init__(
        self,
        spec: BlockSpec,
        *,
        direction: Direction = "past",
        dropout: float = 0.0,
        impl: Impl = "auto",
        chunk_size: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(spec, BlockSpec):
            unlike = [name for name in ("rel_values", "rel_bias", "sinks", "cross") if getattr(spec, name)]
            if unlike or not spec.rel_keys or spec.num_kv_heads != spec.num_heads:
                raise ValueError(
                    f"`spec` must have `rel_keys` alone and as many heads of keys as of queries, got {spec}"
                )
        super().__init__(spec, dropout=dropout, impl=impl, chunk_size=chunk_size, device=device, dtype=dtype)
        check_choice("direction", direction, DIRECTIONS)
        self.direction: Direction = direction
        self.register_parameter("rel_k", None)
        width, heads = spec.embed_dim, (spec.num_heads, spec.head_dim)
        self.pos_proj = nn.Linear(width, spec.num_heads * spec.head_dim, bias=False, device=device, dtype=dtype)
        self.u, self.w = (nn.Parameter(torch.zeros(heads, device=device, dtype=dtype)) for _ in "uw")

    def extra_repr(self) -> str:
        return ", ".join(
            [super().extra_repr(), *([] if self.direction == "past" else [f"direction={self.direction!r}"])]
        )

    def reset_parameters(self) -> None:
        """Draw new weights from torch's generator, and set the biases to zero."""
        super().reset_parameters()
        if hasattr(self, "pos_proj"):  # it is not there when the other projections are made
            fill(self.pos_proj, "weight", partial(nn.init.kaiming_uniform_, a=5**0.5))
            for name in "uw":
                fill(self, name, nn.init.zeros_)

    def table_parameters(self) -> list[nn.Parameter]:
        """Return ``u`` and ``w``, because there is no table."""
        return [self.u, self.w]

    def empty_cache(  # type: ignore[override]  # one signature where the module has three
        self,
        batch: int | tuple[int, ...],
        *,
        length: int | None = None,
        keep: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Growing | FixedCache | SlidingCache | ChunkCache:
        """Return the ``past`` of a first call: with ``blocks_before``, a :class:`ChunkCache` for whole chunks.

        Parameters
        ----------
        batch : int or tuple of int
            The leading axes of the inputs.
        length, keep : int, optional
            As in :meth:`RelativeMultiheadAttention.empty_cache`; not allowed with ``blocks_before``.
        dtype : torch.dtype, optional
            Of the keys and values; by default that of ``u``, or of the autocast region.

        Returns
        -------
        ChunkCache, or what :class:`RelativeMultiheadAttention` returns without ``blocks_before``
        """
        spec = self.spec
        if spec.block_size is None or spec.blocks_before is None:
            sizes: Any = {"length": length, "keep": keep}
            return super().empty_cache(batch, **sizes, dtype=dtype)
        for name, value in (("length", length), ("keep", keep)):
            if value is not None:
                raise ValueError(f"`{name}` must be None with `spec.blocks_before`, got {describe(value)}")
        lead = batch if isinstance(batch, tuple) else (check_int("batch", batch, minimum=0),)
        kept = spec.blocks_before * spec.block_size
        return ChunkCache(*self._room((*lead, spec.num_heads, kept, spec.head_dim), dtype or self.u.dtype))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        size, span = self.spec.block_size, self.spec.span
        if size is not None and "unfilled" in options and q.shape[-2] % size:
            raise ValueError(
                f"`x` must be whole chunks of {size} positions with `past`, got {q.shape[-2]}: pad the last one, and "
                "hide its padding by `key_padding_mask`"
            )
        if not {"offset", "positions"} & options.keys() and not torch.compiler.is_exporting():
            furthest = max(k.shape[-2] - 1, 0)
            span = Span(min(span.left, furthest), min(span.right, furthest), span.beyond)
        rows = self.pos_proj(rows_of_sinusoids(span, self.spec.embed_dim, self.direction, self.u.dtype, q.device))
        rel_k = rows.unflatten(-1, (self.spec.num_heads, -1)).transpose(-2, -3)
        u, w = (bias[:, None, :].to(q.dtype) for bias in (self.u, self.w))
        return super().attend(q + u, k, v, rel_k=rel_k.to(q.dtype), span=span, rel_q=q + w, **options)
