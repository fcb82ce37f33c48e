"""Runs that SQLite leases in the transaction of their messages."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from perdure.store import (
    Delivery,
    Entry,
    Grant,
    Handoff,
    LeaseRequest,
    NewMessage,
    NewRun,
    Rest,
    SupportedVersions,
    Verdict,
)
from perdure.stores.sqlite import SqliteStore, sqlite
from perdure.testing.conformance.samples import as_json, delta, snapshot

HOUR = timedelta(hours=1)
WAITING = as_json(snapshot("a", status="waiting", event="go"))
ODD = 'a"b\\c\n\t%$[0] \u00e9\U0001f600'


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    async with sqlite(tmp_path / "runs.db", prefix="p:") as store:
        yield store


async def wait(
    store: SqliteStore, *ids: str, name: str = "go", workflow: str = "flow", version: int = 1
) -> None:
    rest = Rest("waiting", awaits=(name,))
    await store.enqueue([NewRun(id, workflow, WAITING, version=version, rest=rest) for id in ids])


async def hand_off(
    store: SqliteStore, *ids: str, name: str = "go", limit: int = 1000, dedup_id: str | None = None
) -> Handoff:
    messages = [NewMessage(id, name, b"1", dedup_id) for id in ids]
    supports = [SupportedVersions("flow", 1, 1), SupportedVersions("flow", 3, 4)]
    return await store.send_and_claim(messages, "ana", HOUR, limit, supports=supports)


def ids_of(handoff: Handoff) -> list[str]:
    return [grant.lease.id for grant in handoff.grants]


async def test_names_may_contain_any_characters(store: SqliteStore) -> None:
    """Ids, events and workflows are values of a JSON document."""
    await wait(store, ODD, name=ODD, workflow=ODD)
    message = NewMessage(ODD, ODD, b"1")
    supports = [SupportedVersions(ODD, 1, 1)]
    [grant] = (await store.send_and_claim([message], ODD, HOUR, 1, supports=supports)).grants
    assert (grant.lease.id, grant.lease.owner, grant.inbox[0].name) == (ODD, ODD, ODD)


@pytest.mark.parametrize("many", [3, 255, 257, 700])
async def test_a_batch_may_have_any_size(store: SqliteStore, many: int) -> None:
    """However the messages are divided among statements, each run has its own."""
    ids = [f"run {number}" for number in range(many)]
    await wait(store, *ids)
    handoff = await hand_off(store, *ids, *ids, limit=many - 1)
    assert len(handoff.receipts) == 2 * many
    assert sorted(ids_of(handoff)) == sorted(ids[:-1])
    assert {len(grant.inbox) for grant in handoff.grants} == {2}
    [last] = await store.claim("bob", HOUR, many)
    assert (last.lease.id, len(last.inbox)) == (ids[-1], 2)


async def test_a_workflow_may_have_several_ranges_of_versions(store: SqliteStore) -> None:
    """A version between two ranges is left to others."""
    granted = []
    for version in range(6):
        await wait(store, f"{version}", version=version)
        granted += ids_of(await hand_off(store, f"{version}"))
    assert granted == ["0", "1", "3", "4"]


async def test_a_duplicate_makes_no_run_due(store: SqliteStore) -> None:
    """A run that awaits the event again is not leased for a message that it has consumed."""
    await wait(store, "run")
    [grant] = (await hand_off(store, "run", dedup_id="x")).grants
    rest = Rest("waiting", awaits=("go",))
    consumes = (grant.inbox[0].id,)
    entry = Entry("run", grant.lease.epoch, 1, WAITING, consumes=consumes, rest=rest)
    assert await store.append([entry]) == [Verdict.ACCEPTED]
    handoff = await hand_off(store, "run", dedup_id="x")
    assert handoff.receipts[0].delivery is Delivery.DUPLICATE
    assert not handoff.grants
    assert await store.claim("bob", HOUR, 1) == []


async def test_a_run_that_had_this_owner_is_not_granted_again(store: SqliteStore) -> None:
    """Its lease stays valid, whether another run of the call is leased or not."""
    [mine] = await store.acquire([LeaseRequest("mine", "ana", HOUR, create=WAITING)])
    assert isinstance(mine, Grant)
    await wait(store, "run")
    assert ids_of(await hand_off(store, "mine", "run")) == ["run"]
    assert ids_of(await hand_off(store, "mine")) == []
    entry = Entry("mine", mine.lease.epoch, 1, delta("b"))
    assert await store.append([entry]) == [Verdict.ACCEPTED]
