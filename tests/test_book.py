"""The rendered book: built with warnings as errors, read as files, and in a browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import selenium_axe_python
import yaml
from bs4 import BeautifulSoup, Tag
from conftest import LOCAL, ROOT, requests

from minizero.lab.explorables.timeline import RECORDED, all_steps

pytestmark = pytest.mark.thorough

TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
PAGES = [TOC["root"], *(c["file"] for part in TOC["parts"] for c in part["chapters"])]

SOURCES = [
    f"source/{path.relative_to(ROOT).as_posix()}"
    for kind in ("py", "js", "cpp")
    for path in (ROOT / "minizero").rglob(f"*.{kind}")
    if path.name != "_modidx.py"
]
OTHERS = ["source/minizero/zero/stage1.py", max(SOURCES, key=len), "search"]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What `make book` makes, but elsewhere: the pages' folder, and what went wrong."""
    out = tmp_path_factory.mktemp("book")
    done = subprocess.run(
        [
            Path(sys.executable).with_name("jupyter-book"),
            *("build", "--quiet", "--all", "--warningiserror", "--keep-going"),
            *("--path-output", out, ROOT),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return out / "_build" / "html", done.stdout if done.returncode else ""


@pytest.fixture(scope="session")
def book(build: tuple[Path, str]) -> Path:
    """The folder with the pages."""
    if build[1]:
        pytest.fail("the book was not built: see test_no_warning", pytrace=False)
    return build[0]


@pytest.fixture(scope="session")
def soup(book: Path) -> Callable[[Path], BeautifulSoup]:
    """Parses a page, each once, without the colours of its code."""

    @cache
    def parse(path: Path) -> BeautifulSoup:
        text = re.sub(r'<span class="\w+">([^<]*)</span>', r"\1", path.read_text())
        return BeautifulSoup(text, "html.parser")

    return parse


def test_no_warning(build: tuple[Path, str]) -> None:
    assert not build[1]


def written(book: Path) -> list[Path]:
    """Every page of the book, the search and the index among them."""
    pages = [p for p in book.rglob("*.html") if "_static" not in p.parts]
    assert len(pages) >= len(PAGES)
    return pages


def attribute(tag: Tag, name: str) -> str:
    return str(tag.get(name) or "")


def test_pages_are_those_of_the_toc(book: Path) -> None:
    own = {"index", "search", "genindex"}
    names = {p.relative_to(book).with_suffix("").as_posix() for p in written(book)}
    code = {name for name in names if name.startswith("source/")}
    assert names - own - code == set(PAGES)
    assert code == set(SOURCES)


def test_no_dead_link(book: Path, soup: Callable[[Path], BeautifulSoup]) -> None:
    dead = []
    ids = cache(lambda path: {tag["id"] for tag in soup(path).find_all(id=True)})
    for page in written(book):
        for link in soup(page).find_all("a", href=True):
            url = urlsplit(attribute(link, "href"))
            if url.scheme or url.netloc:
                assert url.scheme in ("http", "https", "mailto"), url
                continue
            target = page.parent.joinpath(unquote(url.path)).resolve()
            target = target if url.path else page
            anchor = unquote(url.fragment) if target.suffix == ".html" else ""
            if not target.is_file() or (anchor and anchor not in ids(target)):
                dead.append(f"{page.relative_to(book)}: {url.geturl()}")
    assert not dead


def test_sections_that_are_named_exist() -> None:
    """A page that sends a reader to a section of a chapter names it as it is."""
    pages = sorted((ROOT / "book").glob("*.md"))
    text = " ".join(" ".join(page.read_text() for page in pages).split())
    link = r"notebooks/(\w+\.ipynb)\)((?:, \*[^*]+\*(?: and \*[^*]+\*)?))"
    found = re.findall(link, text)
    assert found
    for name, sections in found:
        chapter = json.loads((ROOT / "notebooks" / name).read_text())
        prose = "\n".join(
            "".join(cell["source"])
            for cell in chapter["cells"]
            if cell["cell_type"] == "markdown"
        )
        for section in re.findall(r"\*([^*]+)\*", sections):
            assert re.search(rf"^#+ {re.escape(section)}$", prose, re.M), section


REMOTE = {
    "style": re.compile(r"""(@import|url\()\s*["']?(https?:)?//"""),
    "script": re.compile(r"""(\bfrom|import|import\(|fetch\()\s*["'](https?:)?//"""),
}
LOADED = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "manifest"}


def test_nothing_is_requested_from_elsewhere(
    book: Path, soup: Callable[[Path], BeautifulSoup]
) -> None:
    """Each thing that a page loads is a file of the book."""
    found = []
    for page in written(book):
        for tag in soup(page).find_all(True):
            wanted = [attribute(tag, name) for name in ("src", "data", "poster")]
            if tag.name == "link" and LOADED & set(tag.get("rel") or ()):
                wanted.append(attribute(tag, "href"))
            for source in wanted:
                url = urlsplit(source)
                file = page.parent / unquote(url.path)
                if url.scheme == "data" or not source:
                    continue
                if url.scheme or url.netloc or not file.is_file():
                    found.append(f"{page.relative_to(book)}: {tag.name} {source}")
            if tag.name in REMOTE and REMOTE[tag.name].search(tag.text):
                found.append(f"{page.relative_to(book)}: {tag.name}")
    for style in book.rglob("*.css"):
        matches = REMOTE["style"].finditer(style.read_text())
        found += [f"{style}: {m[0]}" for m in matches]
    assert not found


def test_each_file_is_listed_with_its_page(
    book: Path, soup: Callable[[Path], BeautifulSoup]
) -> None:
    """On the page of the source, but for the rooms' own docstrings and figures."""
    listed = soup(book / "book/source.html").select("article a[href*='source/']")
    found = {attribute(link, "href")[3:].removesuffix(".html") for link in listed}
    wanted = {
        name
        for name in SOURCES
        if name.count("/") > 2 and not name.endswith(("__init__.py", ".js"))
    }
    assert found == wanted


def test_lines_of_the_timeline_have_a_place(
    book: Path, soup: Callable[[Path], BeautifulSoup]
) -> None:
    """Where the figure sends a reader who wants to see the code."""
    both = all_steps(), json.loads(RECORDED.read_text())
    sources = [line for each in both for line in each["tables"]["sources"]]
    assert len(sources) > 20
    for path, name, line in sources:
        page = soup(book / f"source/{path}.html")
        assert page.find(id=name)
        assert line in page.get_text()


def test_predictions_return_to_sections_that_exist(
    book: Path, soup: Callable[[Path], BeautifulSoup]
) -> None:
    for path in sorted((book / "notebooks").glob("*.html")):
        for box in soup(path).find_all("explorable-predict"):
            for question in json.loads(attribute(box, "data-state"))["questions"]:
                place = soup(path).find("section", id=question["at"])
                assert place, (path.stem, question["at"])


def test_tables_are_drawn_and_images_have_alt_text(
    book: Path, soup: Callable[[Path], BeautifulSoup]
) -> None:
    for page in written(book):
        texts = [p.text for p in soup(page).find_all("p")]
        assert not [text for text in texts if re.search(r"\| :?[-–]+:? \|", text)]
        for image in soup(page).select("article img"):
            alt = attribute(image, "alt")
            assert len(alt.split()) >= 3, (page.name, attribute(image, "src"))


def test_no_path_of_this_machine(book: Path) -> None:
    for page in written(book):
        text = page.read_text()
        assert str(ROOT) + "/" not in text, page
        assert str(Path.home()) + "/" not in text, page


def open_page(browser: Any, path: Path) -> None:
    """Open a page and wait until its formulas are set."""
    browser.get("about:blank")
    browser.get_log("browser")
    requests(browser)
    browser.get(path.as_uri())
    browser.execute_async_script(
        """
        const done = arguments[0];
        const look = () => window.MathJax && !MathJax.startup
            ? setTimeout(look, 50)
            : window.MathJax ? MathJax.startup.promise.then(done) : done();
        look();
        """
    )


def complaints(browser: Any) -> list[str]:
    """Errors in the console."""
    log = browser.get_log("browser")
    return [entry["message"] for entry in log if entry["level"] == "SEVERE"]


MISSING = """
    const all = query => [...document.querySelectorAll(query)];
    return [
        all(".math").filter(e => !e.querySelector("mjx-container")).map(e => e.id),
        all("article img").filter(e => !e.naturalWidth).map(e => e.src),
        all("*").filter(e => e.localName.startsWith("explorable-") && !e.shadowRoot)
            .map(e => e.localName),
    ];
"""
"""What of a page is not drawn: formulas, pictures, explorables."""
AXE = Path(selenium_axe_python.__file__).parent / "axe-core" / "axe.min.js"
STILL = """
const style = document.createElement("style");
style.textContent = `* { transition: none !important }
  .headerlink { visibility: visible !important }
  #pst-back-to-top { display: block !important }`;
document.head.append(style);
"""
"""A colour on its way from one scheme's to the other's is neither. What shows under a
pointer, or to a reader who scrolls up, is shown."""
FEWER = """
const known = new Set();
const thin = (element, path) => {
  path += `>${element.localName}.${element.className}.${element.getAttribute("style")}`;
  const again = known.has(path);
  known.add(path);
  const inside = [...element.children].map((child) => thin(child, path));
  if (again && inside.every(Boolean)) { element.remove(); return true; }
};
document.querySelectorAll(arguments[0]).forEach((element) => thin(element, ""));
"""
"""Removes what looks as something before it does: elements that have, like all in
them, the tags, classes and styles of another, from the selected ones down."""


def barriers(browser: Any, rules: list[str]) -> list[Any]:
    """What axe-core finds serious: each rule, with the first elements that break it;
    contrast, which takes longest, only if it alone is asked for."""
    return browser.execute_async_script(
        """
        const [values, done] = arguments;
        const rules = { "color-contrast": { enabled: values.length == 1 } };
        axe.run({ resultTypes: ["violations"], runOnly: values, rules }).then(
            ({ violations }) => done(violations
                .filter(({ impact }) => ["serious", "critical"].includes(impact))
                .map(({ id, nodes }) => [id, nodes.slice(0, 3).map((n) => n.html)])),
            (error) => done([String(error)]));
        """,
        rules,
    )


@pytest.mark.parametrize("page", [*PAGES, *OTHERS])
def test_page_in_a_browser(book: Path, browser: Any, page: str) -> None:
    """From a folder, with the network off, on a desk and on a phone, light and dark.

    No error, formulas set, pictures shown, no wider than the window; and nothing that
    axe-core finds a serious barrier to a reader.
    """
    size = {"width": 360, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        open_page(browser, book / f"{page}.html")
        assert not complaints(browser)
        assert not [url for url in requests(browser) if not LOCAL.match(url)]
        assert browser.execute_script(MISSING) == [[], [], []]
        wide = "return document.documentElement.scrollWidth"
        assert browser.execute_script(wide) <= 360
        cut = "return [...document.querySelectorAll('picture img')].filter("
        cut += "e => e.getBoundingClientRect().right > 360).map(e => e.alt)"
        assert not browser.execute_script(cut)
        size["width"] = 1280
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        assert browser.execute_script(wide) <= 1280
        browser.execute_script(AXE.read_text() + STILL)
        levels = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
        browser.execute_script(FEWER, ".highlight, mjx-container")
        assert barriers(browser, levels) == []
        browser.execute_script(FEWER, "body")
        for theme in ("light", "dark"):
            browser.execute_script(f"document.body.parentNode.dataset.theme='{theme}'")
            assert barriers(browser, ["color-contrast"]) == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


SHOWN = """
    const code = [...document.querySelectorAll("div.cell .cell_input")];
    const seen = code.filter(each => each.checkVisibility());
    const folded = seen.filter(each => each.closest("details"));
    return [folded.length, seen.length - folded.length];
"""
"""How many cells of a page show their code: of those that are folded, of the others."""


def test_code_folds_and_hides(book: Path, browser: Any) -> None:
    """Long code is a line that opens at a click, which needs no script; a switch hides
    all code, on other pages too; paper has everything."""

    def click(path: str) -> None:
        found = browser.find_element("xpath", path)
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
        found.click()

    open_page(browser, book / "notebooks/05_zero1.html")
    folded, others = browser.execute_script(SHOWN)
    assert folded == 0 and others > 10
    click("//details/summary[contains(., 'state is sharded')]")
    assert browser.execute_script(SHOWN) == [1, others]
    click("//button[contains(@class, 'btn-code-button')]")
    assert browser.execute_script(SHOWN) == [0, 0]
    paper = "Emulation.setEmulatedMedia"
    browser.execute_cdp_cmd(paper, {"media": "print"})
    folded, printed = browser.execute_script(SHOWN)
    browser.execute_cdp_cmd(paper, {"media": ""})
    assert folded >= 5 and printed == others
    open_page(browser, book / "notebooks/06_zero2.html")
    assert browser.execute_script(SHOWN) == [0, 0]
    click("//button[contains(@class, 'btn-code-button')]")
    folded, others = browser.execute_script(SHOWN)
    assert folded == 0 and others > 10
    assert not complaints(browser)
