"""The reference lists every public name, under its module."""

import re
from importlib import import_module
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "index.md"
MODULES = (
    "perdure",
    "perdure.caches",
    "perdure.callbacks",
    "perdure.dashboard",
    "perdure.insights",
    "perdure.integrations.fastapi",
    "perdure.integrations.logging",
    "perdure.integrations.opentelemetry",
    "perdure.integrations.starlette",
    "perdure.integrations.langgraph",
    "perdure.integrations.mcp",
    "perdure.integrations.openai_agents",
    "perdure.integrations.pydantic_ai",
    "perdure.integrations.sqlalchemy",
    "perdure.stores",
    "perdure.sync",
    "perdure.testing",
)
SECTION = re.compile(r"^## `([\w.]+)`$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
SECTIONS = dict(SECTION.findall(PAGE.read_text()))


def names_in(section: str) -> list[str]:
    """Return the names in the first column of a section's table."""
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_listed_once(module: str) -> None:
    assert sorted(names_in(SECTIONS[module])) == sorted(import_module(module).__all__)


def test_every_section_is_a_public_module() -> None:
    assert set(SECTIONS) == set(MODULES)
