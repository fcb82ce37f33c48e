"""The pages about errors and events have a row for each class, and no other."""

import inspect
import re
from pathlib import Path
from typing import TypeVar

import pytest

from perdure import errors, events
from tests.docs.test_snippets import ROOT

T = TypeVar("T")
ROW = re.compile(r"^\| `(\w+)` \|(.*)$", re.MULTILINE)
REFERENCE = ROOT / "docs" / "reference"


def rows_of(page: Path) -> list[tuple[str, str]]:
    return ROW.findall(page.read_text())


def classes_in(module: object, base: type[T]) -> list[type[T]]:
    members = vars(module).values()
    return [each for each in members if inspect.isclass(each) and issubclass(each, base)]


def test_every_error_has_one_row() -> None:
    listed = [name for name, _ in rows_of(REFERENCE / "errors.md")]
    defined = [
        each.__name__
        for each in classes_in(errors, BaseException)
        if each.__module__ == errors.__name__
    ]
    assert sorted(listed) == sorted(defined)


EVENTS = {each.type: each for each in classes_in(events, events.Event) if hasattr(each, "type")}


def test_every_event_has_one_row() -> None:
    assert sorted(name for name, _ in rows_of(REFERENCE / "events.md")) == sorted(EVENTS)


@pytest.mark.parametrize(("type", "row"), rows_of(REFERENCE / "events.md"))
def test_a_row_names_the_class_and_its_own_fields(type: str, row: str) -> None:
    cls = EVENTS[type]
    base = events.StepEvent if issubclass(cls, events.StepEvent) else events.Event
    own = set(cls.__struct_fields__) - set(base.__struct_fields__)
    name, _, besides = (cell.strip() for cell in row.split("|")[:3])
    assert name == f"`{cls.__name__}`"
    assert set(re.findall(r"`(\w+)`", besides)) == own
