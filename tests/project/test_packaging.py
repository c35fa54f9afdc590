"""What is installed is what the repository shows: mapping, links, wheel, sdist and imports."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import relskew_core
from kernels_built import LEVELS, linked_names, undefined_names
from once import of_run, once
from relskew_core._array.extras import compile_line, install_line
from tracked import IN_GIT, PACKED, PROJECT, PYPROJECT, ROOT, tracked

COMPILED = "_compiled/source/"  # what the kernels are compiled from, which no wheel holds

STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")
"""Whether this Python has the stable ABI, which one without the GIL does not have."""

KERNELS = f"relskew_core/backends/_compiled/_kernels{'.abi3.so' if STABLE else sysconfig.get_config_var('EXT_SUFFIX')}"
LIBRARY = "relskew_core/backends/_compiled/librelskew.so"
COMPILER = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
CAN_COMPILE = (
    sys.platform != "win32"
    and shutil.which(COMPILER.split()[0]) is not None
    and (Path(sysconfig.get_path("include")) / "Python.h").exists()
)
ON_X86_64 = sysconfig.get_platform() == "linux-x86_64"
needs_compiler = pytest.mark.skipif(not CAN_COMPILE, reason="no C++ compiler with Python's headers")
FAILING = {"CC": "false", "CXX": "false"}

LATER_VERSIONS = {"exp", "log", "pthread_create", "pthread_detach"}
"""What glibc has in other versions since 2.29 and 2.34; before, the same functions had lower ones."""

ARRAY_LIBRARIES = {"numpy", "torch", "cupy", "jax", "mlx", "dask", "array_api_strict", "onnx", "onnxruntime"}


def test_nothing_of_others_is_in_the_tree() -> None:
    for name in tracked():
        path = ROOT / name
        assert "third_party" not in path.parts, name
        if path.suffix in (".py", ".c", ".h", ".hpp", ".cpp", ".js", ".toml", "") and not path.is_symlink():
            head = path.read_text(errors="ignore")[:3000].lower()
            for word in ("all rights reserved", "licensed under", "copyright (c)", "spdx-" + "license-identifier"):
                assert word not in head or name == "LICENSE" or path == Path(__file__), (name, word)


def copy_to(folder: Path, link: Callable[[Path, Path], None]) -> None:
    """Copy the project's files as a clone brings them; ``link(path, target)`` makes what is a link here."""
    for name in tracked():
        here, there = ROOT / name, folder / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if here.is_symlink():
            link(there, here.readlink())
        else:
            shutil.copy(here, there)


def run_in(source: Path, *command: str, env: Mapping[str, str] | None = None, code: int = 0) -> str:
    """Run Python in a copy of the project, where ``env`` alone decides whether to compile; check how it ends."""
    env = os.environ | {"RELSKEW_PURE": "", "RELSKEW_LEVELS": ""} | dict(env or {})
    run = subprocess.run(
        [sys.executable, *command], cwd=source, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert run.returncode == code, run.stdout
    return run.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy_to(folder := tmp_path_factory.mktemp("source"), Path.symlink_to)
    return folder


def build(source: Path, dist: Path, *kinds: str, env: Mapping[str, str] | None = None) -> dict[str, Path]:
    """Build, without isolation so that it needs no network; return the files by their suffix, what was told as well."""
    told = run_in(source, "-m", "build", "--no-isolation", *kinds, "--outdir", str(dist), ".", env=env)
    (dist / "told.log").write_text(told)
    return {path.suffix: path for path in dist.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build a wheel and an sdist, once for all workers."""

    def make(folder: Path) -> None:
        copy_to(folder / "source", Path.symlink_to)
        settings = folder / "source" / "setup.py"  # compiled in a third of the time; installation optimises fully
        settings.write_text(settings.read_text().replace('"-O2"', '"-O1"'))
        build(folder / "source", folder / "dist", "--sdist", "--wheel", env={"RELSKEW_LEVELS": "all"})

    folder = once(of_run(tmp_path_factory, "packages"), make)
    return {"source": folder / "source", **{path.suffix: path for path in (folder / "dist").iterdir()}}


def package_sources() -> set[str]:
    """Modules and data of the package by their installed path."""
    mapped = {"backends": "relskew_core/backends", "export": "relskew_core/export", "relskew_core": "relskew_core"}
    return {
        f"{mapped[top]}/{rest}"
        for top, _, rest in (name.partition("/") for name in tracked())
        if top in mapped and not rest.startswith(COMPILED) and not (ROOT / top / rest).is_symlink()
    }


with_links = pytest.mark.skipif(not IN_GIT, reason="an sdist holds no links")


@with_links
def test_mapping_and_links_are_in_step() -> None:
    mapping = PYPROJECT["tool"]["setuptools"]["package-dir"]
    assert mapping
    for package, folder in mapping.items():
        link = ROOT / package.replace(".", "/")
        assert link.is_symlink(), f"{link} must be a link"
        assert link.resolve() == ROOT / folder
    links = {path for path in (ROOT / "relskew_core").iterdir() if path.is_symlink()}
    assert links == {ROOT / package.replace(".", "/") for package in mapping}


def test_every_package_is_listed() -> None:
    folders = {Path(name).parent for name in package_sources() if name.endswith("__init__.py")}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == {".".join(path.parts) for path in folders}


def content(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_holds_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    names = content(built[".whl"])
    assert names - {KERNELS, LIBRARY} == package_sources()
    assert {"relskew_core/py.typed", "relskew_core/backends/__init__.py", "relskew_core/export/__init__.py"} <= names


@needs_compiler
def test_wheel_holds_the_kernels_of_one_platform_for_every_python_with_the_stable_abi(built: dict[str, Path]) -> None:
    assert {KERNELS, LIBRARY} <= content(built[".whl"])
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    version = "".join(map(str, sys.version_info[:2]))
    tag = "cp311-abi3" if STABLE else f"cp{version}-cp{version}t"
    assert built[".whl"].name == f"relskew_core-{relskew_core.__version__}-{tag}-{platform}.whl"


@needs_compiler
def test_the_compiler_warns_of_nothing(built: dict[str, Path]) -> None:
    told = built[".log"].read_text()
    assert "-Wall -Wextra" in told
    assert not re.findall(r"^.*_compiled/source/.*warning.*$", told, re.MULTILINE)


@needs_compiler
def test_no_older_processor_can_be_given_the_code_of_a_newer_one(built: dict[str, Path]) -> None:
    """Linkers take one of all functions with the same name: so what is compiled for a level has names of its own."""
    objects = {path: path.name.split("-")[1] for path in built["source"].glob("build/objects/level-*.o")}
    if ON_X86_64:
        assert set(objects.values()) == set(LEVELS)
    for path, level in objects.items():
        if level != "base":
            assert not [name for name in linked_names(path) if not name.startswith(f"_ZN{len(level)}{level}")], path


@needs_compiler
def test_only_what_has_changed_is_compiled_again(built: dict[str, Path], tmp_path: Path) -> None:
    source = shutil.copytree(built["source"], tmp_path / "source", symlinks=True)
    command, env = ("setup.py", "build_ext", "--inplace"), {"RELSKEW_LEVELS": "all"}
    for path in source.rglob("*.?pp"):
        path.touch()
    assert "compiling kernels" not in run_in(source, *command, env=env)
    with (source / "backends" / COMPILED / "threads.cpp").open("a") as changed:
        changed.write("\n")
    told = run_in(source, *command, env=env)
    assert re.search(r"relskew: compiling kernels for .*, 1 of \d+ files: usually 2 seconds", told)
    assert "compiling kernels" not in run_in(source, *command, env=env)
    assert {path.suffix for path in (source / "build" / "objects").iterdir()} == {".o"}


@needs_compiler
@pytest.mark.skipif(not ON_X86_64, reason="one level on other processors")
@pytest.mark.parametrize(
    ("asked", "macros", "levels"),
    [
        ("", "", "base"),
        ("native", "AVX2 FMA F16C", "base and v3"),
        ("native", "AVX2 FMA F16C AVX512F AVX512DQ AVX512BW AVX512VL", "base and v4"),
        ("native", "AVX2 FMA F16C AVX512F AVX512DQ AVX512BW AVX512VL AVX512BF16", "base and v4 and v4_bf16"),
        ("all", "", "base and v3 and v4 and v4_bf16 and v4_amx"),
        ("v3, v4_bf16", "", "base and v3 and v4 and v4_bf16"),
    ],
)
def test_a_clone_compiles_for_its_processor_or_as_asked(asked: str, macros: str, levels: str, tmp_path: Path) -> None:
    copy_to(tmp_path, Path.symlink_to)
    compiler = tmp_path / "compiler"  # it answers only what the processor has
    lines = " ".join(f"'#define __{name}__ 1'" for name in ["x86_64", *macros.split()])
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-march=native*) printf "%s\\n" {lines} ;; *) exit 1 ;; esac\n')
    compiler.chmod(0o755)
    env = {"CC": str(compiler), "CXX": str(compiler), "RELSKEW_LEVELS": asked}
    assert f"relskew: compiling kernels for {levels}, " in run_in(tmp_path, "setup.py", "build_ext", env=env)


@needs_compiler
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not linked with glibc")
def test_kernels_need_a_c_library_alone_and_an_old_one(built: dict[str, Path], tmp_path: Path) -> None:
    """glibc 2.28 has every function, so what is linked with it runs with it; no runtime of C++ is needed."""
    with zipfile.ZipFile(built[".whl"]) as wheel:
        for name in (KERNELS, LIBRARY):
            path = wheel.extract(name, tmp_path)
            told = subprocess.run(["objdump", "--private-headers", path], check=True, capture_output=True, text=True)
            needed = set(re.findall(r"NEEDED +(\w+)", told.stdout))
            assert needed - {"libc", "libm", "libpthread"} == ({"librelskew"} if name == KERNELS else set())
            asked = dict(re.findall(r"(\w+)@GLIBC_([\d.]+)", " ".join(undefined_names(Path(path)))))
            assert "expf" in asked or name == KERNELS
            newer = {symbol for symbol, version in asked.items() if Version(version) > Version("2.28")}
            assert newer <= LATER_VERSIONS, "RELEASING.md, docs/install.md and pyproject.toml promise glibc 2.28"


def test_a_wheel_without_kernels_is_for_every_platform_with_the_same_bytes(source: Path, tmp_path: Path) -> None:
    """`make release-check` compares wheels with kernels too."""
    copy_to(tmp_path, Path.symlink_to)
    env = {"RELSKEW_PURE": "1", "SOURCE_DATE_EPOCH": "1700000000"}
    wheel, other = (build(each, tmp_path / each.name, "--wheel", env=env)[".whl"] for each in (source, tmp_path))
    assert content(wheel) == package_sources()
    assert wheel.name == f"relskew_core-{relskew_core.__version__}-py3-none-any.whl"
    assert wheel.read_bytes() == other.read_bytes()


def test_a_compiler_that_fails_fails_no_installation(source: Path, tmp_path: Path) -> None:
    """It is told, and what was installed works."""
    alone = ("--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check")
    there = tmp_path / "there"
    told = run_in(source, "-m", "pip", "install", "--verbose", *alone, "--target", str(there), ".", env=FAILING)
    if CAN_COMPILE:
        assert "no kernels are compiled: everything works without them" in told
    code = (
        "import sys, numpy as np, relskew_core, relskew_core.cli\n"
        "x, table = np.ones((1, 2, 4, 8), np.float32), np.ones((7, 8), np.float32)\n"
        "y = relskew_core.relative_attention(x, x, x, table, relskew_core.Span.full(4))\n"
        "assert y.dtype == np.float32 and np.allclose(y, x), y\n"
        "print(relskew_core.__file__)\n"
        "sys.exit(relskew_core.cli.main(['info']))"
    )
    told = run_in(tmp_path, "-c", code, env={"PYTHONPATH": str(there)})
    assert told.startswith(f"{there}{os.sep}")
    assert "\ncompiled kernels: none: no C++ compiler served at installation" in told


@needs_compiler
def test_kernels_that_are_asked_for_have_to_be_compiled(tmp_path: Path) -> None:
    """Where that fails, no older module stays behind."""
    copy_to(tmp_path, Path.symlink_to)
    olds = [tmp_path / "backends" / "_compiled" / Path(name).name for name in (KERNELS, LIBRARY)]
    for asked, code in (("", 0), ("0", 1)):
        for old in olds:
            old.touch()
        run_in(tmp_path, "setup.py", "build_ext", "--inplace", env=FAILING | {"RELSKEW_PURE": asked}, code=code)
        assert not any(old.exists() for old in olds)
    told = run_in(tmp_path, "setup.py", "--version", env={"RELSKEW_PURE": "yes"}, code=1)
    assert "RELSKEW_PURE must be 0 or 1, got 'yes'" in told
    told = run_in(tmp_path, "setup.py", "--version", env={"RELSKEW_LEVELS": "v3,v5"}, code=1)
    assert "RELSKEW_LEVELS must be all, native, or some of base, v3, v4, v4_bf16, v4_amx, v8_bf16, got 'v3,v5'" in told


def test_sdist_holds_what_a_clone_holds(built: dict[str, Path]) -> None:
    with tarfile.open(built[".gz"]) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    packed = {name for name in names if name.startswith(PACKED)}
    assert names - packed == {name for name in tracked() if not (ROOT / name).is_symlink()}


def written_as_text(path: Path, target: Path) -> None:
    path.write_text(str(target))


def left_out(path: Path, target: Path) -> None:
    """Make no link, as an sdist does."""


ALONE = (
    "import os, site, sys; sys.meta_path[:] = [x for x in sys.meta_path if 'ditable' not in repr(x)];"
    "sys.path[1:] = [x for x in sys.path[1:] if not os.path.exists(os.path.join(x, 'relskew_core'))]"
)
"""Begins a program that sees no other relskew than that of its folder, or that it looks for."""


@pytest.mark.parametrize("link", [written_as_text, left_out])
def test_links_that_were_not_unpacked_are_named(link: Callable[[Path, Path], None], tmp_path: Path) -> None:
    copy_to(tmp_path, link)
    for module in ("relskew_core", "relskew_core.backends", "relskew_core.export"):
        error = run_in(tmp_path, "-c", f"{ALONE}; import {module}", code=1).splitlines()[-1]
        assert error.startswith(f"ImportError: {tmp_path / 'relskew_core' / 'backends'} must be a link to the folder")
        assert "pip install --editable ." in error


@pytest.mark.parametrize("link", [pytest.param(Path.symlink_to, marks=with_links), written_as_text])
def test_an_editable_install_is_a_path_where_there_are_links_and_else_a_hook(link: Any, tmp_path: Path) -> None:
    """Type checkers and editors follow a path, and no hook, whose finder maps the folders: then nothing is missing."""
    source, there = tmp_path / "source", tmp_path / "there"
    copy_to(source, link)
    code = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    run_in(source, "-c", code, str(tmp_path), env={"RELSKEW_PURE": "1"})
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as wheel:
        wheel.extractall(there)
    assert bool([*there.glob("*finder.py")]) == (link is written_as_text)
    code = f"{ALONE}; site.addsitedir(sys.argv[1]); import relskew_core.export; print(relskew_core.backends.__file__)"
    (imported,) = run_in(tmp_path, "-c", code, str(there)).splitlines()
    assert Path(imported).samefile(source / "backends" / "__init__.py")


def test_wheel_needs_array_api_compat_only(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built[".whl"]) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        required = re.findall(r"^Requires-Dist: (?!.*extra ==)([\w-]+)", wheel.read(path).decode(), re.MULTILINE)
    assert required == ["array-api-compat"]


def test_the_version_is_written_once() -> None:
    assert metadata.version("relskew-core") == relskew_core.__version__
    assert (ROOT / "CITATION.cff").read_text().count(f"version: {relskew_core.__version__}\n") == 1


def test_one_line_installs_the_library_everywhere() -> None:
    """In pages and notebooks the one that errors give, with quotes that every shell takes."""
    pages = [ROOT / name for name in tracked() if re.fullmatch(r"[A-Z]+\.md|docs/[\w-]+\.md|docs/.*\.ipynb", name)]
    found = []
    for page in pages:
        text = page.read_text().replace('\\"', '"') if page.name != "RELEASING.md" else ""
        for line, extras in re.findall(r"(pip install [^\[\]\n`]*\[([\w,-]+)\][^\s`\\]*)", text):
            assert line.replace("--editable ", "") == install_line(*extras.split(",")), page
            found.append(page.name)
        assert set(re.findall(r"pip install --force-reinstall [^\n`]+", page.read_text())) <= {compile_line()}, page
    assert len(set(found)) > 10
    assert {"install.md", "training.ipynb"} <= set(found)


def test_what_the_library_asks_to_install_exists() -> None:
    """Every ``name[extra]`` in code and docs is the distribution, with an extra that it has."""
    asked = [
        (path, name, extra)
        for path in (ROOT / name for name in tracked() if name.endswith((".py", ".md", ".toml")))
        for name, extras in re.findall(r"\b(relskew[\w-]*)\[([a-z0-9,-]+)\]", path.read_text())
        for extra in extras.split(",")
    ]
    assert len(asked) > 5
    for path, name, extra in asked:
        assert name == PROJECT["name"], f"{path} asks for {name}"
        assert extra in PROJECT["optional-dependencies"], f"{path} asks for {name}[{extra}]"


def bounds(requirements: list[str]) -> dict[str, str]:
    found = (re.match(r"([\w-]+)(?:\[[\w,-]+\])?(?:>=|==)([\d.]+)", line) for line in requirements)
    return {match[1]: match[2] for match in found if match}


def test_the_lowest_releases_are_the_lower_bounds() -> None:
    """Of everything that users install without a GPU; and NumPy is held to one bound everywhere."""
    extras = PROJECT["optional-dependencies"]
    others = re.compile("ci|dev|bench|docs|.*(gpu|12x|13x)")
    for_users = [line for name, lines in extras.items() if not others.fullmatch(name) for line in lines]
    lowest = bounds((ROOT / "requirements" / "lowest.txt").read_text().splitlines())
    strict = bounds(extras["dev"])["array-api-strict"]
    assert lowest == bounds(PROJECT["dependencies"] + for_users) | {"array-api-strict": strict}
    numpy = {line for lines in extras.values() for line in lines if line.startswith("numpy>")}
    assert numpy == {f"numpy>={lowest['numpy']}"}


EXPORTING = (
    "from relskew_core import BlockSpec, Span, init_weights, export;"
    "spec = BlockSpec(4, 2, Span.causal(3), causal=True); weights = init_weights(spec, seed=0);"
    "assert export.validate(export.to_onnx(spec, weights), spec, weights, runtimes=['reference']).ok"
)
GENERATING = (
    "sys.path.append('tests/support'); import small_decoder, tempfile; from relskew_core import export;"
    "path = export.save(small_decoder.growing(), tempfile.mkdtemp() + '/decoder.onnx');"
    "assert export.generate(path, [1, 2, 3], 4).tolist() == small_decoder.greedy([[1, 2, 3]], 4)[0].tolist()"
)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        *((f"import relskew_core{name}", ARRAY_LIBRARIES) for name in ("", ".papers", ".backends", ".cli")),
        (EXPORTING, {"torch", "onnxruntime", "jax", "cupy", "openvino"}),
        (GENERATING, {"torch", "onnxscript", "onnx_ir", "jax", "cupy", "openvino"}),
    ],
)
def test_what_is_not_needed_is_not_imported(code: str, absent: set[str]) -> None:
    assert not absent & set(run_in(ROOT, "-c", f"import sys; {code}; print(*sys.modules)").split())
