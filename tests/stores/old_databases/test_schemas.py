"""The tables of an old SQL database: migrated they are like new ones; newer ones are refused."""

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import psycopg
import pytest

from perdure.errors import StoreError
from tests.servers import mysql, sqld
from tests.stores.old_databases import Run
from tests.stores.old_databases.checks import of_kinds
from tests.stores.old_databases.places import SQL_KINDS, Place

POSTGRES_SCHEMA = """
    SELECT concat_ws(' ', table_name, column_name, data_type, collation_name, is_nullable,
        column_default)
    FROM information_schema.columns
    UNION ALL SELECT indexdef FROM pg_indexes
    UNION ALL SELECT pg_get_triggerdef(oid) FROM pg_trigger
"""
SQLITE_SCHEMA = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"


def query(place: Place, sql: str) -> Sequence[Sequence[Any]]:
    """Run a statement through the driver, and return its rows."""
    match place.kind:
        case "postgres" | "postgres_jsonb" | "sql_postgres":
            with psycopg.connect(place.address) as connection:
                cursor = connection.execute(sql.encode())
                return cursor.fetchall() if cursor.description else []
        case "mysql" | "sql_mysql":
            return list(mysql.query(place.address, sql))
        case "libsql":
            return sqld.query(place.address, sql)
        case _:
            with closing(sqlite3.connect(place.address, isolation_level=None)) as file:
                return file.execute(sql).fetchall()


def schema_of(place: Place, table: str) -> list[str]:
    """Return everything that describes the tables of a store, with `runs` as their name."""
    if "mysql" in place.kind:
        tables = [name for (name,) in query(place, "SHOW TABLES") if name.startswith(table)]
        texts = [query(place, f"SHOW CREATE TABLE `{name}`")[0][1] for name in tables]
    else:
        schema = POSTGRES_SCHEMA if "postgres" in place.kind else SQLITE_SCHEMA
        texts = [text for (text,) in query(place, schema) if table in text]
    texts = [re.sub(r" AUTO_INCREMENT=\d+", "", text).replace(table, "runs") for text in texts]
    return sorted(" ".join(text.split()) for text in texts)


@of_kinds(*(kind for kind in SQL_KINDS if kind != "postgres_jsonb"))
async def test_the_tables_become_like_those_of_a_new_database(
    place: Place, runs: dict[str, Run]
) -> None:
    async with place.open() as store, place.open(table="fresh") as fresh:
        await store.load("due")
        await fresh.load("due")
    assert len(schema_of(place, "fresh")) > 3
    assert schema_of(place, place.table) == schema_of(place, "fresh")


@of_kinds(*SQL_KINDS)
async def test_tables_of_a_newer_version_are_refused(place: Place, runs: dict[str, Run]) -> None:
    columns, values = "version, name", "9999, '9999_future'"
    if place.kind.startswith("sql_"):
        columns, values = "version", "9999"
    elif place.kind == "mysql":
        columns, values = f"{columns}, applied_at", f"{values}, UTC_TIMESTAMP(6)"
    query(place, f"INSERT INTO {place.table}_migrations ({columns}) VALUES ({values})")
    async with place.open() as store:
        with pytest.raises(StoreError, match=r"newer .* \(migration 9999; .* up to \d\): upgrade"):
            await store.load("due")
