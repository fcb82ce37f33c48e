"""Answers over HTTP: the response to each request, and that strangers learn nothing."""

import json
from typing import Any, NamedTuple

import pytest

from perdure import Client, Runtime, Step, workflow
from perdure.callbacks import CallbackApp
from perdure.errors import InvalidArgument
from perdure.stores.memory import MemoryStore
from perdure.testing.faults import FaultyStore


@workflow("ships")
async def ships(step: Step, tons: int) -> Any:
    answer = await step.approval("ship", f"Ship {tons} t?", to="ops", data={"tons": tons})
    return answer.approved, answer.by, answer.value


@workflow("signs")
async def signs(step: Step) -> Any:
    return await step.callback("signed", timeout="7d")


class Answer(NamedTuple):
    status: int
    body: Any
    headers: dict[str, str]


async def request(
    app: CallbackApp, method: str, path: str, *chunks: bytes, root: str = ""
) -> Answer:
    """Send one request to an ASGI app, its body in chunks."""
    parts = [{"type": "http.request", "body": each, "more_body": True} for each in chunks]
    parts.append({"type": "http.request", "body": b""})
    sent: list[Any] = []

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "root_path": root}
    await app(scope, receive, send)
    start, body = sent
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], json.loads(body["body"] or b"null"), headers)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def runtime(store: MemoryStore) -> Runtime:
    return Runtime(store, workflows=[ships, signs])


@pytest.fixture
def app(store: MemoryStore) -> CallbackApp:
    return CallbackApp(Client(store), max_body=1000)


async def token_of(runtime: Runtime, definition: Any, payload: Any = None) -> str:
    return (await runtime.trigger(definition, payload, run_id="r/ä")).pending[0].token


async def test_a_question_is_shown_and_approved(runtime: Runtime, app: CallbackApp) -> None:
    token = await token_of(runtime, ships, 40)
    response = await request(app, "GET", f"/{token}")
    assert (response.status, response.body["question"]) == (200, "Ship 40 t?")
    assert response.body["data"] == {"tons": 40}
    body = json.dumps({"approved": True, "by": "ana", "value": 7}).encode()
    assert (await request(app, "POST", f"/{token}", body)).body == {"answered": True}
    await runtime.sweep()
    assert await runtime.result("r/ä") == (True, "ana", 7)


async def test_a_callback_takes_any_json(runtime: Runtime, app: CallbackApp) -> None:
    token = await token_of(runtime, signs)
    assert (await request(app, "GET", f"/{token}")).body["kind"] == "callback"
    assert (await request(app, "POST", f"/{token}", b'{"a"', b": [1]}")).status == 200
    await runtime.sweep()
    assert await runtime.result("r/ä") == {"a": [1]}


async def test_a_second_answer_is_a_conflict(runtime: Runtime, app: CallbackApp) -> None:
    token = await token_of(runtime, ships, 1)
    await request(app, "POST", f"/{token}", b'{"approved": false, "by": "eve"}')
    for method in ("GET", "POST"):
        second = await request(app, method, f"/{token}", b'{"approved": true}')
        assert (second.status, second.body["by"]) == (409, "eve")


async def test_an_answer_that_is_too_late_is_gone(runtime: Runtime, app: CallbackApp) -> None:
    token = await token_of(runtime, ships, 1)
    await runtime.cancel("r/ä")
    late = await request(app, "POST", f"/{token}", b'{"approved": true}')
    assert (late.status, late.body) == (410, {"error": "the question is no longer open"})


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_stranger_cannot_tell_which_runs_exist(
    runtime: Runtime, app: CallbackApp, method: str
) -> None:
    own = await token_of(runtime, ships, 1)
    forged = "0" * 32 + own[32:]
    yes = b'{"approved": true}'
    waiting = await request(app, method, f"/{forged}", yes)
    await runtime.cancel("r/ä")
    cancelled = await request(app, method, f"/{forged}", yes)
    await runtime.delete("r/ä")
    responses = [await request(app, method, f"/{token}", yes) for token in (forged, own)]
    assert waiting.status == 410
    assert [cancelled, *responses] == [waiting] * 3


@pytest.mark.parametrize("token", ["x", "", "../x", "0" * 32, "0" * 32 + "."])
async def test_what_is_not_a_token_is_not_found(app: CallbackApp, token: str) -> None:
    assert (await request(app, "GET", f"/{token}")).status == 404


BAD = [
    *(b"{", b"NaN", b"[1]", b'{"approved": 1}', b"{}", b'{"approved": true, "x": 1}', b"[" * 900),
    *(b'{"approved": false, "value": 1}', b'{"approved": false, "choice": "a"}'),
]


@pytest.mark.parametrize("body", BAD)
async def test_a_malformed_answer_is_refused(
    runtime: Runtime, app: CallbackApp, body: bytes
) -> None:
    token = await token_of(runtime, ships, 1)
    answer = await request(app, "POST", f"/{token}", body)
    assert answer.status == 400
    assert answer.body["error"]
    assert (await request(app, "GET", f"/{token}")).status == 200


@pytest.mark.parametrize("definition", [ships, signs])
async def test_an_answer_of_any_depth_is_read_by_the_run_or_refused(
    runtime: Runtime, app: CallbackApp, definition: Any
) -> None:
    payload = 1 if definition is ships else None
    for depth in range(80, 95):
        run = await runtime.trigger(definition, payload, run_id=f"r{depth}")
        value = "[" * depth + "]" * depth
        body = f'{{"approved": true, "value": {value}}}' if definition is ships else value
        answer = await request(app, "POST", f"/{run.pending[0].token}", body.encode())
        await runtime.sweep()
        run = await runtime.get_run(run.id) or run
        is_over = (answer.status, run.status) == (200, "completed")
        assert is_over or (answer.status, run.status) == (400, "waiting")


async def test_a_large_answer_is_refused(runtime: Runtime, app: CallbackApp) -> None:
    token = await token_of(runtime, signs)
    answer = await request(app, "POST", f"/{token}", b'"', b"x" * 1000, b'"')
    assert answer.status == 413


async def test_other_methods_are_refused(app: CallbackApp) -> None:
    answer = await request(app, "PUT", "/x")
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD, POST")


@pytest.mark.parametrize("path", ["/callbacks/{token}", "/{token}"])
async def test_it_works_wherever_it_is_mounted(
    runtime: Runtime, app: CallbackApp, path: str
) -> None:
    token = await token_of(runtime, ships, 1)
    answer = await request(app, "GET", path.format(token=token), root="/callbacks")
    assert answer.status == 200
    assert answer.headers["cache-control"] == "no-store"


async def test_an_unavailable_store_is_not_a_refusal(store: MemoryStore, runtime: Runtime) -> None:
    token = await token_of(runtime, ships, 1)
    app = CallbackApp(Client(FaultyStore(store, fail_at=1, stays_down=True)))
    assert (await request(app, "POST", f"/{token}", b'{"approved": true}')).status == 503


def test_it_needs_a_client(store: MemoryStore) -> None:
    with pytest.raises(InvalidArgument, match="Client or Runtime"):
        CallbackApp(store)  # type: ignore[arg-type]  # the wrong type


async def test_it_starts_and_stops_with_a_server(app: CallbackApp) -> None:
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
