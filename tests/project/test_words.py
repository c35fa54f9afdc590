"""Pages, docstrings, comments and names use the field's words: those of the list in CONTRIBUTING become fewer."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tracked import ROOT, tracked

CODE = ("relskew_core", "backends", "export", "benchmarks", "examples", "docs", "setup.py")

CEILING = 2  # how often words of the list are there today. Lower it when a page is rewritten; never raise it.


def listed() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| .+ \|$", section, re.MULTILINE)[1:]
    return [word.strip() for row in rows for word in row.split(",") if not row.startswith("-")]


def prose(path: Path) -> str:
    """Return a page without its code, or the docstrings and comments of a module or of C++."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"```.*?```|`[^`]*`|<[^>]*>", " ", text, flags=re.DOTALL)
    if path.suffix not in (".py", ".pyi"):
        return "\n".join(re.findall(r"//\s(.*)", text))
    said = re.findall(r"#\s(.*)", text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said.append(ast.get_docstring(node) or "")
    return re.sub(r"``.*?``|`[^`]*`|>>>.*", " ", "\n".join(said))


def pages() -> Iterator[Path]:
    for path in (Path(name) for name in tracked() if not (ROOT / name).is_symlink()):
        in_code = path.parts[0] in CODE and path.suffix in (".py", ".pyi", ".cpp", ".hpp")
        in_docs = path.suffix == ".md" and path.parent in (Path("docs"), Path("docs/development"))
        if in_code or in_docs or path == Path("README.md"):
            yield path


def counted(text: str, words: list[str]) -> Counter[str]:
    pattern = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in sorted(words, key=len, reverse=True))
    return Counter(" ".join(found.lower().split()) for found in re.findall(rf"\b(?:{pattern})\b", text, re.IGNORECASE))


def names_in(path: Path) -> Iterator[str]:
    texts = [path.stem]
    if path.suffix in (".py", ".pyi"):
        tokens = tokenize.generate_tokens(io.StringIO((ROOT / path).read_text()).readline)
        texts += [token.string for token in tokens if token.type == tokenize.NAME]
    for text in texts:
        yield from (part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text))


def test_names_have_no_word_of_the_list() -> None:
    words = set(listed())
    found = {str(path): sorted(words.intersection(names_in(path))) for path in pages() if path.suffix != ".md"}
    assert len(found) > 300
    assert {path: names for path, names in found.items() if names} == {}


def test_words_of_the_list_become_fewer() -> None:
    words = listed()
    assert len(words) > 20
    assert {"meets", "of its own"} <= set(words)
    found = {str(path): counted(prose(ROOT / path), words) for path in pages()}
    assert len(found) > 200
    total = sum(sum(each.values()) for each in found.values())
    worst = sorted(found.items(), key=lambda item: -sum(item[1].values()))[:10]
    assert total <= CEILING, f"{total} words of the list in CONTRIBUTING, more than {CEILING}: {worst}"


def test_code_and_names_are_no_prose(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text(
        "It meets a\ntable of its\nown.\n```python\nmeets\n```\n`stands` and <https://stands>, Standing."
    )
    found = counted(prose(page), ["meets", "of its own", "stands", "standing"])
    assert found == {"meets": 1, "of its own": 1, "standing": 1}
