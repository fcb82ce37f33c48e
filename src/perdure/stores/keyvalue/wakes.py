"""Wake lines in documents of one minute each, for each queue.

For each queue, one document lists the days that have lines, and one document per day lists its
minutes and how many documents each has.
"""

from collections.abc import Collection, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeVar

import msgspec

from perdure.filenames import safe_name
from perdure.stores._documents.records import Wake
from perdure.stores._documents.storage import Accepts, Plan
from perdure.stores.keyvalue.documents import Documents, concurrently
from perdure.stores.keyvalue.layout import editing, encode
from perdure.stores.keyvalue.queues import QueueNames

T = TypeVar("T")

_MINUTE = 60_000_000
_MINUTES_OF_DAY = 1_440
_LINES = 250
# A line is written before its run, so a line that is not true (yet) is kept for this long.
_GRACE = timedelta(minutes=1) // timedelta(microseconds=1)


class Line(NamedTuple):
    """A wake line, and when it was written. Lines of layout 1 have no version."""

    at: int
    id: str
    workflow: str | None
    written_at: int
    version: int = 0


class LocatedLine(NamedTuple):
    """A wake line and the document that contains it."""

    line: Line
    minute: int
    part: int


class Contents(NamedTuple):
    """Wake lines, earliest first, and past minutes that are listed but have none."""

    lines: list[LocatedLine]
    empty: set[int]


_decode_lines = msgspec.json.Decoder(list[Line]).decode
_decode_days = msgspec.json.Decoder(list[int]).decode
_decode_minutes = msgspec.json.Decoder(dict[int, int]).decode


class KeyValueWakes:
    """`Wakes` in a key-value store."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._names = QueueNames(documents)

    def gate(self) -> AbstractAsyncContextManager[None]:
        """Do nothing: lines are kept for at least a minute after they are written."""
        return nullcontext()

    async def add(self, wakes: Iterable[Wake], now: int) -> None:
        by_queue: dict[str, list[Line]] = {}
        for wake in wakes:
            line = Line(wake.at, wake.id, wake.workflow, now, wake.version)
            by_queue.setdefault(wake.queue, []).append(line)
        await concurrently(self._add, [*by_queue.items()])

    async def _add(self, lines: tuple[str, list[Line]]) -> None:
        queue, new = lines
        await self.lines(queue).add(new)
        # After the lines, so that a queue whose name was removed in the meantime is listed again.
        if queue:
            await self._names.add(queue)

    def scan(self, queue: str, until: int, now: int, accepts: Accepts) -> "KeyValueScan":
        return KeyValueScan(self, queue, until, now, accepts)

    async def queues(self) -> Collection[str]:
        return await self._names.all()

    def lines(self, queue: str) -> "QueueLines":
        """Return the lines of a queue."""
        return QueueLines(self._documents, queue)

    async def remove(self, queue: str, contents: Contents, now: int) -> None:
        """Remove exactly these lines of a queue, and the queue if it has no others."""
        remaining = self.lines(queue)
        if await remaining.remove(contents, now) and queue:
            await self._names.remove(queue, remaining.exist)


class QueueLines:
    """The wake lines of one queue."""

    def __init__(self, documents: Documents, queue: str) -> None:
        self._documents = documents
        self._root = f"perdure:queue:{safe_name(queue)}" if queue else "perdure:wakes"

    async def add(self, lines: Iterable[Line]) -> None:
        """Write lines."""
        for minute, group in groupby(sorted(lines, key=_minute), key=_minute):
            await self._add(minute, list(group))

    async def exist(self) -> bool:
        """Return whether there may be any lines."""
        return await self._documents.read(self._root) is not None

    async def read(self, until: int, now: int) -> Contents:
        """Read the lines up to a time."""
        # A line with a time in the past is stored in the minute when it was written.
        places = await self._places(max(until, now) // _MINUTE)
        texts = await self._documents.read_many([self._part_key(*place) for place in places])
        documents = [*zip(places, texts, strict=True)]
        lines = [
            LocatedLine(line, *place)
            for place, text in documents
            for line in _lines(text)
            if line.at <= until
        ]
        lines.sort(key=lambda each: (each.line.at, each.line.id))
        past_minutes = {minute for minute, _ in places if _is_past(minute, now)}
        return Contents(lines, past_minutes - {minute for (minute, _), text in documents if text})

    async def _places(self, last: int) -> list[tuple[int, int]]:
        """Return the documents up to a minute, each as its minute and number."""
        days = [day for day in await self._days() if day <= last // _MINUTES_OF_DAY]
        places: list[tuple[int, int]] = []
        for text in await self._documents.read_many([self._day_key(day) for day in days]):
            counts = _minutes(text)
            minutes = [minute for minute in sorted(counts) if minute <= last]
            places += [(minute, part) for minute in minutes for part in range(counts[minute])]
        return places

    async def remove(self, contents: Contents, now: int) -> bool:
        """Remove exactly these lines; return whether the last day was removed as well.

        A past minute without lines is removed from its day.
        """
        by_document: dict[tuple[int, int], set[Line]] = {}
        for line, minute, part in contents.lines:
            by_document.setdefault((minute, part), set()).add(line)
        for place, lines in by_document.items():
            edit = editing(_lines, partial(_without, lines))
            await self._documents.change(self._part_key(*place), edit)
        is_day_removed = False
        for minute in contents.empty | {minute for minute, _ in by_document}:
            if _is_past(minute, now):
                is_day_removed |= await self._remove_minute(minute, now)
        return is_day_removed and not await self.exist()

    async def _add(self, minute: int, lines: list[Line]) -> None:
        day = minute // _MINUTES_OF_DAY
        parts = _minutes(await self._documents.read(self._day_key(day))).get(minute, 1)
        while True:
            fill = _Fill(lines)
            await self._documents.change(self._part_key(minute, parts - 1), fill)
            if not fill.excess:
                break
            lines, parts = fill.excess, parts + 1
        # After the lines, so that a minute that was removed in the meantime is listed again.
        await self._set_parts(minute, parts)
        await self._documents.change(
            self._root, editing(_day_list, lambda days: sorted({*days, day}))
        )

    async def _set_parts(self, minute: int, parts: int) -> None:
        edit = editing(
            _minutes, lambda counts: counts | {minute: max(counts.get(minute, 0), parts)}
        )
        await self._documents.change(self._day_key(minute // _MINUTES_OF_DAY), edit)

    async def _remove_minute(self, minute: int, now: int) -> bool:
        """Remove a minute from its day if it has no lines; return whether the day was removed."""
        day = minute // _MINUTES_OF_DAY
        parts = _minutes(await self._documents.read(self._day_key(day))).get(minute, 0)
        if await self._has_lines(minute, parts):
            return False
        await self._documents.change(
            self._day_key(day),
            editing(_minutes, lambda counts: {m: n for m, n in counts.items() if m != minute}),
        )
        is_past = day < now // _MINUTE // _MINUTES_OF_DAY
        if await self._has_lines(minute, parts + 1):
            await self._set_parts(minute, parts + 1)
        elif is_past and not await self._documents.read(self._day_key(day)):
            await self._documents.change(self._root, editing(_day_list, partial(_without, {day})))
            return True
        return False

    async def _has_lines(self, minute: int, parts: int) -> bool:
        keys = [self._part_key(minute, part) for part in range(parts)]
        return any(text is not None for text in await self._documents.read_many(keys))

    async def _days(self) -> list[int]:
        return _day_list(await self._documents.read(self._root))

    def _day_key(self, day: int) -> str:
        return f"{self._root}:{day}"

    def _part_key(self, minute: int, part: int) -> str:
        return f"{self._root}:{minute // _MINUTES_OF_DAY}:{minute}:{part}"


class KeyValueScan:
    """A `Scan` that removes exactly the lines that it found out of date."""

    def __init__(
        self, wakes: KeyValueWakes, queue: str, until: int, now: int, accepts: Accepts
    ) -> None:
        self._wakes = wakes
        self._queue = queue
        self._until = until
        self._now = now
        self._accepts = accepts
        self._unread: list[Wake] | None = None
        self._lines: dict[str, list[LocatedLine]] = {}
        self._empty_minutes: set[int] = set()
        self._claimed_ids: set[str] = set()
        self._outdated: dict[str, Wake | None] = {}

    async def next(self, count: int) -> list[Wake]:
        if self._unread is None:
            self._unread = await self._read()
        lines, self._unread = self._unread[:count], self._unread[count:]
        return lines

    async def _read(self) -> list[Wake]:
        wakes: list[Wake] = []
        lines, self._empty_minutes = await self._wakes.lines(self._queue).read(
            self._until, self._now
        )
        for located_line in lines:
            line = located_line.line
            self._lines.setdefault(line.id, []).append(located_line)
            wake = Wake(line.at, line.id, line.workflow, self._queue, line.version)
            if self._accepts(wake):
                wakes.append(wake)
        return wakes

    def mark_claimed(self, id: str) -> None:
        self._claimed_ids.add(id)
        self._outdated.pop(id, None)

    def mark_outdated(self, id: str, wake: Wake | None) -> None:
        if all(each.line.written_at + _GRACE < self._now for each in self._lines[id]):
            self._outdated[id] = wake

    async def tidy(self, plan: Plan, now: int) -> None:
        """Remove outdated lines, after writing new ones for postponed runs."""
        await self._wakes.add([wake for wake in self._outdated.values() if wake], now)
        lines = [line for id in [*self._claimed_ids, *self._outdated] for line in self._lines[id]]
        if lines or self._empty_minutes:
            await self._wakes.remove(self._queue, Contents(lines, self._empty_minutes), now)


class _Fill:
    """Adds lines to a document while there is room; the rest end up in `excess`."""

    def __init__(self, lines: list[Line]) -> None:
        self._new = lines
        self.excess: list[Line] = []

    def __call__(self, text: str | None) -> str:
        lines = _lines(text)
        room = max(_LINES - len(lines), 0)
        self.excess = self._new[room:]
        return encode(lines + self._new[:room])


def _without(to_remove: set[T], items: list[T]) -> list[T]:
    return [item for item in items if item not in to_remove]


def _is_past(minute: int, now: int) -> bool:
    """Return whether a minute is over: lines are written only to the current or a later minute."""
    return minute < now // _MINUTE - 1


def _minute(line: Line) -> int:
    # Never in the past, where other processes may be removing lines.
    return max(line.at, line.written_at, 0) // _MINUTE


def _lines(text: str | None) -> list[Line]:
    return [] if text is None else _decode_lines(text)


def _minutes(text: str | None) -> dict[int, int]:
    return {} if text is None else _decode_minutes(text)


def _day_list(text: str | None) -> list[int]:
    return [] if text is None else _decode_days(text)
