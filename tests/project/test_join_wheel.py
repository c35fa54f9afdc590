"""A wheel in parts comes together whole, under the name that pip wants."""

from __future__ import annotations

import zipfile
from pathlib import Path

from benchmarks.join_wheel import join


def test_parts_are_joined_in_order_under_the_wheels_name(tmp_path: Path) -> None:
    original = tmp_path / "original.zip"
    with zipfile.ZipFile(original, "w") as archive:
        archive.writestr("thing/__init__.py", "x = 1\n" * 500)
        archive.writestr("thing-1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: cp312-cp312-manylinux_2_28_x86_64\n")
    content = original.read_bytes()
    size = len(content) // 3 + 1
    parts = []
    for index, letter in enumerate("abc"):
        part = tmp_path / f"part-{letter}"
        part.write_bytes(content[index * size : (index + 1) * size])
        parts.append(part)
    folder = tmp_path / "joined"
    folder.mkdir()
    wheel = join(parts[::-1], folder)
    assert wheel.name == "thing-1.2-cp312-cp312-manylinux_2_28_x86_64.whl"
    assert wheel.read_bytes() == content
