"""A store in a directory: a file for each run's snapshot and one for its journal."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar, cast

import msgspec

from perdure.clock import Clock, SystemClock
from perdure.errors import InvalidArgument, StoreCorrupted, StoreError
from perdure.store import MAX_VALUE_SIZE, Capabilities
from perdure.stores._scan import Answer, EmbeddedStore
from perdure.stores.file.disk import Disk
from perdure.stores.file.leases import FileDesk
from perdure.validation import check_prefix

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 4


class FileStore(EmbeddedStore):
    """Keeps runs as files in a directory, which several processes of one machine may share.

    With `durability="full"` an answered write outlasts a loss of power, with `"normal"` only the
    end of the process. Locks are held during an operation, and end with the process.

        async with FileStore("./workflows") as store:
            await store.save("checkout-123", snapshot)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        prefix: str = "",
        durability: Literal["full", "normal"] = "full",
        clock: Clock = SystemClock(),
        max_value_size: int = MAX_VALUE_SIZE,
    ) -> None:
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise InvalidArgument("directory", directory, "a path")
        if durability not in ("full", "normal"):
            raise InvalidArgument("durability", durability, '"full" or "normal"')
        capabilities = Capabilities(
            journal=True,
            lease="atomic",
            schedule=True,
            inbox=True,
            maintenance=True,
            shared="machine",
            survives="power_loss" if durability == "full" else "process_crash",
            max_value_size=max_value_size,
        )
        self._directory = Path(directory)
        disk = Disk(sync=durability == "full")
        self._files = FileDesk(self._directory, disk, check_prefix(prefix))
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="perdure-file")
        self._process = 0
        super().__init__(self._files, clock, capabilities)

    async def close(self) -> None:
        """Wait for what is being written and refuse further calls; the files stay."""
        if self._closed:
            return
        self._closed = True
        if self._process in (0, os.getpid()):
            await asyncio.to_thread(self._threads.shutdown)
            await asyncio.to_thread(self._files.close)

    async def _call(self, verb: Callable[P, Answer[T]], /, *args: P.args, **options: P.kwargs) -> T:
        self._check_process()
        # In threads of its own: the loop never waits for a disk, nor the disk for the user's steps.
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._threads, lambda: self._ask(verb, *args, **options))
        return cast("T", await answer)

    def _check_process(self) -> None:
        if not self._process:
            self._process = os.getpid()
        if self._process != os.getpid():
            raise StoreError(
                f"the store in {self._directory} was used before this process was forked, and its "
                "threads do not survive that; open a store in each process"
            )

    def _ask(self, verb: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        try:
            self._files.open()
            return verb(*args, **options)
        except OSError as error:
            raise StoreError(f"the files could not be written or read: {error}") from error
        except msgspec.MsgspecError as error:
            raise StoreCorrupted(f"a file of the store is damaged: {error}") from error
