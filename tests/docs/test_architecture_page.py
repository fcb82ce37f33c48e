"""docs/concepts/architecture.md shows the packages that exist, and how they import each other."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_architecture import LEVEL, MODULES, ROWS, SOURCE, imports_of, unit_of

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "architecture.md"
TEXT = PAGE.read_text()
(PICTURE,) = re.findall(r"```mermaid\n(.*?)```", TEXT, re.DOTALL)
LABELS = dict(re.findall(r'(\w+)\["([\w.]+)"\]', PICTURE))
ARROWS = [
    (LABELS[source], LABELS[target])
    for source, target in re.findall(
        r"^\s*(\w+)(?:\[[^]]*\])? --> (\w+)", PICTURE, flags=re.MULTILINE
    )
]
FILES = sorted(set(re.findall(r"`((?:\w+/)*\w+\.py)`", TEXT)))


@cache
def imports() -> set[tuple[str, str]]:
    """Return the units that import each other. Not computed while tests are collected."""
    return {
        (unit_of(module.name), unit_of(each.target))
        for module in MODULES
        for each in imports_of(module)
        if each.ours
    }


def test_the_table_has_the_rows_of_the_import_check() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", TEXT, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(ROWS) + 1))
    assert [tuple(re.findall(r"`([\w.]+)`", units)) for _, units in rows] == list(ROWS)


def test_the_picture_shows_every_unit_once() -> None:
    assert sorted(LABELS.values()) == sorted(LEVEL)


@pytest.mark.parametrize(("source", "target"), ARROWS)
def test_every_arrow_is_an_import(source: str, target: str) -> None:
    assert (source, target) in imports()


def test_every_unit_is_connected() -> None:
    assert {unit for arrow in ARROWS for unit in arrow} == set(LEVEL)


@pytest.mark.parametrize("file", FILES)
def test_every_named_module_exists(file: str) -> None:
    """A file is named by its path below `src/perdure`, or below the repository."""
    assert (SOURCE / file).exists() or (SOURCE.parents[1] / file).exists()
