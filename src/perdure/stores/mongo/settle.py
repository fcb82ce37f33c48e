"""Runs that their owners put to rest or send away by memory, in as few statements as can be."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from perdure.stores.mongo.batch import Turn
from perdure.stores.mongo.documents import body_of, room_of
from perdure.stores.mongo.inbox import awaited
from perdure.stores.mongo.schema import COMMAND_ROOM, Collections
from perdure.stores.mongo.updates import Document, are_running, rest_fields, resting

# The server looks through all of a statement's runs for each of them.
_MOST = 500


class Lying(NamedTuple):
    """What a rest writes, and how many letters the run has got if that matters."""

    turn: Turn
    fields: Document
    counts: bool
    letters: int | None


def _lying_by_memory(turn: Turn) -> Lying:
    # What comes before the rest in the same call is in its snapshot, and is not written by itself.
    entry, rest, position = turn.last, turn.last.rest, turn.position
    assert rest is not None
    assert position is not None
    consumes = turn.consumes()
    due = awaited(position.mail, consumes, rest.awaits)
    body = body_of(entry.data, f"the snapshot of run {entry.id!r}")
    fields = rest_fields(entry, rest, body, consumes, due=due)
    return Lying(turn, fields, bool(rest.awaits) and not due, position.letters or None)


def _portions(lying: Iterable[Lying]) -> Iterator[list[Lying]]:
    """Give them in parts that one command has room for."""
    part: list[Lying] = []
    room = COMMAND_ROOM
    for one in lying:
        weight = room_of(one.fields)
        if part and (len(part) == _MOST or weight > room):
            yield part
            part, room = [], COMMAND_ROOM
        part.append(one)
        room -= weight
    if part:
        yield part


async def lay_down(db: Collections, turns: Iterable[Turn]) -> int:
    """Put runs to rest by memory; give how many of them were found."""
    lying = [_lying_by_memory(turn) for turn in turns]
    done = 0
    for counts in (False, True):
        for some in _portions([one for one in lying if one.counts is counts]):
            # One statement for all: as many of their own would take the server far longer.
            epochs = {one.turn.key: one.turn.last.epoch for one in some}
            letters = {one.turn.key: one.letters for one in some} if counts else {}
            pipeline = resting({one.turn.key: one.fields for one in some})
            result = await db.runs.update_many(are_running(epochs, letters), pipeline)
            done += result.matched_count
    return done


async def remove(db: Collections, epochs: Mapping[str, int]) -> tuple[int, bool]:
    """Delete runs of these epochs; return how many, and whether some may have had letters."""
    # One statement for all: as many of their own would take the server far longer.
    mine = are_running(epochs, {})
    delete = (await db.runs.delete_many({**mine, "letters": None})).deleted_count
    if delete == len(epochs):
        return delete, False
    return delete + (await db.runs.delete_many(mine)).deleted_count, True
