"""Checkpoints of LangGraph in any key-value store.

graph = builder.compile(checkpointer=PerdureSaver(SqliteKeyValue("graphs.db")))
await graph.ainvoke(…, {"configurable": {"thread_id": "1"}})
"""

import asyncio
import hashlib
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Iterable, Sequence
from random import Random, SystemRandom
from typing import Any, TypedDict
from urllib.parse import quote

from perdure import codec
from perdure.errors import CodecError, InvalidArgument, MissingDependency, StoreCorrupted
from perdure.keyvalue import AsyncKeyValue, GetMany, KeyValueStore, as_keyvalue
from perdure.validation import check_prefix, check_random

try:
    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.base import (
        WRITES_IDX_MAP,
        BaseCheckpointSaver,
        ChannelVersions,
        Checkpoint,
        CheckpointMetadata,
        CheckpointTuple,
        get_checkpoint_id,
        get_checkpoint_metadata,
    )
    from langgraph.checkpoint.serde.base import SerializerProtocol
except ImportError as error:
    raise MissingDependency("langgraph-checkpoint>=4", "langgraph") from error

__all__ = ["PerdureSaver"]

_MAX_PART = 120
_STRATEGIES = ("keep_latest", "delete")


class _TypedValue(TypedDict):
    """A value as LangGraph's serializer writes it, with its bytes in base64."""

    type: str
    data: str


class _StoredCheckpoint(TypedDict):
    """A checkpoint without the values of its channels, which are stored by version."""

    thread: str
    ns: str
    id: str
    parent: str | None
    versions: ChannelVersions
    run: str
    deltas: list[str]
    checkpoint: _TypedValue
    metadata: _TypedValue


class PerdureSaver(BaseCheckpointSaver[str]):
    """A checkpointer of LangGraph on a `KeyValueStore` or a driver of py-key-value-aio.

    Only the async methods exist: call `ainvoke` and `astream` of the graph. Keys begin with
    `prefix`. The values of channels are written before the checkpoint that refers to them, and
    deleted after it, so that a crash leaves no checkpoint without its values.
    """

    def __init__(
        self,
        store: KeyValueStore | AsyncKeyValue,
        *,
        prefix: str = "langgraph/",
        serde: SerializerProtocol | None = None,
        random: Random | None = None,
    ) -> None:
        super().__init__(serde=serde)
        self._store = as_keyvalue(store)
        self._prefix = check_prefix(prefix).replace("*", "%2A")
        self._random = SystemRandom() if random is None else check_random(random)

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Reject calls of the graph's synchronous methods, which all begin with this."""
        raise NotImplementedError(
            "PerdureSaver is async only: call ainvoke, astream, aget_state, … of the graph"
        )

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint that a config names, or the latest one of its thread."""
        thread, ns = _thread(config), _namespace(config)
        id = get_checkpoint_id(config)
        if id is None:
            keys = await self._keys("c", thread, ns)
            if not keys:
                return None
            key = max(keys)
        else:
            key = self._key("c", thread, ns, id)
        [checkpoint] = await self._read([key])
        return None if checkpoint is None else await self._tuple(checkpoint)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Yield checkpoints of one thread or of all, newest first."""
        remaining = limit
        for stored in await self._checkpoints(config):
            if before is not None and stored["id"] >= (get_checkpoint_id(before) or ""):
                continue
            metadata = self._load(stored["metadata"])
            if filter and any(metadata.get(name) != value for name, value in filter.items()):
                continue
            if remaining is not None:
                if remaining <= 0:
                    return
                remaining -= 1
            yield await self._tuple(stored)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint, and the values of the channels that have changed."""
        thread, ns = _thread(config), _namespace(config)
        bare: dict[str, Any] = dict(checkpoint)
        values: dict[str, Any] = bare.pop("channel_values", {})
        complete = get_checkpoint_metadata(config, metadata)
        stored: _StoredCheckpoint = {
            "thread": thread,
            "ns": ns,
            "id": checkpoint["id"],
            "parent": get_checkpoint_id(config),
            "versions": checkpoint["channel_versions"],
            "run": str(complete.get("run_id", "")),
            "deltas": [*complete.get("counters_since_delta_snapshot", {})],
            "checkpoint": self._dump(bare),
            "metadata": self._dump(complete),
        }
        blobs = {
            self._key("b", thread, ns, channel, str(version)): self._dump(values[channel])
            for channel, version in new_versions.items()
            if channel in values
        }
        await self._write(blobs)
        await self._write({self._key("c", thread, ns, checkpoint["id"]): stored})
        return _config(thread, ns, checkpoint["id"])

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store what a task has written after a checkpoint, and keep its earlier writes.

        The writes of a task are stored as one value: a crash in between could otherwise leave some
        of them, and the task would count as finished.
        """
        task = _thread(config), _namespace(config), get_checkpoint_id(config) or "", task_id
        ordinary: dict[str, Any] = {}
        special: dict[str, Any] = {}
        for n, (channel, value) in enumerate(writes):
            index = WRITES_IDX_MAP.get(channel, n)
            write = {
                "order": [task_path, task_id, index],
                "channel": channel,
                "value": self._dump(value),
            }
            if index < 0:
                special[self._key("w", *task, str(index))] = {str(index): write}
            else:
                ordinary[str(index)] = write
        await self._write(special)
        if ordinary:
            key = self._key("w", *task, "writes")
            [stored_writes] = await self._read([key])
            await self._write({key: {**ordinary, **(stored_writes or {})}})

    async def adelete_thread(self, thread_id: str) -> None:
        """Delete everything of a thread."""
        await self._delete(await self._keys("c", thread_id))
        await self._delete(await self._keys("b", thread_id))
        await self._delete(await self._keys("w", thread_id))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints that these runs of LangGraph have created."""
        runs = {*run_ids}
        everything = await self._checkpoints(None)
        for thread in {stored["thread"] for stored in everything if stored["run"] in runs}:
            checkpoints = [
                stored
                for stored in everything
                if stored["thread"] == thread and stored["run"] not in runs
            ]
            await self._keep(thread, checkpoints)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy everything of a thread to another one."""
        for kind in ("b", "w", "c"):
            source, target = (
                self._pattern(kind, thread).removesuffix("*")
                for thread in (source_thread_id, target_thread_id)
            )
            keys = await self._keys(kind, source_thread_id)
            copies: dict[str, Any] = {}
            for key, value in zip(keys, await self._read(keys), strict=True):
                copy = {**value, "thread": target_thread_id} if kind == "c" else value
                copies[target + key.removeprefix(source)] = copy
            await self._write(copies)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete all checkpoints of threads, or all but the latest one of each namespace.

        With "keep_latest", older checkpoints from which the latest one is computed are kept too.
        """
        if strategy not in _STRATEGIES:
            raise InvalidArgument("strategy", strategy, " or ".join(map(repr, _STRATEGIES)))
        for thread in thread_ids:
            if strategy == "delete":
                await self.adelete_thread(thread)
                continue
            checkpoints = await self._checkpoints({"configurable": {"thread_id": thread}})
            await self._keep(thread, await self._needed_checkpoints(checkpoints))

    def get_next_version(self, current: str | None, channel: None) -> str:
        """Return the next version, which differs between forks of the thread."""
        number = 0 if current is None else int(str(current).partition(".")[0])
        return f"{number + 1:032}.{self._random.random():.16f}"

    async def _needed_checkpoints(
        self, checkpoints: Sequence[_StoredCheckpoint]
    ) -> list[_StoredCheckpoint]:
        """Return the latest checkpoint of each namespace, and the checkpoints it depends on.

        A delta channel has a value only at some checkpoints; in between, it is computed from the
        previous value and what was written since.
        """
        result: list[_StoredCheckpoint] = []
        by_id = {(stored["ns"], stored["id"]): stored for stored in checkpoints}
        for ns in {stored["ns"] for stored in checkpoints}:
            # They are sorted, newest first.
            latest = next(each for each in checkpoints if each["ns"] == ns)
            missing = {*latest["deltas"]}
            one: _StoredCheckpoint | None = latest
            while one is not None:
                result.append(one)
                if missing:
                    missing -= (await self._values(one)).keys()
                if not missing:
                    break
                one = by_id.get((ns, one["parent"] or ""))
        return result

    async def _keep(self, thread: str, kept_checkpoints: Sequence[_StoredCheckpoint]) -> None:
        """Delete everything that these checkpoints of a thread do not refer to."""
        checkpoints = {self._key("c", thread, one["ns"], one["id"]) for one in kept_checkpoints}
        blobs = {key for one in kept_checkpoints for key in self._blobs(one).values()}
        writes = tuple(
            self._pattern("w", thread, one["ns"], one["id"]).removesuffix("*")
            for one in kept_checkpoints
        )
        keys = await self._keys("c", thread)
        await self._delete(key for key in keys if key not in checkpoints)
        keys = await self._keys("b", thread)
        await self._delete(key for key in keys if key not in blobs)
        keys = await self._keys("w", thread)
        await self._delete(key for key in keys if not key.startswith(writes))

    async def _checkpoints(self, config: RunnableConfig | None) -> list[_StoredCheckpoint]:
        """Return the checkpoints that a config describes, newest first."""
        place: tuple[str, ...] = ()
        if config is not None:
            place = (_thread(config),)
            if "checkpoint_ns" in _names(config):
                place += (_namespace(config),)
        checkpoints: list[_StoredCheckpoint] = await self._read(await self._keys("c", *place))
        id = None if config is None else get_checkpoint_id(config)
        matching = [one for one in checkpoints if one is not None and id in (None, one["id"])]
        return sorted(matching, key=lambda one: one["id"], reverse=True)

    async def _tuple(self, stored_checkpoint: _StoredCheckpoint) -> CheckpointTuple:
        thread, ns, id = (
            stored_checkpoint["thread"],
            stored_checkpoint["ns"],
            stored_checkpoint["id"],
        )
        checkpoint: Any = self._load(stored_checkpoint["checkpoint"])
        checkpoint["channel_values"] = await self._values(stored_checkpoint)
        keys = await self._keys("w", thread, ns, id)
        tasks = [task for task in await self._read(keys) if task is not None]
        writes = [write for task in tasks for write in task.values()]
        writes.sort(key=lambda write: write["order"])
        parent = stored_checkpoint["parent"]
        return CheckpointTuple(
            config=_config(thread, ns, id),
            checkpoint=checkpoint,
            metadata=self._load(stored_checkpoint["metadata"]),
            parent_config=None if parent is None else _config(thread, ns, parent),
            pending_writes=[
                (write["order"][1], write["channel"], self._load(write["value"]))
                for write in writes
            ],
        )

    async def _values(self, checkpoint: _StoredCheckpoint) -> dict[str, Any]:
        """Return the values of a checkpoint's channels; those without a value are left out."""
        blobs = self._blobs(checkpoint)
        values = await self._read([*blobs.values()])
        return {
            channel: self._load(value)
            for channel, value in zip(blobs, values, strict=True)
            if value is not None
        }

    def _blobs(self, checkpoint: _StoredCheckpoint) -> dict[str, str]:
        return {
            channel: self._key("b", checkpoint["thread"], checkpoint["ns"], channel, str(version))
            for channel, version in checkpoint["versions"].items()
        }

    def _dump(self, value: object) -> _TypedValue:
        kind, data = self.serde.dumps_typed(value)
        return {"type": kind, "data": b64encode(data).decode()}

    def _load(self, value: _TypedValue) -> Any:
        return self.serde.loads_typed((value["type"], b64decode(value["data"])))

    def _key(self, kind: str, *parts: str) -> str:
        return self._prefix + "/".join((kind, *map(_part, parts)))

    def _pattern(self, kind: str, *parts: str) -> str:
        return f"{self._key(kind, *parts)}/*"

    async def _keys(self, kind: str, *parts: str) -> list[str]:
        return await self._store.keys(self._pattern(kind, *parts))

    async def _read(self, keys: Sequence[str]) -> list[Any]:
        if isinstance(self._store, GetMany):
            texts = await self._store.get_many(keys) if keys else ()
        else:
            texts = await asyncio.gather(*(self._store.get(key) for key in keys))
        return [_decode(key, text) for key, text in zip(keys, texts, strict=True)]

    async def _write(self, values: dict[str, Any]) -> None:
        for key, value in values.items():
            await self._store.set(key, codec.dumps(value).decode())

    async def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            await self._store.delete(key)


def _names(config: RunnableConfig) -> dict[str, Any]:
    return config.get("configurable") or {}


def _thread(config: RunnableConfig) -> str:
    try:
        return str(_names(config)["thread_id"])
    except KeyError:
        expected = 'a config such as {"configurable": {"thread_id": "1"}}'
        raise InvalidArgument("config", config, expected) from None


def _namespace(config: RunnableConfig) -> str:
    return str(_names(config).get("checkpoint_ns", ""))


def _config(thread: str, ns: str, id: str) -> RunnableConfig:
    names = {"thread_id": thread, "checkpoint_ns": ns, "checkpoint_id": id}
    return {"configurable": names}


def _part(text: str) -> str:
    """Return a part of a key: unique for every string, short, without slashes and stars."""
    part = quote(text, safe="")
    if len(part) <= _MAX_PART:
        return part
    return "~" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _decode(key: str, text: str | None) -> Any:
    try:
        return None if text is None else codec.loads(text.encode())
    except CodecError as error:
        raise StoreCorrupted(f"{key}: not a checkpoint ({error})") from error
