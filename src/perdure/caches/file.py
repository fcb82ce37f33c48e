"""A cache in a directory."""

import asyncio
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

from perdure import codec
from perdure.clock import (
    Clock,
    Duration,
    SystemClock,
    check_clock,
    isoformat,
    parse_duration,
    parse_iso,
)
from perdure.errors import CodecError, InvalidArgument, StoreError
from perdure.filenames import safe_name
from perdure.snapshot import StepRecord

logger = logging.getLogger(__name__)


class FileCache:
    """Keeps each record in a file of its own, so that it outlives the process.

    Any key has its own file name. A write is a whole new file put in place in one act, so several
    processes may share the directory. A file that cannot be read is logged and counts as no record.

        cache = FileCache("./workflow-state", ttl=timedelta(days=7))
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        ttl: Duration | None = None,
        clock: Clock = SystemClock(),
    ) -> None:
        if not isinstance(directory, str | os.PathLike):
            raise InvalidArgument("directory", directory, "a path")
        self._directory = Path(directory)
        self._ttl = None if ttl is None else parse_duration(ttl, "ttl")
        self._clock = check_clock(clock)

    async def get(self, key: str, /) -> StepRecord | None:
        """Give the record or None."""
        return await asyncio.to_thread(self._get, key)

    async def set(self, key: str, record: StepRecord, /, *, ttl: timedelta | None = None) -> None:
        """Keep the record, on disk when this returns; `ttl` goes before the cache's own."""
        ttl = self._ttl if ttl is None else ttl
        expires = None if ttl is None else isoformat(self._clock.now() + ttl)
        content = codec.dumps({"key": key, "expiresAt": expires, "record": record})
        try:
            await asyncio.to_thread(_replace, self._path(key), content)
        except OSError as error:
            raise StoreError(f"the cache entry {key!r} could not be written: {error}") from error

    def has(self, key: str, /) -> bool:
        """Tell whether there is a record."""
        return self._get(key) is not None

    def delete(self, key: str, /) -> bool:
        """Forget the record, so that the step runs again; tell whether there was one."""
        there = self.has(key)
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"the cache entry {key!r} could not be deleted: {error}") from error
        return there

    def clear(self) -> None:
        """Forget every record."""
        try:
            for path in self._files():
                path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"the cache could not be cleared: {error}") from error

    def prune(self) -> int:
        """Remove the files of records whose time is over; give how many."""
        return sum(self._remove_expired(path) for path in self._files())

    def _get(self, key: str) -> StepRecord | None:
        path = self._path(key)
        entry = _read(path)
        if entry is None or self._is_over(entry):
            return None
        if entry["key"] != key:
            logger.warning("%s holds the record of another key and is not used", path)
            return None
        return cast("StepRecord", entry["record"])

    def _is_over(self, entry: dict[str, Any]) -> bool:
        expires: datetime | None = entry["expiresAt"]
        return expires is not None and self._clock.now() >= expires

    def _path(self, key: str) -> Path:
        name = safe_name(key)
        return self._directory / name[-2:] / f"{name}.json"

    def _files(self) -> Iterator[Path]:
        return self._directory.glob("[0-9a-f][0-9a-f]/*.json")

    def _remove_expired(self, path: Path) -> bool:
        entry = _read(path)
        if entry is None or not self._is_over(entry):
            return False
        # Another process may have put a new record there meanwhile: the file is taken aside, looked
        # at again, and goes back unless an even newer one has come.
        aside = path.with_suffix(".expired")
        with suppress(FileNotFoundError):
            path.replace(aside)
            taken = _read(aside)
            fresh = taken is not None and not self._is_over(taken)
            if fresh:
                with suppress(FileExistsError):
                    os.link(aside, path)
            aside.unlink()
            return not fresh
        return False


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read and counts as no record: %s", path, error)
        return None
    try:
        entry = codec.loads(content)
        expires = entry["expiresAt"]
        if not isinstance(entry["record"]["ok"], bool):
            raise TypeError("no record")
        return {**entry, "expiresAt": None if expires is None else parse_iso(expires)}
    except (CodecError, InvalidArgument, KeyError, TypeError):
        logger.warning("%s is damaged and counts as no record", path)
        return None


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    # A rename is on disk only when its directory is.
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
