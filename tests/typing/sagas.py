"""The types of undos: each takes the value of its step."""

from typing import Any, assert_type

from perdure import Ok, Result, Retry, Runtime, Step, durable
from perdure.runtime.run import RollbackInfo


class Room:
    id = "7"


async def book(name: str) -> Room:
    return Room()


def book_now(name: str) -> Room:
    return Room()


async def try_to_book(name: str) -> Result[Room, str]:
    return Ok(Room())


async def cancel(room: Room) -> None: ...


async def release(id: str) -> None: ...


def cancel_now(room: Room) -> bool:
    return True


async def debit(connection: Any, name: str) -> Room:
    return Room()


async def undos(step: Step) -> None:
    assert_type(await step("a", book, "x", undo=cancel), Room)
    assert_type(await step("b", book_now, "x", undo=cancel_now), Room)
    assert_type(await step("c", try_to_book, "x", undo=cancel), Room)
    assert_type(await step("d", book, "x", undo=None, retry=Retry(2)), Room)
    assert_type(await step("e", book, "x", undo=lambda room: release(room.id)), Room)
    assert_type(await step.transaction("f", debit, "x", undo=cancel), Room)
    assert_type(await step.map("g", ["x"], book, undo=cancel), list[Room])
    async with step.saga("booking", undo_retry=Retry(5)) as scope:
        assert_type(scope, None)


@durable.step(undo=cancel)
async def reserve(name: str, *, nights: int) -> Room:
    return Room()


async def decorated() -> None:
    assert_type(await reserve("x", nights=2), Room)


async def clients(runtime: Runtime) -> None:
    run = await runtime.cancel("x", undo=False, wait=False)
    assert_type(run.rollback, RollbackInfo | None)
