"""The message of ``torch.onnx.export`` for an operator without a translation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch._decomp import decomposition_table, meta_table

_KEPT: ContextVar[bool] = ContextVar("relskew_kept", default=False)


@contextmanager
def operators_kept() -> Iterator[None]:
    """Mark exports as having a translation of the operators."""
    token = _KEPT.set(True)
    try:
        yield
    finally:
        _KEPT.reset(token)


def must_decompose() -> bool:
    """Whether torch exports a program, possibly by an exporter without a translation of the operators."""
    return torch.compiler.is_exporting() and not _KEPT.get()


def explain(operator: Any, fake: Callable[..., Any]) -> None:
    """Make an ONNX export without a translation of ``operator`` fail with an error that says what to do.

    The exporter decomposes what it has no translation of, and it alone looks into this table for that. Fake tensors
    look there too, but never for what has a kernel of shapes in Python.
    """
    meta_table[operator] = fake
    decomposition_table[operator] = _refuse


class UntranslatedError(ValueError):
    """An error that says what to do, without the exporter's additions on the way to the caller."""

    def __str__(self) -> str:
        return (
            "torch.onnx.export needs a translation of relative attention: use relskew_core.export.torch_to_onnx, "
            "or pass custom_translation_table=relskew_core.export.torch_translation_table(opset) with "
            "opset_version=opset; the model must be on the CPU"
        )


def _refuse(*args: Any) -> NoReturn:
    raise UntranslatedError
