"""The site as it is built: every page, every link, every picture; in a browser, as wide as a desk and as a phone."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest
from project.test_public_names import PUBLIC

import chromium
import relskew_core
from once import of_run, once
from relskew_core._kernel.call import GROUPS
from tracked import ROOT

WIDTHS = {"desk": (1440, 900), "phone": (390, 844)}
SEEN = ("index", "chooser", "benchmarks", "variants", "reference", "reference/relskew_core.relative_attention")
"""Pages that are looked at in light and dark; all are held to the width of a phone."""


class Page:
    """What a page shows without its scripts."""

    def __init__(self, path: Path) -> None:
        shown = re.sub(r"(<(script|style)\b[^>]*>).*?</\2>|<!--.*?-->", r"\1", path.read_text(), flags=re.DOTALL)
        tags = [
            (tag, {name: unescape(value) for name, value in re.findall(r'([\w:-]+)="([^"]*)"', given)})
            for tag, given in re.findall(r"<(\w+)\b([^>]*)>", shown)
        ]
        self.anchors = {given["id"] for _, given in tags if given.get("id")}
        linking = [given for tag, given in tags if tag in ("a", "link", "script", "img", "source")]
        self.links = [given[name] for given in linking for name in ("href", "src") if name in given]
        self.images = [given for tag, given in tags if tag == "img"]
        said = [given for tag, given in tags if tag == "meta"]
        self.said = {given.get("name") or given.get("property", ""): given.get("content", "") for given in said}
        self.said["icon"] = next(given["href"] for _, given in tags if "icon" in given.get("rel", "").split())
        parts = {tag: re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", shown, re.S) for tag in ("title", "h1", "article")}
        self.texts = {tag: unescape(re.sub("<[^>]*>", "", "".join(found))) for tag, found in parts.items()}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as ``make docs`` does, once for all workers."""

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "docs.site", str(folder)]
        untraced = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
        run = subprocess.run(command, cwd=ROOT, env=untraced, capture_output=True, text=True, timeout=900)
        assert run.returncode == 0, run.stdout + run.stderr

    return once(of_run(tmp_path_factory, "site"), build) / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    found = {path: Page(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}
    assert len(found) > 100
    return found


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        assert not re.findall('src="http[^"]*', path.read_text()), f"{path.name} loads something from elsewhere"
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                assert parts.scheme in ("https", "mailto", "data"), f"{path.name}: {link}"
                assert parts.scheme != "https" or "." in parts.netloc, f"{path.name}: {link}"
                continue
            home = site if parts.path.startswith("/") else path.parent
            target = (home / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.exists() or (target in pages and anchor and anchor not in pages[target].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken, "\n".join(broken)


def test_every_page_has_a_heading_and_text_without_scripts(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        if path.stem not in ("search", "genindex", "py-modindex"):
            assert page.texts["h1"].strip(), path.name
            assert len(page.texts["article"].split()) > 5, f"{path.relative_to(site)} says nothing without scripts"


def test_every_page_says_what_it_is_where_links_to_it_are_shown(site: Path, pages: dict[Path, Page]) -> None:
    """A title with the version, a description, an icon, and a card with a picture."""
    descriptions = set()
    for path, page in pages.items():
        assert f"relskew {relskew_core.__version__}" in page.texts["title"], path.name
        assert (path.parent / page.said["icon"]).exists() or path.stem == "404"
        assert page.said["og:description"] == page.said["description"] != ""
        assert len(page.said["description"]) <= 160
        assert page.said["og:title"]
        if "_modules" not in path.parts:
            descriptions.add(page.said["description"])
        if path.stem != "404":
            assert (path.parent / page.said["og:image"]).read_bytes().startswith(b"\x89PNG")
    assert len(descriptions) > 150


def test_pages_lead_to_their_source_and_missing_ones_home(site: Path, pages: dict[Path, Page]) -> None:
    assert any(link.startswith("_sources/torch.md") for link in pages[site / "torch.html"].links)
    missing = pages[site / "404.html"].links  # it is shown at any address, so links begin at the root
    assert {"/index.html", "/chooser.html", "/reference.html"} <= {urlsplit(link).path for link in missing}
    assert all(link.startswith(("/", "#", "https:")) for link in missing)


def test_the_home_page_begins_with_code_and_lists_pages_by_what_is_on_them(site: Path) -> None:
    home = (site / "index.html").read_text()
    article = home.partition("<article")[2]
    assert article.index("<pre>") < article.index(">Get started<") < article.index("<img")
    assert re.sub("<[^>]*>", "", article.partition("<pre>")[2]).startswith("import torch\n")
    for name in (
        "Hugging Face Transformers", "Masks, windows, packing, dropout", "Distributed", "Music Transformer example",
        "GPU support", "API reference",
    ):  # fmt: skip
        assert f">{name}</a>" in home.partition("<article")[0], name


def test_every_picture_exists_and_has_a_text(pages: dict[Path, Page]) -> None:
    images = [(path, image) for path, page in pages.items() for image in page.images]
    assert len(images) > 8
    for path, image in images:  # the test of links looks for the files
        assert image["src"]
        assert len(image.get("alt", "").split()) > 1, f"{path.name}: {image} has no words for who cannot see it"


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_a_page(module: str, site: Path, pages: dict[Path, Page]) -> None:
    for name in importlib.import_module(module).__all__:
        page = pages[site / "reference" / f"{module}.{name}.html"]
        assert f"{module}.{name}" in page.anchors
        assert page.texts["h1"].startswith(name)
        assert len(page.texts["article"].split()) > 6


AT_THE_ROOT = {"CONTRIBUTING", "CHANGELOG", "SECURITY", "RELEASING"}


def written(*kinds: str) -> set[str]:
    docs = ROOT / "docs"
    return {str(path.relative_to(docs).with_suffix("")) for kind in kinds for path in docs.rglob(f"*.{kind}")}


def test_every_page_of_the_project_is_on_the_site_and_in_its_contents(site: Path, pages: dict[Path, Page]) -> None:
    home = {unquote(urlsplit(link).path) for link in pages[site / "index.html"].links}
    for name in written("md", "ipynb") | AT_THE_ROOT:
        assert site / f"{name}.html" in pages
        assert name == "index" or f"{name}.html" in home, f"{name} is in no list of docs/index.md"


def test_the_search_finds_pages_for_users_only(site: Path) -> None:
    """The words of pages for developers are not in the index, whose entries are one page or a list of pages."""
    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    entries = (found if isinstance(found, list) else [found] for found in index["terms"].values())
    found = {index["docnames"][page] for pages in entries for page in pages}
    for_users = {name for name in written("md") if not name.startswith("development/")}
    assert len(written("md")) > len(for_users) > 20
    assert found & (written("md") | AT_THE_ROOT) == for_users


def test_pages_of_modules_have_what_users_call(site: Path, pages: dict[Path, Page]) -> None:
    """Inherited members too, and nothing that only frameworks call."""
    for framework, names in {
        "torch": ("table_parameters", "empty_cache", "from_multihead", "forward"),
        "flax": ("empty_cache", "weights", "from_weights"),
        "equinox": ("empty_cache", "weights"),
    }.items():
        name = f"relskew_core.layers.{framework}.RelativeMultiheadAttention"
        anchors = pages[site / "reference" / f"{name}.html"].anchors
        assert {f"{name}.{member}" for member in names} <= set(anchors)
        assert not {f"{name}.{member}" for member in ("extra_repr", "processes", "attend", "chosen")} & set(anchors)


def test_the_reference_groups_arguments_and_leads_to_the_code(site: Path, pages: dict[Path, Page]) -> None:
    path = site / "reference" / "relskew_core.relative_attention.html"
    page, text = pages[path], pages[path].texts["article"]
    assert re.findall('<dt class="group">(.*?)</dt>', path.read_text()) == [x.capitalize() for x in GROUPS.values()]
    assert "causal: bool = False" in text
    assert "See also" in text.replace("See Also", "See also")
    assert any(link.startswith("../_modules/relskew_core/") for link in page.links)


def test_code_in_the_pages_leads_to_the_reference(site: Path, pages: dict[Path, Page]) -> None:
    links = pages[site / "chooser.html"].links
    for name in ("huggingface.replace_attention", "relative_attention", "conventions.load_vits", "export.quantize"):
        assert f"reference/relskew_core.{name}.html#relskew_core.{name}" in links
    torch = (site / "torch.html").read_text()
    assert '<span class="pre">nn.MultiheadAttention</span></code>, ' not in torch  # torch's class does not link to ours


needs_chromium = pytest.mark.skipif(chromium.PROGRAM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Chromium]:
    with chromium.Chromium() as opened:
        yield opened


CONTRAST = """(() => {
    const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
    const context = canvas.getContext("2d", {willReadFrequently: true});
    const over = (colour, below) => {
        context.fillStyle = `rgb(${below})`; context.fillRect(0, 0, 1, 1);
        context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
        return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    };
    const behind = (element) => {
        if (!element) return [255, 255, 255];
        return over(getComputedStyle(element).backgroundColor, behind(element.parentElement));
    };
    const light = (colour) => {
        const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
        const [r, g, b] = colour.map((c) => linear(c / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const faint = {};
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || element.closest("script, style, noscript, svg, .headerlink")) continue;
        if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
        const below = behind(element), text = over(getComputedStyle(element).color, below);
        const [high, low] = [light(text), light(below)].sort((a, b) => b - a);
        const ratio = (high + 0.05) / (low + 0.05);
        if (ratio < 4.5) faint[element.className + ": " + walker.currentNode.data.trim().slice(0, 30)] = ratio;
    }
    return faint;
})()"""
"""The texts of a page whose contrast WCAG calls too low, with what it is."""


def loaded(browser: chromium.Chromium, path: Path) -> None:
    """Go to a page and wait for it, whether scripts are allowed or not."""
    browser.open(path.as_uri())
    deadline = time.monotonic() + 60
    while browser.run("[document.readyState, location.href]") != ["complete", path.as_uri()]:
        assert time.monotonic() < deadline, f"{path.name} does not load"
        time.sleep(0.01)


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", SEEN)
def test_a_page_can_be_read(name: str, scheme: str, site: Path, browser: chromium.Chromium, tmp_path: Path) -> None:
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    loaded(browser, site / f"{name}.html")
    for width, size in WIDTHS.items():
        picture = tmp_path / f"{name.replace('/', '_')}-{width}-{scheme}.png"
        browser.screenshot(picture, *size)
        assert picture.stat().st_size > 10_000
        if folder := os.environ.get("SITE_PICTURES"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(picture, folder)
        assert browser.run(CONTRAST) == {}
    assert not browser.errors


CUT = """(() => {
    const wide = [...document.querySelectorAll("html, .content")].filter((e) => e.scrollWidth > innerWidth);
    const parts = [...document.querySelectorAll("article pre, article table, article .table-wrapper")];
    const scrolls = (e) => innerWidth < 500 && e.tagName === "PRE" && getComputedStyle(e).overflowX === "auto";
    const cut = parts.filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth + 1 && !scrolls(e));
    return [...wide, ...cut].map((e) => `${e.tagName} ${e.className}: ${e.innerText.slice(0, 60)}`);
})()"""
"""What is wider than the window, or code and tables of which a part is hidden; on a phone, code scrolls."""


@needs_chromium
def test_nothing_is_cut_on_a_desk_or_on_a_phone(pages: dict[Path, Page], browser: chromium.Chromium) -> None:
    code = [path for path in pages if "_modules" in path.parts]  # all are alike
    for path in [path for path in pages if path not in code] + code[-1:]:
        loaded(browser, path)
        for size in WIDTHS.values():
            browser.resize(*size)
            assert browser.run(CUT) == [], f"{path.name} at {size[0]} pixels"


NAMELESS = """(() => {
    const shown = (e) => e.checkVisibility() && e.innerText.trim();
    const rows = [...document.querySelectorAll("table.docutils tbody tr")].filter((row) => row.checkVisibility());
    return rows.filter((row) => !shown(row.cells[0])).map((row) => row.innerText);
})()"""
"""The rows of a page's tables that do not say what they are about."""

BROKEN = """(() => {
    const broken = [], range = document.createRange();
    for (const label of document.querySelectorAll("table.numbers td .label")) {
        const text = label.firstChild;
        for (const word of text?.data?.matchAll(/\\w+/g) ?? []) {
            range.setStart(text, word.index); range.setEnd(text, word.index + word[0].length);
            if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1) broken.push(text.data);
        }
    }
    return broken;
})()"""
"""The labels of numbers in which a word goes on below."""

DRAWN = """[...document.querySelectorAll('article img[src$=".svg"]')].filter((e) => e.checkVisibility())
    .map((e) => [decodeURI(new URL(e.src).pathname), e.clientWidth])"""


def height_of_text(path: Path, width: int) -> float:
    """Return the pixels of the smallest text of a picture that is shown in a width."""
    text = path.read_text()
    box, *_ = re.findall(r'viewBox="0 0 ([\d.]+)', text)
    return min(map(int, re.findall(r"font(?:-size)?(?::|=\")\s*(\d+)", text))) * width / float(box)


@needs_chromium
def test_a_phone_shows_figures_that_can_be_read_and_a_name_on_each_card(site: Path, browser: chromium.Chromium) -> None:
    browser.resize(*WIDTHS["phone"])
    for name in ("index", "benchmarks"):
        loaded(browser, site / f"{name}.html")
        drawn = browser.run(DRAWN)
        assert len(drawn) >= 2
        assert all(height_of_text(Path(path), width) > 7.5 for path, width in drawn), drawn
    for name in ("benchmarks", "compiled", "variants"):
        loaded(browser, site / f"{name}.html")
        browser.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        assert browser.run(NAMELESS) == [], name
        assert browser.run(BROKEN) == [], name
    assert browser.run("getComputedStyle(document.querySelector('article pre')).whiteSpace") == "pre"
    edges = "(e => [e.left, e.right])(document.querySelector('{}').getBoundingClientRect())"
    assert browser.run(edges.format("table.docutils")) == browser.run(edges.format("article section > p"))


COPIED = """(() => {
    let copied = "";
    document.execCommand = () => { copied = document.querySelector("body > textarea").value; return true; };
    document.querySelector("article pre ~ .copybtn").click();
    return copied;
})()"""
"""What the first button of a page copies."""


@needs_chromium
def test_code_is_copied_without_prompts(site: Path, browser: chromium.Chromium) -> None:
    loaded(browser, site / "jax.html")
    assert browser.run(COPIED) == 'pip install ".[flax]"\npip install ".[equinox]"'
    loaded(browser, site / "reference" / "relskew_core.skew.html")
    assert browser.run(COPIED).startswith("import numpy as np\n")
    assert ">>>" not in browser.run(COPIED)


QUESTIONS = (
    "why is my mask inverted", "how accurate is it", "multi-GPU", "out of memory", "first call slow", "RoPE", "cite",
    "xformers", "NATTEN", "FlexAttention", "gradient checkpointing", "Swin window resize", "accelerate", "torch.fx",
    "forked workers", "T5 in C++", "export T5", "streaming conformer", "learning rate", "which GPU",
)  # fmt: skip
"""What people search for, which the FAQ answers first."""


@needs_chromium
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_answers(question: str, site: Path, browser: chromium.Chromium) -> None:
    browser.open(f"{(site / 'search.html').as_uri()}?q={quote(question)}")
    deadline = time.monotonic() + 60
    found: list[str] = []
    while not found and time.monotonic() < deadline:
        time.sleep(0.05)
        found = browser.run("[...document.querySelectorAll('#search-results ul.search > li > a')].map((e) => e.href)")
    assert found
    assert Path(urlsplit(found[0]).path).stem == "faq", found[:5]


@needs_chromium
def test_figures_follow_the_theme(site: Path, browser: chromium.Chromium) -> None:
    visible = "[...document.querySelectorAll('article img')].filter((e) => e.checkVisibility()).map((e) => e.src)"
    for scheme in ("light", "dark"):
        browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        loaded(browser, site / "benchmarks.html")
        shown = browser.run(visible)
        assert len(shown) == 5
        assert all(source.endswith("-dark.svg") == (scheme == "dark") for source in shown)


@needs_chromium
def test_a_page_without_scripts_shows_the_same(site: Path, browser: chromium.Chromium) -> None:
    page = site / "chooser.html"
    loaded(browser, page)
    text = "document.querySelector('article').innerText"
    with_scripts = browser.run(text)
    browser.ask("Emulation.setScriptExecutionDisabled", value=True)
    try:
        loaded(browser, page)
        assert browser.run(text) == with_scripts
    finally:
        browser.ask("Emulation.setScriptExecutionDisabled", value=False)
