"""Runs as files in a directory, read and written in threads."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from perdure.errors import StoreCorrupted, StoreError, StoreUnavailable
from perdure.stores.file.catalog import Catalog
from perdure.stores.file.disk import Disk, FlushFailed
from perdure.stores.file.folder import Folder
from perdure.stores.file.layout import FileHead
from perdure.stores.file.run import FileRun
from perdure.stores.file.wakes import FileWakes

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

_DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_VERB_THREADS = 4
_RUN_THREADS = 8


class FileStorage:
    """A `Storage` in a directory, which several processes of one machine may share.

    Locks are always taken in the order gate, run, epoch, and are released when the process ends.
    """

    read_ahead = 1

    def __init__(self, root: Path, disk: Disk) -> None:
        self.folder = Folder(root, disk)
        self.wakes = FileWakes(self.folder)
        self._catalog = Catalog(self.folder)
        self._is_open = False
        self._opening = threading.Lock()
        # Dedicated threads, so that the event loop never waits for the disk, nor the disk for the
        # user's steps. Operations wait for the work on their runs, so the two need separate pools.
        self._verbs = ThreadPoolExecutor(_VERB_THREADS, thread_name_prefix="perdure-file")
        self._runs = ThreadPoolExecutor(_RUN_THREADS, thread_name_prefix="perdure-file-run")
        self._process = 0

    async def open(self) -> None:
        """Do nothing: `execute` opens the directory before the first operation."""

    def run(self, id: str) -> FileRun:
        return FileRun(self.folder, id)

    async def heads(self, ids: Sequence[str]) -> list[FileHead | StoreCorrupted | None]:
        return [self._head(id) for id in ids]

    def _head(self, id: str) -> FileHead | StoreCorrupted | None:
        try:
            return self.run(id).read_head()
        except StoreCorrupted as error:
            return error

    async def all_heads(self, prefix: str) -> list[FileHead]:
        return [head for head in self._catalog.heads() if head.id.startswith(prefix)]

    async def gather(
        self, work: Callable[[T], Coroutine[Any, Any, R]], items: Sequence[T]
    ) -> list[R]:
        """Process several items in threads: a disk syncs many files in the time of one."""
        futures = [self._runs.submit(lambda item: _finish(work(item)), item) for item in items]
        # Even after a failure: no work may continue after the caller has opened the gate.
        wait(futures)
        return [future.result() for future in futures]

    async def execute(
        self, verb: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **options: P.kwargs
    ) -> R:
        """Run an operation in a thread, and translate errors of the file system."""
        self._check_process()
        call = partial(self._execute, verb, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._verbs, call)

    async def close(self) -> None:
        """Wait for the operations in progress, and end the threads."""
        if self._process in (0, os.getpid()):
            await asyncio.to_thread(self._verbs.shutdown)
            await asyncio.to_thread(self._runs.shutdown)

    def _check_process(self) -> None:
        if not self._process:
            self._process = os.getpid()
        if self._process != os.getpid():
            raise StoreError(
                f"the store in {self.folder.root} was used before this process was forked, and "
                "threads do not survive a fork; open a store in each process"
            )

    def _execute(
        self, verb: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **options: P.kwargs
    ) -> R:
        try:
            self._open()
            return _finish(verb(*args, **options))
        except OSError as error:
            raise _translate(error, self.folder.root) from error
        except msgspec.MsgspecError as error:
            raise StoreCorrupted(f"a file of the store is damaged: {error}") from error

    def _open(self) -> None:
        with self._opening:
            if not self._is_open:
                self.folder.create()
                self._is_open = True


def _translate(error: OSError, root: Path) -> StoreError:
    if error.errno in _DISK_FAILURES and not isinstance(error, FlushFailed):
        return StoreUnavailable(f"{root}: the disk failed ({error}); check its space and errors")
    return StoreError(f"{root}: the files could not be written or read: {error}")


def _finish(work: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that never suspends, and return its result."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: R = stop.value
        return result
    work.close()
    raise RuntimeError("an operation of the file store suspended")
