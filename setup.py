"""Compiles the kernels of `backends/_compiled`, where there is a compiler; all else is in pyproject.toml."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path("backends/_compiled/source")
FLAGS = [
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden",
]  # fmt: skip
LEVELS = {"v3.cpp": ["-march=x86-64-v3"], "v4.cpp": ["-march=x86-64-v4", "-mprefer-vector-width=512"]}
"""What processors of x86-64 are compiled for beside the least of them, by source."""

intel = platform.machine().lower() in ("x86_64", "amd64")


class Build(build_ext):
    """Compile each source for its processors."""

    def build_extension(self, extension: Extension) -> None:
        """Compile and link."""
        compiler, folder = self.compiler, str(Path(self.build_temp))
        objects = []
        for source in extension.sources:
            flags = [*FLAGS, *LEVELS.get(Path(source).name, [])]
            objects += compiler.compile(
                [source], output_dir=folder, include_dirs=self.include_dirs, extra_postargs=flags
            )
        compiler.link_shared_object(objects, self.get_ext_fullpath(extension.name), libraries=["m"])


sources = [str(SOURCE / name) for name in ("module.cpp", "base.cpp", *(LEVELS if intel else ()))]
kernels = Extension("relskew_core.backends._compiled._kernels", sources, py_limited_api=True, optional=True)
kernels.depends = [str(path) for path in SOURCE.glob("*.hpp")]

setup(
    ext_modules=[] if sys.platform == "win32" else [kernels],
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
