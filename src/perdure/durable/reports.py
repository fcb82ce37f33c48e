"""Reports from inside steps, published in a document before the next entry is written.

No run depends on the document: it is written in the background, failures are logged at DEBUG, and
it is deleted when the run leaves memory. A killed process leaves it behind for at most a day.
"""

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from perdure import codec
from perdure.clock import Clock
from perdure.engine.tasks import cancel_and_wait, detached
from perdure.store import SearchStore
from perdure.validation import MAX_ID_LENGTH

logger = logging.getLogger(__name__)

_PREFIX = "report:"
_INTERVAL = timedelta(seconds=1)
_TTL = timedelta(days=1)


def report_key(run_id: str) -> str:
    """Return the key of the document with the latest report of a run's step."""
    if len(_PREFIX + run_id) > MAX_ID_LENGTH:
        run_id = hashlib.sha256(run_id.encode()).hexdigest()
    return _PREFIX + run_id


class ReportWriter:
    """Writes the latest report of one run to a document, at most once a second."""

    def __init__(self, run_id: str, store: SearchStore, clock: Clock) -> None:
        self._run_id = run_id
        self._store = store
        self._clock = clock
        self._latest: Mapping[str, Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_written = False

    def write(self, report: Mapping[str, Any]) -> None:
        """Write a report soon, in place of one that has not been written yet."""
        self._latest = report
        if self._task is None or self._task.done():
            self._task = detached(self._write_latest())

    async def _write_latest(self) -> None:
        # Sleeping after each write limits the rate of the next one.
        while (report := self._latest) is not None:
            self._latest = None
            self._is_written = True
            try:
                data = codec.dumps(report).decode()
                await self._store.documents.set(report_key(self._run_id), data, ttl=_TTL)
            except Exception as error:  # noqa: BLE001  # no store error may harm a run
                logger.debug("the report of run %r was not written: %r", self._run_id, error)
            await self._clock.sleep(_INTERVAL)

    async def close(self) -> None:
        """Stop writing, and delete the document: the run itself now contains the report."""
        if self._task is not None:
            await cancel_and_wait([self._task])
        if self._is_written:
            try:
                await self._store.documents.delete(report_key(self._run_id))
            except Exception as error:  # noqa: BLE001  # as above: it expires
                logger.debug("the report of run %r was not deleted: %r", self._run_id, error)
