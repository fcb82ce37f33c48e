"""The table of stores in docs/stores/index.md, made from what each store declares.

`python -m tests.docs.store_table` writes it anew.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from perdure.clock import Duration
from perdure.keyvalue import MemoryKeyValue
from perdure.store import Capabilities
from perdure.stores import (
    FileStore,
    MemoryStore,
    SqlStore,
    keyvalue,
    libsql,
    mongo,
    mysql,
    postgres,
    redis,
    sqlite,
)
from perdure.stores.sqlite import SqliteKeyValue

PAGE = Path(__file__).parents[2] / "docs" / "stores" / "index.md"
BEGIN = "<!-- The table is made by tests/docs/store_table.py. -->\n"
END = "<!-- The table ends. -->\n"


class Line(NamedTuple):
    """One store as it is opened by default, and what a power cut does to its answers."""

    name: str
    page: str
    capabilities: Capabilities
    power_cut: str


class NoClient:
    """A client for `SqlStore` that is never asked."""

    async def query(self, sql: str, params: Any) -> Any:
        raise AssertionError("only the declaration is read")


class FiveMethods:
    """A key-value store that is never asked, and that does not compare and set."""

    async def get(self, key: str, /) -> str | None: ...

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None: ...

    async def delete(self, key: str, /) -> bool:
        return False

    async def exists(self, key: str, /) -> bool:
        return False

    async def keys(self, pattern: str = "*", /) -> list[str]:
        return []


def lines(folder: Path) -> Iterator[Line]:
    """Give every store in the box; none of them is connected."""
    yield Line(
        "`MemoryStore()`",
        "memory.md",
        MemoryStore().capabilities,
        "all is gone, as with the end of the process",
    )
    yield Line(
        "`FileStore(directory)`",
        "file.md",
        FileStore(folder).capabilities,
        "nothing is lost: files are flushed before an answer",
    )
    yield Line(
        "`sqlite(path)`, `libsql(file)`",
        "sqlite.md",
        sqlite(folder / "runs.db").capabilities,
        "nothing is lost: the log is flushed at each commit",
    )
    yield Line(
        "`libsql(server)`",
        "libsql.md",
        libsql("http://localhost:8080").capabilities,
        "the last moments may be lost: sqld answers before its disk does",
    )
    yield Line(
        "`postgres(url)`",
        "postgres.md",
        postgres("postgresql://localhost/shop").capabilities,
        "nothing is lost, unless the server has `fsync` or `synchronous_commit` off: then the "
        "store warns",
    )
    yield Line(
        "`postgres(url)` behind a pooler",
        "postgres.md",
        postgres("postgresql://localhost/shop", prepared_statements=False).capabilities,
        "the same",
    )
    yield Line(
        "`mysql(url)`",
        "mysql.md",
        mysql("mysql://root@localhost/shop").capabilities,
        "nothing is lost, unless `innodb_flush_log_at_trx_commit` or `sync_binlog` is not 1: then "
        "the store warns",
    )
    yield Line(
        "`mongo(url)`, replica set",
        "mongo.md",
        mongo("mongodb://localhost/shop", replica_set=True).capabilities,
        "nothing is lost: a majority has the write in its journal before an answer",
    )
    yield Line(
        "`mongo(url)`, alone",
        "mongo.md",
        mongo("mongodb://localhost/shop").capabilities,
        "nothing is lost: the write is in the journal before an answer",
    )
    yield Line(
        "`redis(url)`",
        "redis.md",
        redis("redis://localhost/0").capabilities,
        "nothing is lost: a server without `appendfsync always` is refused",
    )
    yield Line(
        "`SqlStore(client)`, a server",
        "sql.md",
        SqlStore(NoClient(), dialect="postgres").capabilities,
        "what the server's settings say",
    )
    yield Line(
        "`SqlStore(client)`, SQLite",
        "sql.md",
        SqlStore(NoClient(), dialect="sqlite").capabilities,
        "what the client's settings say",
    )
    yield Line(
        "`keyvalue(kv)` that compares and sets",
        "keyvalue.md",
        keyvalue(SqliteKeyValue(folder / "texts.db")).capabilities,
        "what the key-value store says; tell it by `survives=`",
    )
    yield Line(
        "`keyvalue(kv)` that does not",
        "keyvalue.md",
        keyvalue(FiveMethods()).capabilities,
        "the same",
    )
    yield Line(
        "`keyvalue(kv)` in memory",
        "keyvalue.md",
        keyvalue(MemoryKeyValue()).capabilities,
        "all is gone",
    )


def table() -> str:
    """Give the table: a line for each store, a column for each capability."""
    columns = [field.name for field in msgspec.structs.fields(Capabilities)]
    head = ["store", *columns, "after a power cut"]
    rows = [" | ".join(head), " | ".join("---" for _ in head)]
    with tempfile.TemporaryDirectory() as folder:
        for line in lines(Path(folder)):
            cells = [shown(getattr(line.capabilities, column)) for column in columns]
            rows.append(" | ".join([f"[{line.name}]({line.page})", *cells, line.power_cut]))
    return "\n".join(f"| {row} |" for row in rows) + "\n"


def shown(value: bool | int | str) -> str:
    match value:
        case bool():
            return "yes" if value else "–"
        case int():
            return f"{value / 1024**2:g} MiB"
        case _:
            return value.replace("_", " ")


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
