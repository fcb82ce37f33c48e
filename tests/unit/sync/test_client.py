"""`perdure.sync.Client`: many threads, event loops, forks and the end of the program."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

import perdure
from perdure import Runtime, Step, Worker, sync, workflow
from perdure.errors import InvalidArgument, PerdureError, RunNotFound, StoreClosed
from perdure.store import Store
from perdure.stores import MemoryStore, open_store, postgres, redis, sqlite

SOURCE = str(Path(perdure.__file__).parents[1])


@workflow("double")
async def double(step: Step, n: int) -> int:
    return await step("double", lambda: n * 2)


@workflow("approval")
async def approval(step: Step) -> str:
    return str(await step.wait_for_event("approval", "approved"))


@contextmanager
def working(open: Callable[[], Store]) -> Iterator[None]:
    """Run a worker in a thread with an event loop of its own."""

    async def work() -> None:
        async with open() as store:  # type: ignore[attr-defined]  # every built-in store
            runtime = Runtime(store, workflows=[double, approval])
            async with Worker(runtime, poll=0.05):
                started.set()
                while not stopped.is_set():
                    await asyncio.sleep(0.01)

    started, stopped = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    try:
        assert started.wait(30)
        yield
    finally:
        stopped.set()
        thread.join()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/runs.db"


@pytest.fixture
def client(url: str) -> Iterator[sync.Client]:
    with sync.Client(url, workflows=[double, approval]) as client:
        yield client


def use_from_many_threads(open: Callable[[], Store], *, calls: int = 10) -> None:
    """Each of 20 threads triggers, signals and awaits runs through one client."""
    client = sync.Client(open())

    def use(thread: int) -> None:
        for call in range(calls):
            run = client.trigger(double, call, run_id=f"{thread}/{call}")
            assert client.result(run, timeout="60s") == call * 2
        waiting = client.handle(f"approval {thread}", approval)
        client.trigger(approval, run_id=waiting.id)
        assert waiting.signal("approved", thread)
        assert waiting.result(timeout="60s") == str(thread)

    with working(open), client, ThreadPoolExecutor(20) as threads:
        for done in [threads.submit(use, n) for n in range(20)]:
            done.result()
        assert len(client.list_runs(status="completed", limit=1000)) == 20 * (calls + 1)


def test_twenty_threads_share_a_client_on_sqlite(tmp_path: Path) -> None:
    use_from_many_threads(lambda: sqlite(tmp_path / "runs.db"))


def test_twenty_threads_share_a_client_on_postgres(postgres_url: str) -> None:
    """The fixture fails if a connection is left open."""
    use_from_many_threads(lambda: postgres(postgres_url))


def test_twenty_threads_share_a_client_on_redis(redis_url: str, redis_prefix: str) -> None:
    use_from_many_threads(lambda: redis(redis_url, namespace=redis_prefix))


def test_every_verb_of_the_asynchronous_client_exists() -> None:
    verbs = {name for name in dir(perdure.Client) if not name.startswith("_")}
    internal = {"session"}
    assert verbs - internal <= set(dir(sync.Client))


def test_watch_is_a_plain_iterator(url: str, client: sync.Client) -> None:
    run = client.trigger(approval)
    with working(lambda: open_store(url)):
        changes = client.watch(run)
        assert next(changes).status == "queued"
        client.signal(run.id, "approved", "ana")
        assert [change.status for change in changes][-1] == "completed"


def test_a_watch_can_be_left_early(client: sync.Client) -> None:
    run = client.trigger(approval)
    for change in client.watch(run):
        assert change.status == "queued"
        break
    assert client.cancel(run.id).status == "cancelled"


def test_a_timeout_does_not_affect_the_run(client: sync.Client) -> None:
    run = client.trigger(approval)
    with pytest.raises(TimeoutError):
        client.result(run, timeout="10ms")
    stored_run = client.get_run(run.id)
    assert stored_run is not None
    assert stored_run.status == "queued"


def test_errors_are_those_of_the_asynchronous_client(client: sync.Client) -> None:
    with pytest.raises(RunNotFound):
        client.cancel("missing")
    with pytest.raises(InvalidArgument):
        client.watch("")
    with pytest.raises(InvalidArgument):
        sync.Client("nowhere://")


async def test_a_notebook_may_call_inside_the_loop_of_its_kernel(
    client: sync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cells block that loop in any case."""
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    assert client.get_run("unknown") is None


async def test_a_call_inside_an_event_loop_is_refused(client: sync.Client) -> None:
    with pytest.raises(PerdureError, match=r"use perdure\.Client there: run = await"):
        client.trigger(double, 1)
    run = await asyncio.to_thread(client.trigger, double, 1)
    assert run.status == "queued"


def test_a_closed_client_refuses_calls(client: sync.Client) -> None:
    client.trigger(double, 1)
    client.close()
    with pytest.raises(StoreClosed, match="open a new one"):
        client.trigger(double, 2)


def test_a_client_that_is_not_used_any_more_ends_its_thread(url: str) -> None:
    client = sync.Client(url)
    client.list_runs()
    (thread,) = [each for each in threading.enumerate() if each.name == "perdure.sync"]
    del client
    thread.join(10)
    assert not thread.is_alive()


def test_a_store_that_is_passed_in_is_closed_too() -> None:
    """Its connections are in the client's thread."""
    store = MemoryStore()
    with sync.Client(store) as client:
        client.trigger(double, 1)
    with pytest.raises(StoreClosed):
        asyncio.run(store.load("any"))


def run_script(script: str, url: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in which each warning is an error.

    Without `-X dev`: on a busy machine asyncio's debug mode reports slow callbacks.
    """
    code = f"URL = {url!r}\n" + textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


NOT_CLOSED = """
    import threading
    from perdure import sync

    client = sync.Client(URL)
    run = client.trigger("double", 1)
    for change in client.watch(run):
        break
    waiting = threading.Thread(target=client.result, args=(run,), daemon=True)
    waiting.start()
    print("end")
"""


def test_a_program_may_end_without_closing(url: str) -> None:
    process = run_script(NOT_CLOSED, url)
    assert (process.stdout, process.stderr, process.returncode) == ("end\n", "", 0)


def test_a_program_on_postgres_may_end_without_closing(postgres_url: str) -> None:
    process = run_script(NOT_CLOSED, postgres_url)
    assert (process.stdout, process.stderr, process.returncode) == ("end\n", "", 0)


def test_a_program_on_redis_may_end_without_closing(redis_url: str, redis_prefix: str) -> None:
    store = f"__import__('perdure.stores').stores.redis(URL, namespace={redis_prefix!r})"
    process = run_script(NOT_CLOSED.replace("Client(URL)", f"Client({store})"), redis_url)
    assert (process.stdout, process.stderr, process.returncode) == ("end\n", "", 0)


FORKED = """
    import os, sys
    from perdure import sync

    client = sync.Client(URL)
    if {used_before}:
        client.trigger("double", 1, run_id="parent")
    pid = os.fork()
    if pid == 0:
        client.trigger("double", 2, run_id="child")
        client.close()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    client.trigger("double", 3, run_id="parent again")
    print(sorted(run.id for run in client.list_runs()))
"""


@pytest.mark.parametrize("used_before", [False, True], ids=["before", "after"])
def test_a_process_may_be_forked_before_and_after_the_first_use(
    url: str, used_before: bool
) -> None:
    process = run_script(FORKED.format(used_before=used_before), url)
    expected = ["child", "parent", "parent again"] if used_before else ["child", "parent again"]
    assert (process.stdout, process.stderr) == (f"{expected}\n", "")


def test_a_forked_process_does_not_harm_the_connections_of_its_parent(postgres_url: str) -> None:
    process = run_script(FORKED.format(used_before=True), postgres_url)
    assert (process.stdout, process.stderr) == ("['child', 'parent', 'parent again']\n", "")
