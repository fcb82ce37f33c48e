"""The limit: what the raw driver achieves on the same server, with the same durability.

`one` is one durable write of about 250 bytes, `many` a batch of them in one commit. `shared` is the
throughput of many writers that share commits through a minimal committer.
"""

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

from bench.timing import now

Row: TypeAlias = tuple[str, int]
"""Which row: the run it belongs to and its number there. All hold the same bytes."""

ROW = b"x" * 250
IO_COUNTERS = Path("/proc/self/io")
SQL_TABLE = (
    "CREATE TABLE IF NOT EXISTS raw_rows "
    "(run VARCHAR(64), n INT, data {blob}, PRIMARY KEY (run, n))"
)


class Raw(Protocol):
    """A raw driver; `counts_writes` is whether its store reports the bytes written to disk."""

    counts_writes: bool

    async def one(self, run: str, n: int) -> None:
        """Write one row, durably."""
        ...

    async def many(self, rows: Sequence[Row]) -> None:
        """Write the rows of many runs in one commit, durably."""
        ...

    async def written(self) -> float:
        """Return the bytes written to disk so far, mainly to the log."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class Committer:
    """Rows of many writers share commits: rows that arrive during a write form the next batch."""

    def __init__(self, driver: Raw) -> None:
        self._driver = driver
        self._waiting: list[tuple[Row, asyncio.Future[None]]] = []
        self._flusher: asyncio.Task[None] | None = None

    async def write(self, run: str, n: int) -> None:
        """Return when the row is durable."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(((run, n), future))
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush())
        await future

    async def _flush(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            await self._driver.many([row for row, _ in batch])
            for _, future in batch:
                future.set_result(None)
            # Callers that were just resolved may join the next batch.
            await asyncio.sleep(0)
        self._flusher = None


async def ones(driver: Raw, run: str, count: int) -> float:
    """Return the seconds per row for rows written one after another."""
    began = now()
    for n in range(count):
        await driver.one(run, n)
    return (now() - began) / count


async def shared(driver: Raw, name: str, writers: int, rows: int = 10) -> float:
    """Return rows per second for writers that share commits, each writing one row after another."""
    committer = Committer(driver)

    async def writer(run: str) -> None:
        for n in range(rows):
            await committer.write(run, n)

    began = now()
    await asyncio.gather(*(writer(f"{name}-{n}") for n in range(writers)))
    return writers * rows / (now() - began)


async def bulk(driver: Raw, name: str, batches: int = 10, size: int = 200) -> float:
    """Return rows per second for whole batches written one after another."""
    began = now()
    for batch in range(batches):
        await driver.many([(f"{name}-{batch}", n) for n in range(size)])
    return batches * size / (now() - began)


class RawSqlite:
    """The standard library's sqlite3, WAL, synchronous=FULL.

    It runs in the thread of the event loop: a separate thread was slower.
    """

    counts_writes = IO_COUNTERS.exists()

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(SQL_TABLE.format(blob="BLOB"))

    async def one(self, run: str, n: int) -> None:
        self._db.execute("INSERT INTO raw_rows VALUES (?, ?, ?)", (run, n, ROW))

    async def many(self, rows: Sequence[Row]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        values = [(run, n, ROW) for run, n in rows]
        self._db.executemany("INSERT INTO raw_rows VALUES (?, ?, ?)", values)
        self._db.execute("COMMIT")

    async def written(self) -> float:
        # SQLite writes its log and checkpoints in this process, and Linux counts those bytes.
        counters = IO_COUNTERS.read_text().splitlines()
        return float(dict(line.split(": ") for line in counters)["wchar"])

    async def close(self) -> None:
        self._db.close()


class RawPostgres:
    """asyncpg on one connection."""

    counts_writes = True

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, url: str) -> "RawPostgres":
        import asyncpg

        connection = await asyncpg.connect(url)
        await connection.execute(SQL_TABLE.format(blob="BYTEA"))
        return cls(connection)

    async def one(self, run: str, n: int) -> None:
        await self._connection.execute("INSERT INTO raw_rows VALUES ($1, $2, $3)", run, n, ROW)

    async def many(self, rows: Sequence[Row]) -> None:
        statement = "INSERT INTO raw_rows SELECT * FROM unnest($1::text[], $2::int[], $3::bytea[])"
        runs, numbers = [run for run, _ in rows], [n for _, n in rows]
        await self._connection.execute(statement, runs, numbers, [ROW] * len(rows))

    async def written(self) -> float:
        return float(await self._connection.fetchval("SELECT pg_current_wal_insert_lsn() - '0/0'"))

    async def close(self) -> None:
        await self._connection.close()


class RawMysql:
    """asyncmy on one connection with autocommit."""

    counts_writes = True

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, url: str) -> "RawMysql":
        import asyncmy

        parts = urlsplit(url)
        connection = await asyncmy.connect(
            host=parts.hostname,
            port=parts.port,
            user=parts.username,
            password=parts.password or "",
            db=parts.path.lstrip("/"),
            autocommit=True,
        )
        async with connection.cursor() as cursor:
            await cursor.execute(SQL_TABLE.format(blob="BLOB"))
        return cls(connection)

    async def one(self, run: str, n: int) -> None:
        async with self._connection.cursor() as cursor:
            await cursor.execute("INSERT INTO raw_rows VALUES (%s, %s, %s)", (run, n, ROW))

    async def many(self, rows: Sequence[Row]) -> None:
        marks = ",".join(["(%s, %s, %s)"] * len(rows))
        values = [value for run, n in rows for value in (run, n, ROW)]
        async with self._connection.cursor() as cursor:
            await cursor.execute(f"INSERT INTO raw_rows VALUES {marks}", values)

    async def written(self) -> float:
        async with self._connection.cursor() as cursor:
            await cursor.execute("SHOW GLOBAL STATUS LIKE 'Innodb_os_log_written'")
            return float((await cursor.fetchone())[1])

    async def close(self) -> None:
        await self._connection.ensure_closed()


class RawMongo:
    """PyMongo's async client with write concern majority and journaling."""

    counts_writes = True

    def __init__(self, client: Any, rows: Any) -> None:
        self._client = client
        self._rows = rows

    @classmethod
    async def open(cls, url: str) -> "RawMongo":
        from pymongo import AsyncMongoClient, WriteConcern

        client: Any = AsyncMongoClient(url)
        database = client.get_default_database()
        concern = WriteConcern(w="majority", j=True)
        rows = database.get_collection("raw_rows", write_concern=concern)
        await rows.insert_one({"_id": "warm"})
        return cls(client, rows)

    async def one(self, run: str, n: int) -> None:
        await self._rows.insert_one({"_id": f"{run}:{n}", "data": ROW})

    async def many(self, rows: Sequence[Row]) -> None:
        await self._rows.insert_many([{"_id": f"{run}:{n}", "data": ROW} for run, n in rows])

    async def written(self) -> float:
        status = await self._client.admin.command("serverStatus")
        return float(status["wiredTiger"]["log"]["log bytes written"])

    async def close(self) -> None:
        await self._client.close()


class RawRedis:
    """redis-py asyncio, against appendfsync always."""

    counts_writes = True

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    async def open(cls, url: str) -> "RawRedis":
        from redis.asyncio import Redis

        return cls(Redis.from_url(url))

    async def one(self, run: str, n: int) -> None:
        await self._client.rpush(f"raw:{run}", ROW)

    async def many(self, rows: Sequence[Row]) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            for run, _ in rows:
                pipe.rpush(f"raw:{run}", ROW)
            await pipe.execute()

    async def written(self) -> float:
        return float((await self._client.info("persistence"))["aof_current_size"])

    async def close(self) -> None:
        await self._client.aclose()


class RawLibsql:
    """Hrana over HTTP, one request per write."""

    counts_writes = False

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    async def open(cls, url: str) -> "RawLibsql":
        import httpx

        raw = cls(httpx.AsyncClient(base_url=url, timeout=60))
        await raw._send({"sql": SQL_TABLE.format(blob="BLOB")})
        return raw

    async def one(self, run: str, n: int) -> None:
        await self.many([(run, n)])

    async def many(self, rows: Sequence[Row]) -> None:
        marks = ",".join(["(?, ?, ?)"] * len(rows))
        values = [value for run, n in rows for value in (run, str(n), ROW.decode())]
        arguments = [{"type": "text", "value": value} for value in values]
        await self._send({"sql": f"INSERT INTO raw_rows VALUES {marks}", "args": arguments})

    async def _send(self, statement: dict[str, Any]) -> None:
        requests = [{"type": "execute", "stmt": statement}, {"type": "close"}]
        answer = await self._client.post("/v2/pipeline", json={"requests": requests})
        answer.raise_for_status()
        for result in answer.json()["results"]:
            if result["type"] != "ok":
                raise RuntimeError(f"sqld answered {result}")

    async def written(self) -> float:
        raise NotImplementedError("sqld does not report it")

    async def close(self) -> None:
        await self._client.aclose()
