"""Modules of many kinds, and the formula that each must follow, written with torch's own operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import oracles
from relskew_core import BlockSpec, Span
from relskew_core.layers.torch import RelativeMultiheadAttention

SPECS = {
    "causal": BlockSpec(8, 2, Span.causal(16), causal=True),
    "bidirectional": BlockSpec(8, 2, Span.clipped(3), rel_values=True),
    "cross": BlockSpec(8, 2, Span.clipped(3), cross=True),
    "grouped, wide heads": BlockSpec(8, 4, Span.full(16), num_kv_heads=2, head_dim=3, rel_values=True),
    "local": BlockSpec(8, 2, Span.causal(8), causal=True, block_size=4, shared_table=True, bias=False),
    "window": BlockSpec(8, 2, Span(2, 1), window=(2, 1), rel_values=True, shared_table=True),
    "bias alone": BlockSpec(8, 2, Span(3, 0, "clip"), causal=True, rel_keys=False, rel_bias=True),
    "stream": BlockSpec(8, 2, Span(5, 2), block_size=3, blocks_before=1, sinks=True),
    "bias, shared": BlockSpec(8, 2, Span.clipped(3), rel_bias=True, shared_table=True),
}


def inputs(spec: BlockSpec, n: int = 9, m: int = 7, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Draw the module's positional inputs."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, n, spec.embed_dim, generator=generator, dtype=dtype)
    return (x, torch.randn(2, m, spec.embed_dim, generator=generator, dtype=dtype)) if spec.cross else (x,)


def made(spec: BlockSpec, **options: Any) -> RelativeMultiheadAttention:
    """Make a module in float64 whose biases are not zero."""
    module = RelativeMultiheadAttention(spec, dtype=torch.float64, **options)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return module


def dense_module(module: RelativeMultiheadAttention, x: Tensor, memory: Tensor | None = None, **more: Any) -> Tensor:
    """What a module computes, written out with torch's own linear maps."""
    spec = module.spec
    source = x if memory is None else memory

    def heads(of: Tensor, projection: Any, count: int) -> Tensor:
        return projection(of).unflatten(-1, (count, spec.head_dim)).transpose(-2, -3)

    out = oracles.attention(
        heads(x, module.q_proj, spec.num_heads),
        heads(source, module.k_proj, spec.num_kv_heads),
        heads(source, module.v_proj, spec.num_kv_heads),
        module.rel_k,
        module.rel_v,
        module.rel_bias,
        span=spec.span,
        sinks=module.sinks,
        **oracles.pattern(spec),
        **more,
    ).out
    projected: Tensor = module.out_proj(out.transpose(-2, -3).flatten(-2))  # type: ignore[operator]
    return projected
