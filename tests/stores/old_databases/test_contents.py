"""Databases that an earlier version of perdure made: every run is found and continued."""

from datetime import timedelta
from typing import Any

from perdure import Runtime
from perdure.store import Delivery, Entry, Grant, Refusal, Rest, Verdict
from perdure.testing.conformance.samples import as_json
from tests.stores.old_databases import OWNER, Run, deleted_epoch
from tests.stores.old_databases.checks import (
    acquire,
    check_claimed,
    check_found,
    claim_all,
    list_all,
    of_kinds,
    send,
    shape_of,
)
from tests.stores.old_databases.places import KINDS, Place
from tests.stores.old_databases.workflows import order


@of_kinds(*KINDS)
async def test_every_run_is_listed(store: Any, runs: dict[str, Run]) -> None:
    await check_found(store, runs)


@of_kinds(*KINDS)
async def test_every_run_is_loaded_with_its_messages(store: Any, runs: dict[str, Run]) -> None:
    for id, run in runs.items():
        assert await store.load(id) == run["snapshot"], id
        messages = [[m.name, m.payload] for m in await store.inbox(id)]
        assert messages == [[name, as_json(payload)] for name, payload in run["inbox"]], id


@of_kinds(*KINDS)
async def test_runs_are_counted_by_status(store: Any, runs: dict[str, Run]) -> None:
    by_status = (await store.stats()).by_status
    for status in ("suspended", "waiting", "completed", "failed", "cancelled"):
        assert by_status[status] == sum(run["status"] == status for run in runs.values())


@of_kinds(*KINDS)
async def test_due_and_orphaned_runs_are_claimed_once(store: Any, runs: dict[str, Run]) -> None:
    await check_claimed(store, runs)


@of_kinds(*KINDS)
async def test_an_unexpired_lease_is_respected(store: Any, runs: dict[str, Run]) -> None:
    refusal = await acquire(store, "owned")
    assert isinstance(refusal, Refusal)
    assert refusal.owner == OWNER
    grant = await acquire(store, "owned", instead_of=OWNER)
    assert isinstance(grant, Grant)
    assert list(grant.snapshot["steps"]) == ["reserve", "charge"]
    entry = Entry("owned", grant.lease.epoch, 1, as_json({"steps": {"more": {"ok": True}}}))
    assert await store.append([entry]) == [Verdict.ACCEPTED]
    loaded = await store.load("owned")
    assert list(loaded["steps"]) == ["reserve", "charge", "more"]


@of_kinds(*KINDS)
async def test_an_awaited_message_wakes_a_run(store: Any, runs: dict[str, Run]) -> None:
    await claim_all(store)
    ids = [id for id, run in runs.items() if run["status"] == "waiting"]
    for id in ids:
        assert await send(store, id, "approved") is Delivery.DELIVERED
    grants = await claim_all(store)
    assert grants.keys() == set(ids)
    for id, grant in grants.items():
        names = [message.name for message in grant.inbox]
        assert names == [*(name for name, _ in runs[id]["inbox"]), "approved"]


@of_kinds(*KINDS)
async def test_a_message_is_a_duplicate_of_an_old_one(store: Any, runs: dict[str, Run]) -> None:
    """Also of one that was consumed."""
    for id, dedup_id in (("waiting", "note-1"), ("consumed", "used"), ("consumed", "open")):
        assert await send(store, id, "note", dedup_id=dedup_id) is Delivery.DUPLICATE
    for id in ("completed", "failed", "cancelled"):
        assert await send(store, id, "note") is Delivery.OVER
    assert len(await store.inbox("consumed")) == 1


@of_kinds(*KINDS)
async def test_an_epoch_of_a_deleted_run_stays_stale(
    place: Place, store: Any, runs: dict[str, Run]
) -> None:
    grant = await acquire(store, "deleted", create=as_json(runs["queued"]["snapshot"]))
    assert isinstance(grant, Grant)
    assert grant.lease.epoch > deleted_epoch("sqlite" if place.kind == "libsql" else place.kind)


@of_kinds(*KINDS)
async def test_old_runs_are_pruned(store: Any, runs: dict[str, Run]) -> None:
    over = {id for id, run in runs.items() if run["status"] in ("completed", "failed", "cancelled")}
    assert await store.prune(timedelta(0)) == len(over)
    assert (await list_all(store)).keys() == runs.keys() - over


@of_kinds(*KINDS)
async def test_workflows_continue_without_repeating_a_step(
    store: Any, runs: dict[str, Run]
) -> None:
    runtime = Runtime(store, workflows=[order])
    while await runtime.sweep(limit=1000):
        pass
    for id, run in runs.items():
        if shape_of(id) == "waiting":
            await runtime.signal(id, "approved", {"by": "eva"})
        if shape_of(id) in ("waiting", "due", "queued"):
            loaded = await store.load(id)
            assert loaded["execution"]["status"] == "completed", id
            assert list(loaded["steps"])[-1] == "ship"
            recorded = run["snapshot"]["steps"]
            assert {key: loaded["steps"][key] for key in recorded} == recorded
    assert (await runtime.cancel("suspended")).status == "cancelled"
    orphaned = await runtime.get_run("orphaned")
    assert orphaned is not None
    assert orphaned.status == "suspended"


@of_kinds("postgres_jsonb", "sqlite", "libsql", "mongo")
async def test_a_run_that_awaitly_wrote_is_continued(store: Any, runs: dict[str, Run]) -> None:
    grant = await acquire(store, "awaitly")
    assert isinstance(grant, Grant)
    snapshot = {**grant.snapshot, "steps": {**grant.snapshot["steps"], "more": {"ok": True}}}
    rest = Rest("suspended")
    entry = Entry("awaitly", grant.lease.epoch, 1, as_json(snapshot), rest=rest)
    assert await store.append([entry]) == [Verdict.ACCEPTED]
    loaded = await store.load("awaitly")
    assert list(loaded["steps"]) == ["getUser", "more"]
