"""Numbered migration scripts of SQL stores, and the names of their tables.

A script is `migrations/0001_name.sql` beside the store that uses it. Scripts are added at the end
and never changed. Each store applies them under a lock of its own database.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from importlib.resources import files
from textwrap import dedent
from typing import NamedTuple

from perdure.errors import InvalidArgument
from perdure.stores._layout import check_layout

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLACEHOLDER = re.compile(r"\?|\$\d|%s")


class Migration(NamedTuple):
    """One schema change: a template to be filled with the names of the tables."""

    version: int
    name: str
    script: str


@cache
def read_migrations(package: str, folder: str = "migrations") -> Sequence[Migration]:
    """Return the migrations in a folder of a package, in order."""
    scripts = sorted(
        (script.name.removesuffix(".sql"), script.read_text("utf-8"))
        for script in files(package).joinpath(folder).iterdir()
        if script.name.endswith(".sql")
    )
    return [Migration(int(name[:4]), name, script) for name, script in scripts]


def pending(
    migrations: Sequence[Migration], applied_versions: Collection[int], table: str
) -> Sequence[Migration]:
    """Return the migrations that were not applied; raise if a newer perdure applied others."""
    newest = max(migration.version for migration in migrations)
    newest_applied = max(applied_versions, default=0)
    check_layout(f"table {table}", newest_applied, newest, unit="migration", alternative="table")
    return [migration for migration in migrations if migration.version not in applied_versions]


def announce(migrations: Sequence[Migration], table: str) -> Iterator[Migration]:
    """Yield the migrations, and log each before it is applied.

    A migration that rebuilds a large table takes minutes, during which the process would otherwise
    be silent.
    """
    total = len(migrations)
    for done, migration in enumerate(migrations):
        logger.info(
            "table %s: applying migration %s (%d of %d)",
            *(table, migration.name, done + 1, total),
            extra={"done": done, "total": total},
        )
        yield migration


def whole_script(
    migrations: Sequence[Migration], create: str, record: str, fill: Callable[[str], str]
) -> str:
    """Return all migrations as one script that also records them as applied.

    `create` creates the table of applied migrations, `record` inserts a version and a name into it,
    `fill` fills in the names of the tables.
    """
    parts = [fill(create)]
    for migration in migrations:
        insert = record
        for value in (str(migration.version), f"'{migration.name}'"):
            insert = _PLACEHOLDER.sub(value, insert, count=1)
        parts += [fill(migration.script), fill(insert)]
    return "\n\n".join(dedent(part).strip(" \n;") + ";" for part in parts)


def check_table(table: object, max_length: int) -> str:
    """Return a valid table name: `table` or `schema.table`."""
    expected = (
        f"ASCII letters, digits and _, at most {max_length} characters, not starting with a digit; "
        "optionally schema.table"
    )
    parts = table.split(".") if isinstance(table, str) else []
    if not parts or len(parts) > 2 or not all(map(_NAME.fullmatch, parts)):
        raise InvalidArgument("table", table, expected)
    if len(parts[-1]) > max_length:
        raise InvalidArgument("table", table, expected)
    return str(table)
