"""The limit: what the raw driver does on the same server, with the same durability.

`one` is one durable write of about 250 bytes, `many` a batch of them in one commit.
"""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

ROW = b"x" * 250
SQL_TABLE = (
    "CREATE TABLE IF NOT EXISTS raw_rows "
    "(run VARCHAR(64), n INT, data {blob}, PRIMARY KEY (run, n))"
)


class Raw(Protocol):
    """A raw driver."""

    async def one(self, run: str, n: int) -> None:
        """Write one row, durably."""
        ...

    async def many(self, run: str, first: int, count: int) -> None:
        """Write a batch of rows in one commit, durably."""
        ...

    async def close(self) -> None:
        """Let go of the connection."""
        ...


class RawSqlite:
    """The standard library's sqlite3, WAL, synchronous=FULL."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(SQL_TABLE.format(blob="BLOB"))

    async def one(self, run: str, n: int) -> None:
        self._db.execute("INSERT INTO raw_rows VALUES (?, ?, ?)", (run, n, ROW))

    async def many(self, run: str, first: int, count: int) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        rows = [(run, first + n, ROW) for n in range(count)]
        self._db.executemany("INSERT INTO raw_rows VALUES (?, ?, ?)", rows)
        self._db.execute("COMMIT")

    async def close(self) -> None:
        self._db.close()


class RawPostgres:
    """asyncpg on one connection."""

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

    async def many(self, run: str, first: int, count: int) -> None:
        statement = "INSERT INTO raw_rows SELECT $1, unnest($2::int[]), unnest($3::bytea[])"
        numbers = list(range(first, first + count))
        await self._connection.execute(statement, run, numbers, [ROW] * count)

    async def close(self) -> None:
        await self._connection.close()


class RawMysql:
    """asyncmy on one connection with autocommit."""

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

    async def many(self, run: str, first: int, count: int) -> None:
        marks = ",".join(["(%s, %s, %s)"] * count)
        values = [value for n in range(count) for value in (run, first + n, ROW)]
        async with self._connection.cursor() as cursor:
            await cursor.execute(f"INSERT INTO raw_rows VALUES {marks}", values)

    async def close(self) -> None:
        await self._connection.ensure_closed()


class RawMongo:
    """PyMongo's async client, write concern majority and journalled."""

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

    async def many(self, run: str, first: int, count: int) -> None:
        await self._rows.insert_many(
            [{"_id": f"{run}:{first + n}", "data": ROW} for n in range(count)]
        )

    async def close(self) -> None:
        await self._client.close()


class RawRedis:
    """redis-py asyncio, against appendfsync always."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    async def open(cls, url: str) -> "RawRedis":
        from redis.asyncio import Redis

        return cls(Redis.from_url(url))

    async def one(self, run: str, n: int) -> None:
        await self._client.rpush(f"raw:{run}", ROW)

    async def many(self, run: str, first: int, count: int) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            for _ in range(count):
                pipe.rpush(f"raw:{run}", ROW)
            await pipe.execute()

    async def close(self) -> None:
        await self._client.aclose()


class RawLibsql:
    """Hrana over HTTP, one request a write."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    async def open(cls, url: str) -> "RawLibsql":
        import httpx

        raw = cls(httpx.AsyncClient(base_url=url, timeout=60))
        await raw._send([{"sql": SQL_TABLE.format(blob="BLOB")}])
        return raw

    async def one(self, run: str, n: int) -> None:
        await self._send([self._insert(run, n)])

    async def many(self, run: str, first: int, count: int) -> None:
        statements = [self._insert(run, first + n) for n in range(count)]
        await self._send([{"sql": "BEGIN IMMEDIATE"}, *statements, {"sql": "COMMIT"}])

    def _insert(self, run: str, n: int) -> dict[str, Any]:
        values = [run, str(n), ROW.decode()]
        args = [{"type": "text", "value": value} for value in values]
        return {"sql": "INSERT INTO raw_rows VALUES (?, ?, ?)", "args": args}

    async def _send(self, statements: list[dict[str, Any]]) -> None:
        requests: list[dict[str, Any]] = [{"type": "execute", "stmt": s} for s in statements]
        answer = await self._client.post(
            "/v2/pipeline", json={"requests": [*requests, {"type": "close"}]}
        )
        answer.raise_for_status()
        for result in answer.json()["results"]:
            if result["type"] != "ok":
                raise RuntimeError(f"sqld answered {result}")

    async def close(self) -> None:
        await self._client.aclose()


class RawMemory:
    """No store at all: one turn of the event loop."""

    async def one(self, run: str, n: int) -> None:
        await asyncio.sleep(0)

    async def many(self, run: str, first: int, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Nothing to let go of."""
