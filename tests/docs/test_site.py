"""The documentation as a site: complete, and without requests to other hosts."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scripts.site.diagrams import draw, edges_in
from scripts.site.hooks import MODULES, public_names
from tests.docs.test_snippets import ROOT

CONFIG = (ROOT / "mkdocs.yml").read_text()
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a warning, such as a dead link or a page that is in no menu, is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


class Loaded(HTMLParser):
    """Collects what a page makes the browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        if tag == "link" and facts.get("rel") not in ("stylesheet", "icon", "preload"):
            return
        url = facts.get(LOADED.get(tag, ""))
        if url is not None:
            self.urls.append(url)


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    external = {}
    for page in site.rglob("*.html"):
        parser = Loaded()
        parser.feed(page.read_text())
        if external_urls := [url for url in parser.urls if re.match(r"(https?:)?//", url)]:
            external[page.name] = external_urls
    assert external == {}


def test_no_style_loads_anything_from_elsewhere(site: Path) -> None:
    external = re.compile(r"url\(['\"]?(https?:)?//")
    assert [page.name for page in site.rglob("*.css") if external.search(page.read_text())] == []


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_an_entry(site: Path, module: str) -> None:
    page = (site / "reference" / "api" / f"{module}.html").read_text()
    missing = [name for name in public_names(module) if f'id="{module}.{name}"' not in page]
    assert missing == []


def test_the_search_finds_guides_and_names(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    assert "guides/queues.html" in index
    assert "reference/api/perdure.html#perdure.Runtime" in index


def test_the_index_of_guides_has_the_sections_and_pages_of_the_navigation() -> None:
    [nav] = re.findall(r"- guides/index\.md\n(.*?)^  - Concepts:", CONFIG, re.DOTALL | re.MULTILINE)
    index = (ROOT / "docs" / "guides" / "index.md").read_text()
    listed = re.findall(r"^## (.+)$|^\| \[.+?\]\((\S+?)\)", index, re.MULTILINE)
    assert listed == re.findall(r"- (.+):$|- guides/(\S+)$", nav, re.MULTILINE)


def test_a_diagram_has_a_box_for_each_name_and_a_line_for_each_arrow() -> None:
    edges = edges_in('a["top"] --> b["left"]\na --> c["right"]\nb --> d["end"]\n')
    assert edges == [("top", "left"), ("top", "right"), ("left", "end")]
    drawn = draw(edges)
    assert (drawn.count("<rect"), drawn.count("marker-end")) == (4, 3)
