"""What is deprecated warns in time, and is gone in the version that the warning named."""

import ast
import linecache
from collections.abc import Callable
from typing import Any

import pytest
from packaging.version import Version

import relskew_core
from relskew_core._array.checks import explains
from relskew_core._array.extras import warn_deprecated
from tracked import ROOT, tracked


def test_nothing_outlives_its_deprecation_and_a_minor_version_lies_between() -> None:
    folders = ("relskew_core/", "backends/", "export/")
    sources = [name for name in tracked() if name.endswith(".py") and name.startswith(folders)]
    assert sources
    for name in sources:
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "warn_deprecated":
                given = {one.arg: ast.literal_eval(one.value) for one in node.keywords if one.arg != "instead"}
                since, removed_in = Version(given["since"]), Version(given["removed_in"])
                assert removed_in > Version(relskew_core.__version__), f"{name}:{node.lineno}: to be removed"
                assert since.major < removed_in.major or removed_in.minor - since.minor > 1, f"{name}:{node.lineno}"


@pytest.mark.parametrize("decorator", [lambda function: function, explains])
def test_a_warning_points_at_the_line_that_has_to_change(decorator: Callable[..., Any]) -> None:
    library: dict[str, Any] = {"__name__": "relskew_core.library", "warn_deprecated": warn_deprecated}
    exec("def f(): warn_deprecated('`old`', since='0.3', removed_in='0.5', instead='`new`')", library)
    old = decorator(library["f"])
    with pytest.warns(DeprecationWarning, match="`old`.*0.3.*0.5.*`new`") as caught:
        old()
    (warning,) = caught
    assert warning.filename == __file__
    assert linecache.getline(warning.filename, warning.lineno).strip() == "old()"
