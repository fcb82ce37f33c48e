"""The types of steps: a step has the return type of its function."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, assert_type
from uuid import UUID

from perdure import Cron, Err, Limit, Ok, Result, Retry, Step, Timeout

tokens = Limit("tokens", 1000, per="1m")


@dataclass
class User:
    id: str


async def fetch(id: str) -> User:
    return User(id)


def load(id: str, times: int = 1) -> User:
    return User(id * times)


async def find(id: str) -> Result[User, str]:
    return Ok(User(id)) if id else Err("NOT_FOUND")


def look_up(id: str) -> Ok[User] | Err[str]:
    return Ok(User(id))


async def notify(user: User) -> None: ...


async def calls(step: Step) -> None:
    assert_type(await step("async", fetch, "1"), User)
    assert_type(await step("sync", load, "1"), User)
    assert_type(await step("sync, with a default", load, "1", 2), User)
    assert_type(await step("thunk", lambda: fetch("1")), User)
    assert_type(await step("sync thunk", lambda: load("1")), User)
    assert_type(await step("nothing", notify, User("1")), None)


async def results_are_unwrapped(step: Step) -> None:
    assert_type(await step("async", find, "1"), User)
    assert_type(await step("sync", look_up, "1"), User)
    assert_type(await step("thunk", lambda: find("1")), User)


async def options_do_not_change_the_type(step: Step) -> None:
    retry = Retry(3, backoff="linear", retry_if=lambda error: isinstance(error, OSError))
    user = await step(
        "all", fetch, "1", key="user:1", ttl="1h", retry=retry, timeout=Timeout(5), errors=[OSError]
    )
    assert_type(user, User)
    assert_type(await step("limited", fetch, "1", limit=tokens.cost(5)), User)
    assert_type(await step("limited", fetch, "1", limit=tokens), User)
    assert_type(await step("short", fetch, "1", retry=3, timeout="5s", returns=User), User)


async def waits(step: Step) -> None:
    assert_type(await step.sleep("nap", timedelta(days=1)), None)
    assert_type(await step.sleep("morning", Cron("0 9 * * *", tz="Europe/Berlin")), None)
    assert_type(await step.wait_for_event("typed", "approved", returns=User), User | None)
    assert_type(await step.wait_for_event("untyped", "approved", timeout="3d"), Any)
    user = await step.wait_for_event("default", "approved", timeout="3d", returns=User, default=0)
    assert_type(user, User | int)


async def many(step: Step) -> None:
    assert_type(await step.map("async", ["1", "2"], fetch), list[User])
    assert_type(await step.map("sync", ["1", "2"], load, concurrency=2), list[User])
    assert_type(await step.map("results", ["1", "2"], find), list[User])
    assert_type(await step.map("keys", [User("1")], notify, key=lambda user: user.id), list[None])
    assert_type(await step.map("options", "12", fetch, retry=3, timeout="5s"), list[User])


async def collected(step: Step) -> None:
    users = await step.map("async", ["1", "2"], fetch, on_error="collect")
    assert_type(users, list[Ok[User] | Err[Any]])
    users = await step.map("sync", ["1", "2"], load, on_error="collect")
    assert_type(users, list[Ok[User] | Err[Any]])
    assert_type(
        await step.map("results", ["1"], find, on_error="collect"), list[Ok[User] | Err[Any]]
    )
    assert_type(await step.map("raised", ["1"], find, on_error="raise"), list[User])


async def all_at_once(step: Step) -> None:
    user, text, none = await step.all(
        step("user", fetch, "1"), step("text", str.upper, "a"), step.sleep("nap", 1)
    )
    assert_type(user, User)
    assert_type(text, str)
    assert_type(none, None)
    assert_type(await step.all(fetch("1")), tuple[User])
    assert_type(await step.all(*[fetch("1"), fetch("2")]), tuple[User, ...])
    number = step("number", len, "abc")
    six = await step.all(fetch("1"), number, find("1"), number, number, notify(user))
    assert_type(six, tuple[User, int, Ok[User] | Err[str], int, int, None])
    assert_type(await step.all({"a": lambda: fetch("1"), "b": lambda: 2}), dict[str, Any])


async def races(step: Step) -> None:
    index, event = await step.race(
        "ship", step.wait_for_event("shipped", "shipped", returns=User), step.sleep("late", "3d")
    )
    assert_type(index, int)
    assert_type(event, User | None)
    winner = await step.race("three", step("a", fetch, "1"), step("b", len, "a"), notify(User("1")))
    assert_type(winner, tuple[int, User | int | None])
    assert_type(await step.race("many", *[fetch("1"), fetch("2")]), tuple[int, User])
    assert_type(await step.race("first", {"a": lambda: fetch("1")}), tuple[str, Any])


async def pay(cents: int, *, currency: str) -> User:
    return User(f"{cents} {currency}")


async def keyword_arguments(step: Step) -> None:
    assert_type(await step("pay", partial(pay, currency="EUR"), 42), User)
    assert_type(await step("load", partial(load, times=2), "1"), User)


async def attributes(step: Step) -> None:
    assert_type(step.run_id, str)
    assert_type(step.attempt, int)
    assert_type(step.idempotency_key, str)


class Connection:
    """The connection of a store."""


async def debit(connection: Connection, account: str, amount: int = 1) -> User:
    return User(account * amount)


async def count(connection: Connection) -> int:
    return 1


async def try_debit(connection: Connection, account: str) -> Result[User, str]:
    return Ok(User(account))


async def transactions(step: Step) -> None:
    assert_type(await step.transaction("debit", debit, "ana", 5), User)
    assert_type(await step.transaction("debit, by default", debit, "ana"), User)
    assert_type(await step.transaction("count", count, returns=int), int)
    assert_type(await step.transaction("result", try_debit, "ana"), User)


async def values_of_the_run(step: Step) -> None:
    assert_type(await step.now(), datetime)
    assert_type(await step.now("later"), datetime)
    assert_type(step.random(), float)
    assert_type(step.uuid(), UUID)
    assert_type(step.uuid("order"), UUID)
    assert_type(await step.sleep_until("opening", datetime.now(UTC)), None)
    step.tag(plan="pro", stage=None)
    step.report(progress=0.5)
    step.report(note="half way")
