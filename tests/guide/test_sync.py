"""`perdure.sync`: starting and reading runs from scripts, Flask and Django views."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

from perdure import Runtime, Step, Worker, sync, workflow
from perdure.errors import Cancelled


@workflow("order")
async def order(step: Step, amount: int) -> str:
    return await step("charge", lambda: f"charged {amount}")


@workflow("approval")
async def approval(step: Step) -> str:
    approved = await step.wait_for_event("approval", "approved")
    return f"approved by {approved['by']}"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db"


@pytest.fixture
def client(url: str) -> Iterator[sync.Client]:
    """One client per program, shared by all of its threads. The first call starts its thread."""
    with sync.Client(url) as client:
        yield client


@pytest.fixture
def _worker(url: str) -> Iterator[None]:
    """A worker, usually a separate program. It calls the workflow functions."""

    async def work() -> None:
        async with Runtime(url, workflows=[order, approval]) as runtime, Worker(runtime, poll=0.05):
            while not stopped.is_set():
                await asyncio.sleep(0.01)

    stopped = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    yield
    stopped.set()
    thread.join()


@pytest.mark.usefixtures("_worker")
def test_a_script_starts_a_run_and_waits_for_its_result(client: sync.Client) -> None:
    run = client.trigger(order, 7, run_id="order-1")
    assert client.result(run, timeout="30s") == "charged 7"


@pytest.mark.usefixtures("_worker")
def test_a_workflow_can_be_named(client: sync.Client) -> None:
    """The program does not need to import the workflow's function."""
    run = client.trigger("order", 7)
    assert client.result(run, timeout="30s") == "charged 7"


@pytest.mark.usefixtures("_worker")
def test_a_run_can_be_signalled_and_watched(client: sync.Client) -> None:
    run = client.trigger(approval)
    assert client.signal(run.id, "approved", {"by": "ana"})
    *_, last = client.watch(run)
    assert last.output == "approved by ana"


def test_a_handle_stands_for_a_run(client: sync.Client) -> None:
    client.trigger(approval, run_id="approval-1")
    handle = client.handle("approval-1", approval)
    assert handle.cancel(reason="not needed").status == "cancelled"
    with pytest.raises(Cancelled, match="not needed"):
        handle.result()


def test_runs_can_be_found_and_deleted(client: sync.Client) -> None:
    client.trigger_many(order, [1, 2, 3], run_ids=["a", "b", "c"])
    assert sorted(run.id for run in client.list_runs(status="queued")) == ["a", "b", "c"]
    assert client.delete("b")
    assert client.get_run("b") is None


Respond = Callable[[str, list[tuple[str, str]]], object]


@pytest.mark.usefixtures("_worker")
def test_the_views_of_a_web_application_share_a_client(client: sync.Client) -> None:
    """A WSGI server calls them in many threads at once; so do Flask and Django."""

    def application(environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        run = client.trigger(order, int(environ["QUERY_STRING"]))
        respond("200 OK", [("Content-Type", "application/json")])
        return [json.dumps({"receipt": client.result(run, timeout="30s")}).encode()]

    def get(amount: int) -> Any:
        environ: dict[str, Any] = {"QUERY_STRING": str(amount)}
        setup_testing_defaults(environ)
        return json.loads(b"".join(application(environ, lambda status, headers: None)))

    with ThreadPoolExecutor(8) as server:
        answers = list(server.map(get, range(24)))
    assert answers == [{"receipt": f"charged {amount}"} for amount in range(24)]
