"""The store of docs/guides/writing-a-store.md passes the conformance kit."""

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
    """All checks of the five methods pass; those of other capabilities are skipped."""

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Any]:
        store = one_table()(str(tmp_path / "runs.db"))
        yield store
        await store.close()


def test_it_is_short() -> None:
    """It has less than sixty lines, including imports."""
    assert len([line for line in CODE.splitlines() if line.strip()]) < 60
