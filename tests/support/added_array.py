"""A program that calls every library in a copy of relskew to which :func:`add` has added an array, ``key_bias``.

It is a number for each key of each key head, which is added to the logits, with a gradient. Two lines declare it, of a
kind that other arrays have, and the portable kernels alone read it. So ``impl="auto"`` has to compute what
``"portable"`` does, and ``"native"`` has to refuse it; calls without the array are as before.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DECLARED = (
    ("    rel_q: Array | None = None\n", "    key_bias: Array | None = None\n"),
    ("    rel_q: Annotated[Array | None, kinds.QUERY] = None  # (..., H, Lq, Dr), None if it is q\n",
     "    key_bias: Annotated[Array | None, kinds.KEY] = None\n"),
)  # fmt: skip
CHANGES = {
    "call.py": DECLARED,
    "view.py": (
        ("        logits = grouped_matmul(q, xp.matrix_transpose(k), xp=xp)\n",
         "        if self.operands.key_bias is not None:\n"
         "            own = xp.matrix_transpose(self.keys(self.operands.key_bias))\n"
         "            logits = logits + grouped_matmul(xp.ones_like(q[..., :1]), own, xp=xp)\n"),
    ),
    "backward.py": (
        ('    sums.add_keys(view, "k", d_logits, q, of_table)\n',
         "    if operands.key_bias is not None:\n"
         '        sums.add_keys(view, "key_bias", d_logits, xp.ones_like(q[..., :1]))\n'),
    ),
}  # fmt: skip
"""Lines of the kernels' files, and those that are put after them."""


def add(package: Path) -> None:
    for name, changes in CHANGES.items():
        path = package / "_kernel" / name
        text = path.read_text()
        for line, more in changes:
            assert text.count(line) == 1, line
            text = text.replace(line, line + more)
        path.write_text(text)


def check(row: Any, attend: Any, pull_back: Any) -> None:
    """Compare a library's calls with NumPy's, whose keys have one more number, and queries one for it."""
    q, d_out = np.random.default_rng(0).standard_normal((2, 2, 4, 24, 8)).astype(np.float32)
    k, v = np.random.default_rng(1).standard_normal((2, 2, 2, 24, 8)).astype(np.float32)
    own = np.random.default_rng(2).standard_normal((2, 2, 24, 1)).astype(np.float32)
    arrays = {name: row.asarray(x) for name, x in {"q": q, "k": k, "v": v, "key_bias": own, "d_out": d_out}.items()}
    names: tuple[str, ...] = ("k", "v", "key_bias")
    options: dict[str, Any] = {"causal": True, "scale": 0.5}

    def called(function: Any, *given: str, **more: Any) -> Any:
        def call(arrays: dict[str, Any]) -> Any:
            found = function(**arrays, **options, **more)
            gradients = [] if function is attend else [name for name in names if name in given]
            return {name: getattr(found, name) for name in gradients} or {"out": found}

        found = row.wrap(call)({name: arrays[name] for name in given})
        return {name: row.to_numpy(x) for name, x in found.items()}

    for numbers in (own, np.zeros_like(own)):
        longer = np.concatenate([q, np.full_like(q[..., :1], 2)], -1), np.concatenate([k, numbers], -1), v
        out = attend(*longer, **options, impl="portable")
        gradients = pull_back(d_out, *longer, **options, impl="portable")
        expected = {"k": gradients.k[..., :-1], "v": gradients.v, "key_bias": gradients.k[..., -1:]}
        given = ("q", "k", "v", "key_bias") if numbers.any() else ("q", "k", "v")
        for size in (7, None):  # short calls may have other kernels
            for impl in ("auto", "portable"):
                found = called(attend, *given, chunk_size=size, impl=impl)["out"]
                assert abs(found - out).max() < 1e-5, (row.name, given, size, impl)
                for name, x in called(pull_back, "d_out", *given, chunk_size=size, impl=impl).items():
                    assert abs(x - expected[name]).max() < 1e-4, (row.name, name, given, size, impl)
    why = r"no native path for this call: (.*`key_bias`|array_api_strict has none|mlx has none)"
    for function, more in ((attend, ()), (pull_back, ("d_out",))):
        with pytest.raises((ValueError, RuntimeError), match=why):  # torch.compile raises a RuntimeError
            called(function, *more, *given[:3], "key_bias", impl="native")


if __name__ == "__main__":
    from libraries import LIBRARIES
    from relskew_core import backends, relative_attention, relative_attention_vjp
    from relskew_core._kernel.call import Operands

    assert Path(backends.__file__).is_relative_to(sys.argv[1])
    assert "key_bias" in Operands._fields
    for row in LIBRARIES:
        if not row.gpu and row.missing() is None:
            with row.setting():
                check(row, relative_attention, relative_attention_vjp)
    from relskew_core.backends import _cupy
    from relskew_core.backends._path import PORTABLE

    backends._module = lambda library: _cupy
    _cupy.torch_refusal = lambda *call: None
    _cupy.FUSED = replace(PORTABLE, supports=_cupy.FUSED.supports)
    backends._prepared.clear()
    check(LIBRARIES[0], relative_attention, relative_attention_vjp)
