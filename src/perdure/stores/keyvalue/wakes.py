"""When runs want a worker: documents of one minute each, so that nobody reads the runs to know.

A line is written before the run it tells of, and says only where to look: one whose run has other
plans by now is harmless. One document lists the days that have lines, and a day lists its minutes
with how many documents each has.
"""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import NamedTuple

import msgspec

from perdure.stores.keyvalue.documents import Documents

_MINUTE = 60_000_000
_MINUTES_OF_DAY = 1_440
_LINES = 250
_DAYS = "perdure:wakes"


class Wake(NamedTuple):
    """A run that may want a worker at a time, and when that was written down; in microseconds."""

    at: int
    id: str
    workflow: str | None
    filed: int


class Found(NamedTuple):
    """A line, and where it stands."""

    wake: Wake
    minute: int
    part: int


_read_wakes = msgspec.json.Decoder(list[Wake]).decode
_read_days = msgspec.json.Decoder(list[int]).decode
_read_minutes = msgspec.json.Decoder(dict[int, int]).decode


class Wakes:
    """The lines."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    async def add(self, wakes: Iterable[Wake]) -> None:
        """Write lines down."""
        for minute, group in groupby(sorted(wakes, key=_home), key=_home):
            await self._add(minute, list(group))

    async def until(self, now: int) -> list[Found]:
        """Give the lines up to a time, earliest first."""
        last = now // _MINUTE
        days = [day for day in await self._days() if day <= last // _MINUTES_OF_DAY]
        places: list[tuple[int, int]] = []
        for text in await self._documents.read_many([_day_key(day) for day in days]):
            listed = _minutes(text)
            minutes = [minute for minute in sorted(listed) if minute <= last]
            places += [(minute, part) for minute in minutes for part in range(listed[minute])]
        texts = await self._documents.read_many([_part_key(*place) for place in places])
        found = [
            Found(wake, *place)
            for place, text in zip(places, texts, strict=True)
            for wake in _wakes(text)
            if wake.at <= now
        ]
        return sorted(found, key=lambda line: (line.wake.at, line.wake.id))

    async def drop(self, lines: Iterable[Found], now: int) -> None:
        """Take exactly these lines out; a past minute without any is forgotten."""
        delete: dict[tuple[int, int], set[Wake]] = {}
        for line in lines:
            delete.setdefault((line.minute, line.part), set()).add(line.wake)
        for place, wakes in delete.items():
            await self._documents.change(_part_key(*place), _without(wakes))
        for minute in {minute for minute, _ in delete}:
            # Lines are filed under the present or the future: nobody adds to a minute of long ago.
            if minute < now // _MINUTE - 1:
                await self._forget(minute, now)

    async def _add(self, minute: int, wakes: list[Wake]) -> None:
        day = minute // _MINUTES_OF_DAY
        parts = _minutes(await self._documents.read(_day_key(day))).get(minute, 1)
        left = wakes
        while True:
            more = _More(left)
            await self._documents.change(_part_key(minute, parts - 1), more)
            if not more.over:
                break
            left, parts = more.over, parts + 1
        # Only now, so that a minute that was forgotten meanwhile is listed again.
        await self._documents.change(_day_key(day), _with_minute(minute, parts))
        await self._documents.change(_DAYS, _with_day(day))

    async def _forget(self, minute: int, now: int) -> None:
        day = minute // _MINUTES_OF_DAY
        text = await self._documents.read(_day_key(day))
        parts = _minutes(text).get(minute, 0)
        if await self._holds(minute, parts):
            return
        await self._documents.change(_day_key(day), _without_minute(minute))
        if await self._holds(minute, parts + 1):
            await self._documents.change(_day_key(day), _with_minute(minute, parts + 1))
        elif day < now // _MINUTE // _MINUTES_OF_DAY and not await self._documents.read(
            _day_key(day)
        ):
            await self._documents.change(_DAYS, _without_day(day))

    async def _holds(self, minute: int, parts: int) -> bool:
        keys = [_part_key(minute, part) for part in range(parts)]
        return any(text is not None for text in await self._documents.read_many(keys))

    async def _days(self) -> list[int]:
        return _days_in(await self._documents.read(_DAYS))


class _More:
    """Adds lines to a document as far as there is room; `over` are those that are left."""

    def __init__(self, wakes: list[Wake]) -> None:
        self._wakes = wakes
        self.over: list[Wake] = []

    def __call__(self, text: str | None) -> str:
        lines = _wakes(text)
        room = max(_LINES - len(lines), 0)
        self.over = self._wakes[room:]
        return _text(lines + self._wakes[:room])


def _without(wakes: set[Wake]) -> Callable[[str | None], str | None]:
    def edit(text: str | None) -> str | None:
        left = [wake for wake in _wakes(text) if wake not in wakes]
        return _text(left) if left else None

    return edit


def _with_minute(minute: int, parts: int) -> Callable[[str | None], str | None]:
    def edit(text: str | None) -> str | None:
        minutes = _minutes(text)
        known = minutes.get(minute, 0)
        return text if known >= parts else _text({**minutes, minute: parts})

    return edit


def _without_minute(minute: int) -> Callable[[str | None], str | None]:
    def edit(text: str | None) -> str | None:
        minutes = _minutes(text)
        minutes.pop(minute, None)
        return _text(minutes) if minutes else None

    return edit


def _with_day(day: int) -> Callable[[str | None], str | None]:
    def edit(text: str | None) -> str | None:
        days = _days_in(text)
        return text if day in days else _text(sorted([*days, day]))

    return edit


def _without_day(day: int) -> Callable[[str | None], str | None]:
    def edit(text: str | None) -> str | None:
        days = [each for each in _days_in(text) if each != day]
        return _text(days) if days else None

    return edit


def _home(wake: Wake) -> int:
    # Never in the past, which others may be clearing away.
    return max(wake.at, wake.filed, 0) // _MINUTE


def _day_key(day: int) -> str:
    return f"{_DAYS}:{day}"


def _part_key(minute: int, part: int) -> str:
    return f"{_DAYS}:{minute // _MINUTES_OF_DAY}:{minute}:{part}"


def _wakes(text: str | None) -> list[Wake]:
    return [] if text is None else _read_wakes(text)


def _minutes(text: str | None) -> dict[int, int]:
    return {} if text is None else _read_minutes(text)


def _days_in(text: str | None) -> list[int]:
    return [] if text is None else _read_days(text)


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
