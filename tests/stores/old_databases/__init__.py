"""Databases as perdure made them before the store contract got queues, tags and versions.

`recorded/` has, for each store, the tables, documents, keys or files that the code of commit
b79ca5c wrote for one run of every shape (`recorded/expected.json` has the runs as that code read
them). It is never changed: what a later version makes of it is what happens to a user's database.

Leases and sleeps that have not ended last for a hundred years, so that no time needs to be adapted.
SQL databases and MongoDB are filled with as many copies of the runs in `COPIED` as a test wants;
for the other stores, `COPIES` of each were recorded.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from sqlite3 import complete_statement
from typing import Any

RECORDED = Path(__file__).parent / "recorded"

OWNER = "shop-1:6f1c0de2-8a4b-4d53-9a52-0b6f6f3f2a11:4026531836:4242:1187231:9f86d081884c7d65"
"""The owner of the runs that are owned."""

COPIED = (
    "suspended",
    "waiting",
    "due",
    "queued",
    "owned",
    "orphaned",
    "completed",
    "failed",
    "cancelled",
)
"""The runs of which copies exist: their ids are `due`, `due 1`, `due 2` …."""

COPIES = 6
"""How many copies were recorded of each on stores that cannot be filled by a query."""

Run = dict[str, Any]
Value = str | int | None
Row = dict[str, Value | dict[str, str]]


def recorded(name: str) -> Any:
    """Return what was recorded of a kind of store."""
    return json.loads((RECORDED / f"{name}.json").read_text("utf-8"))


def recorded_schema(name: str) -> str:
    """Return the statements that created a database."""
    return (RECORDED / f"{name}.sql").read_text("utf-8")


@cache
def expected_runs(*, awaitly: bool) -> dict[str, Run]:
    """Return the runs without their copies, by id, with or without the one that awaitly wrote."""
    runs: dict[str, Run] = recorded("expected")["runs"]
    return {id: run for id, run in runs.items() if awaitly or id != "awaitly"}


def deleted_epoch(kind: str) -> int:
    """Return the last epoch of the run `deleted`."""
    return int(recorded("expected")["deleted"][kind])


def copy_ids(shapes: Sequence[str], copies: int) -> Iterator[tuple[str, str]]:
    """Yield the id of each copy, and the id of the run that it is a copy of."""
    for shape in shapes:
        for number in range(1, copies + 1):
            yield f"{shape} {number}", shape


def split_statements(script: str) -> Iterator[str]:
    """Yield the statements of a script, without their semicolons."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if complete_statement(statement):
            yield statement.strip().removesuffix(";")
            statement = ""
