"""What the comparisons share: peers by name, random weights, heads."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from oracles import relative_error

Tensor = torch.Tensor


def peer(path: str) -> Any:
    """Return a class or function of a peer: ``"transformers.models.vits.modeling_vits.VitsAttention"``."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def timm_layer(module: str, name: str) -> Any:
    """Return a layer of timm without its packages' ``__init__``, which import all of torchvision."""
    for package in ("timm", "timm.layers"):
        if package not in sys.modules:
            spec = importlib.util.find_spec(package)
            assert spec is not None
            sys.modules[package] = importlib.util.module_from_spec(spec)  # never executed
    return getattr(importlib.import_module(f"timm.layers.{module}"), name)


def timm_function(module: str, name: str) -> Any:
    """Return a function of a module of timm whose imports need all of torchvision: its own lines alone are run."""
    spec = importlib.util.find_spec("timm")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / module).read_text())
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    function.decorator_list.clear()
    tree.body = [function]
    names: dict[str, Any] = {"torch": torch, "List": list}
    exec(compile(tree, module, "exec"), names)
    return names[name]


def randomised(module: Any, seed: int = 0) -> Any:
    """Give a module random float64 weights, biases and tables included."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return module


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def split(x: Tensor, heads: int) -> Tensor:
    """``(batch, length, heads · D)`` to ``(batch, heads, length, D)``."""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def join(x: Tensor) -> Tensor:
    """``(batch, heads, length, D)`` to ``(batch, length, heads · D)``."""
    return x.transpose(-2, -3).flatten(-2)


def check(got: Any, want: Any, gate: float = 1e-12) -> None:
    """Equal up to rounding; peers that make constants in float32 get a gate of 1e-6."""
    error = relative_error(got.detach().numpy(), want.detach().numpy())
    assert error < gate, f"relative error {error}"


def padding(lengths: list[int], longest: int) -> Tensor:
    """Which keys of a padded batch are there, ``(batch, 1, 1, longest)``."""
    return (torch.arange(longest) < torch.tensor(lengths)[:, None])[:, None, None, :]
