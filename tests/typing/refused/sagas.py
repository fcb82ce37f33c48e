"""Undos that do not take the value of their step."""

from typing import Any

from perdure import Step, durable


class Room:
    pass


async def book(name: str) -> Room:
    return Room()


async def debit(connection: Any, name: str) -> Room:
    return Room()


async def cancel_seat(seat: int) -> None: ...


async def undos(step: Step) -> None:
    await step("another type", book, "x", undo=cancel_seat)  # refused
    await step("a value", book, "x", undo=5)  # refused
    await step.transaction("another type", debit, "x", undo=cancel_seat)  # refused
    await step.map("another type", ["x"], book, undo=cancel_seat)  # refused
    step.saga("a duration", undo_retry="5s")  # refused


@durable.step(undo=cancel_seat)  # refused
async def reserve(name: str) -> Room:
    return Room()
