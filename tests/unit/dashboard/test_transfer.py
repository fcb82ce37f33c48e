"""Runs that are exported from a store as files, and imported into another."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest

from perdure import Runtime, Step, workflow
from perdure.insights import Insights, Redact, read_bundle
from perdure.stores import MemoryStore
from tests.unit.dashboard.visitor import SAME_ORIGIN, Visitor, dashboard, failed_run, text_of


async def exported(run_id: str = "order-1") -> str:
    """Return what the page of a run exports."""
    store = MemoryStore()
    await failed_run(store, run_id, note="ü\r\n–")
    return (await Visitor(dashboard(store)).get(f"/runs/{run_id}/export")).text


@workflow("heavy")
async def heavy(step: Step) -> int:
    rows = [{"id": n, "token": "t", "note": "ü" * 2400} for n in range(3_100)]
    return len(await step("load", lambda: rows))


async def test_a_large_export_is_sent_while_it_is_made() -> None:
    """The rest is not made before the receiver has taken the beginning."""
    paths: list[tuple[str, ...]] = []
    messages: list[Any] = []
    seen_at_first = 0

    def hides(path: tuple[str, ...], value: Any) -> bool:
        paths.append(path)
        return False

    async def receive() -> Any:
        return await asyncio.get_running_loop().create_future()

    async def take(message: Any) -> None:
        nonlocal seen_at_first
        messages.append(message)
        if len(messages) == 2:
            seen_at_first = len(paths)

    store = MemoryStore()
    await Runtime(store, workflows=[heavy]).trigger(heavy, run_id="heavy")
    app = dashboard(store, redact=Redact(function=hides))
    path = {"path": "/runs/heavy/export", "query_string": b"", "headers": []}
    await app({"type": "http", "method": "GET", **path}, receive, take)
    body = b"".join(message["body"] for message in messages[1:])
    assert messages[0]["status"] == 200
    assert len(body) > 15_000_000
    assert 0 < seen_at_first < len(paths) / 50
    assert read_bundle(json.loads(body)).redacted


async def send(store: MemoryStore, files: dict[str, Any], **fields: str) -> Any:
    """Send the form of the page of the store, as a browser sends one with files."""
    visitor = Visitor(dashboard(store))
    data = {"form_token": await visitor.token("/store"), **fields}
    return await visitor.http.post("/store/import", data=data, files=files, headers=SAME_ORIGIN)


NO_FILE = {"bundle": ("", b"", "application/octet-stream")}


async def test_a_file_becomes_a_run() -> None:
    store = MemoryStore()
    file = {"bundle": ("rün.json", (await exported()).encode(), "application/json")}
    response = await send(store, file, run_id="", why="moved")
    assert (response.status_code, response.headers["location"]) == (303, "/runs/order-1")
    facts = await Insights(store).run("order-1")
    assert (facts.run.status, facts.payload) == ("failed", {"note": "ü\r\n–"})
    assert [(act.verb, act.by, act.why) for act in facts.acts] == [("import", "ana", "moved")]


async def test_pasted_text_becomes_a_run_with_another_id() -> None:
    store = MemoryStore()
    text = json.dumps(json.loads(await exported()), indent=2)
    response = await send(store, NO_FILE, bundle=text, run_id="copy", why="")
    assert response.headers["location"] == "/runs/copy"
    assert (await Insights(store).run("copy")).run.status == "failed"


@pytest.mark.parametrize("bundle", ["", "{", "{}", '{"run_id": "x"}'])
async def test_what_is_not_a_bundle_is_refused(bundle: str) -> None:
    store = MemoryStore()
    response = await send(store, NO_FILE, bundle=bundle)
    assert response.status_code == 400
    assert (await Insights(store).runs()).runs == ()


async def test_a_bundle_that_was_changed_is_refused() -> None:
    changed = (await exported()).replace("CarrierDown", "CarrierUp")
    response = await send(MemoryStore(), NO_FILE, bundle=changed)
    assert "Its checksum does not match" in text_of(response)


async def test_a_file_that_is_not_text_or_too_large_is_refused() -> None:
    for content in (b"\xff\xfe", b"x" * 1_000_001):
        response = await send(MemoryStore(), {"bundle": ("run.json", content)})
        assert response.status_code == 413


async def test_the_form_of_an_import_needs_its_right() -> None:
    page = await Visitor(dashboard(MemoryStore(), "view")).get("/store")
    assert "Import a run" not in page.text


@workflow("nap")
async def nap(step: Step) -> None:
    await step.sleep("nap", timedelta(days=1))


async def test_the_ids_of_a_query_are_text() -> None:
    store = MemoryStore()
    runtime = Runtime(store, workflows=[nap])
    ids = {f"nap-{n}" for n in range(520)}
    for run_id in ids:
        await runtime.trigger(nap, run_id=run_id, wait=False)
    await failed_run(store)
    response = await Visitor(dashboard(store)).get("/runs?q=workflow:nap&format=ids")
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert "content-security-policy" in response.headers
    lines = response.text.splitlines()
    assert len(lines) == 520
    assert set(lines) == ids


async def test_an_id_with_a_line_break_is_one_line() -> None:
    store = MemoryStore()
    await failed_run(store, "a\r\nb")
    response = await Visitor(dashboard(store)).get("/runs?format=ids")
    assert response.text == "a\\u000d\\u000ab\n"


async def test_a_query_for_ids_that_cannot_be_understood_says_why() -> None:
    page = await Visitor(dashboard(MemoryStore())).get("/runs?q=status:fialed&format=ids")
    assert page.status_code == 400
