"""The array library of a call, determined once, in the public function."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import array_api_compat

from relskew_core._array.checks import describe
from relskew_core._array.typing import Array, Namespace

LIBRARIES = {
    "cupy": ("CuPy", "cupy.asarray"), "dask": ("dask", "dask.array.asarray"), "jax": ("JAX", "jnp.asarray"),
    "jaxlib": ("JAX", "jnp.asarray"), "mlx": ("MLX", "mx.asarray"), "numpy": ("NumPy", "np.asarray"),
    "torch": ("torch", "torch.as_tensor"),
}  # fmt: skip
"""Libraries by the first part of their arrays' module: their usual name, and a function that converts arrays."""


def namespace_of_arrays(
    arrays: Mapping[str, Array], optional: Mapping[str, Array | None] | None = None, *, floating: bool = True
) -> Namespace:
    """Return the namespace of the arrays, which must share the library, the device and a floating dtype.

    The first array is the reference; errors name the argument that differs from it. ``optional`` ones may be ``None``.
    """
    present = {name: array for name, array in (optional or {}).items() if array is not None}
    (first_name, first), *others = {**arrays, **present}.items()
    xp = _namespace(first_name, first)
    if floating and not is_floating(first, xp=xp):
        raise TypeError(
            f"`{first_name}` must be an array of a real floating dtype of its library, got {describe(first)}"
        )
    for name, array in others:
        check_companion(name, array, first_name, first, xp=xp)
        if array.dtype != first.dtype:
            raise TypeError(f"`{name}` must have the dtype of `{first_name}`, {first.dtype}, got {describe(array)}")
    return xp


PROTOCOL = frozenset(("__array_finalize__", "__array_function__", "__array_ufunc__", "__array_wrap__"))
"""Methods of NumPy's protocols by which an array keeps more than numbers: a unit, a mask, labels, two axes."""

PLAIN = (("numpy", "generic"), ("numpy", "memmap"), ("numpy", "ndarray"))
"""Modules and names of NumPy's classes whose numbers are all that there is; a file is only where they are."""


def check_plain(name: str, x: Any, *, converted: bool = False) -> Any:
    """Return a value; arrays with units, masks or labels, which a conversion or the kernels would drop, are refused.

    Classes of tensors see every call of torch's functions and of operators: only a conversion drops what they add.
    """
    if is_torch(x):
        name_of_class = type(x).__name__
        if name_of_class in ("Tensor", "Parameter"):
            return x
        kinds = [kind for kind in type(x).__mro__ if "__torch_function__" in vars(kind)] if converted else []
        own = any(kind.__module__.partition(".")[0] != "torch" for kind in kinds)
        if name_of_class == "MaskedTensor" or own:
            plain = "get_data()` and `mask=x.get_mask()" if not own else "as_subclass(torch.Tensor)"
            raise TypeError(
                f"`{name}` must be a tensor of numbers alone, such as `x.{plain}`, because results would lose what "
                f"its class adds, got {describe(x)}"
            )
        return x
    if isinstance(x, (list, tuple)):
        for each in x:
            if not isinstance(each, (int, float)):
                check_plain(name, each)
        return x
    for kind in type(x).__mro__:
        library = kind.__module__.partition(".")[0]
        if library == "dask":
            check_plain(name, getattr(x, "_meta", None))  # like the arrays of its blocks
            return x
        own = library in LIBRARIES and library != "numpy"
        if PROTOCOL & vars(kind).keys() and not own and (kind.__module__, kind.__name__) not in PLAIN:
            raise TypeError(
                f"`{name}` must be an array of numbers alone, such as its `.value`, `.magnitude` or `numpy.asarray`, "
                f"because results would lose units, masks and labels, got {describe(x)}"
            )
    return x


def check_companion(name: str, array: Array, first_name: str, first: Array, *, xp: Namespace) -> None:
    if _namespace(name, array) is not xp:
        library = type(first).__module__.partition(".")[0]
        known, make = LIBRARIES.get(library, (library, None))
        hint = "" if make is None or "." in name else f": {make}({name})"
        raise TypeError(
            f"`{name}` must be of the array library of `{first_name}`, {known}{hint}, got {describe(array)}"
        )
    here, there = device(first), device(array)
    if here != there and None not in (here, there):  # if one is None, JAX reports the mismatch
        raise ValueError(f"`{name}` must be on the device of `{first_name}`, {here}, got one on {there}")


def is_floating(array: Array, *, xp: Namespace) -> bool:
    """Whether a dtype is real, floating, and computed by the library itself: none with 8 bits is."""
    try:
        return bool(xp.isdtype(array.dtype, "real floating")) and getattr(array.dtype, "itemsize", 2) > 1
    except TypeError:  # NumPy does not support ml_dtypes' bfloat16 and would compute with it in float32
        return False


def namespace_of(library: Any) -> Namespace:
    if not hasattr(library, "asarray"):
        raise TypeError(f"`xp` must be the module of an array library, such as numpy or torch, got {describe(library)}")
    return _conforming(library.asarray(0.0))


def device(array: Array) -> Any:
    """Return the device of an array, ``None`` if JAX traces it or it is split over several devices.

    A library whose arrays have none, such as MLX, has them on the host.
    """
    if is_torch(array):
        return array.device
    try:
        found = array.spec if type(array).__module__.startswith("cubed.") else array_api_compat.device(array)
    except AttributeError:
        return "cpu"
    return None if hasattr(found, "device_set") else found


def on_cpu(array: Array) -> bool:
    """Whether an array is certainly in host memory; JAX's tracers have no device."""
    return "cpu" in str(device(array)).lower()


def is_torch(array: Array) -> bool:
    """Whether an array is torch's; torch.compile can trace this, and warns about array_api_compat's caches."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def private(name: str, otherwise: Any) -> Any:
    """Return ``torch.name``, or what gives the same results, perhaps slower, in a release without that private name."""
    try:
        return attrgetter(name)(sys.modules["torch"])
    except AttributeError:
        return otherwise


def library_name(xp: Any) -> str:
    """Return the top-level name of the library behind a namespace, such as ``numpy`` or ``torch``."""
    name = xp.__name__.removeprefix("array_api_compat.").removeprefix("relskew_core._array.")
    return str(name).partition(".")[0]


def is_compiling() -> bool:
    """Whether torch traces this code, which must then not use what is remembered between calls."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def _namespace(name: str, array: Array) -> Namespace:
    check_plain(name, array)
    if is_torch(array):
        from array_api_compat import torch as namespace  # a plain import would assign to a local name

        if array.is_nested:
            raise TypeError(
                f"`{name}` must be a tensor with one length for all items, got a nested tensor of {array.size(0)} "
                "items: pad them and hide the padding by `mask`, or call for each item of `unbind()`, as the modules "
                "of `relskew_core.layers.torch` do"
            )
        if array.layout != sys.modules["torch"].strided:
            raise TypeError(f"`{name}` must be a dense tensor, such as `x.to_dense()`, got layout {array.layout}")
        return namespace
    try:
        namespace = _conforming(array)
    except TypeError:
        hint = ", such as its `weight`" if hasattr(array, "weight") else ""
        raise TypeError(f"`{name}` must be an array{hint}, got {describe(array)}") from None
    if namespace.__name__ != "numpy" and any(size is None or isinstance(size, float) for size in array.shape):
        raise ValueError(
            f"`{name}` must have known sizes, as `compute_chunk_sizes()` of dask gives; `relskew_core.export` "
            f"makes graphs of any length, got {describe(array)}"
        )
    return namespace


def _conforming(array: Array) -> Namespace:
    """Return the array's namespace: from NumPy 2.1 on NumPy itself, because the wrapper would import all of it.

    An array of JAX gives its namespace itself: array_api_compat makes another one, which JAX compiles a program for.
    """
    if hasattr(array, "aval") and array_api_compat.is_jax_array(array):
        return array.__array_namespace__()
    own = array_api_compat.is_numpy_array(array) and hasattr(sys.modules["numpy"], "__array_namespace_info__")
    namespace = array_api_compat.array_namespace(array, use_compat=False if own else None)
    if namespace.__name__ == "mlx.core":
        from relskew_core._array import mlx

        return mlx
    if namespace.__name__ == "cubed":
        from relskew_core._array import cubed

        return cubed
    return namespace
