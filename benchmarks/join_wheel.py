"""Join the parts of a wheel, install it beside everything else, and say whether onnxruntime finds its GPU.

    python benchmarks/join_wheel.py wheel-part-* --target DIRECTORY

``onnxruntime-gpu`` is too large for some ways onto a machine without network. Afterwards put DIRECTORY first on
``PYTHONPATH``; ``onnxruntime.preload_dlls()`` takes CUDA's and cuDNN's libraries from torch's packages.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CHECK = """
import torch  # its packages hold the libraries
import onnxruntime
onnxruntime.preload_dlls()
print("onnxruntime", onnxruntime.__version__, onnxruntime.get_available_providers())
"""


def join(parts: list[Path], folder: Path) -> Path:
    """Join the parts, in the order of their names, into a wheel under its own name."""
    whole = folder / "joined.zip"
    with whole.open("wb") as target:
        for part in sorted(parts):
            with part.open("rb") as source:
                shutil.copyfileobj(source, target)
    with zipfile.ZipFile(whole) as archive:
        described = next(name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        lines = archive.read(described).decode().splitlines()
    tags = [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]
    name = described.split("/")[0].removesuffix(".dist-info")
    return whole.rename(folder / f"{name}-{tags[0]}.whl")


def main() -> int:
    """Join, install, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", type=Path, help="the parts, whose names sort in their order")
    parser.add_argument("--target", required=True, type=Path, help="folder to install into")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = join(arguments.parts, Path(folder))
        pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(arguments.target)]
        subprocess.run([*pip, str(wheel)], check=True)
    program = f"import sys; sys.path.insert(0, {str(arguments.target.resolve())!r})\n{CHECK}"
    return subprocess.run([sys.executable, "-c", program], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
