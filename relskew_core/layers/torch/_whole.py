"""Modules that tools which rewrite models keep whole."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import fx, nn


class Whole(nn.Module):
    """A module that ``torch.fx`` calls as one node, as it does torch's own, and that ``torch.jit.script`` refuses."""

    def _call_impl(self, *given: Any, **named: Any) -> Any:
        for x in (*given, *named.values()):
            if isinstance(x, fx.Proxy):
                tracer: Any = x.tracer
                return tracer.create_proxy("call_module", tracer.path_of_module(self), given, named)
        return super()._call_impl(*given, **named)  # type: ignore[no-untyped-call]  # torch does not annotate it

    def __prepare_scriptable__(self) -> NoReturn:
        raise TypeError(
            f"torch.jit.script cannot compile {type(self).__name__}: use torch.compile, torch.export.export or "
            "torch.jit.trace"
        )
