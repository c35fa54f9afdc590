"""What the comparisons share: peers by name, random weights, heads."""

import ast
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks.families import find
from oracles import relative_error

Tensor = torch.Tensor
ROOT = Path(__file__).parents[2]
hf = find  # a class or function of transformers, or of one of its models: "T5Config", "vits.VitsAttention"


def peer(path: str) -> Any:
    """Return a class or function of a peer: ``"peft.LoraConfig"``."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def alone(path: str, *unused: str) -> Any:
    """Return what :func:`peer` does, without its packages' ``__init__``, which import more than is installed.

    Its file may import modules that are ``unused``, and need not be installed either.
    """
    module, _, name = path.rpartition(".")
    parts = module.split(".")[:-1]
    packages = [".".join(parts[: count + 1]) for count in range(len(parts))]
    missing = [package for package in packages if package not in sys.modules]
    for package in missing:
        spec = importlib.util.find_spec(package)
        assert spec is not None, f"{package} is not installed: run `make .venv-peers/stamp`"
        sys.modules[package] = importlib.util.module_from_spec(spec)  # never executed
    absent = [package for package in unused if package not in sys.modules]
    sys.modules.update({package: MagicMock() for package in absent})
    try:
        return getattr(importlib.import_module(module), name)
    finally:  # others import the whole packages
        for package in missing + absent:
            del sys.modules[package]


def installed(package: str) -> None:
    """Skip a comparison with a package that an older environment of the peers lacks."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: run `make .venv-peers/stamp`")


def definitions(package: str, file: str, *names: str, **given: Any) -> Any:
    """Return functions or classes of a package whose own imports cannot be had: their lines alone are run, unchanged.

    Imports of torch and of the standard library are run too, and ``given`` has what else the lines need. A name
    ``"Class.method"`` is a method as a function.
    """
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed: run `make .venv-peers/stamp`"
    assert spec.submodule_search_locations is not None
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())
    kept, whose = {name.rpartition(".")[2] for name in names}, {name.rpartition(".")[0] for name in names}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in whose]
    lines = [*tree.body, *(node for each in classes for node in each.body)]
    tree.body = [node for node in lines if _is_kept(node, kept)]
    name = f"{package}/{file}".replace(".", "_")
    sys.modules[name] = ModuleType(name)  # where pickle finds the classes
    made = vars(sys.modules[name])
    made.update(given)
    exec(compile(tree, file, "exec"), made)
    values = [made[name.rpartition(".")[2]] for name in names]
    return values[0] if len(values) == 1 else values


def _is_kept(node: ast.stmt, names: set[str]) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = node.names[0].name if isinstance(node, ast.Import) else "." * node.level + str(node.module)
        return module.partition(".")[0] in {"torch", "numpy"} | sys.stdlib_module_names
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names


def page(name: str, language: str = "python") -> list[str]:
    """Return the programs of a page of the documentation."""
    text = (ROOT / "docs" / name).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(*blocks: str) -> dict[str, Any]:
    """Run the programs of a page, and return what they leave."""
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    return names


def randomised(module: Any, seed: int = 0) -> Any:
    """Give a module random float64 weights, biases and tables included."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return module


def made(path: str, configured: str, *more: Any, seed: int = 0, **options: Any) -> Any:
    """Make a module of transformers of a config, with random weights; its width is 24, in 3 heads."""
    options = {"hidden_size": 24, "num_attention_heads": 3, "attn_implementation": "eager", **options}
    return randomised(hf(path)(hf(configured)(**options), *more), seed)


def additive(mask: Tensor, least: float = -1e30) -> Tensor:
    """Return a mask that is added to logits."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, least)


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def split(x: Tensor, heads: int) -> Tensor:
    """``(batch, length, heads · D)`` to ``(batch, heads, length, D)``."""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def join(x: Any) -> Tensor:
    """``(batch, heads, length, D)`` to ``(batch, length, heads · D)``."""
    return x.transpose(-2, -3).flatten(-2)


def check(got: Any, want: Any, gate: float = 1e-12) -> None:
    """Equal up to rounding, or each of several; peers that make constants in float32 get a gate of 1e-6."""
    if not isinstance(got, Tensor):
        for one, other in zip(got, want, strict=True):
            check(one, other, gate)
        return
    error = relative_error(got.detach().numpy(), want.detach().numpy())
    assert error < gate, f"relative error {error}"


def padded(length: int) -> tuple[Tensor, Tensor]:
    """Return a batch of two sequences of width 24, and which keys are there."""
    return randn(2, length, 24), padding([length, max(1, length - 3)], length)


def padding(lengths: list[int], longest: int) -> Tensor:
    """Which keys of a padded batch are there, ``(batch, 1, 1, longest)``."""
    return (torch.arange(longest) < torch.tensor(lengths)[:, None])[:, None, None, :]
