"""The tables of the MySQL store: their names, the server's dialect, and the numbered migrations."""

import re
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from typing import NamedTuple

from perdure.errors import InvalidArgument, StoreError, StoreUnavailable
from perdure.stores.mysql.database import Database, Transaction
from perdure.stores.mysql.errors import NO_SUCH_TABLE, code_of
from perdure.stores.mysql.literals import Statement, Value

# MySQL takes names of up to 64 characters, and this is the longest that is made of the table's.
_LONGEST_TABLE = 64 - len("_migrations")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATIENCE_SECONDS = 60
_RESTING = ("folded", "snapshot", "status", "wake_at", "awaits", "updated_at")

_APPLIED = "SELECT version FROM {migrations}"
_KEEP_COUNT = """
    CREATE TABLE IF NOT EXISTS {migrations} (
        version INT NOT NULL PRIMARY KEY,
        name VARCHAR(100) NOT NULL,
        applied_at DATETIME(6) NOT NULL
    ) ENGINE = InnoDB
"""
_COUNT = "INSERT INTO {migrations} (version, name, applied_at) VALUES (%s, %s, UTC_TIMESTAMP(6))"
# Of many that begin at once, one makes the tables and the others wait. A transaction would not do:
# it ends with the first CREATE TABLE.
_LOCK = "SELECT GET_LOCK(%s, %s)"
_UNLOCK = "SELECT RELEASE_LOCK(%s)"


class Dialect(NamedTuple):
    """What the servers say differently.

    `given` is what an upsert calls a column of the row it was given, and `as_given` what it needs
    to say for that beforehand.
    """

    collation: str
    skip_locked: str = "SKIP LOCKED"
    given: str = "VALUES({})"
    as_given: str = ""

    @property
    def words(self) -> dict[str, str]:
        """What stands in a statement for `{collation}`, `{skip_locked}`, …."""
        rest = ", ".join(f"{column} = {self.given.format(column)}" for column in _RESTING)
        return {**self._asdict(), "rest_as_given": rest}


class Migration(NamedTuple):
    """One step of a schema: a statement that wants the names of the tables.

    There is no rolling back a statement that makes a table: after a crash it is run again, and must
    do no harm then.
    """

    version: int
    name: str
    script: str


class Names:
    """The quoted names of a table and its companions: `{runs}`, `{journal}`, ….

    `table` may name a database: `"billing.runs"`.
    """

    def __init__(self, table: object) -> None:
        self.table = check_table(table)
        database, _, name = self.table.rpartition(".")
        dot = f"`{database}`." if database else ""
        self.fields = {
            "runs": f"{dot}`{name}`",
            "journal": f"{dot}`{name}_journal`",
            "inbox": f"{dot}`{name}_inbox`",
            "migrations": f"{dot}`{name}_migrations`",
            "fence": f"`{name}_fence`",
        }

    def fill(self, sql: str, dialect: Dialect) -> bytes:
        """Give a statement with the names, and the server's own words, in it."""
        return sql.format(**self.fields, **dialect.words).encode()


class Schema:
    """The tables of one name, as the migrations make them."""

    def __init__(self, names: Names, dialect: Dialect) -> None:
        self.migrations = read_migrations()
        self._names = names
        self._dialect = dialect

    async def set_up(self, database: Database) -> None:
        """Apply the migrations that are missing, also when many try at once."""
        if await database.transact(self._missing):
            await database.transact(self._migrate)

    async def _migrate(self, transaction: Transaction) -> None:
        lock = "perdure " + blake2b(self._names.table.encode(), digest_size=16).hexdigest()
        result = await transaction.alone(self._on(_LOCK, lock, _PATIENCE_SECONDS))
        if result.rows[0][0] != 1:
            raise StoreUnavailable(
                f"another process has been making the table {self._names.table} for "
                f"{_PATIENCE_SECONDS}s; look for it among the server's processes"
            )
        try:
            missing = await self._missing(transaction)
            if missing:
                await transaction.alone(self._on(_KEEP_COUNT))
            for migration in missing:
                await transaction.alone(self._on(migration.script))
                await transaction.alone(self._on(_COUNT, migration.version, migration.name))
        finally:
            await transaction.alone(self._on(_UNLOCK, lock))

    async def _missing(self, transaction: Transaction) -> Sequence[Migration]:
        try:
            result = await transaction.alone(self._on(_APPLIED))
        except transaction.errors as error:
            if code_of(error) != NO_SUCH_TABLE:
                raise
            return self.migrations
        applied = {version for (version,) in result.rows}
        if unknown := applied - {migration.version for migration in self.migrations}:
            raise StoreError(
                f"table {self._names.table} was made by a newer perdure, as migration "
                f"{max(unknown)} shows; upgrade perdure, or choose another table"
            )
        return [migration for migration in self.migrations if migration.version not in applied]

    def _on(self, sql: str, *values: Value) -> Statement:
        return Statement(self._names.fill(sql, self._dialect), values)


def dialect_of(version: str) -> Dialect:
    """Give how a server of this version speaks, or raise when it is too old."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if "mariadb" in version.lower():
        if numbers >= (10, 6):
            return Dialect("utf8mb4_nopad_bin")
        if numbers >= (10, 3):
            return Dialect("utf8mb4_nopad_bin", skip_locked="")
    elif numbers >= (8, 0, 19):
        return Dialect("utf8mb4_0900_bin", given="given.{}", as_given="AS given")
    raise StoreError(f"{version} is too old: MySQL 8.0.19 or MariaDB 10.3 is needed, or newer")


def check_table(table: object, parameter: str = "table") -> str:
    """Give the table's name back, or raise: `table` or `database.table`."""
    expected = (
        "a name of ASCII letters, digits and _, no digit first, of at most "
        f"{_LONGEST_TABLE} characters, or two with a dot between them"
    )
    if not isinstance(table, str):
        raise InvalidArgument(parameter, table, expected)
    parts = table.split(".")
    if len(parts) > 2 or not all(map(_NAME.fullmatch, parts)) or len(parts[-1]) > _LONGEST_TABLE:
        raise InvalidArgument(parameter, table, expected)
    return table


@cache
def read_migrations() -> Sequence[Migration]:
    """Give the migrations, by number."""
    scripts = files("perdure.stores.mysql").joinpath("migrations").iterdir()
    numbered = sorted((script.name, script) for script in scripts if script.name.endswith(".sql"))
    return [
        Migration(int(name[:4]), name.removesuffix(".sql"), script.read_text().strip(" \n;"))
        for name, script in numbered
    ]
