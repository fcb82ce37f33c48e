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
    """Keeps each record in its own file, so that it outlives the process.

    A write replaces the file atomically, so several processes may share the directory. A file that
    cannot be read is logged and treated as missing.

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
        """Return the record, or `None`."""
        return await asyncio.to_thread(self._get, key)

    async def set(self, key: str, record: StepRecord, /, *, ttl: timedelta | None = None) -> None:
        """Store the record durably; `ttl` takes precedence over the cache's own."""
        ttl = self._ttl if ttl is None else ttl
        expires = None if ttl is None else isoformat(self._clock.now() + ttl)
        content = codec.dumps({"key": key, "expiresAt": expires, "record": record})
        try:
            await asyncio.to_thread(_replace, self._path(key), content)
        except OSError as error:
            raise StoreError(f"the cache entry {key!r} could not be written: {error}") from error

    def has(self, key: str, /) -> bool:
        """Return whether there is a record."""
        return self._get(key) is not None

    def delete(self, key: str, /) -> bool:
        """Delete the record, so that the step runs again; return whether it existed."""
        existed = self.has(key)
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"the cache entry {key!r} could not be deleted: {error}") from error
        return existed

    def clear(self) -> None:
        """Delete all records."""
        try:
            for path in self._files():
                path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"the cache could not be cleared: {error}") from error

    def prune(self) -> int:
        """Delete the files of expired records; return how many there were."""
        return sum(self._remove_expired(path) for path in self._files())

    def _get(self, key: str) -> StepRecord | None:
        path = self._path(key)
        entry = _read(path)
        if entry is None or self._is_expired(entry):
            return None
        if entry["key"] != key:
            logger.warning("%s contains the record of another key and is ignored", path)
            return None
        return cast("StepRecord", entry["record"])

    def _is_expired(self, entry: dict[str, Any]) -> bool:
        expires: datetime | None = entry["expiresAt"]
        return expires is not None and self._clock.now() >= expires

    def _path(self, key: str) -> Path:
        name = safe_name(key)
        return self._directory / name[-2:] / f"{name}.json"

    def _files(self) -> Iterator[Path]:
        return self._directory.glob("[0-9a-f][0-9a-f]/*.json")

    def _remove_expired(self, path: Path) -> bool:
        entry = _read(path)
        if entry is None or not self._is_expired(entry):
            return False
        # Another process may have stored a new record since we read the file. So move the file
        # aside, read it again, and move it back if it has not expired, unless there is an even
        # newer one.
        aside = path.with_suffix(".expired")
        with suppress(FileNotFoundError):
            path.replace(aside)
            record = _read(aside)
            is_new = record is not None and not self._is_expired(record)
            if is_new:
                with suppress(FileExistsError):
                    os.link(aside, path)
            aside.unlink()
            return not is_new
        return False


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read and is ignored: %s", path, error)
        return None
    try:
        entry = codec.loads(content)
        expires = entry["expiresAt"]
        if not isinstance(entry["record"]["ok"], bool):
            raise TypeError("not a record")
        return {**entry, "expiresAt": None if expires is None else parse_iso(expires)}
    except (CodecError, InvalidArgument, KeyError, TypeError):
        logger.warning("%s is damaged and is ignored", path)
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
    # A rename survives a power loss only once its directory is synced.
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
