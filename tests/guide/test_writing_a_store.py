"""The store of docs/guides/writing-a-store.md, held against the conformance kit."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure.testing import StoreConformance

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "writing-a-store.md"
CODE = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]


def one_table() -> Any:
    namespace: dict[str, Any] = {}
    exec(compile(CODE, str(PAGE), "exec"), namespace)
    return namespace["OneTable"]


class TestOneTable(StoreConformance):
    """Every check of the five methods holds; those of further abilities do not apply."""

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Any]:
        store = one_table()(str(tmp_path / "runs.db"))
        yield store
        await store.close()


def test_it_is_written_in_an_hour() -> None:
    """Less than sixty lines, imports and all."""
    assert len([line for line in CODE.splitlines() if line.strip()]) < 60
