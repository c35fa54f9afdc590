"""State dicts, read key by key: missing, misshapen and unread keys raise errors that name them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias

from relskew_core._array.checks import describe
from relskew_core._array.extras import needs_extra
from relskew_core._array.namespace import namespace_of_arrays
from relskew_core._array.typing import Array, Namespace
from relskew_core._block.spec import PROJECTIONS, BlockSpec
from relskew_core._positions.span import Span


class HasGraph(Protocol):
    """An ``onnx.ModelProto``."""

    @property
    def graph(self) -> Any: ...


Stored: TypeAlias = Mapping[str, Array] | HasGraph | str | os.PathLike[str]


def _arrays_of(state: Any) -> Mapping[str, Any]:
    """Return a mapping as it is, and the initializers of an ONNX model or file as arrays of NumPy."""
    if isinstance(state, Mapping):
        return state
    if not isinstance(state, str | os.PathLike) and not hasattr(state, "graph"):
        raise TypeError(
            f"`state` must be a mapping from names to arrays, an onnx.ModelProto or its path, got {describe(state)}"
        )
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise needs_extra("reading an ONNX model", "onnx", error) from error
    model: Any = state if hasattr(state, "graph") else onnx.load(state)
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


class State:
    """The part of a state dict that belongs to one attention.

    Sizes have names: the first array that has one says how large it is, and the others must agree.
    Of the names ``marks``, every such attention has one, and nothing else has any. If there is a single attention, an
    empty prefix means its prefix.
    """

    def __init__(self, arrays: Any, prefix: str, *marks: str, **sizes: int) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"`prefix` must be a str, got {describe(prefix)}")
        self.arrays = _arrays_of(arrays)
        there = self._prefixes(marks)
        self.prefix = there.pop() if not prefix and len(there) == 1 else prefix
        self.check_prefix("prefix", self.prefix, *marks)
        self.sizes = {"1": 1, **sizes}
        self._read: dict[str, Array] = {}

    @property
    def xp(self) -> Namespace:
        return namespace_of_arrays(self._read)

    def label(self, name: str) -> str:
        return _label(self.prefix + name)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.arrays

    def find(self, suffix: str) -> str | None:
        """Return the one name that ends in ``suffix``; the scope before it differs between models."""
        keys = sorted(key for key in self.arrays if key.startswith(self.prefix) and key.endswith(f"/{suffix}"))
        if len(keys) > 1:
            raise ValueError(f"`prefix` must single out one attention, got {self.prefix!r} with {', '.join(keys)}")
        return keys[0].removeprefix(self.prefix) if keys else None

    def check_prefix(self, argument: str, prefix: str, *marks: str) -> None:
        """Refuse a prefix under which there is none of ``marks``, if there is one under others."""
        there = self._prefixes(marks)
        if prefix in there:
            return
        if unfinished := [other for other in there if other[:-1] == prefix]:
            raise ValueError(f"`{argument}` must end in {unfinished[0][-1]!r}: {unfinished[0]!r}, got {prefix!r}")
        if there:
            raise ValueError(
                f"`{argument}` must be one of those in `state`, {_listed(map(repr, there))}, got {prefix!r}"
            )

    def _prefixes(self, marks: Iterable[str]) -> set[str]:
        return {
            key.removesuffix(mark)
            for mark in marks
            for key in map(str, self.arrays)
            if key.endswith((f".{mark}", f"/{mark}")) or key == mark
        }

    def read(self, name: str, *forms: str, prefix: str | None = None) -> Array:
        """Return an array whose shape is one of ``forms``, such as ``"W E"`` or ``"1 R D"``."""
        key = (self.prefix if prefix is None else prefix) + name
        if key not in self.arrays:
            place = key[: max(key.rfind("."), key.rfind("/")) + 1]
            raise ValueError(f"`state` must have {key!r}; its keys there are {self._keys_under(place)}")
        array = self.arrays[key]
        first = {_label(read): self._read[read] for read in list(self._read)[:1]}
        namespace_of_arrays({**first, _label(key): array})
        for form in forms:
            sizes = self._sizes_of(array, form.split())
            if sizes is not None:
                self.sizes |= sizes
                self._read[key] = array
                return array
        raise ValueError(f"`{_label(key)}` must have shape {self._expected(forms)}, got {describe(array)}")

    def finish(self, hint: str = "") -> None:
        """Refuse keys of the attention that were not read, because ignoring them would change its results.

        Entries below an array, such as ``"q/kernel/Adam"``, were left in the checkpoint by an optimizer.
        """
        keys = {str(key) for key in self.arrays if str(key).startswith(self.prefix)} - set(self._read)
        unknown = [key for key in keys if key.rpartition("/")[0] not in self._read]
        if unknown:
            expected = f"no key under {self.prefix!r} but {_listed(self._read)}"
            raise ValueError(f"`state` must have {expected}, got {_listed(unknown)}{hint}")

    def lacks(self, names: str) -> ValueError:
        there = self._keys_under(self.prefix)
        return ValueError(f"`state` must have {names} under {self.prefix!r}; its keys there are {there}")

    def _keys_under(self, place: str) -> str:
        return _listed([key for key in map(str, self.arrays) if key.startswith(place)] or map(str, self.arrays))

    def _sizes_of(self, array: Array, axes: list[str]) -> dict[str, int] | None:
        """Return the sizes of an array by the names of its axes, ``None`` if they do not fit."""
        if array.ndim != len(axes) or 0 in array.shape:
            return None
        sizes = dict(zip(axes, array.shape, strict=True))
        return sizes if all(self.sizes.get(axis, size) == size for axis, size in sizes.items()) else None

    def _expected(self, forms: tuple[str, ...]) -> str:
        shapes = " or ".join(f"({', '.join(form.split())}{'' if ' ' in form else ','})" for form in forms)
        axes = dict.fromkeys(axis for form in forms for axis in form.split())
        known = ", ".join(f"{axis} = {self.sizes[axis]}" for axis in axes if axis in self.sizes and axis != "1")
        return f"{shapes} with {known}" if known else shapes


def _label(key: str) -> str:
    return f"state[{key!r}]"


def _listed(keys: Iterable[str]) -> str:
    listed = sorted(keys)
    return ", ".join(listed[:12]) + (" …" if len(listed) > 12 else "") if listed else "none"


Weights = dict[str, Array]
FORMS = {"q_proj": "W E", "k_proj": "W E", "v_proj": "W E", "out_proj": "E W"}


def note_head_width(state: State, name: str) -> None:
    width, heads = state.sizes["W"], state.sizes["H"]
    if width % heads:
        raise ValueError(
            f"`num_heads` must divide the width of the queries, {width} in `{state.label(name)}`, got {heads}"
        )
    state.sizes["D"] = width // heads


def read_weights(state: State, names: Mapping[str, str], axes: str = "") -> Weights:
    weights = {f"{name}.weight": state.read(f"{names[name]}.weight", FORMS[name] + axes) for name in PROJECTIONS}
    note_head_width(state, f"{names['q_proj']}.weight")
    return {name: weight[..., 0] if axes else weight for name, weight in weights.items()}


def read_biases(state: State, names: Mapping[str, str]) -> Weights:
    if not any(state.has(f"{other}.bias") for other in names.values()):
        return {}
    return {f"{name}.bias": state.read(f"{other}.bias", FORMS[name].split()[0]) for name, other in names.items()}


def as_block(state: State, weights: Weights, span: Span, **options: Any) -> tuple[BlockSpec, Weights]:
    state.finish()
    spec = BlockSpec(
        state.sizes["E"], state.sizes["H"], span, head_dim=state.sizes["D"],
        shared_table="rel_k" in weights and weights["rel_k"].ndim == 2, rel_values="rel_v" in weights,
        rel_keys="rel_k" in weights, rel_bias="rel_bias" in weights, bias="q_proj.bias" in weights, **options,
    )  # fmt: skip
    spec.check_weights(weights)
    return spec, {key: weights[key] for key in spec.weight_shapes()}
