"""Apply one verb to every run that a query matches.

The operation is a document: its query, its verb, and its progress. The process that works on it
replaces the document at every step, with compare-and-set, so that at most one process does; if it
dies, another one can continue. The ids of a page are written before its first run is changed,
because a run that was being changed when the process died may no longer match the query. Each run
is changed once: a request that was already applied is recognized by its id.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import msgspec
from msgspec.structs import replace

from perdure.clock import Clock
from perdure.durable.owners import is_gone
from perdure.engine.tasks import detached
from perdure.errors import AppliedBefore, InvalidArgument, PerdureError, Refused, StoreError
from perdure.insights.bulk import SILENT_AFTER
from perdure.insights.insights import Insights
from perdure.insights.model import BulkProgress, Tally
from perdure.insights.query import ParsedQuery, parse_query
from perdure.keyvalue import Documents
from perdure.runtime.requests import Request, Verb
from perdure.store import SearchStore
from perdure.validation import check_flag

BulkVerb: TypeAlias = Literal[
    "cancel",
    "complete_step",
    "delete",
    "fail_step",
    "pause",
    "retry",
    "retry_step",
    "rewind",
    "signal",
    "skip_step",
    "unpause",
    "wake",
]

KEPT_FOR: Final = timedelta(days=90)

_PAGE = 100
_TICK = timedelta(microseconds=1)
_AT_ONCE = 8
_SAVE_EVERY = 1.0
_MAX_REASONS = 20

Do: TypeAlias = Callable[[str, str], Awaitable[None]]
"""Applies the verb to a run, with a request id that is the same every time."""


class BulkDocument(BulkProgress, frozen=True):
    """The stored form of a bulk operation: its progress and what is needed to continue.

    `arguments` are the arguments of the verb. `page` are the runs that are being changed, and
    `cursor` is where the search continues after them, `None` at its end. `before` are the numbers
    of changed runs and of refusals before this page. `process` is the owner id of the process that
    works on it.
    """

    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    page: tuple[str, ...] = ()
    cursor: str | None = ""
    before: tuple[int, int] = (0, 0)
    process: str = ""


class DocumentChanged(Exception):
    """Another process changed the document in the meantime."""


class Bulk:
    """A bulk operation that this process works on."""

    def __init__(
        self, store: SearchStore, insights: Insights, clock: Clock, document: BulkDocument, do: Do
    ) -> None:
        self._documents = store.documents
        self._insights = insights
        self._clock = clock
        self._document = document
        self._text: str | None = None
        self._do = do
        self._reasons: list[str] = list(document.reasons)
        self._done, self._refused_count = document.before

    async def run(self, text: str | None) -> AsyncGenerator[BulkProgress]:
        """Work until every matching run was handled, and yield the progress about once a second.

        `stored` is the document as it was read, or `None` if there is none yet.
        """
        self._text = text
        try:
            yield await self._save()
            async for progress in self._work():
                yield progress
            while (cursor := self._document.cursor) is not None:
                page = await self._insights.runs(self._query(), _PAGE, cursor or None)
                yield await self._save(
                    page=tuple(run.id for run in page.runs),
                    cursor=page.cursor,
                    before=(self._done, self._refused_count),
                )
                async for progress in self._work():
                    yield progress
            yield await self._finish()
        except DocumentChanged:
            document, _ = await read_document(self._documents, self._document.id)
            yield document
        except BaseException:
            await self._interrupt()
            raise

    async def _work(self) -> AsyncGenerator[BulkProgress]:
        """Change the runs of the page."""
        page, saved_at = self._document.page, self._clock.monotonic()
        size = _AT_ONCE if self._document.rate is None else 1
        for first in range(0, len(page), size):
            began = self._clock.monotonic()
            await self._change_all(page[first : first + size])
            if self._clock.monotonic() - saved_at >= _SAVE_EVERY:
                saved_at = self._clock.monotonic()
                yield await self._save()
            if self._document.rate is not None:
                await self._clock.sleep(1 / self._document.rate - self._clock.monotonic() + began)

    async def _change_all(self, run_ids: tuple[str, ...]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for run_id in run_ids:
                    tasks.create_task(self._change(run_id))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _change(self, run_id: str) -> None:
        digest = hashlib.sha256(run_id.encode()).hexdigest()[:16]
        try:
            await self._do(run_id, f"{self._document.id}-{digest}")
        except StoreError:
            raise
        except AppliedBefore:
            self._done += 1
        except PerdureError as error:
            self._refused_count += 1
            reason = error.reason if isinstance(error, Refused) else str(error)
            if (line := f"{run_id}: {reason}") not in self._reasons:
                self._reasons = [line, *self._reasons][:_MAX_REASONS]
        else:
            self._done += 1

    def _query(self) -> ParsedQuery:
        """Return the query, excluding runs that were updated since the operation began."""
        began = self._document.began_at
        query = parse_query(self._document.query, began)
        until = began + _TICK
        if query.index.until is not None:
            until = min(until, query.index.until)
        return replace(query, index=replace(query.index, until=until))

    async def _save(self, **changes: Any) -> BulkProgress:
        """Replace the document; raise `DocumentChanged` if another process has changed it."""
        document = replace(
            self._document,
            done=self._done,
            refused=self._refused_count,
            reasons=tuple(self._reasons),
            seen_at=self._clock.now(),
            **changes,
        )
        text = msgspec.json.encode(document).decode()
        key = key_of(document.id)
        if not await self._documents.replace(key, self._text, text):
            raise DocumentChanged
        self._text, self._document = text, document
        return document

    async def _finish(self) -> BulkProgress:
        progress = await self._save(state="done", ended_at=self._clock.now())
        if self._text is not None:
            await self._documents.set(key_of(progress.id), self._text, ttl=KEPT_FOR)
        return progress

    async def _interrupt(self) -> None:
        try:
            await self._save(state="interrupted")
        except (DocumentChanged, StoreError):
            # Its timestamp shows that the process is gone.
            return


_background: set[asyncio.Task[None]] = set()
"""Operations that continue without a caller; the event loop itself keeps no reference to a task."""


async def begin(progress: AsyncGenerator[BulkProgress]) -> BulkProgress | None:
    """Return the first report of an operation, and continue in the background.

    If this process ends first, the operation is shown as interrupted and can be resumed.
    """
    first = await anext(progress, None)

    async def finish() -> None:
        async for _ in progress:
            pass

    task = detached(finish())
    _background.add(task)
    task.add_done_callback(_background.discard)
    return first


def key_of(id: str) -> str:
    """Return the key of an operation's document."""
    return f"bulk:{id}"


async def read_document(documents: Documents, id: str) -> tuple[BulkDocument, str]:
    """Return a stored operation, decoded and as text; raise `InvalidArgument` if it is missing."""
    text = await documents.get(key_of(id))
    if text is None:
        raise InvalidArgument("bulk", id, "the id of a bulk operation")
    return msgspec.json.decode(text, type=BulkDocument), text


def can_resume(document: BulkDocument, now: datetime) -> bool:
    """Return whether an operation has work left, and no process is working on it."""
    if document.state == "running":
        is_silent = document.seen_at is None or now - document.seen_at > SILENT_AFTER
        return is_silent or is_gone(document.process)
    return document.state != "done"


async def stop(documents: Documents, id: str) -> BulkProgress:
    """Mark an operation as stopped; its process notices when it writes its progress."""
    while True:
        document, text = await read_document(documents, id)
        if document.state != "running":
            return document
        stopped_document = replace(document, state="stopped")
        if await documents.replace(
            key_of(id), text, msgspec.json.encode(stopped_document).decode()
        ):
            return stopped_document


def check_verb(verb: object) -> BulkVerb:
    """Return the verb, or raise `InvalidArgument` if it does not apply to many runs."""
    if verb not in get_args(BulkVerb):
        raise InvalidArgument("verb", verb, f"one of {', '.join(get_args(BulkVerb))}")
    return cast(BulkVerb, verb)


_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "signal": ("event", "payload"),
    "complete_step": ("step", "value"),
    "fail_step": ("step", "error"),
    "retry_step": ("step",),
    "skip_step": ("step",),
    "rewind": ("at",),
    "wake": ("wait",),
}
"""The arguments of each verb: the request's `step` and its `value`."""


def request_of(verb: BulkVerb, arguments: Mapping[str, Any]) -> Request:
    """Return the request for a verb with these arguments, without the operator."""
    if verb == "cancel" and set(arguments) <= {"undo"}:
        return Request("", verb, undo=check_flag(arguments.get("undo", True), "undo"))
    names = _ARGUMENTS.get(verb, ())
    if unknown := set(arguments) - set(names):
        expected = f"arguments of {verb}: {', '.join(names) or 'it has none'}"
        raise InvalidArgument("arguments", sorted(unknown), expected)
    step = arguments.get(names[0]) if names else ""
    if verb != "wake" and names and not step:
        raise InvalidArgument(names[0], step, "a non-empty string")
    value = arguments.get(names[1]) if len(names) > 1 else None
    return Request("", cast(Verb, verb), step=step or "", value=value)


async def count_matches(insights: Insights, query: ParsedQuery, limit: int | None) -> Tally:
    """Return how many runs match, counting at most `limit`."""
    count, cursor = 0, None
    while True:
        page = await insights.runs(query, _PAGE * 10, cursor)
        count, cursor = count + len(page.runs), page.cursor
        if limit is not None and count > limit:
            return Tally(limit, capped=True)
        if cursor is None:
            return Tally(count)
