"""No compiler warns of anything in the kernels: this machine's, older and newer ones, and those for other machines.

`make test-compilers` tries every compiler that is installed, and `make test-clang-cl` Clang in place of Microsoft's
compiler; otherwise it is this machine's GCC and Clang.
"""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import kernels_built
from kernels_built import LEVELS, ON_ARM, SSE2, WINDOWS

COMPILERS = os.environ.get("KERNELS_COMPILERS", "g++ clang++").split()
needs_headers = pytest.mark.skipif("INCLUDE" not in os.environ, reason="no headers of Windows: make test-clang-cl")
WITH = {"x86_64": [f"-DWITH_{level}" for level in LEVELS], "aarch64": [f"-DWITH_{level}" for level in ON_ARM]}
"""What says that there are further levels, by the kind of processors."""

HEADERS = Path(sysconfig.get_path("include"))

PYCONFIG = """
#define SIZEOF_SHORT __SIZEOF_SHORT__
#define SIZEOF_INT __SIZEOF_INT__
#define SIZEOF_LONG __SIZEOF_LONG__
#define SIZEOF_LONG_LONG __SIZEOF_LONG_LONG__
#define SIZEOF_SIZE_T __SIZEOF_SIZE_T__
#define SIZEOF_VOID_P __SIZEOF_POINTER__
#define SIZEOF_WCHAR_T __SIZEOF_WCHAR_T__
#define HAVE_STDARG_PROTOTYPES 1
#ifdef _WIN32
#define MS_WINDOWS
#define MS_WIN64
typedef __INTPTR_TYPE__ Py_ssize_t;
#define HAVE_PY_SSIZE_T 1
#define PY_SSIZE_T_MAX __INTPTR_MAX__
#else
#define HAVE_UNISTD_H 1
#define HAVE_SYS_TYPES_H 1
#endif
"""
"""What Python's headers ask about a machine, answered by the compiler: those of this one are about this one."""


def machine(compiler: str) -> str:
    """Return what a compiler compiles for, such as ``x86_64-linux-gnu``."""
    return subprocess.run([compiler, "-dumpmachine"], check=True, capture_output=True, text=True).stdout.strip()


def fits(level: str | None, target: str) -> bool:
    return level in (None, "base") or target.startswith("aarch64" if level in ON_ARM else ("x86_64", "amd64"))


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return Python's headers for a machine that is not this one."""
    folder = tmp_path_factory.mktemp("headers")
    for path in HEADERS.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "Python.h").unlink()
    (folder / "pyconfig.h").unlink()
    # The compiler looks for a header next to the file that includes it.
    shutil.copy(HEADERS / "Python.h", folder)
    (folder / "pyconfig.h").write_text(PYCONFIG)
    return folder


CLANG = os.environ.get("CLANG", "clang++")
MINGW, WINE = "x86_64-w64-mingw32-g++-posix", shutil.which("wine64") or shutil.which("wine")


@needs_headers
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("unit", kernels_built.WARNED_OF, ids=str)
def test_clang_cl_warns_of_nothing(unit: kernels_built.Unit, machine: str, headers: Path, tmp_path: Path) -> None:
    if not fits(unit.level, machine):
        pytest.skip("for another kind of processors")
    levels = WITH["x86_64"] if machine == "x86_64" else []
    flags = [f"-I{headers}", *unit.flags, *WINDOWS, *levels, *kernels_built.warnings(CLANG), "-Werror"]
    target, made = f"--target={machine}-pc-windows-msvc", tmp_path / "made.o"
    ended = subprocess.run([CLANG, target, *flags, "-c", unit.source, "-o", made], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert made.read_bytes()[:2] == {"x86_64": b"\x64\x86", "aarch64": b"\x64\xaa"}[machine]  # a file of Windows


@pytest.mark.skipif(WINE is None, reason="needs Wine")
@pytest.mark.parametrize(
    ("compiler", "levels", "linking"),
    [
        # vectors that are longer than those of GCC lie on the stack of Windows where they may not
        pytest.param([MINGW], {"base"}, ["-static"], id="mingw"),
        pytest.param(
            [CLANG, "--target=x86_64-pc-windows-msvc", *WINDOWS], {*LEVELS} - {"v4_amx"}, ["-fuse-ld=lld"],
            id="clang_cl", marks=needs_headers,
        ),
    ],
)  # fmt: skip
def test_a_program_of_windows_attends_on_several_threads(
    compiler: list[str], levels: set[str], linking: list[str], tmp_path: Path
) -> None:
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no {compiler[0]} is here")
    units = [unit for unit in kernels_built.UNITS if unit.level in (None, *levels) and unit.source.name != "module.cpp"]
    flags = [*(flag for flag in units[0].flags if flag != "-O2"), "-O1", *(f"-DWITH_{level}" for level in levels)]
    program = tmp_path / "host.exe"
    objects = [tmp_path / f"{place}.o" for place in range(len(units))]
    for unit, made in zip(units, objects, strict=True):
        subprocess.run([*compiler, *unit.flags, *flags, "-c", unit.source, "-o", made], check=True)
    include = f"-I{kernels_built.SOURCE.parent / 'include'}"
    host = kernels_built.ROOT / "tests" / "support" / "windows_host.cpp"
    subprocess.run([*compiler, *flags, include, host, *objects, *linking, "-o", program], check=True)
    ended = subprocess.run([str(WINE), program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("unit", kernels_built.WARNED_OF, ids=str)
def test_compilers_warn_of_nothing(compiler: str, unit: kernels_built.Unit, headers: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} is here")
    target = machine(compiler)
    if not fits(unit.level, target):
        pytest.skip("for another kind of processors")
    here = machine("cc") if shutil.which("cc") else None
    own = [*([] if target == here else [f"-I{headers}"]), *(SSE2 if target.startswith("i686") else [])]
    levels = WITH.get(target.partition("-")[0].replace("amd64", "x86_64"), [])
    flags = [*own, *unit.flags, *levels, *kernels_built.warnings(compiler, target), "-Werror", "-fsyntax-only"]
    ended = subprocess.run([compiler, *flags, unit.source], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
