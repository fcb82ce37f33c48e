"""Saved views, and what `doctor` repairs."""

import asyncio
import json
from pathlib import Path

from perdure.stores import sqlite
from tests.unit.cli.conftest import Perdure


def test_a_query_is_saved_and_used(perdure: Perdure) -> None:
    result = perdure("views", "save", "broken-orders", "status:failed workflow:order")
    assert result.stdout == "View broken-orders is saved.\n"
    assert perdure("views", "-o", "ids").stdout == "broken-orders\n"
    assert perdure("ls", "view:broken-orders", "-o", "ids").stdout == "broken\n"
    retried = perdure("retry", "--where", "view:broken-orders", "--yes")
    assert retried.stdout == "1 retried, 0 refused.\n"
    [bulk] = json.loads(perdure("bulk", "-o", "json").stdout)
    assert bulk["query"] == "status:failed workflow:order"


def test_a_view_is_deleted(perdure: Perdure) -> None:
    perdure("views", "save", "mine", "status:failed")
    perdure("views", "delete", "mine")
    assert "there is no view 'mine'" in perdure("ls", "view:mine", code=2).stderr
    perdure("views", "delete", "mine", code=5)


def test_what_is_not_a_query_is_not_saved(perdure: Perdure) -> None:
    assert "did you mean 'failed'?" in perdure("views", "save", "x", "status:fialed", code=2).stderr
    perdure("views", "save", "a b", "status:failed", code=2)
    assert perdure("views").stdout == ""


async def lose_copies(path: Path) -> list[str]:
    async with sqlite(path) as store:
        keys = await store.documents.keys("act:*")
        for key in keys:
            await store.documents.delete(key)
        return keys


def test_doctor_restores_what_a_crash_has_lost_of_the_audit_trail(
    perdure: Perdure, tmp_path: Path
) -> None:
    perdure("start", "order", "{}", "--id", "new")
    perdure("pause", "new", "--why", "outage")
    before = perdure("acts", "-o", "json").stdout
    assert len(asyncio.run(lose_copies(tmp_path / "shop.db"))) == 2
    message = perdure("doctor", code=1).stderr
    assert "2 entries of the audit trail missing after a crash. perdure doctor --fix" in message
    assert "2 entries of the audit trail restored." in perdure("doctor", "--fix").stderr
    assert perdure("acts", "-o", "json").stdout == before
    assert perdure("doctor").stderr == ""
