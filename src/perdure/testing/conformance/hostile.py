"""Checks with ids and names that break stores which quote, split, fold case or sort carelessly."""

import unicodedata
from itertools import chain
from typing import Any

import pytest

from perdure.errors import InvalidArgument
from perdure.store import (
    Delivery,
    Entry,
    Grant,
    LeaseRequest,
    NewRun,
    Rest,
    Store,
    Verdict,
)
from perdure.testing.conformance.base import pages_of
from perdure.testing.conformance.harness import (
    LONG,
    Harness,
    acquire_run,
    append_entries,
    need_inbox,
    need_journal,
    need_lease,
    need_schedule,
    refused,
    send_one,
    step,
    steps_of,
    supports,
    write_rest,
)
from perdure.testing.conformance.samples import as_json, snapshot
from perdure.validation import MAX_ID_LENGTH

NAMES = [
    "'",
    '"',
    "`",
    "'; DROP TABLE runs; --",
    "%",
    "_",
    "a%b_c",
    "\\",
    "a\\",
    "\\%",
    ".",
    "..",
    "../../etc/passwd",
    "/",
    "a/b//c/",
    "$",
    "$where",
    "$1",
    "a.b.c",
    ":name",
    "?",
    "{}",
    "{a}",
    "[0]",
    "*",
    "a*",
    "h?llo",
    "a~",
    "#2",
    "a b",
    " a",
    "a ",
    "a  ",
    "\t",
    "\n",
    "a\r\nb",
    "\x01\x1f\x7f",
    "null",
    "None",
    "0",
    "00",
    "1e3",
    "-1",
    "true",
    "__proto__",
    "constructor",
    "toString",
    "CON",
    "a:b",
    "A",
    "a",
    "ss",
    "ß",
    "ẞ",
    "i",
    "İ",
    "ı",
    "é",
    unicodedata.normalize("NFD", "é"),
    "ﬁ",
    "fi",
    "Å",
    unicodedata.normalize("NFD", "Å"),
    "\u212b",
    "\u200b",
    "a\u200d",
    "\u202eabc",
    "🦊",
    "👩‍👩‍👧",
    "𝕏",
    "\ufeff",
    "\uffff",
    "日本語",
    "x" * MAX_ID_LENGTH,
    "x" * (MAX_ID_LENGTH - 1) + "y",
    "🦊" * MAX_ID_LENGTH,
    "'" * MAX_ID_LENGTH,
]
INVALID_IDS: list[Any] = ["", "a\0b", "x" * (MAX_ID_LENGTH + 1), "\ud800", None, 7, b"run"]


class HostileIdChecks(Harness):
    """Ids are non-empty strings of up to 512 characters without NUL."""

    async def test_every_id_is_a_separate_run(self, store: Store) -> None:
        """Ids are non-empty strings of up to 512 characters without NUL, and no two are equal."""
        for number, id in enumerate(NAMES):
            await store.save(id, snapshot(f"step {number}"))
        for number, id in enumerate(NAMES):
            assert await steps_of(store, id) == [f"step {number}"], ascii(id)
        assert {run.id for run in await store.list(limit=1_000)} == set(NAMES)

    async def test_deleting_one_run_keeps_the_others(self, store: Store) -> None:
        """Delete the run, and no other."""
        for id in NAMES:
            await store.save(id, snapshot())
        for number, id in enumerate(NAMES):
            await store.delete(id)
            remaining = await store.list(limit=1_000)
            assert {run.id for run in remaining} == set(NAMES[number + 1 :]), ascii(id)

    async def test_every_prefix_is_exact(self, store: Store) -> None:
        """`prefix` is exact and case-sensitive, whatever its characters."""
        for id in NAMES:
            await store.save(id, snapshot())
        for prefix in NAMES:
            ids = {run.id for run in await store.list(prefix=prefix, limit=1_000)}
            assert ids == {id for id in NAMES if id.startswith(prefix)}, ascii(prefix)

    async def test_paging_returns_every_id(self, store: Store) -> None:
        """`after` is the `cursor` of the last run, whatever its id."""
        for id in NAMES:
            await store.save(id, snapshot())
        assert sorted(chain(*await pages_of(store, limit=3))) == sorted(NAMES)

    async def test_an_invalid_id_is_refused(self, store: Store) -> None:
        """Any other id is refused."""
        for id in INVALID_IDS:
            with pytest.raises(InvalidArgument):
                await store.save(id, snapshot())
            with pytest.raises(InvalidArgument):
                await store.load(id)
            with pytest.raises(InvalidArgument):
                await store.delete(id)
        assert list(await store.list()) == []

    async def test_an_invalid_id_cannot_be_acquired(self, store: Store) -> None:
        """Any other id is refused, whatever the method."""
        leases = need_lease(store)
        for id in INVALID_IDS:
            with pytest.raises(InvalidArgument):
                await leases.acquire([LeaseRequest(id, "ana", LONG, create=as_json(snapshot()))])
        assert list(await leases.list()) == []

    async def test_an_invalid_id_cannot_be_enqueued(self, store: Store) -> None:
        """Any other id is refused, and with it the whole batch: it is one write."""
        schedule = need_schedule(store)
        for id in INVALID_IDS:
            with pytest.raises(InvalidArgument):
                await schedule.enqueue(
                    [NewRun(each, "order", as_json(snapshot())) for each in ("good", id)]
                )
        assert list(await schedule.list()) == []

    async def test_every_id_can_be_acquired_and_journaled(self, store: Store) -> None:
        """Each id has its own lease and its own journal."""
        journal = need_journal(store)
        requests = [LeaseRequest(id, "ana", LONG, create=as_json(snapshot())) for id in NAMES]
        grants = await journal.acquire(requests)
        entries = [
            Entry(grant.lease.id, grant.lease.epoch, 1, as_json(snapshot(f"step {number}")))
            for number, grant in enumerate(grants)
            if isinstance(grant, Grant)
        ]
        assert await append_entries(journal, *entries) == [Verdict.ACCEPTED] * len(NAMES)
        for number, id in enumerate(NAMES):
            assert await steps_of(journal, id) == [f"step {number}"], ascii(id)

    async def test_every_id_can_be_claimed(self, store: Store) -> None:
        """Each id is enqueued, claimed and released separately."""
        schedule = need_schedule(store)
        runs = [NewRun(id, "order", as_json(snapshot())) for id in NAMES]
        assert all(await schedule.enqueue(runs))
        grants = await schedule.claim("ana", LONG, 1_000)
        assert {grant.lease.id for grant in grants} == set(NAMES)
        renewed = await schedule.renew([grant.lease for grant in grants], LONG)
        assert {lease.id for lease in renewed if lease is not None} == set(NAMES)
        await schedule.release([grants[0].lease])
        (grant_after_release,) = await schedule.claim("bob", LONG, 1_000)
        assert grant_after_release.lease.id == grants[0].lease.id

    async def test_owners_may_have_any_name(self, store: Store) -> None:
        """Refused if another owner's lease has not expired: no two names are the same owner."""
        leases = need_lease(store)
        owners = [name for name in NAMES if len(name) < 100]
        for number, owner in enumerate(owners):
            other = owners[number - 1]
            grant = await acquire_run(leases, owner=owner)
            assert grant.lease.owner == owner
            refusal = await refused(leases, LeaseRequest("run", other, LONG))
            assert refusal.owner == owner, ascii(owner)
            await leases.release([grant.lease])


class HostileNameChecks(Harness):
    """Names of workflows, events and steps, and dedup ids."""

    async def test_workflows_may_have_any_name(self, store: Store) -> None:
        """`workflow` restricts the list to runs of this name, whatever its characters."""
        for number, name in enumerate(NAMES):
            await store.save(f"run {number}", snapshot(workflow=name))
        for number, name in enumerate(NAMES):
            runs = await store.list(workflow=name)
            assert [(run.id, run.workflow) for run in runs] == [(f"run {number}", name)]

    async def test_claims_may_be_restricted_to_any_workflow_name(self, store: Store) -> None:
        """`supports` restricts the claim to these workflows, whatever their characters."""
        schedule = need_schedule(store)
        data = as_json(snapshot())
        await schedule.enqueue([NewRun(f"{n}", name, data) for n, name in enumerate(NAMES)])
        for number, name in enumerate(NAMES):
            grants = await schedule.claim("ana", LONG, 10, supports=supports(name))
            assert [grant.lease.id for grant in grants] == [f"{number}"], ascii(name)

    async def test_events_may_have_any_name(self, store: Store) -> None:
        """An unowned run that awaits `name` becomes due at once: exactly that run."""
        inboxes = need_inbox(store)
        for number, name in enumerate(NAMES):
            grant = await acquire_run(inboxes, f"{number}")
            await write_rest(inboxes, grant, Rest("waiting", None, (name, f"never {number}")))
        for number, name in enumerate(NAMES):
            await send_one(inboxes, f"{number}", name, b"1")
            (claimed,) = await inboxes.claim("ana", LONG, 10)
            assert claimed.lease.id == f"{number}", ascii(name)
            assert [message.name for message in claimed.inbox] == [name]

    async def test_an_event_with_a_similar_name_wakes_no_run(self, store: Store) -> None:
        """Exactly this name: a similar name does not count."""
        inboxes = need_inbox(store)
        awaited = NAMES[::2]
        await write_rest(inboxes, await acquire_run(inboxes), Rest("waiting", None, tuple(awaited)))
        for name in NAMES[1::2]:
            await send_one(inboxes, "run", name, b"1")
        assert list(await inboxes.claim("ana", LONG, 10)) == []

    async def test_dedup_ids_may_be_any_string(self, store: Store) -> None:
        """A `dedup_id` is any string, and no two are equal."""
        inboxes = need_inbox(store)
        await acquire_run(inboxes)
        first = [await send_one(inboxes, "run", "paid", b"1", dedup_id=name) for name in NAMES]
        second_deliveries = [
            await send_one(inboxes, "run", "paid", b"1", dedup_id=name) for name in NAMES
        ]
        assert first == [Delivery.DELIVERED] * len(NAMES)
        assert second_deliveries == [Delivery.DUPLICATE] * len(NAMES)

    async def test_steps_may_have_any_key(self, store: Store) -> None:
        """Steps are in the order they were recorded, whatever their keys."""
        await store.save("run", snapshot("", *NAMES, "\0"))
        assert await steps_of(store) == ["", *NAMES, "\0"]

    async def test_journaled_steps_may_have_any_key(self, store: Store) -> None:
        """Steps are in the order they were recorded, in the journal and after a rest."""
        journal = need_journal(store)
        keys = ["\0", *reversed(NAMES), ""]
        grant = await acquire_run(journal)
        await append_entries(journal, *(step(grant, n, key) for n, key in enumerate(keys)))
        assert await steps_of(journal) == keys
        await write_rest(journal, grant, Rest("completed"), *keys)
        assert await steps_of(journal) == keys


class HostileChecks(HostileIdChecks, HostileNameChecks):
    """Checks with hostile ids and names."""
