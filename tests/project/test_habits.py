"""Workflows run what every change must pass, forges can read their templates, guides name what is there."""

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tracked import PROJECT, ROOT, tracked

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PARTS = re.findall(r"^(\w+)\(\) ", (ROOT / ".ci/run").read_text(), re.MULTILINE)


def read(path: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(path.read_text())
    return found


def supported_pythons() -> list[str]:
    return [match[1] for line in PROJECT["classifiers"] if (match := re.fullmatch(r".* :: (3\.\d+)", line))]


def runs(workflow: dict[Any, Any]) -> list[str]:
    """Return the commands of all jobs, once for each entry of a matrix."""
    found = []
    for job in workflow["jobs"].values():
        lines = [step["run"] for step in job["steps"] if "run" in step]
        for name, values in job.get("strategy", {}).get("matrix", {}).items():
            lines = [line.replace(f"${{{{ matrix.{name} }}}}", value) for line in lines for value in values]
        found += lines
    return found


def test_every_change_is_tested_in_separate_jobs_on_every_python() -> None:
    workflow = read(ROOT / ".github/workflows/ci.yml")
    assert {"push", "pull_request"} <= set(workflow[True])  # `on` is a boolean in YAML 1.1
    assert {f".ci/run {part}" for part in ("lint", "types", "tests", "peers")} <= set(runs(workflow))
    pythons = workflow["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert pythons[0] == supported_pythons()[0] == PROJECT["requires-python"].removeprefix(">=")
    assert set(supported_pythons()) <= set(pythons)


def test_workflows_together_run_every_part() -> None:
    lines = [line for path in WORKFLOWS for line in runs(read(path))]
    parts = {part for line in lines if line.startswith(".ci/run") for part in line.split()[1:]}
    assert parts == set(PARTS) - {"clang_runtime", "sanitize", "rest"}
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {word for line in lines for word in re.findall(r"make ([\w-]+)", line)} <= set(targets)


@pytest.mark.parametrize(
    "path", [*WORKFLOWS, ROOT / ".forgejo/workflows/ci.yml"], ids=lambda path: f"{path.parts[-3]}-{path.stem}"
)
def test_actions_are_pinned_by_commit_and_may_only_read(path: Path) -> None:
    workflow, used = read(path), re.findall(r"uses: (\S+) ?(.*)", path.read_text())
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) and "# v" in version for action, version in used)
    assert path.parts[-3] == ".forgejo" or workflow["permissions"] == {"contents": "read"}


def test_other_forges_run_everything_on_the_oldest_and_the_newest_python() -> None:
    (forgejo,) = read(ROOT / ".forgejo/workflows/ci.yml")["jobs"].values()
    (gitlab,) = read(ROOT / ".gitlab-ci.yml").values()
    assert [step["run"] for step in forgejo["steps"] if "run" in step][-1] == ".ci/run"
    assert gitlab["script"] == [".ci/run"]
    pythons = [supported_pythons()[0], supported_pythons()[-1]]
    assert forgejo["strategy"]["matrix"]["python"] == pythons
    assert gitlab["parallel"]["matrix"] == [{"PYTHON_VERSION": pythons}]


def test_the_citation_and_the_metadata_name_the_same_authors() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["authors"] == PROJECT["authors"]
    assert citation["license"] == PROJECT["license"] == "MIT"
    assert {"cff-version", "message", "title", "abstract", "version"} <= set(citation)


def test_hooks_call_the_pinned_ruff_and_download_nothing() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    assert all(hook["entry"].startswith(".venv/bin/ruff ") for hook in repository["hooks"])


def test_issue_forms_have_what_a_form_needs() -> None:
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert forms
    for form in map(read, forms):
        assert form["name"]
        assert form["description"]
        identifiers = [field["id"] for field in form["body"]]
        assert len(set(identifiers)) == len(identifiers)
        assert all(field["type"] in ("textarea", "input") and field["attributes"]["label"] for field in form["body"])


def test_forges_get_the_same_request_template() -> None:
    templates = (".github/PULL_REQUEST_TEMPLATE.md", ".gitlab/merge_request_templates/Default.md")
    assert len({(ROOT / path).read_text() for path in templates}) == 1


MADE = ("build/objects", "dist/", "site/html", ".emulated/")  # folders that make writes


def test_an_unknown_part_is_refused_before_anything_runs() -> None:
    assert (ROOT / ".ci/release-check").stat().st_mode & 0o111  # the guides call it too
    ended = subprocess.run([ROOT / ".ci/run", "lint", "all"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("all is none of lint, types, tests, peers, ")


@pytest.mark.parametrize("guide", ["CONTRIBUTING.md", "GOVERNANCE.md", "RELEASING.md", "SECURITY.md"])
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


PUBLIC_ALONE = (
    "backends", "cli", "core", "distributed", "draw", "examples", "export", "huggingface", "layers", "peers", "web",
)  # fmt: skip
"""Folders of tests that import public names alone, except in files ``inside_*.py``."""


def test_tests_of_behaviour_import_public_names() -> None:
    for path in (path for folder in PUBLIC_ALONE for path in (ROOT / "tests" / folder).rglob("test_*.py")):
        imports = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        names = [f"{getattr(node, 'module', None) or ''}.{alias.name}" for node in imports for alias in node.names]
        private = [name for name in names if re.search(r"relskew_core(\.\w+)*\._(?!_)", name)]
        assert not private, f"{path.name} imports {private}: move its test to a file inside_*.py"
