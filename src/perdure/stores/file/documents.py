"""The documents of a file store, one file each.

Files are replaced whole, so readers need no lock. Writers of a document take a lock, which is
released when the process ends.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec

from perdure.clock import Clock
from perdure.filenames import safe_name
from perdure.stores._keyvalue import KeyValueBackend
from perdure.stores._timestamps import to_microseconds
from perdure.stores.file.disk import lock_file
from perdure.stores.file.storage import FileStorage

logger = logging.getLogger(__name__)

_MICROSECOND = timedelta(microseconds=1)


class Document(msgspec.Struct, frozen=True):
    """The content of one file; `expires_at` is in microseconds since 1970."""

    key: str
    value: str
    expires_at: int | None = None


_decode = msgspec.json.Decoder(Document).decode


class FileDocuments(KeyValueBackend):
    """Documents, with one directory per kind: the part of the key before the first colon.

    Listing the keys of one kind reads no files of another, and removes expired files.
    """

    def __init__(self, storage: FileStorage, clock: Clock, prefix: str) -> None:
        super().__init__(prefix)
        self._storage = storage
        self._folder = storage.folder
        self._clock = clock

    async def set_up(self) -> None:
        """Do nothing: directories are created with the first document in them."""

    async def get(self, keys: Sequence[str]) -> Mapping[str, str]:
        return await self._storage.execute(self._get, keys)

    async def set(self, key: str, value: str, ttl: timedelta | None) -> None:
        await self._storage.execute(self._set, key, value, ttl)

    async def delete(self, key: str) -> bool:
        return await self._storage.execute(self._delete, key)

    async def keys(self, prefix: str) -> list[str]:
        return await self._storage.execute(self._keys, prefix)

    async def replace(self, key: str, old: str | None, new: str | None) -> bool:
        return await self._storage.execute(self._replace, key, old, new)

    async def _get(self, keys: Sequence[str]) -> Mapping[str, str]:
        values = ((key, self._value(self._path(key))) for key in keys)
        return {key: value for key, value in values if value is not None}

    async def _set(self, key: str, value: str, ttl: timedelta | None) -> None:
        path = self._path(key)
        with lock_file(self._lock(path)):
            expires_at = None if ttl is None else self._now() + ttl // _MICROSECOND
            self._write(path, Document(key, value, expires_at))

    async def _delete(self, key: str) -> bool:
        path = self._path(key)
        with lock_file(self._lock(path)):
            try:
                existed = self._value(path) is not None
            except msgspec.MsgspecError:
                existed = True  # an unreadable document can still be deleted
            self._remove(path)
        return existed

    async def _keys(self, prefix: str) -> list[str]:
        return [document.key for document in self._find(prefix)]

    async def _replace(self, key: str, old: str | None, new: str | None) -> bool:
        path = self._path(key)
        with lock_file(self._lock(path)):
            if self._value(path) != old:
                return False
            if new is None:
                self._remove(path)
            else:
                self._write(path, Document(key, new))
        return True

    def _find(self, prefix: str) -> Iterator[Document]:
        """Yield the documents whose keys begin with `prefix`, and remove expired ones."""
        for path in self._paths(prefix):
            try:
                document = _read(path)
            except msgspec.MsgspecError:
                logger.exception("the document in %s cannot be read; it is not listed", path)
                continue
            if document is None or not document.key.startswith(prefix):
                continue
            if self._is_expired(document):
                self._remove_expired(path)
            else:
                yield document

    def _paths(self, prefix: str) -> Iterator[Path]:
        root = self._folder.documents
        has_kind = ":" in prefix[len(self.prefix) :]
        directories = [self._path(prefix).parent] if has_kind else [*_children(root)]
        for directory in directories:
            yield from (path for path in _children(directory) if path.suffix == ".json")

    def _remove_expired(self, path: Path) -> None:
        with lock_file(self._lock(path)):
            # The document may have been set again in the meantime.
            document = _read(path)
            if document is not None and self._is_expired(document):
                self._folder.disk.remove(path)

    def _value(self, path: Path) -> str | None:
        document = _read(path)
        return None if document is None or self._is_expired(document) else document.value

    def _write(self, path: Path, document: Document) -> None:
        self._folder.disk.replace(path, msgspec.json.encode(document))

    def _remove(self, path: Path) -> None:
        if self._folder.disk.remove(path):
            self._folder.disk.sync_directory(path.parent)

    def _path(self, key: str) -> Path:
        kind = key[len(self.prefix) :].partition(":")[0]
        directory = self._folder.documents / safe_name(self.prefix + kind)
        return directory / f"{safe_name(key)}.json"

    def _lock(self, path: Path) -> Path:
        return self._folder.locks / f"document-{path.stem[-2:]}"

    def _is_expired(self, document: Document) -> bool:
        return document.expires_at is not None and document.expires_at <= self._now()

    def _now(self) -> int:
        return to_microseconds(self._clock.now())


def _read(path: Path) -> Document | None:
    try:
        return _decode(path.read_bytes())
    except FileNotFoundError:
        return None


def _children(directory: Path) -> list[Path]:
    return [*directory.iterdir()] if directory.is_dir() else []
