"""Old databases of stores without SQL: documents, keys and files as they were recorded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymongo
import redis
from bson import json_util

from perdure.stores.sqlite import SqliteKeyValue
from tests.servers import mongo
from tests.stores.old_databases import COPIED, recorded

Document = dict[str, Any]

_RUNS, _JOURNAL, _INBOX = "perdure_runs", "perdure_runs_journal", "perdure_runs_inbox"
_RECORDED_NAMESPACE = "perdure"


def fill_mongo(url: str, copies: int) -> None:
    """Insert the documents and so many copies of each run, and create the indexes."""
    parts: dict[str, Any] = json_util.loads(json.dumps(recorded("mongo")))
    with pymongo.MongoClient[Document](url, appname=mongo.ADMIN) as client:
        database = client.get_default_database()
        for name in (_RUNS, _JOURNAL, _INBOX):
            for index, options in parts[f"{name} indexes"]:
                keys = [(field, direction) for field, direction in options.pop("key")]
                options.pop("v")
                database[name].create_index(keys, name=index, **options)
            for document in parts[f"{name} documents"]:
                database[name].insert_many([document, *_copies(document, copies)])


def _copies(document: Document, copies: int) -> Iterator[Document]:
    """Yield copies of a document: its `_id` is the run's id, perhaps followed by NUL and more."""
    run, nul, rest = document["_id"].partition("\0")
    if run not in (*COPIED, "awaitly"):
        return
    for number in range(1, copies + 1):
        copy = {**document, "_id": f"{run} {number}{nul}{rest}"}
        if "run" in document:
            copy["run"] = f"{run} {number}"
        yield copy


def restore_redis(url: str, namespace: str) -> None:
    """Write the keys, in another namespace."""
    with redis.Redis.from_url(url) as client, client.pipeline(transaction=False) as pipeline:
        for recorded_key, content in recorded("redis").items():
            key = namespace + recorded_key.removeprefix(_RECORDED_NAMESPACE)
            ((kind, value),) = content.items()
            match kind:
                case "string":
                    pipeline.set(key, value)
                case "hash":
                    pipeline.hset(key, mapping=dict(value))
                case "zset":
                    pipeline.zadd(key, {member: float(score) for member, score in value})
                case "set":
                    pipeline.sadd(key, *value)
                case _:
                    pipeline.rpush(key, *value)
        pipeline.execute()


def restore_files(directory: Path) -> None:
    """Write the files."""
    for name, content in recorded("file").items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode())


async def restore_keyvalue(path: Path) -> None:
    """Write the documents to a key-value store in a SQLite file."""
    async with SqliteKeyValue(path, durability="normal") as kv:
        for key, value in recorded("keyvalue").items():
            await kv.set(key, value)
