"""A program that calls every library in a copy of relskew to which :func:`add` has added an array, ``tilt``.

It multiplies the logits of a head, and the portable kernels alone read it. So ``impl="auto"`` has to compute what
``"portable"`` does, and ``"native"`` has to refuse it; calls without the array are as before.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CHANGES = {
    "call.py": (
        ("    rel_q: Array | None = None\n", "    tilt: Array | None = None\n"),
        ("    rel_q: Annotated[Array | None, Kind.QUERY] = None  # (..., H, Lq, Dr), None if it is q\n",
         "    tilt: Annotated[Array | None, Kind.MASK] = None\n"),
    ),
    "forward.py": (
        ("    logits = grouped_matmul(q, xp.matrix_transpose(k), xp=xp)\n",
         "    logits = logits if operands.tilt is None else logits * operands.tilt\n"),
    ),
}  # fmt: skip
"""Lines of the kernels' files, and those that are put after them."""


def add(package: Path) -> None:
    """Add the array to a copy of the package."""
    for name, changes in CHANGES.items():
        path = package / "_kernel" / name
        text = path.read_text()
        for line, more in changes:
            assert text.count(line) == 1, line
            text = text.replace(line, line + more)
        path.write_text(text)


def check(row: Any, attend: Any, pull_back: Any) -> None:
    """Compare a library's calls with NumPy's, whose queries are multiplied."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 2, 24, 8)).astype(np.float32)
    tilt = np.asarray([[[0.5]], [[2.0]]], np.float32)
    arrays = {name: row.asarray(x) for name, x in {"q": q, "k": k, "v": v, "tilt": tilt}.items()}
    plain = {name: arrays[name] for name in "qkv"}

    def found(function: Any, arrays: dict[str, Any], **options: Any) -> Any:
        def called(given: dict[str, Any]) -> Any:
            return function(**given, **options)

        return row.to_numpy(row.wrap(called)(arrays))

    def pulled(**given: Any) -> Any:
        return pull_back(given["q"], **given).v

    for factor, given in ((np.float32(1), plain), (tilt, arrays)):
        expected = attend(q * factor, k, v, causal=True, impl="portable")
        gradient = pull_back(q, q * factor, k, v, causal=True, impl="portable").v
        for size in (7, None):  # short calls may have other kernels
            for impl in ("auto", "portable"):
                out = found(attend, given, causal=True, chunk_size=size, impl=impl)
                assert abs(out - expected).max() < 1e-5, (row.name, list(given), size, impl)
        out = found(pulled, given, causal=True)
        assert abs(out - gradient).max() < 1e-4, (row.name, list(given))
    why = r"no native path for this call: (.*`tilt`|array_api_strict has none|mlx has none)"
    for function in (attend, pulled):
        with pytest.raises((ValueError, RuntimeError), match=why):  # torch.compile raises a RuntimeError
            found(function, arrays, causal=True, impl="native")


if __name__ == "__main__":
    from libraries import LIBRARIES
    from relskew_core import backends, relative_attention, relative_attention_vjp
    from relskew_core._kernel.call import Operands

    assert Path(backends.__file__).is_relative_to(sys.argv[1])
    assert "tilt" in Operands._fields
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
