"""Modules that are made without memory, loaded, averaged, cast, copied or traced, between calls of equal results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers.modules import SPECS, inputs, made

import lives
from relskew_core import BlockSpec, Span, attention_block
from relskew_core.layers.torch import ConformerAttention, MultiheadAttention, RelativeMultiheadAttention

Tensor = torch.Tensor


def conformer() -> Any:
    torch.manual_seed(0)
    return ConformerAttention(BlockSpec(8, 2, Span.full(20)), dtype=torch.float64)


def multihead(**options: Any) -> Any:
    torch.manual_seed(0)
    module = MultiheadAttention(8, 2, Span.clipped(3), batch_first=True, dtype=torch.float64, **options)
    for table in module.table_parameters():
        torch.nn.init.normal_(table)
    return module


def call(module: Any) -> Tensor:
    x, *memory = inputs(module.spec)
    if isinstance(module, MultiheadAttention):
        return module(x, x, x, need_weights=False)[0]
    y: Tensor = module(x, *memory)
    return y


MODULES: dict[str, Callable[[], Any]] = {
    **{name: lambda spec=spec: made(spec) for name, spec in SPECS.items()},  # type: ignore[misc]
    "conformer": conformer,
    "multihead": multihead,
}


@pytest.mark.parametrize(("name", "step"), lives.cases(MODULES, "alibi", "t5", "conformer"))
@torch.no_grad()
def test_a_step_changes_no_result(name: str, step: str) -> None:
    lives.check_step(step, lambda: MODULES[name]().eval(), call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slopes_have_the_dtype_of_the_call(dtype: torch.dtype) -> None:
    """With twelve heads they are no powers of two."""
    spec = BlockSpec.alibi(24, 12)
    module = RelativeMultiheadAttention(spec, dtype=dtype).double()
    (x,) = inputs(spec)
    torch.testing.assert_close(module(x), attention_block(x, module.state_dict(), spec), rtol=0, atol=1e-13)
