"""The way to MongoDB: a client of our own or one that was passed in, set up at first use."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlsplit

from bson.codec_options import CodecOptions, TypeRegistry
from pymongo import IndexModel, WriteConcern
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import InvalidURI, OperationFailure, PyMongoError
from pymongo.read_preferences import ReadPreference
from pymongo.uri_parser import parse_uri

from perdure.clock import Clock
from perdure.errors import InvalidArgument, StoreError
from perdure.stores._lifecycle import Lifecycle
from perdure.stores.mongo.documents import AS_PLAIN_INTEGERS
from perdure.stores.mongo.driver import AsyncMongoClient
from perdure.stores.mongo.errors import UNAUTHORIZED, translated
from perdure.stores.mongo.server_clock import ServerClock

Client: TypeAlias = AsyncMongoClient[Any]
Database: TypeAlias = AsyncDatabase[Any]
Collection: TypeAlias = AsyncCollection[Any]
Durability: TypeAlias = Literal["full", "normal"]

T = TypeVar("T")

DEFAULT_DATABASE = "perdure"
FULL = WriteConcern(w="majority", j=True)
CASUAL = WriteConcern(w=1, j=False)

# MongoDB 4.2: updates that compute, which is how the server's clock gets into a document.
_WIRE_VERSION = 8
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,99}")
_PLAIN: CodecOptions[Any] = CodecOptions(
    tz_aware=True, type_registry=TypeRegistry(AS_PLAIN_INTEGERS)
)


class Target(NamedTuple):
    """Where a URL leads: the hosts for people, the database, and whether it names a replica set."""

    where: str
    database: str
    replica_set: bool


class Connection(Generic[T]):
    """Gives what `bind` makes of a database, indexed by `prepare`, and translates what goes wrong.

    async with connection.use() as db:
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
        clock: Clock,
        bind: Callable[[Database], T],
        prepare: Callable[[T], Awaitable[None]],
    ) -> None:
        if durability not in ("full", "normal"):
            raise InvalidArgument("durability", durability, '"full" or "normal"')
        self.target = target
        self.clock = clock
        self._url = url
        self._lent = client
        self._options = client_options or {}
        self._concern = FULL if durability == "full" else CASUAL
        self._bind = bind
        self._prepare = prepare
        self._client: Client | None = None
        self._bound: T | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.server_clock = ServerClock(self._server_time)
        self._life = Lifecycle("MongoDB", self._set_up)

    def use(self) -> "Use[T]":
        """Give the database for the length of a block."""
        return Use(self)

    async def open(self) -> T:
        """Give the database, set up."""
        await self._life.ready()
        return self._connected()

    async def close(self) -> None:
        """Close the client if it is ours; a second call does nothing."""
        if self._life.close() and self._client is not None and self._lent is None:
            await self._client.close()

    def translated(self, error: PyMongoError, began: float) -> StoreError:
        """Give the driver's error in our words."""
        seconds = self.clock.monotonic() - began
        return translated(error, self.target.where, self.target.database, seconds)

    def _connected(self) -> T:
        # A client lives in one loop; after that loop's end another one is needed.
        if self._bound is None or self._loop is not asyncio.get_running_loop():
            self._bound = self._connect()
        return self._bound

    def _connect(self) -> T:
        client = self._lent
        if client is None:
            options: dict[str, Any] = {"appname": "perdure", **self._options}
            client = AsyncMongoClient(self._url, **options)
        database = client.get_database(
            self.target.database,
            codec_options=_PLAIN,
            read_preference=ReadPreference.PRIMARY,
            write_concern=self._concern,
        )
        self._loop = asyncio.get_running_loop()
        self._client = client
        return self._bind(database)

    async def _set_up(self) -> None:
        bound = self._connected()
        hello = await self._hello()
        if hello["maxWireVersion"] < _WIRE_VERSION:
            raise StoreError(f"MongoDB at {self.target.where} is older than 4.2, which is needed")
        if self.target.replica_set and "setName" not in hello and hello.get("msg") != "isdbgrid":
            raise StoreError(
                f"MongoDB at {self.target.where} is alone: it has neither transactions nor change "
                "streams; make it a replica set, or pass replica_set=False"
            )
        await self._prepare(bound)

    async def _hello(self) -> Mapping[str, Any]:
        assert self._client is not None
        answer: Mapping[str, Any] = await self._client.admin.command("hello")
        return answer

    async def _server_time(self) -> datetime:
        time: datetime = (await self._hello())["localTime"]
        return time.replace(tzinfo=UTC)


class Use(Generic[T]):
    """One use of a connection: what the driver raises in the block comes out in our words."""

    __slots__ = ("_began", "_connection")

    def __init__(self, connection: Connection[T]) -> None:
        self._connection = connection
        self._began = connection.clock.monotonic()

    async def __aenter__(self) -> T:
        try:
            return await self._connection.open()
        except PyMongoError as error:
            raise self._connection.translated(error, self._began) from error

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, PyMongoError):
            raise self._connection.translated(error, self._began) from error


def target_of(url: str, database: str | None, replica_set: bool | None) -> Target:
    """Give where a URL leads; `database` and `replica_set` go before what it says itself."""
    # Which hosts a name of the SRV kind stands for is asked when they are needed, not here.
    plain = str(url).replace("mongodb+srv://", "mongodb://", 1)
    try:
        parsed = parse_uri(plain, validate=False)
    except (InvalidURI, ValueError) as error:
        # What is wrong may be a character of the password: neither it nor the driver's words show.
        login, _, rest = plain.rpartition("@")
        quoted = "Characters such as / and @ in user and password are written as %2F and %40"
        raise InvalidArgument(
            "url", rest, "a MongoDB URL", quoted if login else str(error)
        ) from None
    named = any(option.lower() == "replicaset" for option in parsed["options"])
    several = named or plain != url or len(parsed["nodelist"]) > 1
    name = database or parsed["database"] or DEFAULT_DATABASE
    if len(name) > 63 or not _NAME.fullmatch(name) or "." in name:
        expected = "letters, digits, _ and -, at most 63, the first a letter or _"
        raise InvalidArgument("database", name, expected)
    return Target(_host(url), name, several if replica_set is None else replica_set)


def check_collection(name: str) -> str:
    """Give the name of a collection back, or raise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.startswith("system."):
        expected = "letters, digits, _, - and dots, at most 100, the first a letter or _"
        raise InvalidArgument("collection", name, expected)
    return name


def casual(collection: Collection) -> Collection:
    """Give the collection for writes that may be lost: they are made again, or not missed."""
    return collection.with_options(write_concern=CASUAL)


async def create_indexes(collection: Collection, indexes: Sequence[IndexModel]) -> None:
    """Create the indexes that are not there."""
    try:
        await collection.create_indexes([*indexes])
    except OperationFailure as error:
        # Who may not create indexes may still use those that an administrator created.
        if error.code != UNAUTHORIZED or not await _has_indexes(collection, indexes):
            raise


async def _has_indexes(collection: Collection, indexes: Sequence[IndexModel]) -> bool:
    try:
        there = await collection.index_information()
    except OperationFailure:
        return False
    return all(index.document["name"] in there for index in indexes)


def _host(url: object) -> str:
    """Give the host part of a URL, for people: no user, no password."""
    return urlsplit(url).netloc.rpartition("@")[2] if isinstance(url, str) else repr(url)
