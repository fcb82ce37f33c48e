"""Crashes between any two writes of a verb, and what must be stored afterwards.

For stores whose verbs consist of several writes, of files or of keys.
"""

from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

from perdure.errors import StoreError
from perdure.store import (
    Delivery,
    Entry,
    Grant,
    LeaseRequest,
    NewRun,
    Rest,
    SupportedVersions,
    Verdict,
)
from perdure.testing.clock import TestClock
from perdure.testing.conformance.harness import FullStore, send_one
from perdure.testing.conformance.samples import as_json, snapshot

HOUR = timedelta(hours=1)


class Crash(Exception):
    """The process crashes here."""


Verb = Callable[[FullStore, Grant], Coroutine[Any, Any, object]]


def step(grant: Grant, n: int, key: str) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, as_json(snapshot(key)))


async def _rest(store: FullStore, grant: Grant) -> object:
    data = as_json(snapshot("a", "b", status="suspended"))
    rest = Rest("suspended", grant.now + 2 * HOUR)
    return await store.append([Entry("run", grant.lease.epoch, 9, data, rest=rest)])


async def _rest_awaiting_a_message(store: FullStore, grant: Grant) -> object:
    data = as_json(snapshot("a", "b", status="waiting"))
    rest = Rest("waiting", None, ("paid",))
    return await store.append([Entry("run", grant.lease.epoch, 9, data, rest=rest)])


async def _save(store: FullStore, grant: Grant) -> object:
    whole = snapshot("a", "b", status="suspended", wake_at=grant.now)
    await store.save("run", whole)
    return None


async def _create(store: FullStore, grant: Grant) -> object:
    return await store.acquire([LeaseRequest("new", "ana", HOUR, create=as_json(snapshot()))])


VERBS: dict[str, Verb] = {
    "append": lambda store, grant: store.append([step(grant, 7, "c")]),
    "rest": _rest,
    "rest awaiting a message": _rest_awaiting_a_message,
    "renew": lambda store, grant: store.renew([grant.lease], timedelta(minutes=1)),
    "release": lambda store, grant: store.release([grant.lease]),
    "take over": lambda store, grant: store.acquire([LeaseRequest("run", "ana", HOUR)]),
    "send": lambda store, grant: send_one(store, "run", "other", b"1"),
    "enqueue": lambda store, grant: store.enqueue([NewRun("new", "w", as_json(snapshot()))]),
    "create": _create,
    "save": _save,
}


async def survives_crash(
    store: FullStore, crashing: FullStore, clock: TestClock, verb: Verb
) -> bool:
    """Run a verb on a store that crashes, and check the runs; return whether the verb finished."""
    (grant,) = await store.acquire([LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))])
    assert isinstance(grant, Grant)
    await store.append([step(grant, 1, "a"), step(grant, 2, "b")])
    assert await send_one(store, "run", "paid", b"1") is Delivery.DELIVERED
    finished = await finishes(verb(crashing, grant))
    await clock.advance(3 * HOUR)
    claimed = {grant.lease.id: grant for grant in await store.claim("bob", HOUR, 10)}
    assert list(claimed["run"].snapshot["steps"])[:2] == ["a", "b"]
    assert [message.name for message in claimed["run"].inbox][:1] == ["paid"]
    assert set(claimed) == {line.id for line in await store.list()}
    verdicts = await store.append([step(grant, 1, "z") for grant in claimed.values()])
    assert set(verdicts) == {Verdict.ACCEPTED}
    return finished


async def check_rest_with_delete(store: FullStore, crashing: FullStore) -> bool:
    """Write a rest with `delete` on a store that crashes, and check that it is atomic.

    Return whether the write finished before the crash.
    """
    (grant,) = await store.acquire([LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))])
    assert isinstance(grant, Grant)
    await store.append([step(grant, 1, "a"), step(grant, 2, "b")])
    rest = Rest("completed", delete=True)
    entry = Entry("run", grant.lease.epoch, 9, as_json(snapshot()), rest=rest)
    finished = await finishes(crashing.append([entry]))
    loaded = await store.load("run")
    assert loaded is None or list(loaded["steps"]) == ["a", "b"]
    return finished


async def check_delete(store: FullStore, crashing: FullStore) -> bool:
    """Delete a run on a store that crashes, and check that all of it is deleted, or nothing.

    Return whether the deletion finished before the crash.
    """
    request = LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))
    (before,) = await store.acquire([request])
    assert isinstance(before, Grant)
    await store.append([step(before, 1, "a")])
    await send_one(store, "run", "paid", b"1")
    finished = await finishes(crashing.delete("run"))
    assert not finished or await store.load("run") is None
    (after,) = await store.acquire([request])
    assert isinstance(after, Grant)
    assert after.lease.epoch > before.lease.epoch
    state = (after.created, list(after.snapshot["steps"]), len(after.inbox))
    assert state in [(True, [], 0), (False, ["a"], 1)]
    return finished


async def finishes(work: Coroutine[Any, Any, object]) -> bool:
    """Return whether the work finished before the crash."""
    try:
        await work
    except Crash:
        return False
    except StoreError as error:
        if not isinstance(error.__cause__, Crash):
            raise
        return False
    return True


async def _rest_with_another_version(store: FullStore, grant: Grant) -> object:
    data = as_json(snapshot(status="suspended"))
    rest = Rest("suspended", grant.now, version=2)
    return await store.append([Entry("run", grant.lease.epoch, 9, data, rest=rest)])


async def _rest_woken_by_a_message(store: FullStore, grant: Grant) -> object:
    data = as_json(snapshot(status="waiting"))
    rest = Rest("waiting", None, ("paid",), version=2)
    return await store.append([Entry("run", grant.lease.epoch, 9, data, rest=rest)])


async def _save_without_a_queue(store: FullStore, grant: Grant) -> object:
    await store.save("run", snapshot(status="suspended", wake_at=grant.now, workflow="other"))
    return None


async def _create_elsewhere(store: FullStore, grant: Grant) -> object:
    await store.delete("run")
    return await store.enqueue([NewRun("run", "order", as_json(snapshot()), queue="b", version=3)])


MOVES: dict[str, Verb] = {
    "rest": _rest_with_another_version,
    "rest that is woken": _rest_woken_by_a_message,
    "save": _save_without_a_queue,
    "delete and enqueue": _create_elsewhere,
    "release": lambda store, grant: store.release([grant.lease]),
    "renew": lambda store, grant: store.renew([grant.lease], timedelta(minutes=1)),
}


async def check_move(store: FullStore, crashing: FullStore, clock: TestClock, verb: Verb) -> bool:
    """Change a run's queue or version on a store that crashes, and check that it is found there.

    Return whether the verb finished before the crash.
    """
    await store.enqueue([NewRun("run", "order", as_json(snapshot()), queue="a", version=1)])
    (grant,) = await store.claim("ana", HOUR, 1, queues={"a": 1})
    await send_one(store, "run", "paid", b"1")
    finished = await finishes(verb(crashing, grant))
    await clock.advance(3 * HOUR)
    for run in await store.list():
        assert run.workflow is not None
        exactly = [SupportedVersions(run.workflow, run.version, run.version)]
        (claimed,) = await store.claim("bob", HOUR, 5, supports=exactly, queues={run.queue: 5})
        assert (claimed.lease.id, claimed.queue, claimed.version) == ("run", run.queue, run.version)
        await clock.advance(3 * HOUR)
        assert list(await store.queues(clock.now(), 5)) == ([run.queue] if run.queue else [])
    return finished
