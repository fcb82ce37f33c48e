"""Links lead to files and headings that exist, and every page is linked."""

import re
from pathlib import Path

import pytest

from tests.docs.test_snippets import FENCE, PAGES, ROOT, name_of

LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
DOCS = [page for page in PAGES if ROOT / "docs" in page.parents]
every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def prose_of(page: Path) -> str:
    """Return the page without its code blocks."""
    return FENCE.sub("", page.read_text())


def anchor_of(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not anchor:
        return target.exists()
    return anchor in map(anchor_of, HEADING.findall(prose_of(target)))


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    links = LINK.findall(prose_of(page))
    assert [link for link in links if not leads_somewhere(page, link)] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_every_row_of_a_table_is_one_line(page: Path) -> None:
    rows = re.findall(r"^ *\|.*$", prose_of(page), re.MULTILINE)
    assert [row for row in rows if not row.endswith("|")] == []


def test_every_page_can_be_reached_from_the_index() -> None:
    reached, queue = set[Path](), [ROOT / "docs" / "index.md"]
    while queue:
        page = queue.pop()
        reached.add(page)
        links = [link.partition("#")[0] for link in LINK.findall(prose_of(page))]
        linked = {(page.parent / link).resolve() for link in links if link}
        queue += [page for page in DOCS if page in linked - reached]
    assert [name_of(page) for page in DOCS if page not in reached] == []
