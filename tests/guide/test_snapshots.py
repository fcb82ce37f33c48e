"""Snapshots: what a run did, as plain JSON that any database can store."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from perdure import (
    Ok,
    Snapshot,
    Step,
    Workflow,
    assert_valid_snapshot,
    merge_snapshots,
    validate_snapshot,
)
from perdure.errors import SnapshotFormatError
from perdure.snapshot import looks_like_workflow_snapshot
from perdure.stores import MemoryStore, sqlite
from tests.guide.shop import Shop


async def user_and_posts(step: Step, shop: Shop) -> dict[str, Any]:
    user = await step("fetch_user", shop.fetch_user, "1", key="user:1")
    posts = await step("fetch_posts", shop.fetch_posts, user["id"], key=f"posts:{user['id']}")
    return {"user": user["name"], "posts": len(posts)}


async def snapshot_of(shop: Shop) -> Snapshot:
    workflow = Workflow("workflow", shop)
    await workflow.run(user_and_posts)
    return workflow.snapshot()


async def test_save_and_resume(shop: Shop) -> None:
    """A snapshot can be serialized with `json`; a workflow that gets it executes no step again."""
    database = {"wf-123": json.dumps(await snapshot_of(shop))}
    shop.calls.clear()

    restored = json.loads(database["wf-123"])
    workflow = Workflow("workflow", shop, snapshot=restored)
    assert await workflow.run(user_and_posts) == Ok({"user": "Ana", "posts": 1})
    assert shop.calls == []


async def test_a_store_holds_snapshots(shop: Shop) -> None:
    """`save` and `load` by id; here in memory, elsewhere in a database."""
    async with MemoryStore() as store:
        await store.save("wf-123", await snapshot_of(shop))
        snapshot = await store.load("wf-123")
    workflow = Workflow("workflow", shop, snapshot=snapshot)
    assert await workflow.run(user_and_posts) == Ok({"user": "Ana", "posts": 1})


async def test_listing_and_deleting(shop: Shop) -> None:
    """Runs are listed newest first, by prefix, with a limit."""
    async with MemoryStore() as store:
        for id in ("orders:1", "orders:2", "mails:1"):
            await store.save(id, await snapshot_of(shop))
        assert [line.id for line in await store.list(limit=100)] == [
            "mails:1", "orders:2", "orders:1",
        ]  # fmt: skip
        (newest,) = await store.list(prefix="orders:", limit=1)
        assert (newest.id, newest.status) == ("orders:2", "completed")
        assert newest.updated_at <= datetime.now(UTC)
        await store.delete("orders:2")
        assert await store.load("orders:2") is None


async def test_stores_with_different_prefixes_are_separate(shop: Shop) -> None:
    """Two stores on one database do not see each other's runs."""
    orders = MemoryStore(prefix="orders:")
    mails = MemoryStore(prefix="mails:", shares=orders)
    await orders.save("1", await snapshot_of(shop))
    assert [line.id for line in await orders.list()] == ["1"]
    assert await mails.list() == []


async def test_a_sqlite_file_is_one_line(shop: Shop, tmp_path: Any) -> None:
    """Other databases differ only in this line."""
    async with sqlite(tmp_path / "workflow.db") as store:
        await store.save("wf-123", await snapshot_of(shop))
    async with sqlite(tmp_path / "workflow.db") as store:
        assert await store.load("wf-123") is not None


async def test_without_a_snapshot_a_run_starts_from_scratch(shop: Shop) -> None:
    """`load` returns `None` for an unknown id, which `snapshot=` accepts."""
    async with MemoryStore() as store:
        snapshot = await store.load("nothing here")
    assert await Workflow("workflow", shop, snapshot=snapshot).run(user_and_posts)
    assert shop.calls == ["fetch_user", "fetch_posts"]


async def test_the_contents_of_a_snapshot(shop: Shop) -> None:
    """It contains the steps in order, the state of the run, and metadata."""
    snapshot = await snapshot_of(shop)
    assert snapshot["formatVersion"] == 1
    assert list(snapshot["steps"]) == ["user:1", "posts:1"]
    assert snapshot["steps"]["user:1"]["ok"]
    assert snapshot["execution"]["status"] == "completed"
    assert snapshot["execution"]["lastUpdated"].endswith("Z")


async def test_the_record_of_a_failure(shop: Shop) -> None:
    """It contains the error, its cause, and whether it was raised."""
    shop.down.add("fetch_posts")
    failed: Any = (await snapshot_of(shop))["steps"]["posts:1"]
    assert not failed["ok"]
    assert failed["error"] == {"type": "ConnectionError", "message": "fetch_posts is down"}
    assert failed["cause"]["type"] == "error"
    assert failed["meta"] == {"origin": "throw"}


async def test_the_ok_of_a_record_shows_whether_the_step_succeeded(shop: Shop) -> None:
    snapshot = await snapshot_of(shop)
    record = snapshot["steps"].get("user:1")
    assert record is not None
    assert record["ok"]


async def test_parts_of_a_snapshot(shop: Shop) -> None:
    """Only successes or failures, only some steps, only what is new; with metadata."""
    workflow = Workflow("workflow", shop)
    await workflow.run(user_and_posts)
    assert list(workflow.snapshot(include="completed", limit=1)["steps"]) == ["user:1"]
    assert list(workflow.snapshot(since="user:1")["steps"]) == ["posts:1"]
    assert list(workflow.snapshot(include="failed")["steps"]) == []
    assert workflow.snapshot(metadata={"user_id": "123"})["metadata"]["user_id"] == "123"


async def test_merging_a_delta(shop: Shop) -> None:
    """For incremental saves: the delta's steps and execution count, and metadata is merged."""
    workflow = Workflow("workflow", shop)
    await workflow.run(user_and_posts)
    base = workflow.snapshot(limit=1, metadata={"a": 1, "b": 1})
    delta = workflow.snapshot(since="user:1", metadata={"b": 2})
    merged = merge_snapshots(base, delta)
    assert merged["steps"] == workflow.snapshot()["steps"]
    assert (merged["metadata"]["a"], merged["metadata"]["b"]) == (1, 2)


async def test_validation(shop: Shop) -> None:
    """A quick check, all problems, or an exception."""
    snapshot = await snapshot_of(shop)
    assert looks_like_workflow_snapshot(snapshot)
    assert validate_snapshot(snapshot).valid

    check = validate_snapshot({"formatVersion": 1, "steps": {"a": {}}})
    assert not check.valid
    assert any('steps["a"]' in problem for problem in check.errors)
    with pytest.raises(SnapshotFormatError, match="Invalid snapshot format"):
        assert_valid_snapshot({"formatVersion": 2})


async def test_changed_code_is_detected(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """A resumed workflow notices that the function has changed, or that recorded steps are not
    called: with a warning, an error, or not at all.
    """

    async def only_the_user(step: Step, shop: Shop) -> str:
        return str((await step("fetch_user", shop.fetch_user, "1", key="user:1"))["name"])

    workflow = Workflow(
        "workflow",
        shop,
        snapshot=await snapshot_of(shop),
        on_definition_change="warn",
        on_unknown_steps="warn",
    )
    assert await workflow.run(only_the_user) == Ok("Ana")
    assert "another definition of the function" in caplog.text
    assert "recorded steps: posts:1" in caplog.text
