"""A store in a directory, with one file for each run's snapshot and one for its journal."""

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from perdure.clock import Clock, SystemClock, check_clock
from perdure.errors import InvalidArgument
from perdure.store import MAX_VALUE_SIZE, Capabilities
from perdure.stores._documents.backend import DocumentBackend
from perdure.stores._durability import Durability, check_durability, survives
from perdure.stores._keyvalue import scope_of
from perdure.stores._shell import NotifyShell
from perdure.stores._watching import Notifications
from perdure.stores.file.disk import Disk
from perdure.stores.file.documents import FileDocuments
from perdure.stores.file.layout import FileHead
from perdure.stores.file.storage import FileStorage
from perdure.validation import check_prefix


class FileBackend(DocumentBackend[FileHead]):
    """A backend in a directory, which is watched for changes by other processes."""

    def __init__(
        self, storage: FileStorage, documents: FileDocuments, prefix: str, clock: Clock
    ) -> None:
        super().__init__(storage, documents, prefix, clock)
        self._notifications = Notifications(storage.folder.notifications.watching)

    async def notifications(self) -> AsyncGenerator[None]:
        async with aclosing(self._notifications.listen()) as notifications:
            async for notification in notifications:
                yield notification

    async def close(self) -> None:
        await self._notifications.close()
        await super().close()


class FileStore(NotifyShell[FileBackend]):
    """Keeps runs as files in a directory, which several processes of one machine may share.

    With `durability="full"` an acknowledged write survives a power loss; with `"normal"` it only
    survives a crash of the process. Locks are held during an operation, and are released when the
    process ends.

    Workers notice within about 40 ms when another process makes a run due. They find a run by
    polling only if its sleep ended, or if a process died between its write and the notification.

        async with FileStore("./workflows") as store:
            await store.save("checkout-123", snapshot)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        prefix: str = "",
        durability: Durability = "full",
        clock: Clock = SystemClock(),
        max_value_size: int = MAX_VALUE_SIZE,
    ) -> None:
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise InvalidArgument("directory", directory, "a path")
        check_durability(durability)
        capabilities = Capabilities(
            journal=True,
            lease="atomic",
            schedule=True,
            queues=True,
            inbox=True,
            notify=True,
            maintenance=True,
            search=True,
            shared="machine",
            survives=survives(durability),
            max_value_size=max_value_size,
        )
        storage = FileStorage(Path(directory), Disk(sync=durability == "full"))
        documents = FileDocuments(storage, check_clock(clock), scope_of(check_prefix(prefix)))
        backend = FileBackend(storage, documents, prefix, clock)
        super().__init__(backend, "file", capabilities, any_loop=True)
