"""The connection to MongoDB: the store's own client, or the user's."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlsplit

import pymongo
from bson.codec_options import CodecOptions, TypeRegistry
from pymongo import IndexModel, WriteConcern
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import InvalidURI, OperationFailure, PyMongoError
from pymongo.read_preferences import ReadPreference
from pymongo.uri_parser import parse_uri

from perdure.clock import Clock, Duration, parse_duration
from perdure.errors import InvalidArgument, StoreError
from perdure.stores._cancellation import count_cancellations, swallowed_cancellation
from perdure.stores._durability import Durability, check_durability
from perdure.stores._lifecycle import CallsInFlight
from perdure.stores.mongo.documents import AS_PLAIN_INTEGERS
from perdure.stores.mongo.driver import AsyncMongoClient
from perdure.stores.mongo.errors import UNAUTHORIZED, translate

Client: TypeAlias = AsyncMongoClient[Any]
Database: TypeAlias = AsyncDatabase[Any]
Collection: TypeAlias = AsyncCollection[Any]

T = TypeVar("T")

DEFAULT_DATABASE = "perdure"
_SELECTION = "serverSelectionTimeoutMS"
# Seconds in which closing a client may still send requests.
_CLOSE_TIMEOUT = 1.0

_MAJORITY = WriteConcern(w="majority", j=True)
_RELAXED = WriteConcern(w=1, j=False)
# MongoDB 4.4 has unions of pipelines: one round trip for many queues.
_MIN_WIRE_VERSION = 9
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,99}")
_CODEC: CodecOptions[Any] = CodecOptions(
    tz_aware=True, type_registry=TypeRegistry(AS_PLAIN_INTEGERS)
)


class Target(NamedTuple):
    """A parsed URL: the hosts (without credentials), the database, and whether it is a set."""

    location: str
    database: str
    replica_set: bool


class Connection(Generic[T]):
    """A client, and the result of `bind` for its database; `prepare` creates the indexes.

    with connection.use() as db:
        await db.runs.find_one(...)
    """

    def __init__(
        self,
        url: str,
        *,
        target: Target,
        client: Client | None,
        client_options: Mapping[str, Any] | None,
        durability: Durability = "full",
        connect_timeout: Duration = 30,
        clock: Clock,
        bind: Callable[[Database], T],
        prepare: Callable[[T], Awaitable[None]],
    ) -> None:
        check_durability(durability)
        self.target = target
        self.clock = clock
        self.is_closed = False
        self._url = url
        self._borrowed = client
        self._options = client_options or {}
        self._seconds = parse_duration(connect_timeout, "connect_timeout").total_seconds()
        self._concern = _MAJORITY if durability == "full" else _RELAXED
        self._bind = bind
        self._prepare = prepare
        self._client: Client | None = None
        self._bound: T | None = None
        self._calls = CallsInFlight()

    def use(self) -> "Use[T]":
        """Return a context that provides the database and translates the driver's errors.

        Closing waits for it.
        """
        return Use(self, self._calls)

    def listen(self) -> "Use[T]":
        """Return a context like that of `use`, for which closing does not wait."""
        return Use(self, CallsInFlight())

    async def open(self) -> None:
        """Check the server's version and kind, and create the indexes."""
        with self.use() as bound:
            hello = await self._hello()
            if hello["maxWireVersion"] < _MIN_WIRE_VERSION:
                raise StoreError(f"MongoDB at {self.target.location} is too old: 4.4 is required")
            is_standalone = "setName" not in hello and hello.get("msg") != "isdbgrid"
            if self.target.replica_set and is_standalone:
                raise StoreError(
                    f"MongoDB at {self.target.location} is a standalone server: it has neither "
                    "transactions nor change streams; convert it to a replica set, or pass "
                    "replica_set=False"
                )
            await self._prepare(bound)

    def forget_loop(self) -> None:
        """Drop the client, which belongs to the event loop that opened it."""
        self._client = self._bound = None
        self._calls = CallsInFlight()

    async def close(self) -> None:
        """Close the client unless it was passed in, soon even if the server does not answer."""
        self.is_closed = True
        if self._client is not None and self._borrowed is None:
            await self._calls.ended()
            await _close(self._client)

    async def server_time(self) -> datetime:
        """Return the server's clock."""
        time: datetime = (await self._hello())["localTime"]
        return time.replace(tzinfo=UTC)

    def bound(self) -> T:
        """Return the result of `bind` for the database, opening the client if necessary."""
        if self._bound is None:
            self._client = self._borrowed
            if self._client is None:
                self._client = AsyncMongoClient(self._url, **self._client_options())
            self._bound = self._bind(
                self._client.get_database(
                    self.target.database,
                    codec_options=_CODEC,
                    read_preference=ReadPreference.PRIMARY,
                    write_concern=self._concern,
                )
            )
        return self._bound

    def _client_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"appname": "perdure"}
        if _SELECTION.casefold() not in self._url.casefold():
            # With 0, the driver would not even try to connect once.
            options[_SELECTION] = max(round(self._seconds * 1000), 50)
        return {**options, **self._options}

    async def _hello(self) -> Mapping[str, Any]:
        assert self._client is not None
        reply: Mapping[str, Any] = await self._client.admin.command("hello")
        return reply


class Use(Generic[T]):
    """One use of a connection."""

    __slots__ = ("_calls", "_cancellations", "_connection", "_started")

    def __init__(self, connection: Connection[T], calls: CallsInFlight) -> None:
        self._connection = connection
        self._calls = calls
        self._started = connection.clock.monotonic()

    def __enter__(self) -> T:
        bound = self._connection.bound()
        self._cancellations = count_cancellations()
        self._calls.begin()
        return bound

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._calls.end()
        if isinstance(error, PyMongoError):
            target = self._connection.target
            seconds = self._connection.clock.monotonic() - self._started
            raise translate(error, target.location, target.database, seconds) from error
        if error is None and count_cancellations() > self._cancellations:
            raise swallowed_cancellation()


def parse_target(url: str, database: str | None, replica_set: bool | None) -> Target:
    """Parse a URL; `database` and `replica_set` override it."""
    # The hosts behind a mongodb+srv name are looked up by the driver when it connects.
    plain = str(url).replace("mongodb+srv://", "mongodb://", 1)
    try:
        uri = parse_uri(plain, validate=False)
    except (InvalidURI, ValueError) as error:
        # The problem may be the password itself, so show neither it nor the driver's message.
        login, _, rest = plain.rpartition("@")
        hint = "Characters such as / and @ in user and password are written as %2F and %40"
        raise InvalidArgument("url", rest, "a MongoDB URL", hint if login else str(error)) from None
    has_option = any(option.lower() == "replicaset" for option in uri["options"])
    is_set = has_option or plain != url or len(uri["nodelist"]) > 1
    name = database or uri["database"] or DEFAULT_DATABASE
    if len(name) > 63 or not _NAME.fullmatch(name) or "." in name:
        expected = "letters, digits, _ and -, at most 63, the first a letter or _"
        raise InvalidArgument("database", name, expected)
    location = urlsplit(url).netloc.rpartition("@")[2]
    return Target(location, name, is_set if replica_set is None else replica_set)


def check_collection(name: str) -> str:
    """Return a valid name of a collection."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.startswith("system."):
        expected = "letters, digits, _, - and dots, at most 100, the first a letter or _"
        raise InvalidArgument("collection", name, expected)
    return name


async def _close(client: Client) -> None:
    cancellations = count_cancellations()
    # The driver tells the server that its sessions have ended, and would wait for a server that is
    # unavailable. They also expire by themselves.
    with pymongo.timeout(_CLOSE_TIMEOUT):
        await client.close()
    if count_cancellations() > cancellations:
        raise swallowed_cancellation()


def relaxed(collection: Collection) -> Collection:
    """Return the collection for writes that may be lost, because they are repeated or optional."""
    return collection.with_options(write_concern=_RELAXED)


async def create_indexes(collection: Collection, indexes: Sequence[IndexModel]) -> None:
    """Create the indexes that do not exist."""
    try:
        await collection.create_indexes([*indexes])
    except OperationFailure as error:
        # A user without that permission can use indexes that an administrator created.
        if error.code != UNAUTHORIZED or not await _has_indexes(collection, indexes):
            raise


async def _has_indexes(collection: Collection, indexes: Sequence[IndexModel]) -> bool:
    try:
        existing = await collection.index_information()
    except OperationFailure:
        return False
    return all(index.document["name"] in existing for index in indexes)
