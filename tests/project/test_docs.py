"""Everything that the pages show is run: Python as doctests or as programs, commands through their programs.

A page is a namespace and a folder of its own. What is not run is recognised word by word, with its reason.
"""

import doctest
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from project.test_public_names import ABSENT, PUBLIC

import libraries
import relskew_core
from notebooks import TUTORIALS, cells_of, fingerprint, run
from relskew_core._array.extras import compile_line
from relskew_core.export import custom_ops_library
from relskew_core.export._files.library import found_library
from tracked import PROJECT, ROOT, tracked

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

OF_PEERS = {
    "accelerate.md": "tests/peers/test_families_page.py",
    "huggingface.md": "tests/peers/test_families_page.py",
    "keras.md": "tests/peers/test_keras.py",
    "piper.md": "tests/peers/trained_weights.py",
    "speech.md": "tests/peers/test_families_page.py",
    "t5.md": "tests/peers/test_families_page.py",
}
"""Pages that need what only ``make test-peers`` or ``make test-weights`` installs, and what runs them there."""

OF_SOME_PLATFORMS = {"mlx.md": "mlx"}  # pages of a library that has no wheels for every platform

assert all((ROOT / test).exists() for test in OF_PEERS.values())
RUN = [page for page in PAGES if page.name not in OF_PEERS]

SHOWN = {"text", "toml", "json", "bibtex", "{toctree}", "{include} README.md"}
"""Languages of blocks that are read and not run; what the site's generator does, tests/project/test_site.py builds."""

NOT_RUN = {
    "apt-get install --no-install-recommends debootstrap debian-archive-keyring qemu-user-static "
    "g++-aarch64-linux-gnu": "changes the system, and takes minutes",
    "relskew verify": "takes a minute; tests/cli/inside_verify.py runs it",
    "python -m benchmarks": "takes minutes; tests/project/test_benchmarks.py runs it small",
}
"""Commands that are shown and not run, with the reason."""


class Block(NamedTuple):
    language: str
    code: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 2)
        for match in re.finditer(r"^```(.*)\n((?:(?!```).*\n)*)```$", text, re.MULTILINE)
    ]


def run_python(block: Block, page: Path, names: dict[str, Any]) -> None:
    if not block.code.startswith(">>> "):
        exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(block.code, names, page.name, str(page), block.line - 1)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=report.append, clear_globs=False)
    names.update(test.globs)
    assert not runner.failures, "".join(report)


def ran(command: list[str], folder: Path) -> None:
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, f"{command}: {run.stdout}{run.stderr}"


def run_command(command: str, folder: Path) -> None:
    """Run ``relskew``; check that what ``make`` and ``pip`` are asked for exists; know the rest word by word."""
    if command in NOT_RUN or command == compile_line():
        return
    program, *arguments = shlex.split(command)
    if program == "make":
        targets = " ".join(re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert set(arguments) <= set(targets.split()), f"no such target: {command}"
    elif program == "pip":
        extras = re.fullmatch(r"install (?:--editable )?(?:\.|relskew-core)(?:\[([\w,-]+)\])?", " ".join(arguments))
        assert extras is not None, f"not an installation of relskew: {command}"
        assert set((extras[1] or "numpy").split(",")) <= PROJECT["optional-dependencies"].keys()
    else:
        assert program == "relskew", f"not run and not known: {command}"
        ran([sys.executable, "-m", "relskew_core.cli", *arguments], folder)


def run_c(block: Block, folder: Path, page: Path) -> None:
    """Compile a program of C in the folder of the library, and run it, by the lines that its page shows."""
    library = custom_ops_library()  # for the page that does not run without it
    if shutil.which("cc") is None:
        pytest.skip("no compiler of C is here")
    (folder / "host.c").write_text(block.code)
    (folder / library.name).symlink_to(library)
    (folder / "include").symlink_to(library.parent / "include")
    compiles, runs = re.findall(r"^\$ (.*)$", page.read_text(), re.MULTILINE)
    for line in (f"{compiles} -std=c99 -Wall -Wextra -Werror -pedantic", runs):
        ran(shlex.split(line), folder)


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name in OF_SOME_PLATFORMS:
        pytest.importorskip(OF_SOME_PLATFORMS[page.name])
    if "custom_ops_library" in page.read_text() and found_library() is None:
        pytest.skip("no operator library was compiled at installation")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.language == "python":
            if "from transformers" not in block.code:  # tests/peers/test_families_page.py runs it
                run_python(block, page, names)
        elif block.language == "c":
            run_c(block, tmp_path, page)
        elif block.language == "console":
            commands = re.findall(r"^\$ (.*)$", re.sub(r"\\\n\s+", "", block.code), re.MULTILINE)
            assert commands, f"{page.name}:{block.line}: a console block shows commands after `$ `"
            for command in commands:
                run_command(command, tmp_path)
        else:
            assert block.language in SHOWN, f"{page.name}:{block.line}: a block in {block.language!r} is not run"


def test_biases_by_pair_have_the_gradients_of_the_plain_formula() -> None:
    pytest.importorskip("torch")

    def plain(q: Any, k: Any, v: Any, *, mask: Any) -> Any:
        return ((q @ k.mT) * q.shape[-1] ** -0.5 + mask).softmax(-1) @ v

    page = ROOT / "docs" / "options.md"
    blocks = [block for block in blocks_of(page) if "nn." in block.code]
    assert len(blocks) == 3  # Graphormer, AlphaFold, Evoformer
    found = []
    for attention in (relskew_core.relative_attention, plain):
        names: dict[str, Any] = {"relative_attention": attention}
        for block in blocks:
            run_python(block, page, names)
        learned = [names["spatial"].weight, names["pairs"], names["to_bias"][1].weight, names["to_qkv"].weight]
        found.append([names["out"], names["starting"], names["ending"], *(x.grad for x in learned)])
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() < 1e-5 * want.norm()
        assert want.norm() > 0


COLUMNS = 88  # of code on a page of the site; `docs/ruff.toml` has the same, and `pyproject.toml` for docstrings


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_fences_are_closed_code_fits_and_links_lead_somewhere(page: Path) -> None:
    text, blocks = page.read_text(), blocks_of(page)
    assert 2 * len(blocks) == len(re.findall(r"^```", text, re.MULTILINE))
    wide = [line for block in blocks for line in block.code.splitlines() if len(line) > COLUMNS]
    assert not wide, f"{page.name} has code of more than {COLUMNS} columns: {wide}"
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", prose):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


FOR_USERS = [page for page in PAGES if page.parent.name == "docs"]


def test_one_page_says_what_was_run_on_gpus() -> None:
    """A paragraph or a row elsewhere that says that something was not run there links to its table."""
    lacking = re.compile(r"\b(?:not|nothing|none)\b[^.]*\b(?:run|tried|tested|verified)\b", re.IGNORECASE)
    for page in FOR_USERS:
        for part in re.split(r"\n\n|\n(?=[|-])", page.read_text() if page.name != "gpu.md" else ""):
            said = [x for x in re.split(r"(?<=\.)\s+", part) if lacking.search(" ".join(x.split()))]
            if any(re.search(r"\b(?:GPUs?|CUDA|TensorRT|ROCm|Metal)\b", x) for x in said):
                assert "gpu.md#what-has-run-on-a-gpu" in part, f"{page.name}: {part}"


def test_pages_show_the_same_table_of_devices() -> None:
    """Copy it from docs/gpu.md."""
    tables = [re.findall(r"<!-- cards -->.*?<!-- end of cards -->", page.read_text(), re.DOTALL) for page in FOR_USERS]
    assert len({table for of_page in tables for table in of_page}) == 1
    assert sum(map(len, tables)) > 1


def test_pages_for_users_name_no_tests_and_no_private_files() -> None:
    """Except the variants, each of which names the test that compares it."""
    private = r"\b(?:test|inside)_\w+|\btests/\w+/|\bbackends/_\w+|\brelskew_core/_\w+"
    pages = [page for page in FOR_USERS if page.name != "variants.md"]
    prose = {page.name: re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(), flags=re.DOTALL) for page in pages}
    assert {name: found for name, text in prose.items() if (found := re.findall(private, text))} == {}


def docs(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_the_table_of_libraries_is_the_matrix() -> None:
    begin = "<!-- libraries: python tests/support/libraries.py -->\n"
    shown = docs("accuracy.md").partition(begin)[2].partition("<!-- end of libraries")[0]
    assert shown.strip() == libraries.table().strip()


def test_the_table_of_names_is_complete() -> None:
    section = docs("reference.md").partition("<!-- names -->")[2].partition("<!-- end of names -->")[0]
    first_cells = re.findall(r"^\| ([^|]*)\|", section, re.MULTILINE)
    assert sorted(name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)) == sorted(relskew_core.__all__)


def test_the_table_of_modules_is_complete() -> None:
    first_cells = re.findall(r"^\| (`[^|]*)\|", docs("reference.md").partition("\n## Modules\n")[2], re.MULTILINE)
    named = [name for cell in first_cells for name in re.findall(r"`([\w.]+)`", cell)]
    named = [name for name in named if name not in ABSENT]
    assert sorted([*named, "relskew_core"]) == sorted(name for name in PUBLIC if importlib.import_module(name).__all__)


def test_the_gates_are_those_of_the_tests() -> None:
    shown = dict(re.findall(r"(float64|float32|float16|bfloat16)\s+(\de-\d+)", docs("accuracy.md")))
    assert {dtype: float(gate) for dtype, gate in shown.items()} == libraries.GATES


def test_every_extra_is_named() -> None:
    named = set(re.findall(r"`([\w-]+)`", docs("install.md").partition("The extras are")[2].partition("\n\n")[0]))
    assert PROJECT["optional-dependencies"].keys() - {"ci", "dev", "bench", "docs"} == named - {"relskew"}


def cell(page: str, heading: str, row: str, column: str) -> str:
    section = page.partition(f"# {heading}\n")[2]
    lines = [[part.strip() for part in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    return next(cells for cells in lines if cells[0] == row)[lines[0].index(column)]


def test_the_figures_of_the_readme_are_those_of_the_records() -> None:
    """Their pages are written from the records."""
    memory = partial(cell, docs("benchmarks.md"), "Peak extra memory, causal, forward", column="L = 4096")
    seconds = partial(cell, docs("benchmarks.md"), "Forward, causal", column="L = 2048")
    theirs, ours, plain = "pad–reshape–slice (Huang)", "relskew on torch", "plain SDPA, no relative positions"
    biased, flex = "SDPA with a skewed bias", "compiled FlexAttention"
    before, after = cell(docs("huggingface.md"), "Time and memory", "T5", "MiB, longest").split(" → ")
    figures = [memory(row=row) for row in (theirs, biased, ours)]
    figures += [seconds(row=row).split(" (")[0] for row in (plain, theirs, flex, ours)]
    readme = (ROOT / "README.md").read_text()
    section = readme.partition("<!-- figures -->")[2].partition("<!-- end of figures -->")[0]
    said = f"takes {memory(row=ours)}, and a bias for torch's attention {memory(row=biased)}."
    assert said in " ".join(readme.split())
    jobs = partial(cell, docs("whole-jobs.md"), "Measurements", "T5-small, 1024 tokens in, 64 out")
    figures += [f"{before} MiB", f"{after} MiB", jobs("usual code")]
    assert re.findall(r"\d[\d.]* (?:MiB|ms|s)\b", section) == figures
    assert re.findall(r"(\d[\d.]*) of it", section) == [jobs("CTranslate2 in int8"), jobs("with dynamic")]


def test_the_ratios_of_the_kernels_are_those_of_the_table() -> None:
    text = docs("compiled.md").partition("## Speed")[2].partition("## Grids")[0]
    rows = re.findall(r"^\| ([^|]+, \d+(?:, float64)?) \|(.*)\|$", text, re.MULTILINE)
    ratios = {name: [float(x) for x in re.findall(r"s, ([\d.]+) \(", cells)] for name, cells in rows}
    tables = [x for name, found in ratios.items() if name.startswith(("causal", "every", "clipped")) for x in found]
    low, high, most = min(tables), max(tables), max(x for found in ratios.values() for x in found)
    text = " ".join(text.split())
    assert f"{low:.1f} to {high:.1f} times as long as torch's `scaled_dot_product_attention` without positions" in text
    assert f"up to {most:.1f} times as long with masks or with a key table too" in text


QUESTIONS = [
    "why is my mask inverted", "how accurate is it", "multi-gpu", "which gpu", "out of memory", "rope", "cite",
    "export t5", "swin window resize", "xformers", "natten", "flexattention", "alibi by item", "streaming conformer",
    "gradient checkpointing", "learning rate", "accelerate", "torch.fx", "forked workers", "rel_shift",
    "why is the first call slow",
]  # fmt: skip
"""What people type into the search, whose answer is in the FAQ or in the page of other tools."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_finds_its_answer_first(question: str) -> None:
    """The search prefers a heading that has the words in this order and is not twice as long."""
    scores = {
        (len(question) / len(heading), page.name)
        for page in (ROOT / "docs").glob("*.md")
        for heading in re.findall("^#+ (.*)$", re.sub("```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
        if question in heading.lower() and 2 * len(question) >= len(heading)
    }
    assert scores, f"no heading has {question!r}"
    assert max(scores)[1] in ("faq.md", "other-tools.md")


# The paper says what was measured: its figures stand in the pages that are written from the records

PAPER = (ROOT / "paper.md").read_text()
MEASURED = "".join(
    (ROOT / "docs" / name).read_text() for name in ("benchmarks.md", "graphs.md", "gpu.md", "development/gpu.md")
)


def test_every_citation_has_its_entry_and_every_entry_is_cited() -> None:
    cited = set(re.findall(r"@(\w+)", PAPER.partition("\n---\n")[2]))
    assert cited == set(re.findall(r"^@\w+\{(\w+),", (ROOT / "paper.bib").read_text(), re.MULTILINE))


SECTION = PAPER.partition("# Research impact statement")[2].partition("\n# ")[0]
FIGURES = sorted(set(re.findall(r"\b[\d.]+ (?:ms|MiB)", SECTION)))


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_was_measured(figure: str) -> None:
    number, unit = figure.split()
    shown = re.findall(rf"\b([\d.]+) {unit}\b", MEASURED)
    assert any(number in (one, f"{float(one):.1f}") for one in shown), f"no page says {figure}"


def test_every_ratio_was_measured() -> None:
    assert len(FIGURES) > 15
    ratios = re.findall(r"([\d.]+) times as long", " ".join(PAPER.split()))
    assert ratios
    assert all(f"({ratio}×)" in MEASURED for ratio in ratios)


def test_the_paper_has_the_sections_and_the_length_that_its_journal_asks_for() -> None:
    body = PAPER.partition("\n---\n")[2]
    assert re.findall(r"^# (.*)$", body, re.MULTILINE) == [
        "Summary", "Statement of need", "State of the field", "Software design", "Research impact statement",
        "AI usage disclosure", "Acknowledgements", "References",
    ]  # fmt: skip
    assert 750 <= len(re.findall(r"[^\s|]+", body)) <= 1750


def test_the_paper_counts_families_as_the_page_does() -> None:
    page = (ROOT / "docs" / "huggingface.md").read_text().partition("## Families")[2].partition("## Limits")[0]
    assert "more than forty families" in PAPER
    assert len(re.findall(r"[\w-]+", "".join(re.findall(r"^\| ([^|]*)\|", page, re.MULTILINE)))) > 40


# Pages, docstrings, comments and names use the field's words: those of the list in CONTRIBUTING become fewer

CODE = ("relskew_core", "backends", "export", "benchmarks", "examples", "docs", "setup.py")

CEILING = 1  # how often they are there today, in code too. Lower it when a page is rewritten; never raise it.


def listed() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| .+ \|$", section, re.MULTILINE)[1:]
    return [word.strip() for row in rows for word in row.split(",") if not row.startswith("-")]


def pages() -> Iterator[Path]:
    for path in (Path(name) for name in tracked() if not (ROOT / name).is_symlink()):
        in_code = path.parts[0] in CODE and path.suffix in (".py", ".pyi", ".cpp", ".hpp")
        in_docs = path.suffix == ".md" and path.parent in (Path("docs"), Path("docs/development"))
        if in_code or in_docs or path == Path("README.md"):
            yield path


def test_words_of_the_list_become_fewer() -> None:
    """In names too, whose parts begin with capitals or after underscores."""
    words = sorted(listed(), key=len, reverse=True)
    assert len(words) > 20
    assert {"meets", "of its own"} <= set(words)
    pattern = "|".join(re.escape(word).replace(r"\ ", r"[\s#/]+") for word in words)
    found = Counter[str]()
    for path in pages():
        text = re.sub("(?<=[a-z])(?=[A-Z])", " ", f"{path}\n{(ROOT / path).read_text()}")
        found[str(path)] = len(re.findall(rf"(?<![a-z])(?:{pattern})(?![a-z])", text, re.IGNORECASE))
    assert len(found) > 300
    assert found.total() <= CEILING, f"more than {CEILING} words of the list in CONTRIBUTING: {found.most_common(10)}"


# The tutorials as they lie in git: with the outputs of their code, a title, a reader, and extras that exist

NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))
READERS = ("teachers", "researchers", "JAX", "production")  # a word of who each kind of reader is


each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_every_kind_of_reader_has_a_notebook() -> None:
    readers = [cells_of(path)[0].source.split("**")[1] for path in NOTEBOOKS]
    assert all(any(reader in one for one in readers) for reader in READERS)


@each_notebook
def test_outputs_are_those_of_the_code(path: Path) -> None:
    """``python tests/support/notebooks.py`` writes them."""
    cells = cells_of(path)
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert {cell.cell_type for cell in cells} == {"code", "markdown"}
    assert json.loads(path.read_text())["metadata"]["code"] == fingerprint(cells), "a cell has changed since it was run"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert "/tmp/" not in str(outputs)
    identities = [cell.id for cell in cells]
    assert len(set(identities)) == len(identities)
    assert path.stat().st_size < 300_000


@each_notebook
def test_the_first_cell_says_what_for_whom_and_with_extras_that_bring_what_is_imported(path: Path) -> None:
    first, *others = cells_of(path)
    assert re.match(r"# \w[^\n]+\n\n\*\*For [^*]+\.\*\* \w+ minutes", first.source)
    (extras,) = re.findall(r'`pip install "[\w.-]+\[([\w,-]+)\]"`', first.source)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    brought = {
        "numpy": {"numpy"}, "torch": {"torch"}, "torch-onnx": {"torch", "onnx"}, "onnxruntime": {"onnxruntime"},
        "plot": {"matplotlib"}, "flax": {"jax", "flax", "optax"},
    }  # fmt: skip
    there = {"relskew_core", "time", "tracemalloc", "tempfile", "pathlib"}.union(
        *(brought[x] for x in extras.split(","))
    )
    code = "\n".join(cell.source for cell in others if cell.cell_type == "code")
    assert set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)) <= there


@each_notebook
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    pyplot.switch_backend("Agg")
    try:
        assert any(value is not None for value in run(path))
    finally:
        pyplot.close("all")
