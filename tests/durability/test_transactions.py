"""`step.transaction` is applied exactly once, with workers that are killed at random while they
transfer money.
"""

import asyncio
import random
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pymongo
import pytest

from perdure import Runtime
from perdure.store import Store
from perdure.stores import open_store
from tests.durability.forked import forked
from tests.durability.ledger import MOVES, amount_of, transfers, work
from tests.lengths import LONG
from tests.servers import mysql, sqld
from tests.servers.process import Server

NAMES = ("ana", "ben")
KILLS = 50 if LONG else 25
DEADLINE = 30.0


class Bank(ABC):
    """The accounts and the list of transfers, read without perdure."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url

    @property
    def store_url(self) -> str:
        return self.url

    def notice_the_death(self) -> None:  # noqa: B027  # most servers do so themselves
        """Make the server notice at once that a client is gone."""

    @abstractmethod
    def open(self) -> None:
        """Create both accounts, empty."""

    @abstractmethod
    def balances(self) -> list[int]:
        """Return both balances, read at the same time."""

    @abstractmethod
    def moves(self) -> list[tuple[str, int, int]]:
        """Return every transfer: its run, number and amount."""


class SqlBank(Bank):
    """A bank in a SQL database."""

    def open(self) -> None:
        self.query("CREATE TABLE accounts (name VARCHAR(9) PRIMARY KEY, balance INTEGER NOT NULL)")
        self.query("CREATE TABLE moves (run VARCHAR(99), n INTEGER, amount INTEGER)")
        self.query("INSERT INTO accounts VALUES ('ana', 0), ('ben', 0)")

    def balances(self) -> list[int]:
        return [int(row[0]) for row in self.query("SELECT balance FROM accounts ORDER BY name")]

    def moves(self) -> list[tuple[str, int, int]]:
        rows = self.query("SELECT run, n, amount FROM moves")
        return [(run, int(n), int(amount)) for run, n, amount in rows]

    @abstractmethod
    def query(self, statement: str) -> Sequence[Sequence[Any]]: ...


class PostgresBank(SqlBank):
    def query(self, statement: str) -> Sequence[Sequence[Any]]:
        with psycopg.connect(self.url) as connection, connection.cursor() as cursor:
            cursor.execute(statement.encode())
            return cursor.fetchall() if cursor.description else ()


class MysqlBank(SqlBank):
    def query(self, statement: str) -> Sequence[Sequence[Any]]:
        return mysql.query(self.url, statement)


class SqliteBank(SqlBank):
    @property
    def store_url(self) -> str:
        return f"sqlite:///{self.url}"

    def query(self, statement: str) -> Sequence[Sequence[Any]]:
        with closing(sqlite3.connect(self.url, timeout=30)) as connection, connection:
            return connection.execute(statement).fetchall()


class SqldBank(SqlBank):
    def __init__(self, server: Server, url: str) -> None:
        super().__init__("sqld", url)
        self._server = server

    def notice_the_death(self) -> None:
        # By default it keeps the transaction of a lost client for five seconds.
        if self._server.ours:
            self._server.kill()
            self._server.ensure()

    @property
    def store_url(self) -> str:
        return f"libsql+{self.url}"

    def query(self, statement: str) -> Sequence[Sequence[Any]]:
        return sqld.query(self.url, statement)


class MongoBank(Bank):
    def open(self) -> None:
        with pymongo.MongoClient[dict[str, Any]](self.url) as client:
            database = client.get_default_database()
            database["accounts"].insert_many([{"_id": name, "balance": 0} for name in NAMES])
            database.create_collection("moves")

    def notice_the_death(self) -> None:
        # By default it keeps the transaction of a lost client for a minute.
        with pymongo.MongoClient[dict[str, Any]](self.url) as client:
            client.admin.command("killAllSessions", [])

    def balances(self) -> list[int]:
        with pymongo.MongoClient[dict[str, Any]](self.url) as client:
            accounts = client.get_default_database()["accounts"]
            # A command reads one point in time only if it may take a snapshot.
            with client.start_session(snapshot=True) as session:
                found = accounts.find(session=session).sort("_id")
                return [account["balance"] for account in found]

    def moves(self) -> list[tuple[str, int, int]]:
        with pymongo.MongoClient[dict[str, Any]](self.url) as client:
            moves = client.get_default_database()["moves"].find()
            return [(move["run"], move["n"], move["amount"]) for move in moves]


@pytest.fixture
def postgres_bank(postgres_url: str) -> Bank:
    return PostgresBank("postgres", postgres_url)


@pytest.fixture
def mysql_bank(mysql_url: str) -> Bank:
    return MysqlBank("mysql", mysql_url)


@pytest.fixture
def sqlite_bank(tmp_path: Path) -> Bank:
    return SqliteBank("sqlite", f"{tmp_path}/bank.db")


@pytest.fixture
def sqld_bank(sqld_server: Server, sqld_url: str) -> Bank:
    return SqldBank(sqld_server, sqld_url)


@pytest.fixture
def mongo_bank(mongo_url: str) -> Bank:
    return MongoBank("mongo", mongo_url)


@pytest.fixture(params=["postgres", "mysql", "sqlite", "sqld", "mongo"])
def bank(request: pytest.FixtureRequest) -> Bank:
    bank = request.getfixturevalue(f"{request.param}_bank")
    assert isinstance(bank, Bank)
    bank.open()
    return bank


class Teller:
    """A worker process that is replaced whenever it is killed."""

    def __init__(self, url: str) -> None:
        self._processes = forked()
        self._url = url
        self.start()

    def start(self) -> None:
        self._moving = self._processes.Event()
        self._process = self._processes.Process(target=work, args=(self._url, self._moving))
        self._process.start()

    def wait_for_a_move(self) -> None:
        assert self._moving.wait(DEADLINE), "the worker does not work"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


async def order(runtime: Runtime, bank: Bank, run: str) -> None:
    payload = {"kind": bank.kind, "run": run}
    await runtime.trigger(transfers, payload, run_id=run, wait=False)


async def all_over(store: Store, runs: Sequence[str]) -> None:
    open_runs = set(runs)
    while open_runs:
        completed_runs = await store.list(status="completed", limit=len(runs))
        open_runs -= {line.id for line in completed_runs}
        await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.long
async def test_each_transfer_is_applied_once(bank: Bank) -> None:
    """The accounts balance after every kill, and in the end each transfer was made exactly once."""
    runs = [f"run-{n}" for n in range(KILLS)]
    async with open_store(bank.store_url) as store:
        runtime = Runtime(store, workflows=[transfers])
        teller = Teller(bank.store_url)
        try:
            for run in runs:
                await order(runtime, bank, run)
                await asyncio.to_thread(teller.wait_for_a_move)
                await asyncio.sleep(random.uniform(0, 0.1))
                teller.kill()
                bank.notice_the_death()
                assert sum(bank.balances()) == 0
                teller.start()
            await asyncio.wait_for(all_over(store, runs), DEADLINE)
        finally:
            teller.kill()
    wanted = [(run, n, amount_of(n)) for run in runs for n in range(MOVES)]
    assert sorted(bank.moves()) == sorted(wanted)
    total = sum(amount for _, _, amount in wanted)
    assert bank.balances() == [-total, total]
