"""Modules of many kinds, and the formula that each must follow, written with torch's own operations."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
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
    "alibi": BlockSpec.alibi(12, 3),
    "alibi, causal, grouped": BlockSpec.alibi(8, 4, causal=True, num_kv_heads=2, window=(5, 0), sinks=True),
    "alibi, cross": BlockSpec.alibi(8, 2, cross=True),
    "alibi beside a table": BlockSpec(8, 2, Span.full(9), rel_bias="alibi"),
    "t5": BlockSpec.t5(8, 2, num_buckets=8, max_distance=6),
    "t5, causal": BlockSpec.t5(8, 2, num_buckets=4, max_distance=7, causal=True, bias=False),
    "no positions": BlockSpec(8, 2, Span.full(3), rel_keys=False),
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


def bias_of(module: RelativeMultiheadAttention, *, of: Tensor) -> tuple[Span, Tensor | None]:
    """Return a module's bias as the numbers of relative positions, and which those are: by the papers' formulas."""
    spec = module.spec
    span = spec.span if spec.rel_keys or spec.rel_values or spec.rel_bias is True else Span.full(40)
    r = torch.arange(-span.left, span.right + 1)
    if spec.rel_bias == "alibi":
        by_heads = {2: [4, 8], 3: [4, 8, 2], 4: [2, 4, 6, 8]}[spec.num_heads]
        slopes = torch.tensor([2.0**-power for power in by_heads], dtype=of.dtype)
        return span, -slopes[:, None] * r.abs()
    if spec.rel_bias != "t5":
        return span, module.rel_bias
    assert module.rel_bias is not None
    assert spec.num_buckets is not None
    side = spec.num_buckets // (1 if spec.causal else 2)
    exact = side // 2
    distance = r.clamp(max=0).abs() if spec.causal else r.abs()
    shared = (distance.clamp(min=1) / exact).log() / math.log(spec.max_distance / exact) * (side - exact)  # type: ignore[operator]
    bucket = torch.where(distance < exact, distance, (exact + (shared + 1e-9).floor().long()).clamp(max=side - 1))
    return span, module.rel_bias[bucket + (0 if spec.causal else side * (r > 0))].T


def dense_module(
    module: RelativeMultiheadAttention, x: Tensor, memory: Tensor | None = None, *, of_weights: bool = False,
    **more: Any,
) -> Tensor:  # fmt: skip
    """What a module computes, written out with torch's own linear maps; or the weights of its attention."""
    spec = module.spec
    source = x if memory is None else memory

    def heads(of: Tensor, projection: Any, count: int) -> Tensor:
        return projection(of).unflatten(-1, (count, spec.head_dim)).transpose(-2, -3)

    span, bias = bias_of(module, of=x)
    keys, values = (heads(source, projection, spec.num_kv_heads) for projection in (module.k_proj, module.v_proj))
    out = oracles.attention(heads(x, module.q_proj, spec.num_heads), keys,
                            one_hot_heads(keys) if of_weights else values, module.rel_k,
                            None if of_weights else module.rel_v, bias, span=span, sinks=module.sinks,
                            **oracles.pattern(spec), **more).out  # fmt: skip
    if of_weights:
        return out
    projected: Tensor = module.out_proj(out.transpose(-2, -3).flatten(-2))
    return projected


def one_hot_heads(k: Tensor) -> Tensor:
    """Return values that are one-hot."""
    return torch.eye(k.shape[-2], dtype=k.dtype).expand(*k.shape[:-1], k.shape[-2])


DRAWN = BlockSpec(64, 4, Span.clipped(40), num_kv_heads=2, rel_values=True, sinks=True)


def check_drawn(weights: Mapping[str, Any]) -> None:
    """Compare the weights of `DRAWN`, of any library, with the bounds of ``init_weights``, and their distribution."""
    DRAWN.check_weights(weights)
    for name, weight in weights.items():
        x = np.asarray(weight)
        assert x.dtype == np.float32
        if name.endswith("bias") or name == "sinks":
            assert not x.any()
            continue
        bound = (3 / 16) ** 0.5 if name.startswith("rel") else (6 / sum(x.shape)) ** 0.5
        assert 0.99 * bound < abs(x).max() <= bound
        assert x.var() == pytest.approx(bound**2 / 3, rel=0.06)
