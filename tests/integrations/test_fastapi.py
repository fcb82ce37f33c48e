"""A runtime in a FastAPI app: lifespan, dependency and router."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import msgspec
import pytest
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field

from perdure import Client, Runtime, Step, Worker, workflow
from perdure.errors import InvalidArgument
from perdure.integrations.fastapi import Durable, allow_all
from perdure.stores import MemoryStore


class Signup(BaseModel):
    email: str
    age: int = Field(ge=18)


@dataclass
class Parcel:
    weight: float


class Letter(msgspec.Struct):
    text: str


@workflow("welcome")
async def welcome(step: Step, signup: Signup) -> Signup:
    """Welcome a new customer.

    Waits for their name.
    """
    await step.wait_for_event("name", "name")
    return signup


@workflow("ship")
async def ship(step: Step[str], parcel: Parcel) -> str:
    return f"{parcel.weight} kg by {step.deps}"


@workflow("send/letter")
async def send(step: Step, letter: Letter) -> str:
    return letter.text


@workflow("clean")
async def clean(step: Step, days: int = 7) -> int:
    return days


@workflow("ping")
async def ping(step: Step) -> str:
    return "pong"


WORKFLOWS: list[Any] = [welcome, ship, send, clean, ping]


def new_durable(**options: Any) -> Durable:
    return Durable(Runtime(MemoryStore(), workflows=WORKFLOWS, deps="train"), **options)


def new_app(durable: Durable, **options: Any) -> FastAPI:
    app = FastAPI(lifespan=durable.lifespan)
    options = {"dependencies": [Depends(allow_all)], **options}
    app.include_router(durable.router(prefix="/runs", **options))
    return app


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop")


def test_a_small_app_drives_its_runs_itself() -> None:
    durable = new_durable(worker=True)
    app = new_app(durable)

    @app.post("/stripe")
    async def stripe(event: dict[str, Any], runtime: Annotated[Runtime, Depends(durable)]) -> str:
        receipt = await runtime.signal(
            event["run"], "name", event["name"], dedup_id=event["id"], wait=False
        )
        return receipt.delivery.value

    with TestClient(app) as http:
        started = http.post("/runs/welcome", json={"email": "ana@shop", "age": 30})
        assert started.status_code == 202
        event = {"id": "evt_1", "run": started.json()["id"], "name": "Ana"}
        assert [http.post("/stripe", json=event).json() for _ in range(2)] == [
            "delivered",
            "duplicate",
        ]
        with http.stream("GET", f"{started.headers['location']}/stream") as stream:
            *_, last = [line for line in stream.iter_lines() if line.startswith("data: ")]
    run = msgspec.json.decode(last.removeprefix("data: "))
    assert (run["status"], run["output"]) == ("completed", {"email": "ana@shop", "age": 30})


async def test_a_forgotten_lifespan_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise runs would stay queued, and nothing would say why."""
    durable = new_durable(worker=True)
    async with client_of(new_app(durable)) as http:
        for _ in range(2):
            assert (await http.post("/runs/ping")).status_code == 202
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "lifespan=durable.lifespan" in record.message


async def test_a_route_of_the_app_logs_a_forgotten_lifespan_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await new_durable(worker=True)()
    assert "lifespan=durable.lifespan" in caplog.text


async def test_a_lifespan_that_was_entered_or_has_no_worker_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await new_durable()()
    durable = new_durable(worker=True)
    async with durable.lifespan():
        await durable()
    assert caplog.text == ""


async def test_a_body_that_cannot_be_read_is_422() -> None:
    """FastAPI reads the payload: only the other routes answer with 400 or 415."""
    async with client_of(new_app(new_durable())) as http:
        for kind, events in (("application/json", 400), ("text/plain", 415)):
            request: dict[str, Any] = {"content": "{", "headers": {"Content-Type": kind}}
            assert (await http.post("/runs/welcome", **request)).status_code == 422
            assert (await http.post("/runs/r/events/e", **request)).status_code == events


async def test_cancelling_an_ended_run_shows_it() -> None:
    durable = new_durable()
    await durable.runtime.trigger(ping, run_id="r")
    async with client_of(new_app(durable)) as http:
        response = await http.post("/runs/r/cancel")
    assert (response.status_code, response.json()["status"]) == (200, "completed")


def test_dependencies_are_entered_for_the_time_of_the_app() -> None:
    entered: list[str] = []

    @asynccontextmanager
    async def carrier() -> AsyncGenerator[str, None]:
        entered.append("in")
        yield "ship"
        entered.append("out")

    runtime = Runtime(MemoryStore(), workflows=[ship], deps=carrier)
    durable = Durable(runtime, worker=Worker(runtime, concurrency=1))
    with TestClient(new_app(durable)) as http:
        assert entered == ["in"]
        location = http.post("/runs/ship", json={"weight": 2}).headers["location"]
        with http.stream("GET", f"{location}/stream") as stream:
            assert any("2.0 kg by ship" in line for line in stream.iter_lines())
    assert entered == ["in", "out"]


async def test_the_payload_is_checked_by_its_type() -> None:
    async with client_of(new_app(new_durable())) as http:
        young = await http.post("/runs/welcome", json={"email": "a@b", "age": 5})
        assert young.status_code == 422
        assert young.json()["detail"][0]["loc"] == ["body", "age"]
        assert (await http.post("/runs/welcome")).status_code == 422
        unknown = await http.post("/runs/send%2Fletter", json={"text": 5})
        assert unknown.status_code == 422
        assert unknown.json()["errors"]


@pytest.mark.parametrize(
    ("path", "body", "output"),
    [
        ("ship", {"weight": 2}, "2.0 kg by train"),
        ("send/letter", {"text": "hi"}, "hi"),
        ("~c2VuZC9sZXR0ZXI", {"text": "hi"}, "hi"),
        ("clean", 3, 3),
        ("clean", None, 7),
        ("ping", None, "pong"),
    ],
)
async def test_every_workflow_can_be_started(path: str, body: Any, output: Any) -> None:
    durable = new_durable()
    async with client_of(new_app(durable)) as http:
        options = {} if body is None else {"json": body}
        started = await http.post(f"/runs/{path}", **options)
        assert started.status_code == 202, started.text
        await durable.runtime.sweep()
        response = await http.get(started.headers["location"])
        assert response.json()["output"] == output


async def test_a_workflow_that_is_registered_later_can_be_started() -> None:
    @workflow("late")
    async def late(step: Step) -> None: ...

    durable = new_durable()
    async with client_of(new_app(durable)) as http:
        assert (await http.post("/runs/late")).status_code == 404
        durable.runtime.register(late)
        assert (await http.post("/runs/late")).status_code == 202


async def test_idempotency_keys_events_and_cancelling_are_those_of_the_app() -> None:
    durable = new_durable()
    async with client_of(new_app(durable)) as http:
        headers = {"Idempotency-Key": "a/cancel"}
        body = {"email": "a@b", "age": 20}
        first, again = [
            await http.post("/runs/welcome", json=body, headers=headers) for _ in range(2)
        ]
        assert first.headers["location"] == again.headers["location"]
        location = first.headers["location"]
        response = await http.post(f"{location}/events/other", json=1, headers={"webhook-id": "1"})
        assert response.json() == {"delivery": "delivered"}
        cancelled = await http.post(f"{location}/cancel", json={"reason": "changed my mind"})
        assert cancelled.json()["error"]["message"].endswith("changed my mind")
        late = await http.post(f"{location}/events/other")
        assert (late.status_code, late.json()["title"]) == (409, "Conflict")
        assert (await http.get("/runs/nope")).json()["status"] == 404


async def test_without_dependencies_everything_is_refused() -> None:
    durable = new_durable()
    async with client_of(new_app(durable, dependencies=[])) as http:
        for answer in (await http.post("/runs/ping"), await http.get("/runs/1")):
            assert answer.status_code == 403
    assert not await durable.runtime.list_runs()


async def test_dependencies_say_who_may_use_the_routes() -> None:
    async def auth(request: Request) -> None:
        if request.headers.get("x-token") != "t":
            raise HTTPException(401)

    async with client_of(new_app(new_durable(), dependencies=[Depends(auth)])) as http:
        assert (await http.post("/runs/ping")).status_code == 401
        assert (await http.post("/runs/ping", headers={"X-Token": "t"})).status_code == 202


def test_the_schema_shows_routes_payloads_and_answers() -> None:
    schema = new_app(new_durable()).openapi()
    assert set(schema["paths"]) == {
        "/runs/{run_id}",
        "/runs/{run_id}/stream",
        "/runs/{run_id}/events/{name}",
        "/runs/{run_id}/cancel",
        "/runs/welcome",
        "/runs/ship",
        "/runs/clean",
        "/runs/ping",
        "/runs/~c2VuZC9sZXR0ZXI",
    }
    start = schema["paths"]["/runs/welcome"]["post"]
    assert start["summary"] == "Welcome a new customer."
    assert start["description"] == "Waits for their name."
    body = start["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/Signup"}
    answer = start["responses"]["202"]["content"]["application/json"]["schema"]
    assert answer == {"$ref": "#/components/schemas/RunView"}
    assert "requestBody" not in schema["paths"]["/runs/ping"]["post"]
    assert schema["paths"]["/runs/clean"]["post"]["requestBody"].get("required") is not True
    assert schema["components"]["schemas"]["RunView"]["properties"]["status"] == {
        "type": "string",
        "title": "Status",
    }


def test_two_routers_of_one_app_are_different_operations() -> None:
    app = FastAPI()
    for prefix in ("/a", "/b"):
        app.include_router(new_durable().router(prefix=prefix), prefix="/v1")
    paths = app.openapi()["paths"]
    ids = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(ids) == len(set(ids)) == 18


def test_what_does_not_fit_is_refused() -> None:
    runtime = Runtime(MemoryStore())
    for wrong in (Client(MemoryStore()), MemoryStore()):
        with pytest.raises(InvalidArgument, match="a Runtime"):
            Durable(wrong)  # type: ignore[arg-type]
    for worker in (Worker(Runtime()), "yes"):
        with pytest.raises(InvalidArgument, match="worker"):
            Durable(runtime, worker=worker)  # type: ignore[arg-type]
