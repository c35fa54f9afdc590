"""The description of an attention block: its sizes, its visibility, and the shapes of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

from relskew_core._array.checks import check_bool, check_int, check_window, describe, explains
from relskew_core._array.namespace import check_plain
from relskew_core._functions.buckets import check_endless, t5_buckets
from relskew_core._positions.span import Span, check_span_given

Put: TypeAlias = Callable[[str, Any], None]
"""Sets a field of a frozen block."""

BUCKETS = ("num_buckets", "max_distance")

ENDLESS = 2**31
"""The positions of a span without an end: more than any input has."""


def check_blocks(spec: Any, put: Put) -> None:
    size, before = spec.block_size, spec.blocks_before
    if before is not None:
        put("blocks_before", check_int("blocks_before", before, minimum=0))
        if size is None:
            raise ValueError(f"`blocks_before` needs `block_size`, got blocks_before={before} and block_size=None")
    if size is None:
        return
    put("block_size", check_int("block_size", size, minimum=1))
    if not spec.causal and before is None:
        raise ValueError(
            f"`block_size` requires `causal=True` unless `blocks_before` is given, got block_size={size}, causal=False"
        )
    if spec.cross:
        raise ValueError(f"`block_size` excludes `cross`, got block_size={size}, cross=True")


def check_future(spec: Any) -> None:
    span, window = spec.span, spec.window
    if span.left > span.right == 0 and not (spec.causal or spec.cross) and (window is None or window[1] is None):
        raise ValueError(
            f"`span` ends at the query itself, but queries see their future, got {span} and causal=False: say "
            f"causal=True, or give a span that reaches the future, such as Span({span.left}, {span.left}, "
            f"{span.beyond!r})"
        )


def check_bias(spec: Any, put: Put) -> None:
    kind = spec.rel_bias
    # An array compares each of its entries, if it allows comparisons with strings.
    if not (isinstance(kind, bool) or (isinstance(kind, str) and kind in ("alibi", "t5"))):
        raise ValueError(f"`rel_bias` must be True, False, 'alibi' or 't5', got {describe(kind)}")
    for name in BUCKETS:
        size = getattr(spec, name)
        if (size is None) == (kind == "t5"):
            wanted = "be given" if kind == "t5" else "be None"
            raise ValueError(f"`{name}` must {wanted} because `rel_bias` is {kind!r}, got {describe(size)}")
        put(name, None if size is None else check_int(name, size))
    if kind == "t5":
        spec.buckets()
    elif kind == "alibi":
        check_endless(spec.span)
        if spec.has_tables and spec.span.rows > ENDLESS:
            raise ValueError(f"`span` must be that of the tables, a row for each position, got {spec.span}")


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
TABLES = ("rel_k", "rel_v", "rel_bias")
ATTENDED = (*TABLES, "sinks")
"""The weights that attention itself uses, by the names of its arguments."""


@explains
@dataclass(frozen=True, slots=True, repr=False)
class BlockSpec:
    """An attention block with relative positions: projections, heads, visibility and tables.

    Parameters
    ----------
    embed_dim : int
        Width ``E`` of the inputs and of the output.
    num_heads : int
        Number ``H`` of query heads.
    span : Span
        Relative positions of the tables. A span that ends at the query itself, such as :meth:`Span.causal`, needs
        ``causal``, ``cross`` or a ``window`` that limits how far ahead a query sees.
    num_kv_heads : int, optional
        Number ``Hkv`` of key and value heads (grouped queries); a divisor of ``num_heads``, which is the default.
    head_dim : int, optional
        Width ``D`` of a head; ``embed_dim / num_heads`` by default.
    causal : bool, default False
        Queries see no later keys.
    cross : bool, default False
        Keys and values come from a memory instead of the input.
    window : (int or None, int or None), optional
        A query sees the keys at ``-left <= r <= right`` only; ``None`` is unbounded.
    block_size : int, optional
        Music Transformer's local attention (Huang et al. 2018, section 3.5): a query sees its own block, causally,
        and the whole previous block. Requires ``causal`` unless ``blocks_before`` is given, and excludes ``cross``.
    blocks_before : int, optional
        With ``block_size``: a query sees its whole block and this many blocks before it, as in streaming Conformers;
        with ``causal``, its own block only up to itself.
    shared_table : bool, default False
        One table ``(R, D)`` for all heads instead of ``(H, R, D)``.
    rel_values : bool, default False
        A table ``rel_v`` adds relative positions to the values (Shaw et al. 2018, equation 3).
    rel_keys : bool, default True
        A table ``rel_k`` adds relative positions to the keys (Shaw et al. 2018, equation 4). If this, ``rel_values``
        and ``rel_bias`` are all False, attention has no positions, as a baseline for the same model.
    rel_bias : bool, "alibi" or "t5", default False
        A bias, added to the logits. True: a table ``rel_bias`` with a learned number for each head and relative
        position. ``"t5"``: T5's bias, with a learned number for each head and bucket of positions (:meth:`t5`).
        ``"alibi"``: ALiBi's bias, a slope times the distance, in which nothing is learned (:meth:`alibi`).
    num_buckets, max_distance : int, optional
        With ``rel_bias="t5"``, as in :func:`relskew_core.t5_buckets`; the buckets are bidirectional unless ``causal``.
    sinks : bool, default False
        Attention sinks: one more logit in the softmax of each row, learned for each head, ``sinks (H,)``, and without a
        value, so that a query can attend to nothing.
    bias : bool, default True
        The projections have biases.

    Examples
    --------
    >>> spec = BlockSpec(8, 2, Span.causal(16), causal=True)
    >>> spec
    BlockSpec(embed_dim=8, num_heads=2, span=Span(left=15, right=0, beyond='error'), causal=True)
    >>> spec.head_dim, spec.num_kv_heads
    (4, 2)
    >>> spec.weight_shapes()["rel_k"]
    (2, 16, 4)
    """

    embed_dim: int
    num_heads: int
    span: Span
    _: KW_ONLY
    num_kv_heads: int = None  # type: ignore[assignment]  # an int once made: None asks for num_heads
    head_dim: int = None  # type: ignore[assignment]  # an int once made: None asks for embed_dim / num_heads
    causal: bool = False
    cross: bool = False
    window: tuple[int | None, int | None] | None = None
    block_size: int | None = None
    blocks_before: int | None = None
    shared_table: bool = False
    rel_values: bool = False
    rel_keys: bool = True
    rel_bias: bool | str = False
    num_buckets: int | None = None
    max_distance: int | None = None
    sinks: bool = False
    bias: bool = True
    _says_what_is_seen: ClassVar[bool] = True

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in ("embed_dim", "num_heads"):
            put(name, check_int(name, getattr(self, name), minimum=1))
        check_span_given(self.span)
        for name in ("causal", "cross", "shared_table", "rel_values", "rel_keys", "sinks", "bias"):
            check_bool(name, getattr(self, name))
        put("window", check_window("window", self.window))
        if self.num_kv_heads is None:
            put("num_kv_heads", self.num_heads)
        put("num_kv_heads", check_int("num_kv_heads", self.num_kv_heads, minimum=1))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"`num_heads` must be a multiple of `num_kv_heads`, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim is None:
            if self.embed_dim % self.num_heads:
                raise ValueError(
                    "`embed_dim` must be a multiple of `num_heads` unless `head_dim` is given, "
                    f"got {self.embed_dim} and {self.num_heads}"
                )
            put("head_dim", self.embed_dim // self.num_heads)
        put("head_dim", check_int("head_dim", self.head_dim, minimum=1))
        check_blocks(self, put)
        if self._says_what_is_seen:
            check_future(self)
        check_bias(self, put)

    @classmethod
    def alibi(cls, embed_dim: int, num_heads: int, **options: Any) -> BlockSpec:
        """Return a block with ALiBi's bias and no table, for inputs of any length; the bias is not learned.

        Parameters
        ----------
        embed_dim, num_heads : int
            As in :class:`BlockSpec`.
        **options
            Other arguments of :class:`BlockSpec`: ``causal``, ``num_kv_heads``, ``window``, ``cross`` …

        Notes
        -----
        Press et al. 2022, "Train Short, Test Long", section 3; :func:`relskew_core.alibi_bias` has the slopes. Without
        ``causal``, the bias decreases with the distance on both sides, as in MosaicBERT and the encoders of jina.

        Examples
        --------
        >>> spec = BlockSpec.alibi(8, 2, causal=True)
        >>> spec.rel_bias, spec.weight_shapes(projections=False)
        ('alibi', {})
        """
        given: dict[str, Any] = {"span": endless(**options), "rel_keys": False, "rel_bias": "alibi"}
        return cls(embed_dim, num_heads, **given, **options)

    @classmethod
    def t5(
        cls, embed_dim: int, num_heads: int, *, num_buckets: int = 32, max_distance: int = 128, **options: Any
    ) -> BlockSpec:
        """Return a block with T5's bias: a learned number for each head and bucket of relative positions.

        Parameters
        ----------
        embed_dim, num_heads : int
            As in :class:`BlockSpec`.
        num_buckets : int, default 32
            Rows of the weight ``rel_bias (num_buckets, H)``.
        max_distance : int, default 128
            Distance from which on all positions share the last bucket.
        **options
            Other arguments of :class:`BlockSpec`. Logits are scaled by ``head_dim ** -0.5``, which T5 has in its
            initial weights.

        Notes
        -----
        Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", section
        2.1.

        Examples
        --------
        >>> BlockSpec.t5(8, 2).weight_shapes(projections=False)
        {'rel_bias': (32, 2)}
        """
        reach = check_int("max_distance", max_distance, minimum=1)
        span = Span(reach, min(reach, endless(**options).right), "clip")
        given: dict[str, Any] = {"num_buckets": num_buckets, "max_distance": reach}
        return cls(embed_dim, num_heads, span, rel_keys=False, rel_bias="t5", **given, **options)

    @property
    def has_tables(self) -> bool:
        """Whether there is a table by relative position. Without one, any bias is ALiBi's and fits every length."""
        return self.rel_keys or self.rel_values or self.rel_bias in (True, "t5")

    def buckets(self) -> tuple[int, ...]:
        """Return the bucket of each relative position of the span, with ``rel_bias="t5"``."""
        return _buckets(self.span, not self.causal, **{name: getattr(self, name) for name in BUCKETS})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.chosen())})"

    def chosen(self) -> list[str]:
        """Return the arguments of this spec that differ from the defaults."""
        usual = {field.name: field.default for field in fields(self)}
        usual["num_kv_heads"] = self.num_heads
        if self.head_dim * self.num_heads == self.embed_dim:
            usual["head_dim"] = self.head_dim
        values = {name: getattr(self, name) for name in usual}
        return [f"{name}={value!r}" for name, value in values.items() if value != usual[name]]

    @property
    def table_shape(self) -> tuple[int, ...]:
        """Shape of ``rel_k`` and ``rel_v``: ``(R, D)`` if shared by the heads, else ``(H, R, D)``."""
        rows = (self.span.rows, self.head_dim)
        return rows if self.shared_table else (self.num_heads, *rows)

    def weight_shapes(self, *, projections: bool = True) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight by its key, with the names of torch modules and optionally no projections."""
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {
            "q_proj": (width, self.embed_dim),
            "k_proj": (kv_width, self.embed_dim),
            "v_proj": (kv_width, self.embed_dim),
            "out_proj": (self.embed_dim, width),
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for name in PROJECTIONS if projections else ():
            shapes[f"{name}.weight"] = sizes[name]
            if self.bias:
                shapes[f"{name}.bias"] = sizes[name][:1]
        if self.rel_keys:
            shapes["rel_k"] = self.table_shape
        if self.rel_values:
            shapes["rel_v"] = self.table_shape
        if self.rel_bias is True:
            shapes["rel_bias"] = self.table_shape[:-1]
        elif self.num_buckets is not None:
            shapes["rel_bias"] = (self.num_buckets, self.num_heads)
        if self.sinks:
            shapes["sinks"] = (self.num_heads,)
        return shapes

    def check_weights(self, weights: Any, *, projections: bool = True) -> None:
        """Raise an error that names the key if a mapping does not have the keys and shapes of :meth:`weight_shapes`."""
        if not isinstance(weights, Mapping):
            raise TypeError(f"`weights` must be a mapping from names to arrays, got {describe(weights)}")
        shapes = self.weight_shapes(projections=projections)
        missing = [key for key in shapes if key not in weights]
        extra = [str(key) for key in weights if key not in shapes]
        if missing or extra:
            found = [f"{word} {', '.join(keys)}" for word, keys in (("missing", missing), ("extra", extra)) if keys]
            raise ValueError(f"`weights` must have exactly the keys {', '.join(shapes)}; {'; '.join(found)}")
        for key, shape in shapes.items():
            if not hasattr(weights[key], "shape"):
                raise TypeError(f"`weights[{key!r}]` must be an array of shape {shape}, got {describe(weights[key])}")
            check_plain(f"weights[{key!r}]", weights[key])
            if tuple(weights[key].shape) != shape:
                raise ValueError(f"`weights[{key!r}]` must have shape {shape}, got {tuple(weights[key].shape)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values; :meth:`from_dict` is the inverse."""
        fields = {name: value for name, value in asdict(self).items() if name not in BUCKETS or value is not None}
        fields["window"] = None if self.window is None else list(self.window)
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> BlockSpec:
        """Make a spec from :meth:`to_dict`'s result, also after a round trip through JSON."""
        kwargs = dict(fields)
        return cls(**{**kwargs, "span": Span(**kwargs["span"])})


@lru_cache(maxsize=64)
def _buckets(span: Span, bidirectional: bool, **sizes: int) -> tuple[int, ...]:
    return t5_buckets(span, bidirectional=bidirectional, **sizes)


def endless(*, causal: bool = False, cross: bool = False, **_: Any) -> Span:
    return Span.causal(ENDLESS) if causal and not cross else Span.full(ENDLESS)


class CallSpec(BlockSpec):
    """A block whose visibility is given with each call, which may hide the future."""

    __slots__ = ()
    _says_what_is_seen = False


def check_spec(spec: Any) -> None:
    if not isinstance(spec, BlockSpec):
        own = ", such as its `spec`" if hasattr(spec, "spec") else ""
        raise TypeError(f"`spec` must be a BlockSpec{own}, got {describe(spec)}")
