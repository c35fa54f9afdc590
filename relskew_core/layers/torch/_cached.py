"""Modules that are called with a cache: the types of their calls, and their caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, overload

import torch
from torch import Tensor

from relskew_core._array.autocast import autocast
from relskew_core._block.cache import Growing, check_room
from relskew_core._block.masks import Past, Seen
from relskew_core.layers.torch._attention import TableAttention
from relskew_core.layers.torch._caches import FixedCache, SlidingCache


class CachedAttention(TableAttention):
    """A module for a sequence, or for a sequence and a memory, that decodes with caches."""

    processes = 1
    """The number of processes that share the heads, which ``TableParallel`` sets."""

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

    @overload
    def empty_cache(
        self, batch: int | tuple[int, ...], *, length: None = None, keep: None = None, dtype: torch.dtype | None = None
    ) -> Growing: ...
    @overload
    def empty_cache(
        self, batch: int | tuple[int, ...], *, length: int, keep: None = None, dtype: torch.dtype | None = None
    ) -> FixedCache: ...
    @overload
    def empty_cache(
        self, batch: int | tuple[int, ...], *, length: None = None, keep: int, dtype: torch.dtype | None = None
    ) -> SlidingCache: ...
    def empty_cache(
        self,
        batch: int | tuple[int, ...],
        *,
        length: int | None = None,
        keep: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Growing | FixedCache | SlidingCache:
        """Return the ``past`` of a first call: no keys and no values.

        Parameters
        ----------
        batch : int or tuple of int
            The leading axes of the inputs.
        length : int, optional
            Make room for this many positions at once, and write into it: every step has the same shapes, and
            ``torch.compile`` makes one graph for the prompt and one for all steps.
        keep : int, optional
            Keep this many positions and forget those before: attention with ``window=(keep, 0)``, without end and in
            constant memory. No more are kept than ``spec.window`` lets a query see.
        dtype : torch.dtype, optional
            Of the keys and values; by default that of the projection's weight, or of the autocast region.

        Returns
        -------
        Growing, FixedCache or SlidingCache
            Named tuples. Without ``length`` and ``keep`` a pair of keys and values that grows with every call.

        Raises
        ------
        ValueError, TypeError
            If the block is not causal or keys are a memory's, or an argument does not fit; the message names it.

        Examples
        --------
        >>> import torch
        >>> from relskew_core import BlockSpec, Span
        >>> from relskew_core.layers.torch import RelativeMultiheadAttention
        >>> attention = RelativeMultiheadAttention(
        ...     BlockSpec(8, 2, Span.causal(16), causal=True)
        ... ).eval()
        >>> x = torch.randn(1, 16, 8)
        >>> with torch.no_grad():
        ...     y, past = attention(x[:, :10], past=attention.empty_cache(1, length=16))
        ...     for position in range(10, 16):
        ...         step, past = attention(x[:, position : position + 1], past=past)
        ...     torch.allclose(step, attention(x)[:, -1:], atol=1e-6)
        True
        """
        spec = self.spec
        lead, length, keep = check_room(spec, batch, length, keep)
        weight = getattr(self.k_proj, "weight", None)  # in quantised projections it is a method, or integers
        weights = (weight, *self.table_parameters(), *self.parameters(), self.slopes)
        like = next(x for x in weights if isinstance(x, Tensor) and x.is_floating_point())
        new = torch.empty(0, dtype=like.dtype if dtype is None else dtype, device=like.device)
        new = autocast({"new": new})["new"]
        shape = (*lead, spec.num_kv_heads // self.processes, length or keep or 0, spec.head_dim)
        keys, values = new.new_zeros(shape), new.new_zeros(shape)
        if length is keep is None:
            return Growing(keys, values)
        none = torch.zeros((), dtype=torch.int64, device=new.device)
        return (SlidingCache if length is None else FixedCache)(keys, values, none)
