"""`save` leaves the old file or the new one, whole, and nothing else."""

import contextlib
import errno
import itertools
import os
import shutil
import stat
import sys
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import faults
from export_forms import FORMS, random_weights
from relskew_core import _files
from relskew_core.export import save, to_onnx, validate
from relskew_core.export._files import publish
from relskew_core.export._files.save import write

SPEC = FORMS["causal"][0]


def model(seed: int = 0, rows: int = 9) -> onnx.ModelProto:
    """Make a model; three weights are added that are worth an external file, one of them of no more than 1 KiB."""
    made = to_onnx(SPEC, random_weights(SPEC, seed))
    for name, shape in (("ballast", (rows, 1000)), ("kibibyte", (256,)), ("last", (3, 1000))):
        extra = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        made.graph.initializer.append(numpy_helper.from_array(extra, name))
    return made


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


PAIR = ("block.onnx", "other.onnx")


def save_pair(folder: Path, seed: int) -> None:
    targets, texts = [folder / name for name in PAIR], {"config.json": str(seed)}
    write([model(seed), model(seed)], targets, overwrite=True, external_threshold=0, texts=texts)


def test_save_writes_one_file_and_leaves_the_model_alone(tmp_path: Path) -> None:
    small = save(to_onnx(SPEC, random_weights(SPEC)), tmp_path / "small.onnx", external_threshold=0)
    assert names(tmp_path) == ["small.onnx"]  # no weight is worth an external file
    small.unlink()
    made = model()
    before = made.SerializeToString(deterministic=True)
    path = save(made, os.fspath(tmp_path / "block.onnx"))
    assert path == tmp_path / "block.onnx"
    assert names(tmp_path) == ["block.onnx"]
    assert onnx.load(path) == made
    assert made.SerializeToString(deterministic=True) == before
    (tmp_path / "another").touch()
    assert path.stat().st_mode == (tmp_path / "another").stat().st_mode


def test_large_weights_lie_in_one_external_file(tmp_path: Path) -> None:
    made = model()
    path = save(made, tmp_path / "block.onnx", external_threshold=1000)
    _, data = names(tmp_path)
    assert data.startswith("block.onnx.")
    bare = onnx.load(path, load_external_data=False)
    outside = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in bare.graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL
    }
    assert set(outside) == {"ballast", "kibibyte", "last"}
    assert {entries["location"] for entries in outside.values()} == {data}
    assert [int(entries["offset"]) for entries in outside.values()] == [0, 9 * 4096, 10 * 4096]  # 36,000 bytes, 1,024
    whole = onnx.load(path)
    for tensor in whole.graph.initializer:
        tensor.ClearField("data_location")
    assert whole == made
    failures = validate(path, SPEC, random_weights(SPEC), batches=(1,)).failures
    assert [check.name for check in failures] == ["unread"]  # the ballast
    with pytest.raises(ValueError, match="`model` must hold its weights"):
        save(bare, tmp_path / "other.onnx")


def test_saving_again_removes_old_weights_after_a_minute(tmp_path: Path) -> None:
    path = save(model(0), tmp_path / "block.onnx", external_threshold=0)
    first = contents(tmp_path)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save(model(1), path, external_threshold=0)
    assert contents(tmp_path) == first
    save(model(0), path, external_threshold=0, overwrite=True)
    assert contents(tmp_path) == first
    age(tmp_path)
    save(model(1), path, external_threshold=0, overwrite=True)
    second = names(tmp_path)
    assert len(second) == 3
    assert first.keys() < set(second)  # a reader of the first model still finds its weights
    assert ballast(path) == 1
    save(model(2), path, overwrite=True)
    assert names(tmp_path) == second
    age(tmp_path)
    save(model(2), path, overwrite=True)
    assert names(tmp_path) == ["block.onnx"]
    (tmp_path / "notes.txt").write_text("mine")
    save(model(2), tmp_path / "notes.txt", overwrite=True)
    assert ballast(tmp_path / "notes.txt") == 2


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def age(folder: Path, seconds: float = 120) -> None:
    for path in [folder, *folder.rglob("*")]:
        touch(path, seconds)


def touch(path: Path, seconds: float) -> None:
    """Let so many seconds pass since a file or folder was written."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def ballast(path: Path) -> int | None:
    """Return the seed of the model at ``path``; ``None`` if its weights are no seed's."""
    found = next(numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer if t.name == "ballast")
    drawn = (np.random.default_rng(seed).standard_normal(found.shape).astype(np.float32) for seed in range(4))
    return next((seed for seed, x in enumerate(drawn) if np.array_equal(found, x)), None)


def test_weights_in_use_stay_whatever_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a network's file system may be wrong by hours."""
    monkeypatch.setattr(publish, "_GRACE", -1e6)
    path = tmp_path / "block.onnx"
    for seed in (0, 1, 1):
        save(model(seed), path, external_threshold=0, overwrite=True)
        assert ballast(path) == seed
        assert len(names(tmp_path)) == 2


def test_files_of_others_are_left(tmp_path: Path) -> None:
    """Only weights that an earlier save of this very path wrote are removed with it."""
    path = tmp_path / "block.onnx"
    onnx.save(model(0), path, save_as_external_data=True, location="weights.bin", size_threshold=100)
    lookalike = tmp_path / "block.onnx.0123456789abcdef.data"
    lookalike.write_text("precious")
    for _ in range(2):
        age(tmp_path)
        save(model(1), path, overwrite=True)
    assert names(tmp_path) == ["block.onnx", lookalike.name, "weights.bin"]


def test_symbolic_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    for name, overwrite in itertools.product(("victim", "nowhere"), (False, True)):
        link = tmp_path / f"{name}-{overwrite}.onnx"
        link.symlink_to(tmp_path / name)
        with pytest.raises(ValueError, match="`path` must not be a symbolic link"):
            save(model(), link, overwrite=overwrite)
        assert link.is_symlink()
    assert (tmp_path / "victim").read_text() == "precious"
    assert len(names(tmp_path)) == 5


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("kind", ["file", "link", "link to the same", "folder"])
def test_another_file_with_the_name_of_the_weights_is_kept(tmp_path: Path, kind: str, existing: bool) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    save(model(), tmp_path / "a" / "block.onnx", external_threshold=0)
    (same,) = (tmp_path / "a").glob("*.data")
    victim, path, taken = tmp_path / "victim", tmp_path / "b" / "block.onnx", tmp_path / "b" / same.name
    victim.write_text("precious")
    if existing:
        save(model(1), path)
    if kind == "file":
        taken.write_text("mine")
    elif kind == "folder":
        taken.mkdir()
    else:
        taken.symlink_to(victim if kind == "link" else same)
    before = names(tmp_path / "b")
    with pytest.raises(FileExistsError, match="need a name that another file has") as refusal:
        save(model(), path, external_threshold=0, overwrite=existing)
    assert repr(os.fspath(taken)) in str(refusal.value)
    assert (victim.read_text(), names(tmp_path / "b")) == ("precious", before)
    assert kind != "file" or taken.read_text() == "mine"
    assert not existing or ballast(path) == 1


def test_a_failed_save_raises_its_error_though_all_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(model(), tmp_path / "block.onnx", external_threshold=0)

    def fails(*args: Any) -> None:
        for path in tmp_path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(onnx.checker, "check_model", lambda path: monkeypatch.setattr(os, "replace", fails))
    with pytest.raises(OSError, match="Input/output error"):
        save(model(), path, external_threshold=0, overwrite=True)
    assert not names(tmp_path)


def test_save_passes_where_others_remove_files_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of the model that is replaced, and what a save would have tidied up."""
    path = save(model(0), tmp_path / "block.onnx", external_threshold=0)
    next(tmp_path.glob("*.data")).unlink()
    save(model(1), path, external_threshold=0, overwrite=True)
    assert ballast(path) == 1
    age(tmp_path)
    (tmp_path / ".killed.relskew-saving").mkdir()
    real, gone = publish._idle, []

    def others_first(path: Path, seconds: float, *, inside: bool = False) -> bool:
        gone.append(path)
        path.rmdir() if path.is_dir() else path.unlink()
        return real(path, seconds, inside=inside) if inside else True

    monkeypatch.setattr(publish, "_idle", others_first)
    save(model(2), path, overwrite=True)
    assert len(gone) == 2
    assert names(tmp_path) == ["block.onnx"]


def test_arguments_and_paths_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    path, long, broken = tmp_path / "block.onnx", "b" * 300, model()
    broken.graph.node[0].input[0] = "nobody"
    of_one = "`path` must be a str or a path-like object of one, got "
    too_long = r"`path` cannot be written: File name too long: '.*b\.onnx'"
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((b"model", path), {}, TypeError, "`model` must be an onnx"),
        ((broken, path), {}, onnx.checker.ValidationError, "nobody"),
        ((model(), path), {"overwrite": 1}, TypeError, "`overwrite` must be a bool"),
        ((model(), path), {"external_threshold": -1}, ValueError, "`external_threshold` must be an int >= 0"),
        ((model(), tmp_path / "no" / "b"), {}, FileNotFoundError, "`path` must lie in a directory that exists"),
        ((model(), tmp_path / long / "b"), {}, FileNotFoundError, "`path` must lie in a directory that exists"),
        ((model(), tmp_path), {}, ValueError, "`path` must be a regular file"),
        ((model(), tmp_path / "pipe"), {}, ValueError, "`path` must be a regular file"),
        ((model(), tmp_path / "pipe"), {"overwrite": True}, ValueError, "`path` must be a regular file"),
        ((model(), "/"), {}, ValueError, "`path` must name a file"),
        *(((model(), x), {}, TypeError, of_one) for x in (None, 3, b"")),
        ((model(), "s3://a/b"), {}, ValueError, "`path` must be a file, not an address: .* got 's3://a/b'"),
        ((model(), "b\ud800.onnx"), {}, ValueError, "`path` must be text that UTF-8 can encode"),
        ((model(), "b\0.onnx"), {}, ValueError, "`path` must not have a NUL character"),
        # of the second, the temporary folder has too long a name
        *(((model(), tmp_path / f"{name}.onnx"), {}, OSError, too_long)
          for name in (long, "b" * 245)),
    ]  # fmt: skip
    if os.path.isdir("/proc/self"):
        told = r"`path` cannot be written: .* '/proc/self/block\.onnx'"
        wrong.append(((model(), "/proc/self/block.onnx"), {}, OSError, told))
    for given, options, error, message in wrong:
        with pytest.raises(error, match=message):
            save(*given, **options)
    assert names(tmp_path) == ["pipe"]


def test_a_check_sees_the_finished_file_first(tmp_path: Path) -> None:
    """At its place nothing is changed by then, and nothing will be if the check raises."""
    path, made = save(model(0), tmp_path / "block.onnx"), model(1)
    before = names(tmp_path)

    def check(files: Sequence[Path]) -> None:
        assert [ballast(new) for new in files] == [1]
        assert ballast(path) == 0
        raise ArithmeticError

    for threshold in (0, 2**30):
        with pytest.raises(ArithmeticError):
            write([made], [path], overwrite=True, external_threshold=threshold, check=check)
        assert names(tmp_path) == before
        assert ballast(path) == 0


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore:.*unclosed file|Exception ignored")  # where the line is one that closes it
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "failure", [KeyboardInterrupt, partial(OSError, errno.ENOSPC, "full")], ids=["interrupt", "disk"]
)
def test_a_failure_at_any_line_leaves_whole_files(tmp_path: Path, monkeypatch: Any, old: bool, failure: Any) -> None:
    """A new set is complete or absent; of an old one, each file stays or is replaced."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(sys.modules[__name__], "model", cache(model))
    start = tmp_path / "start"
    start.mkdir()
    if old:
        with_a_copy(start)
    before, outcomes = contents(start), set()
    for number in itertools.count(1):
        folder = Path(shutil.copytree(start, tmp_path / f"{number}"))
        passes = contextlib.suppress(KeyboardInterrupt, OSError)
        with faults.raising_at(number, publish, _files, failure=failure) as reached, passes:
            save_pair(folder, 1)
        found = contents(folder)
        assert not [name for name in found if name.startswith(".")], number
        seeds = [ballast(folder / name) if name in found else None for name in PAIR]
        assert set(seeds) <= ({0, 1} if old else {1}) or found == before, number
        assert referred(folder) | before.keys() >= {name for name in found if name.endswith(".data")}
        assert not old or ballast(folder / "copy.onnx") == 0
        outcomes.add(tuple(seeds))
        shutil.rmtree(folder)
        if not reached():
            break
    assert number > 60
    assert outcomes == ({(0, 0), (1, 0), (1, 1)} if old else {(None, None), (1, 1)})


def test_contents_are_flushed_before_and_names_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut loses what no flush has written."""
    steps: list[str] = []
    link = os.link

    def flush(handle: int) -> None:
        steps.append("flush folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "flush file")

    def name(source: Path, target: Path) -> None:
        steps.append(f"name {target.suffix}")
        link(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "link", name)
    save(model(), tmp_path / "block.onnx", external_threshold=0)
    assert steps == [*3 * ["flush file"], "name .data", "flush folder", "name .onnx", "flush folder"]


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "block.onnx"
    monkeypatch.setattr(onnx.checker, "check_model", lambda *args: path.write_text("theirs"))
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save(model(), path, external_threshold=0)
    assert contents(tmp_path) == {"block.onnx": b"theirs"}


def test_a_file_system_without_hard_links_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = save(model(), tmp_path / "block.onnx")
    assert ballast(path) == 0
    with pytest.raises(FileExistsError):
        save(model(1), path)
    assert names(tmp_path) == ["block.onnx"]


def with_a_copy(folder: Path) -> None:
    save_pair(folder, 0)
    shutil.copy(folder / PAIR[0], folder / "copy.onnx")


@pytest.fixture(scope="module", params=[None, with_a_copy], ids=["new", "existing"])
def deaths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("deaths")
    faults.die_at_every_step(home, request.param, partial(save_pair, seed=1))
    folders = list(home.iterdir())
    assert len(folders) > 20
    return folders


def referred(folder: Path) -> set[str]:
    models = [onnx.load(path, load_external_data=False) for path in folder.glob("*.onnx")]
    entries = [entry for model in models for tensor in model.graph.initializer for entry in tensor.external_data]
    return {entry.value for entry in entries if entry.key == "location"}


@pytest.mark.no_cover
def test_a_kill_leaves_whole_files_and_later_saves_remove_the_rest(deaths: list[Path], tmp_path: Path) -> None:
    outcomes = set()
    for killed in deaths:
        folder = Path(shutil.copytree(killed, tmp_path / killed.name, symlinks=True))
        old = {0} if (folder / "copy.onnx").exists() else {None}
        seeds = [ballast(folder / name) if (folder / name).exists() else None for name in PAIR]
        assert set(seeds) <= old | {1}
        text = folder / "config.json"
        assert (int(text.read_text()) if text.exists() else None) in old | {1}
        assert old == {None} or ballast(folder / "copy.onnx") == 0
        before = names(folder)
        age(folder, 0)  # however long the last folders took
        save(model(2), folder / "later.onnx")
        if old == {None} and None in seeds:  # whether the other save has ended is not known yet
            assert names(folder) == sorted([*before, "later.onnx"])
        age(folder)
        save(model(3), folder / "later.onnx", overwrite=True)
        left = {name for name in names(folder) if name.endswith(".data")}
        # As after a save that was not killed, replaced weights may stay until the same model is saved again.
        assert left == referred(folder) or seeds == [1, 1]
        assert not [name for name in names(folder) if name.endswith(".relskew-saving")]
        assert old == {None} or ballast(folder / "copy.onnx") == 0
        outcomes.add(tuple(seeds))
    assert len(outcomes) == 3


@pytest.mark.no_cover
def test_a_save_that_was_killed_is_repeated_at_once(deaths: list[Path]) -> None:
    """Weights may have two names then, and onnx rejects such files."""
    for folder in deaths:
        save_pair(folder, 1)
        assert [ballast(folder / name) for name in PAIR] == [1, 1]
        assert (folder / "config.json").read_text() == "1"
        age(folder)
        save_pair(folder, 2)
        age(folder)
        save_pair(folder, 2)
        kept = (folder / "copy.onnx").exists()
        assert len(names(folder)) == 4 + 2 * kept  # both graphs have the same weights, in one file
        assert not kept or ballast(folder / "copy.onnx") == 0


def test_a_save_at_work_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another save in the same folder removes nothing, however long the first one takes."""
    path, real = tmp_path / "block.onnx", onnx.checker.check_model

    def others_meanwhile(*args: Any) -> None:
        monkeypatch.setattr(onnx.checker, "check_model", real)
        for other in (tmp_path / "other.onnx", path):
            age(tmp_path)
            save(model(2), other, overwrite=True)
        real(*args)

    monkeypatch.setattr(onnx.checker, "check_model", others_meanwhile)
    save(model(1), path, external_threshold=0, overwrite=True)
    assert [ballast(tmp_path / name) for name in PAIR] == [1, 2]


@pytest.mark.parametrize("lock", ["free", "held", "unknown"])
@pytest.mark.parametrize("other", [False, True])
def test_folders_of_killed_saves_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: str, other: bool) -> None:
    """A free lock tells a killed save's folder after a minute without a change; without a lock a day must pass."""
    hours = {"old": (48, 48), "written in": (48, 2), "young": (2, 2), "at work": (2, 0)}
    for name, (made, written) in hours.items():
        folder = tmp_path / f".{name}.relskew-saving"
        folder.mkdir()
        (folder / "weights").touch()
        touch(folder / "weights", 3600 * written)
        touch(folder, 3600 * made)
    link = tmp_path / ".link.relskew-saving"
    link.symlink_to(tmp_path / ".old.relskew-saving")
    with contextlib.ExitStack() as stack:
        if lock == "held":
            for folder in tmp_path.iterdir():
                assert stack.enter_context(publish._locked(folder)) == (folder != link)
        elif lock == "unknown":
            monkeypatch.setattr(publish, "fcntl", None)
        if other:
            monkeypatch.setattr(os, "geteuid", lambda: 10**6)
        save(model(), tmp_path / "block.onnx")
    left = set(hours) - (set() if other else {"old", "written in", "young"} if lock == "free" else {"old"})
    assert names(tmp_path) == sorted([*(f".{name}.relskew-saving" for name in left), link.name, "block.onnx"])
