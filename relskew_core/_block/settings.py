"""The options of a module that are not part of its spec."""

from __future__ import annotations

from typing import Any, NamedTuple

from relskew_core._array.checks import check_choice, check_int, check_real
from relskew_core._array.typing import IMPLS, Impl
from relskew_core._block.spec import check_spec


class Settings(NamedTuple):
    """The options of a module that are not arrays."""

    dropout: float
    impl: Impl
    chunk_size: int | None

    def chosen(self) -> list[str]:
        """Return the options that are not as by default."""
        usual = Settings(0.0, "auto", None)
        pairs = zip(self._fields, self, usual, strict=True)
        return [f"{name}={value!r}" for name, value, default in pairs if value != default]

    @classmethod
    def of(cls, spec: Any, dropout: float, impl: Impl, chunk_size: int | None) -> Settings:
        """Return what a caller chose, if it can be chosen."""
        check_spec(spec)
        dropout = check_real("dropout", dropout)
        if not 0 <= dropout < 1:
            raise ValueError(f"`dropout` must be at least 0 and less than 1, got {dropout}")
        check_choice("impl", impl, IMPLS)
        return cls(dropout, impl, None if chunk_size is None else check_int("chunk_size", chunk_size, minimum=1))
