"""Runs over HTTP, as an ASGI app."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount

from perdure import Client, Runtime, Step, Worker, workflow
from perdure.errors import InvalidArgument, StoreUnavailable
from perdure.integrations import starlette
from perdure.integrations.starlette import allow_all, runs_app
from perdure.result import Err, Result
from perdure.stores import MemoryStore
from perdure.testing import FaultyStore
from perdure.urls import encode_id
from tests.unit.dashboard.test_mounts import FRAMEWORKS

EVENT = "YS9i"  # "a/b", encoded
HOSTILE = ["a/b", "a/stream", "a/events/b", "a/cancel", "..", "/", "a b?c=d#e", "ä/🦊", "%2F", '"<']


@dataclass
class Signup:
    email: str
    age: int = 18


@dataclass
class Welcome:
    text: str
    at: datetime


@workflow("welcome")
async def welcome(step: Step, signup: Signup) -> Welcome:
    name = await step.wait_for_event("name", "name")
    return Welcome(f"hello {name} ({signup.email})", datetime(2026, 1, 2, tzinfo=UTC))


@workflow("fail")
async def fail(step: Step, kind: str) -> Result[str, str]:
    if kind == "raise":
        raise ValueError("no luck")
    return Err("no stock")


@workflow("a/b ü")
async def odd(step: Step) -> str:
    return "odd"


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop")


@pytest.fixture
def runtime() -> Runtime:
    return Runtime(MemoryStore(), workflows=[welcome, fail, odd])


@pytest.fixture
async def http(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=[Mount("/api/runs", runs_app(runtime, auth=allow_all))])
    async with client_of(app) as client:
        yield client


async def started(http: httpx.AsyncClient, **headers: str) -> str:
    answer = await http.post("/api/runs/welcome", json={"email": "ana@shop"}, headers=headers)
    assert answer.status_code == 202, answer.text
    return answer.headers["location"]


async def test_a_run_is_started_followed_and_signalled(
    http: httpx.AsyncClient, runtime: Runtime
) -> None:
    location = await started(http)
    async with Worker(runtime):
        response = await http.post(f"{location}/events/name", json="Ana")
        run_id = (await http.get(location)).json()["id"]
        await runtime.result(run_id)
    assert (response.status_code, response.json()) == (202, {"delivery": "delivered"})
    run = (await http.get(location)).json()
    assert run["status"] == "completed"
    assert run["output"] == {"text": "hello Ana (ana@shop)", "at": "2026-01-02T00:00:00Z"}
    assert location == f"/api/runs/{run_id}"


async def test_an_idempotency_key_starts_one_run(http: httpx.AsyncClient) -> None:
    first = await started(http, **{"Idempotency-Key": "k/1"})
    assert await started(http, **{"Idempotency-Key": "k/1"}) == first
    assert await started(http, **{"Idempotency-Key": "k/2"}) != first
    other = await http.post(
        "/api/runs/welcome", json={"email": "eve@shop"}, headers={"Idempotency-Key": "k/1"}
    )
    assert other.status_code == 409
    assert other.headers["content-type"] == "application/problem+json"
    # A key can be guessed: the answer does not show what its first user sent.
    assert "already exists" in other.json()["detail"]
    assert "ana@shop" not in other.text


@pytest.mark.parametrize("header", ["webhook-id", "X-GitHub-Delivery", "Idempotency-Key"])
async def test_an_event_that_is_delivered_twice_counts_once(
    http: httpx.AsyncClient, header: str
) -> None:
    location = await started(http)
    answers = [
        await http.post(f"{location}/events/name", json="Ana", headers={header: "msg_1"})
        for _ in range(2)
    ]
    assert [each.json()["delivery"] for each in answers] == ["delivered", "duplicate"]


async def test_the_dedup_id_can_be_part_of_the_event(runtime: Runtime) -> None:
    app = runs_app(runtime, auth=allow_all, dedup_id=lambda event: event["id"])
    await runtime.trigger(welcome, Signup("a@b"), run_id="1")
    async with client_of(app) as http:
        answers = [
            await http.post("/1/events/name", json={"id": n}) for n in ("evt_1", "evt_1", "evt_2")
        ]
    assert [each.json()["delivery"] for each in answers[:2]] == ["delivered", "duplicate"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("mount", ["", "/api/läufe"])
async def test_every_id_has_a_url_wherever_the_app_is(
    runtime: Runtime, framework: Any, mount: str
) -> None:
    async with client_of(framework(runs_app(runtime, auth=allow_all), mount)) as http:
        for run_id in HOSTILE:
            await runtime.trigger(welcome, Signup("a@b"), run_id=run_id)
            url = f"{mount}/{encode_id(run_id)}"
            assert (await http.get(url)).json()["id"] == run_id
            assert (await http.post(f"{url}/events/~{EVENT}", json=1)).status_code == 202
            assert (await http.post(f"{url}/cancel")).json()["status"] == "cancelled"


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("mount", ["", "/api/läufe"])
async def test_a_location_leads_to_the_run(runtime: Runtime, framework: Any, mount: str) -> None:
    async with client_of(framework(runs_app(runtime, auth=allow_all), mount)) as http:
        for workflow in ("a%2Fb%20%C3%BC", "a/b ü"):
            for key in ("1", "a/stream", "..", "?"):
                headers = {"Idempotency-Key": key}
                answer = await http.post(f"{mount}/{workflow}", headers=headers)
                location = answer.headers["location"]
                assert location.isascii()
                assert (await http.get(location)).json()["id"] == f"a/b ü:{key}"


@pytest.mark.parametrize(
    "id", [each for each in HOSTILE if each not in ("..", "/") and "a/" not in each[:2]] + ["a/b"]
)
async def test_an_id_may_be_percent_encoded(
    http: httpx.AsyncClient, runtime: Runtime, id: str
) -> None:
    await runtime.trigger(welcome, Signup("a@b"), run_id=id)
    assert (await http.get(f"/api/runs/{quote(id, safe='')}")).json()["id"] == id


@pytest.mark.parametrize("path", ["order/1", "order%2F1", "~b3JkZXIvMQ"])
async def test_an_id_with_a_slash_can_be_written_in_three_ways(
    http: httpx.AsyncClient, runtime: Runtime, path: str
) -> None:
    await runtime.trigger(welcome, Signup("a@b"), run_id="order/1")
    assert (await http.get(f"/api/runs/{path}")).json()["id"] == "order/1"
    assert (await http.post(f"/api/runs/{path}/cancel")).status_code == 200


@pytest.mark.parametrize("path", ["a/b ü", "a%2Fb%20%C3%BC", "~YS9iIMO8"])
async def test_a_workflow_may_have_any_name(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(f"/api/runs/{path}")
    assert answer.json()["workflow"] == "a/b ü"
    assert answer.headers["location"].startswith("/api/runs/~")
    assert (await http.get(answer.headers["location"])).status_code == 200


async def test_a_failed_run_says_why_and_shows_no_traceback(
    http: httpx.AsyncClient, runtime: Runtime
) -> None:
    await runtime.trigger(fail, "raise", run_id="1")
    await runtime.trigger(fail, "return", run_id="2")
    raised, returned = [(await http.get(f"/api/runs/{n}")).json() for n in (1, 2)]
    assert raised["error"] == {"type": "ValueError", "message": "no luck", "value": None}
    assert returned["error"] == {"type": "Err", "message": "no stock", "value": "no stock"}
    assert "Traceback" not in json.dumps(raised)


JSON = {"Content-Type": "application/json"}
BODY = {"email": "a"}
BAD: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("POST", "/nope", {"json": 1}, 404, "no workflow 'nope'"),
    ("POST", "/welcome", {"json": {"email": 5, "age": "old"}}, 422, "not valid"),
    ("POST", "/welcome", {}, 422, "not valid"),
    ("POST", "/welcome", {"content": b"{", "headers": JSON}, 400, "not JSON"),
    ("POST", "/welcome", {"content": b"[" * 10**5, "headers": JSON}, 400, "not JSON"),
    ("POST", "/welcome", {"content": b"{}"}, 415, "Content-Type"),
    ("POST", "/welcome", {"json": BODY, "headers": {"Idempotency-Key": ""}}, 422, "non-empty"),
    ("POST", "/welcome", {"json": BODY, "headers": {"Idempotency-Key": "x" * 600}}, 422, "512"),
    ("GET", "/nope", {}, 404, "no run"),
    ("GET", "/~schedule:x", {}, 404, "no run"),
    ("GET", "/nope/stream", {}, 404, "no run"),
    ("POST", "/nope/events/name", {}, 404, "no run"),
    ("POST", "/nope/events/~name", {}, 422, "reserved"),
    ("POST", "/nope/cancel", {}, 404, "no run"),
    ("POST", "/", {}, 404, "Name a workflow"),
    ("DELETE", "/nope", {}, 405, "DELETE"),
]


@pytest.mark.parametrize(("method", "path", "options", "status", "word"), BAD)
async def test_a_bad_request_gets_a_problem(
    http: httpx.AsyncClient,
    method: str,
    path: str,
    options: Mapping[str, Any],
    status: int,
    word: str,
) -> None:
    answer = await http.request(method, f"/api/runs{path}", **options)
    problem = answer.json()
    assert (answer.status_code, problem["status"]) == (status, status)
    assert answer.headers["content-type"] == "application/problem+json"
    assert word in problem["detail"]


async def test_each_bad_field_of_a_payload_is_named(http: httpx.AsyncClient) -> None:
    answer = await http.post("/api/runs/welcome", json={"age": "old"})
    assert [each.partition(":")[0] for each in answer.json()["errors"]] == ["email", "age"]


async def test_an_event_for_a_run_that_is_over_is_refused(
    http: httpx.AsyncClient, runtime: Runtime
) -> None:
    await runtime.trigger(odd, run_id="1")
    answer = await http.post("/api/runs/1/events/name")
    assert (answer.status_code, answer.json()["title"]) == (409, "Conflict")


async def test_an_unavailable_store_is_reported_without_its_address() -> None:
    store = FaultyStore(
        MemoryStore(),
        fail_at=1,
        stays_down=True,
        error=lambda _: StoreUnavailable("postgres at db.internal:5432 does not answer"),
    )
    async with client_of(runs_app(Client(store, workflows=[odd]), auth=allow_all)) as http:
        answer = await http.post("/a%2Fb%20%C3%BC")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "db.internal" not in answer.text


async def test_without_auth_everything_is_refused(runtime: Runtime) -> None:
    async with client_of(runs_app(runtime)) as http:
        answer = await http.post("/welcome", json={"email": "a@b"})
    assert answer.status_code == 403
    assert "closed" in answer.json()["detail"]
    assert not await runtime.list_runs()


@pytest.mark.parametrize("allowed", [None, False, 1, "yes"])
async def test_only_true_lets_a_request_in(runtime: Runtime, allowed: Any) -> None:
    async def auth(request: Request) -> Any:
        return allowed

    async with client_of(runs_app(runtime, auth=auth)) as http:
        assert (await http.get("/1")).status_code == 403


async def test_a_hook_may_return_a_response(runtime: Runtime) -> None:
    async def auth(request: Request) -> bool | Response:
        return request.headers.get("x-token") == "t" or PlainTextResponse("sign in", 401)

    async with client_of(runs_app(runtime, auth=auth)) as http:
        assert (await http.get("/1")).status_code == 401
        assert (await http.get("/1", headers={"X-Token": "t"})).status_code == 404


async def test_what_is_not_a_hook_is_refused(runtime: Runtime) -> None:
    for options in ({"auth": "secret"}, {"dedup_id": "id"}):
        with pytest.raises(InvalidArgument):
            runs_app(runtime, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        runs_app(MemoryStore())  # type: ignore[arg-type]


class Stream:
    """Reads server-sent events of an app while it writes them: httpx waits for the end."""

    def __init__(self, app: Any, path: str, headers: Mapping[str, str] | None = None) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self._left = asyncio.Event()
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()],
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self.messages.put))

    async def _receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def leave(self) -> None:
        self._left.set()
        await self.task

    async def next(self) -> str:
        while True:
            message = await asyncio.wait_for(self.messages.get(), 10)
            if message.get("body") or not message.get("more_body", True):
                return str(message["body"].decode())


def run_in(event: str) -> Any:
    return json.loads(event.partition("data: ")[2])


async def test_a_stream_shows_each_change_and_ends_with_the_run(runtime: Runtime) -> None:
    await runtime.trigger(welcome, Signup("a@b"), run_id="1")
    stream = Stream(runs_app(runtime, auth=allow_all), "/1/stream")
    first = await stream.next()
    assert first.startswith("event: run\ndata: ")
    assert run_in(first)["waits"] == [{"id": "name", "event": "name", "until": None}]
    await runtime.signal("1", "name", "Ana")
    while not (last := await stream.next()).startswith("event: run\nid: over\n"):
        assert run_in(last)["status"] in ("running", "waiting")
    assert run_in(last)["output"]["text"] == "hello Ana (a@b)"
    assert await stream.next() == ""
    await stream.task


async def test_a_browser_that_reconnects_after_the_end_gets_204(http: httpx.AsyncClient) -> None:
    answer = await http.get("/api/runs/1/stream", headers={"Last-Event-ID": "over"})
    assert answer.status_code == 204


async def test_a_quiet_stream_stays_open_and_ends_when_the_browser_leaves(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starlette, "HEARTBEAT", 0.01)
    await runtime.trigger(welcome, Signup("a@b"), run_id="1")
    before = asyncio.all_tasks()
    stream = Stream(runs_app(runtime, auth=allow_all), "/1/stream")
    assert [(await stream.next())[:1] for _ in range(3)] == ["e", ":", ":"]
    await stream.leave()
    while asyncio.all_tasks() - before:
        await asyncio.sleep(0)


async def test_a_stream_ends_when_its_run_is_deleted(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    await runtime.trigger(welcome, Signup("a@b"), run_id="1")
    stream = Stream(runs_app(runtime, auth=allow_all), "/1/stream")
    await stream.next()
    await runtime.delete("1")
    assert await stream.next() == ""
    await stream.task
    assert "the stream of run '1' ended" in caplog.text


async def test_progress_is_streamed_while_a_step_runs() -> None:
    may_end = asyncio.Event()

    async def slow(step: Step) -> None:
        step.report(progress=0.5, note="half")
        await may_end.wait()

    @workflow("slow")
    async def slowly(step: Step) -> None:
        await step("slow", slow, step)

    runtime = Runtime(MemoryStore(), workflows=[slowly])
    async with Worker(runtime):
        await runtime.trigger(slowly, run_id="1", wait=False)
        stream = Stream(runs_app(runtime, auth=allow_all), "/1/stream")
        while run_in(await stream.next())["progress"] != 0.5:
            pass
        may_end.set()
        await stream.task


async def test_it_can_be_served_without_another_app(runtime: Runtime) -> None:
    sent: list[Any] = []
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await runs_app(runtime)({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
