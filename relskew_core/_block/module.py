"""What the modules of flax, equinox and MLX are: what came is checked, and the block applied."""

from __future__ import annotations

from typing import Any, ClassVar, overload

from relskew_core._array.checks import describe
from relskew_core._array.precision import cast
from relskew_core._array.typing import Array, Namespace
from relskew_core._block.block import apply_block, check_inputs
from relskew_core._block.cache import Cache, Growing, check_room
from relskew_core._block.masks import check_padding, without_keys
from relskew_core._block.settings import Settings
from relskew_core._block.spec import BlockSpec
from relskew_core._functions.attention import relative_attention


class ModuleBlock:
    """What these modules do alike: caches, and the call of the block."""

    xp: ClassVar[Namespace]
    caches: ClassVar[tuple[type[Any], type[Any]]]
    """Of one length, and sliding."""

    spec: BlockSpec
    settings: Settings

    @overload
    def empty_cache(
        self, batch: int | tuple[int, ...], *, length: None = None, keep: None = None, dtype: Any = None
    ) -> Growing: ...
    @overload
    def empty_cache(
        self, batch: int | tuple[int, ...], *, length: int | None = None, keep: int | None = None, dtype: Any = None
    ) -> Any: ...
    def empty_cache(
        self,
        batch: int | tuple[int, ...],
        *,
        length: int | None = None,
        keep: int | None = None,
        dtype: Any = None,
    ) -> Any:
        """Return the ``past`` of a first call: no keys and no values.

        Parameters
        ----------
        batch : int or tuple of int
            The leading axes of the inputs.
        length : int, optional
            Make room for this many positions at once: every step has the same shapes, as what is compiled asks for.
        keep : int, optional
            Keep this many positions and forget those before: attention with ``window=(keep, 0)``, without end and in
            constant memory. No more are kept than ``spec.window`` lets a query see.
        dtype : dtype, optional
            Of the keys and values; by default what the module computes in, or the dtype of its tables.

        Returns
        -------
        Growing, FixedCache or SlidingCache
            Named tuples. Without ``length`` and ``keep`` a pair of keys and values that grows with every call.

        Raises
        ------
        ValueError, TypeError
            If the block is not causal or keys are a memory's, or an argument does not fit; the message names it.
        """
        if dtype is None:
            dtype = getattr(self, "dtype", None)
        if dtype is None:
            dtype = next(iter(self._tables().values())).dtype
        lead, length, keep = check_room(self.spec, batch, length, keep)
        shape = (*lead, self.spec.num_kv_heads, length or keep or 0, self.spec.head_dim)
        keys, values = (self.xp.zeros(shape, dtype=dtype) for _ in range(2))
        if length is keep is None:
            return Growing(keys, values)
        fixed, sliding = self.caches
        return (sliding if length is None else fixed)(keys, values, self.xp.zeros((), dtype=self.xp.int32))

    def _call(
        self,
        x: Array,
        memory: Array | None,
        key: Array | None,
        *,
        past: Any,
        mask: Array | None,
        key_padding_mask: Array | None,
        **given: Any,
    ) -> Array | tuple[Array, Cache]:
        """Apply the block; ``key`` is that of dropout, ``None`` for no dropout."""
        check_inputs(x, memory, self.spec)
        xp = self.xp
        options = {name: value for name, value in given.items() if value is not None}
        if past is not None:
            for name in ("offset", "positions"):
                if name in options:
                    raise ValueError(f"`{name}` must be None with `past`, which sets it, got {describe(options[name])}")
            past = past if isinstance(past, self.caches) else Growing.of(past, self.spec)
        if key is not None:
            options.update(dropout=self.settings.dropout, seed=key)
        options.update(impl=self.settings.impl, chunk_size=self.settings.chunk_size)

        def attend(q: Array, k: Array, v: Array, *, unfilled: Array | None = None, **seen: Any) -> Array:
            met = {name: cast(table, q.dtype, xp=xp) for name, table in self._tables().items()}
            padding = None if key_padding_mask is None else check_padding(key_padding_mask, k, xp=xp)
            shown = without_keys(unfilled, without_keys(padding, mask, q, k, xp=xp), q, k, xp=xp)
            return relative_attention(q, k, v, mask=shown, **met, **{**seen, **options})

        y, present = apply_block(x, self.spec, self._project, {}, memory=memory, cache=past, attend=attend, xp=xp)
        return y if present is None else (y, present)

    def _project(self, name: str, x: Array) -> Array:
        """Apply a projection."""
        raise NotImplementedError

    def _tables(self) -> dict[str, Array]:
        """Return the tables and sinks that there are."""
        raise NotImplementedError
