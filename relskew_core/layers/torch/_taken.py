"""Modules made from a torch module: with its weights, and with tables that do not change its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from relskew_core._array.checks import describe
from relskew_core._block.spec import PROJECTIONS, BlockSpec
from relskew_core._positions.span import Span


def taken_over(kind: Any, attention: nn.MultiheadAttention, span: Span, options: Mapping[str, Any]) -> Any:
    """Return a module of a class with the weights of ``nn.MultiheadAttention``, and tables of zeros."""
    if not isinstance(attention, nn.MultiheadAttention):
        raise TypeError(f"`attention` must be a torch.nn.MultiheadAttention, got {describe(attention)}")
    unlike = {
        "kdim": attention.kdim != attention.embed_dim,
        "vdim": attention.vdim != attention.embed_dim,
        "add_bias_kv": attention.bias_k is not None,
        "add_zero_attn": attention.add_zero_attn,
    }
    if any(unlike.values()):
        found = ", ".join(name for name, here in unlike.items() if here)
        raise ValueError(f"`attention` must have one width and no extra keys, got one made with {found}")
    if options.get("sinks"):
        raise ValueError("`sinks` must be False: no finite sinks leave the outputs of `attention` unchanged, got True")
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    spec = BlockSpec(attention.embed_dim, attention.num_heads, span, bias=bias is not None, **options)
    module = kind(spec, dropout=attention.dropout, device=weight.device, dtype=weight.dtype)
    module.train(attention.training)
    with torch.no_grad():
        for name, part in zip(PROJECTIONS, (*weight.chunk(3), attention.out_proj.weight), strict=True):
            module.get_parameter(f"{name}.weight").copy_(part)
        if bias is not None:
            for name, part in zip(PROJECTIONS, (*bias.chunk(3), attention.out_proj.bias), strict=True):
                module.get_parameter(f"{name}.bias").copy_(part)
        for table in module.table_parameters():
            table.zero_()
    return module
