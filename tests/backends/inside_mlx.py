"""MLX's namespace: the functions that portable code calls, as precise as their dtype."""

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relskew_core
from libraries import of_name
from relskew_core._array.namespace import device, namespace_of

mx: Any = pytest.importorskip("mlx.core")
ROW = of_name("MLX")


def test_arrays_are_on_the_host() -> None:
    assert device(ROW.asarray([1.0])) == "cpu"


def test_exponentials_are_as_precise_as_their_dtype() -> None:
    xp, x = namespace_of(mx), np.concatenate([np.linspace(-80, 80, 1001), [-800.0, -np.inf, 0.0]])
    np.testing.assert_allclose(ROW.to_numpy(xp.exp(ROW.asarray(x))), np.exp(x), rtol=1e-14)
    gradient = mx.grad(lambda x: mx.sum(xp.exp(x)))(ROW.asarray(x[-3:]))
    np.testing.assert_allclose(ROW.to_numpy(gradient), np.exp(x[-3:]), rtol=0, atol=1e-12)


def asked() -> tuple[dict[str, set[str]], set[str]]:
    """Return the functions of a namespace that portable code calls, with their keywords, and the optional ones.

    What only some namespaces have is looked for by ``hasattr``.
    """
    calls: dict[str, set[str]] = {}
    optional = {"lib", "empty"}  # NumPy's views, and torch's `meta`
    for folder in ("_array", "_positions", "_kernel", "_functions", "_block"):
        for path in (Path(relskew_core.__file__).parent / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                keywords = node.keywords if isinstance(node, ast.Call) else []
                function = node.func if isinstance(node, ast.Call) else node
                if isinstance(function, ast.Attribute) and ast.unparse(function.value) in ("xp", "self.xp", "self._xp"):
                    calls.setdefault(function.attr, set()).update(word.arg for word in keywords if word.arg)
                if isinstance(node, ast.Call) and ast.unparse(node).startswith("hasattr(xp, '"):
                    optional.add(ast.literal_eval(node.args[1]))
    return calls, optional


def test_the_namespace_has_every_function_that_portable_code_calls() -> None:
    xp, (calls, optional) = namespace_of(mx), asked()
    assert len(calls) > 40
    assert calls["ones"] == {"dtype", "device"}
    for name, keywords in calls.items():
        if name not in optional:
            function = getattr(xp, name)
            signature = (function.__doc__ or "").strip().partition("\n")[0]
            own = {"device"} & (getattr(function, "__kwdefaults__", None) or {}).keys()
            assert not [word for word in keywords - own if f"{word}:" not in signature], (name, signature)
