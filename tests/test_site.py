"""The documentation site: what `make site` builds is whole, and needs no network."""

import collections
import html
import inspect
import json
import re
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import dp_sparse
from dp_sparse import auditing, distribution, layers, losses, offline
from tests.subprocesses import ROOT

build = pytest.importorskip("mkdocs.commands.build").build
load_config = pytest.importorskip("mkdocs.config").load_config
Abort = pytest.importorskip("mkdocs.exceptions").Abort
pytest.importorskip("mkdocstrings_handlers.python")

CONFIG = ROOT / "mkdocs.yml"
BESIDE = {"CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"}  # of docs/, and in the site
GROUPS = (dp_sparse, auditing, distribution, layers, losses, offline)
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"")


def built(config: Path, folder: Path) -> Path:
    """The site of a configuration; fails where a strict build would."""
    build(load_config(str(config), site_dir=str(folder), strict=True))
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(CONFIG, tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, str]:
    """The text of each page."""
    return {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}


def ids(page: str) -> set[str]:
    return set(map(html.unescape, re.findall(r'\bid="([^"]+)"', page)))


def reference(pages: dict[Path, str]) -> str:
    return "".join(text for path, text in pages.items() if path.parent.parent.name == "reference")


def public_objects() -> dict[str, object]:
    """By path; a name that several modules export stands under the shortest one."""
    found: dict[int, tuple[str, object]] = {}
    for group in GROUPS:
        short = re.sub(r"dp_sparse\.(?:sampling|layers)\.", "dp_sparse.", group.__name__)
        for name in group.__all__:
            value = getattr(group, name)
            found.setdefault(id(value), (f"{short}.{name}", value))
    return dict(found.values())


def test_every_public_name_stands_in_the_reference(pages: dict[Path, str]) -> None:
    there = collections.Counter(re.findall(r'<h2 id="(dp_sparse[^"]*)"', reference(pages)))
    assert there - collections.Counter(there.keys()) == collections.Counter()  # each once
    assert set(public_objects()) == set(there) - {"dp_sparse.optimizers.PrivateOptimizer"}


def test_guarantees_stand_in_boxes(pages: dict[Path, str]) -> None:
    text = reference(pages)
    promised = [
        name
        for name, value in public_objects().items()
        if not inspect.ismodule(value) and "### Formal Guarantees" in (inspect.getdoc(value) or "")
    ]
    boxes = re.split(r'<h2 id="(dp_sparse[^"]*)"', text)
    by_name = dict(zip(boxes[1::2], boxes[2::2], strict=True))
    assert len(promised) > 40
    assert not [name for name in promised if '<details class="formal-guar' not in by_name[name]]
    assert "### " not in text and not re.search(r"<h\d[^>]*>Formal Guarantees", text)


def test_the_index_of_the_reference_is_that_of_its_pages() -> None:
    folder = ROOT / "docs" / "reference"
    index = (folder / "README.md").read_text()
    rows = re.findall(r"^\| \[(.*?)\]\((\w+\.md)\) \| (.*) \|$", index, re.MULTILINE)
    assert {page for _, page, _ in rows} == {p.name for p in folder.glob("*.md")} - {"README.md"}
    for title, page, names in rows:
        text = (folder / page).read_text()
        found = re.findall(r"^::: dp_sparse\.(?!optimizers\.)(\S+)", text, re.MULTILINE)
        assert text.startswith(f"# {title}\n") and re.findall(r"`(.*?)`", names) == found


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r"^ +- .*?([\w/]+\.md)$", CONFIG.read_text(), re.MULTILINE)
    folder = ROOT / "docs"
    there = {str(path.relative_to(folder)) for path in folder.rglob("*.md")} | BESIDE
    there |= {f"notebooks/{path.stem}.md" for path in folder.glob("notebooks/*.ipynb")}
    assert sorted(navigation) == sorted(there)


def test_every_link_leads_somewhere(site: Path, pages: dict[Path, str]) -> None:
    known = {path: ids(text) for path, text in pages.items()}
    lost, followed = [], 0
    for path, text in pages.items():
        for link in map(html.unescape, re.findall(r'<a\b[^>]*?\bhref="([^"]*)"', text)):
            if re.match(r"[a-z]+:", link):
                continue
            where, anchor = urldefrag(unquote(link))
            target = (path.parent / where).resolve() if where else path
            target = target / "index.html" if target.is_dir() else target
            followed += 1
            if not target.is_file() or (anchor and anchor not in known[target]):
                lost.append((str(path.relative_to(site)), link))
    assert followed > 1000 and not lost


def test_notebooks_are_pages(site: Path) -> None:
    for path in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        page = (site / "notebooks" / path.stem / "index.html").read_text()
        cells = json.loads(path.read_text())["cells"]
        code = sum(cell["cell_type"] == "code" for cell in cells)
        assert code >= 3 and page.count('<div class="highlight') == code
        assert f'href="../{path.name}"' in page and (path.parent / path.name).is_file()
    assert 'href="notebooks/clicks/"' in (site / "index.html").read_text()


def test_a_reader_needs_no_network(site: Path, pages: dict[Path, str]) -> None:
    loaded = {(path, link) for path, text in pages.items() for link in LOADED.findall(text)}
    assert len(loaded) > 100 and not [link for _, link in loaded if re.match(r"(\w+:)?//", link)]
    assert not [path for path, link in loaded if not (path.parent / urldefrag(link)[0]).exists()]
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert styles and not [1 for text in styles if re.search(r"(url\(|@import\s*)['\"]?http", text)]
    assert not [path for path, text in pages.items() if 'class="mermaid"' in text]


def test_a_search_finds_names_and_headings(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    places = {entry["location"] for entry in found}
    assert {"reference/plans/#dp_sparse.PrivacyPlan", "pitfalls/#budget"} <= places
    assert list(site.glob("assets/javascripts/workers/search.*.js"))


def test_lists_are_lists_as_on_github(pages: dict[Path, str]) -> None:
    """Python-Markdown begins a list behind a blank line alone."""
    assert not [path for path, text in pages.items() if re.search(r"<p>[^<]*\n(- |\d+\. )", text)]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The configuration, for two pages and without the reference."""
    text = CONFIG.read_text()
    plugins = re.search(r"^plugins:\n.*?\n\n", text, re.MULTILINE | re.DOTALL)
    navigation = re.search(r"^nav:\n.*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert plugins and navigation
    text = text.replace(plugins[0], "plugins: [search]\n\n")
    text = text.replace(navigation[0], f"nav: {['README.md', 'page.md', *sorted(BESIDE)]}\n\n")
    text = text.replace("[docs/hooks.py]", f"[{ROOT / 'docs' / 'hooks.py'}]")
    (tmp_path / "docs").mkdir()
    for page in ("docs/README", "docs/page", "CONTRIBUTING", "CHANGELOG", "SECURITY"):
        link = "page.md#title" if page.startswith("docs/") else "docs/page.md#title"
        (tmp_path / f"{page}.md").write_text(f"# Title\n\n[page]({link})\n")
    (tmp_path / "LICENSE").write_text("")
    (tmp_path / "mkdocs.yml").write_text(text)
    return tmp_path


def test_a_whole_site_is_built(small: Path) -> None:
    (small / "docs" / "page.md").write_text("# Title\n\n[how](../CONTRIBUTING.md#title)\n")
    folder = built(small / "mkdocs.yml", small / "site")
    assert 'href="../CONTRIBUTING/#title"' in (folder / "page" / "index.html").read_text()
    assert (folder / "LICENSE").exists()


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("page", "[x](nothing.md)"),
        ("page", "[x](README.md#nothing)"),
        ("page", "[x](#nothing)"),
        ("page", "![x](nothing.png)"),
        ("page", "[x](../setup.py)"),
        ("page", "[x](/README.md)"),
        ("another", "not in the navigation"),
    ],
)
def test_a_site_with_a_fault_is_not_built(small: Path, page: str, text: str) -> None:
    (small / "docs" / f"{page}.md").write_text(f"# Title\n\n{text}\n")
    with pytest.raises(Abort, match="Aborted with 1 warnings in strict mode"):
        built(small / "mkdocs.yml", small / "site")
