"""Names for types that no array library defines."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

# The array API standard has no nominal array type: these names only document.
Array: TypeAlias = Any
Namespace: TypeAlias = Any

Impl: TypeAlias = Literal["auto", "portable", "native"]
IMPLS = get_args(Impl)
