"""Workflows run what every change must pass, forges can read their templates, guides name what is there."""

import ast
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tracked import ROOT, tracked

WORKFLOWS = [ROOT / ".github/workflows/ci.yml", ROOT / ".forgejo/workflows/ci.yml"]
GUIDES = ["CONTRIBUTING.md", "RELEASING.md", "SECURITY.md"]


def read(path: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(path.read_text())
    return found


def supported_pythons() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [match[1] for line in project["classifiers"] if (match := re.fullmatch(r".* :: (3\.\d+)", line))]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.parts[-3])
def test_a_workflow_runs_everything_on_the_oldest_and_the_newest_python(path: Path) -> None:
    workflow = read(path)
    assert {"push", "pull_request"} <= set(workflow[True])  # `on` is a boolean in YAML 1.1
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step][-1] == ".ci/run"
    assert job["strategy"]["matrix"]["python"] == [supported_pythons()[0], supported_pythons()[-1]]


def test_gitlab_runs_everything_on_the_oldest_and_the_newest_python() -> None:
    (job,) = read(ROOT / ".gitlab-ci.yml").values()
    assert job["script"] == [".ci/run"]
    (pythons,) = job["parallel"]["matrix"]
    assert pythons == {"PYTHON_VERSION": [supported_pythons()[0], supported_pythons()[-1]]}


def test_the_oldest_python_is_the_one_that_is_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={supported_pythons()[0]}"


def test_the_citation_and_the_metadata_name_the_same_authors() -> None:
    citation = read(ROOT / "CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["authors"] == project["authors"]
    assert citation["license"] == project["license"] == "MIT"
    assert {"cff-version", "message", "title", "abstract", "version"} <= set(citation)


def test_hooks_call_the_pinned_ruff_and_download_nothing() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"].startswith(".venv/bin/ruff ")


def test_issue_forms_have_what_a_form_needs() -> None:
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert forms
    for path in forms:
        form = read(path)
        assert form["name"]
        assert form["description"]
        identifiers = [field["id"] for field in form["body"]]
        assert len(set(identifiers)) == len(identifiers)
        assert all(field["type"] in ("textarea", "input") and field["attributes"]["label"] for field in form["body"])


def test_forges_get_the_same_request_template() -> None:
    templates = (".github/PULL_REQUEST_TEMPLATE.md", ".gitlab/merge_request_templates/Default.md")
    assert len({(ROOT / path).read_text() for path in templates}) == 1


MADE = ("build/objects", "dist/", "site/html", ".emulated/")
"""Folders that make writes."""


@pytest.mark.parametrize("guide", GUIDES)
def test_the_guides_name_what_is_there(guide: str) -> None:
    """Every path in backticks is a file of the project, or one of its folders."""
    names = tracked()
    there = set(names) | {str(folder) for name in names for folder in Path(name).parents}
    last = ""
    for path in re.findall(r"`([\w./-]+)`", (ROOT / guide).read_text()):
        is_path = "/" in path or path.endswith((".py", ".md", ".toml", ".txt", ".cff"))
        if not is_path or path.startswith(".venv"):
            continue
        if path.strip("/") in there:
            last = str(Path(path).parent)
        else:  # the second of two files in one folder has its file name in the id
            assert f"{last}/{path}" in there or path in MADE, f"{guide} names {path}"


def test_the_comparisons_find_their_own_modules() -> None:
    """Without the peers themselves, which `make test-peers` installs, none of them is imported by the other tests."""
    sources = [(ROOT / name).read_text() for name in tracked() if name.startswith("tests/peers/")]
    ours = {name for source in sources for name in re.findall(r"^from (peers\.\w+) import", source, re.MULTILINE)}
    assert ours
    assert all(find_spec(name) for name in ours)


def test_what_the_guides_call_can_be_called() -> None:
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    assert (ROOT / ".ci/release-check").stat().st_mode & 0o111


PUBLIC_ALONE = (
    "backends", "cli", "core", "distributed", "draw", "examples", "export", "huggingface", "layers", "peers", "web",
)  # fmt: skip
"""Folders of tests that import public names alone, except in files ``inside_*.py``."""


def test_tests_of_behaviour_import_public_names() -> None:
    for path in (path for folder in PUBLIC_ALONE for path in (ROOT / "tests" / folder).rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None) or ""
                names = [f"{module}.{alias.name}" for alias in node.names]
                private = [name for name in names if re.search(r"relskew_core(\.\w+)*\._(?!_)", name)]
                assert not private, f"{path.name} imports {private}: move its test to a file inside_*.py"
