"""Checks of the header, which a store keeps beside the snapshot."""

from typing import Any

import pytest

from perdure.errors import InvalidArgument
from perdure.store import MAX_SUMMARY_SIZE, Entry, LeaseRequest, Rest, RunSummary, Store
from perdure.testing.conformance.harness import (
    LONG,
    Harness,
    SearchableStore,
    acquire_run,
    append_entries,
    need_search,
    step,
    write_rest,
)
from perdure.testing.conformance.queues import queued
from perdure.testing.conformance.samples import as_json, snapshot

TAGS = ("customer=42", "plan=pro")
BYTES = bytes(range(256)) * 4


async def header(store: SearchableStore, id: str = "run") -> RunSummary:
    """Return the summary of a run that exists."""
    (run,) = await store.summaries([id])
    assert run is not None, f"the run {id!r} does not exist"
    return run


class HeaderChecks(Harness):
    """Version, tags and summary, at creation and in rests."""

    async def test_a_new_run_has_the_header_of_its_request(self, store: Store) -> None:
        """`workflow`, `version`, `tags` and `summary` apply to a new run."""
        search = need_search(store)
        request = LeaseRequest(
            "run",
            "ana",
            LONG,
            create=as_json(snapshot()),
            workflow="order",
            version=3,
            tags=TAGS,
            summary=BYTES,
        )
        await search.acquire([request])
        run = await header(search)
        assert (run.workflow, run.version, run.tags, run.queue) == ("order", 3, TAGS, "")
        assert run.summary == BYTES

    async def test_an_enqueued_run_has_its_header(self, store: Store) -> None:
        """Queue, version, tags and summary are written when a run is created."""
        search = need_search(store)
        new = queued("run", "emails/ana", version=2, tags=TAGS, summary=BYTES)
        await search.enqueue([new, queued("plain")])
        run, plain = await header(search), await header(search, "plain")
        assert (run.queue, run.version, run.tags) == ("emails/ana", 2, TAGS)
        assert run.summary == BYTES
        assert (plain.queue, plain.version, plain.tags, plain.summary) == ("", 0, (), b"")

    async def test_a_request_for_an_existing_run_does_not_change_its_header(
        self, store: Store
    ) -> None:
        """`workflow`, `version`, `tags` and `summary` apply only to a *new* run."""
        search = need_search(store)
        await search.enqueue([queued("run", version=2, tags=TAGS, summary=b"2")])
        other: dict[str, Any] = {"version": 9, "tags": ("a=b",), "summary": b"9"}
        data = as_json(snapshot())
        await search.acquire([LeaseRequest("run", "ana", LONG, data, workflow="x", **other)])
        assert list(await search.enqueue([queued("run", "other", **other)])) == [False]
        run = await header(search)
        assert (run.workflow, run.version, run.tags, run.queue) == ("order", 2, TAGS, "")
        assert run.summary == b"2"

    async def test_a_rest_replaces_the_header(self, store: Store) -> None:
        """`version`, `tags` and `summary` of a rest replace the stored ones."""
        search = need_search(store)
        await search.enqueue([queued("run", "emails", version=2, tags=TAGS, summary=b"2")])
        grant = await acquire_run(search)
        rest = Rest("completed", version=3, tags=("plan=free",), summary=b"3")
        await write_rest(search, grant, rest)
        run = await header(search)
        assert (run.version, run.tags, run.summary) == (3, ("plan=free",), b"3")
        assert run.queue == "emails"
        await write_rest(search, await acquire_run(search), Rest("failed", tags=(), summary=b""))
        run = await header(search)
        assert (run.version, run.tags, run.summary) == (3, (), b"")

    async def test_a_rest_without_a_header_leaves_it_as_it_is(self, store: Store) -> None:
        """`None` leaves them as they are."""
        search = need_search(store)
        await search.enqueue([queued("run", "emails", version=2, tags=TAGS, summary=b"2")])
        await write_rest(search, await acquire_run(search), Rest("completed"))
        run = await header(search)
        assert (run.version, run.tags, run.summary) == (2, TAGS, b"2")
        assert (run.queue, run.status) == ("emails", "completed")

    async def test_an_entry_does_not_change_the_header(self, store: Store) -> None:
        """They are written when a run is created and by rests, never by other entries."""
        search = need_search(store)
        await search.enqueue([queued("run", version=2, tags=TAGS, summary=b"2")])
        grant = await acquire_run(search)
        changed = snapshot("a", metadata={"version": 9, "tags": {"a": "b"}})
        entry = Entry("run", grant.lease.epoch, 2, as_json(changed))
        await append_entries(search, step(grant, 1, "a"), entry)
        run = await header(search)
        assert (run.version, run.tags, run.summary) == (2, TAGS, b"2")

    async def test_save_replaces_the_header(self, store: Store) -> None:
        """Replace the whole run: its version and tags are those in the snapshot's metadata."""
        search = need_search(store)
        await search.enqueue([queued("run", "emails", version=2, tags=TAGS, summary=b"2")])
        metadata = {"version": 5, "tags": {"plan": "free"}}
        await search.save("run", snapshot(workflow="other", metadata=metadata))
        run = await header(search)
        assert (run.workflow, run.version, run.tags) == ("other", 5, ("plan=free",))
        assert run.queue == ""
        await search.save("run", snapshot())
        run = await header(search)
        assert (run.version, run.tags) == (0, ())

    async def test_the_time_of_creation_stays(self, store: Store) -> None:
        """`created_at` is set once, `updated_at` by each rest."""
        search = need_search(store)
        await search.enqueue([queued("run")])
        created = await header(search)
        assert created.created_at is not None
        await self.pass_time(2 * self.short)
        await write_rest(search, await acquire_run(search), Rest("completed"))
        rested = await header(search)
        assert rested.created_at == created.created_at
        assert rested.updated_at > created.updated_at

    async def test_a_header_that_cannot_be_stored_is_refused(self, store: Store) -> None:
        """Invalid tags, versions and summaries are rejected, and nothing is written."""
        search = need_search(store)
        bad: list[dict[str, Any]] = [
            {"tags": ("b=1", "a=1")},
            {"tags": ("a=1", "a=1")},
            {"tags": ("no value",)},
            {"tags": ("=no name",)},
            {"tags": ("a=" + "x" * 255,)},
            {"tags": tuple(f"t{n:02}=1" for n in range(17))},
            {"tags": ("a=\0",)},
            {"version": -1},
            {"summary": b"x" * (MAX_SUMMARY_SIZE + 1)},
        ]
        grant = await acquire_run(search)
        for fields in bad:
            with pytest.raises(InvalidArgument):
                await search.enqueue([queued("fine"), queued("bad", **fields)])
            with pytest.raises(InvalidArgument):
                await write_rest(search, grant, Rest("completed", **fields))
        assert list(await search.summaries(["fine", "bad"])) == [None, None]
        assert (await header(search)).status == "running"
