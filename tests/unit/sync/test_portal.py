"""The event loop behind `perdure.sync`: threads, cancellation and closing."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from perdure.errors import StoreClosed
from perdure.sync.portal import Portal

log: list[str] = []


async def on_close() -> None:
    log.append("closed")


@pytest.fixture
def portal() -> Iterator[Portal]:
    log.clear()
    portal = Portal(on_close)
    yield portal
    portal.close()


async def double(n: int) -> int:
    await asyncio.sleep(0.001)
    return n * 2


async def forever() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        log.append("cancelled")


def test_threads_share_one_loop(portal: Portal) -> None:
    before = threading.active_count()
    with ThreadPoolExecutor(20) as threads:
        doubled = threads.map(lambda n: portal.call(double(n)), range(200))
        assert list(doubled) == [n * 2 for n in range(200)]
    assert threading.active_count() == before + 1


def test_an_unused_portal_has_no_thread(portal: Portal) -> None:
    before = threading.active_count()
    portal.close()
    assert threading.active_count() == before
    assert log == []


def test_closing_ends_the_calls_before_the_store(portal: Portal) -> None:
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(lambda: portal.call(forever()))
        portal.call(double(1))
        portal.close()
        with pytest.raises(StoreClosed, match="closed while a call waited"):
            call.result()
    assert log == ["cancelled", "closed"]


def test_a_closed_portal_refuses_calls(portal: Portal) -> None:
    portal.call(double(1))
    portal.close()
    portal.close()
    with pytest.raises(StoreClosed, match="open a new one"):
        portal.call(double(1))
    assert log == ["closed"]


def test_closing_from_many_threads_closes_once(portal: Portal) -> None:
    portal.call(double(1))
    with ThreadPoolExecutor(10) as threads:
        for closing in [threads.submit(portal.close) for _ in range(10)]:
            closing.result()
    assert log == ["closed"]


def test_calls_and_closing_at_once_lose_no_call(portal: Portal) -> None:
    """Each call returns its value or raises `StoreClosed`; none waits forever."""

    def calls() -> None:
        for n in range(10_000):
            try:
                assert portal.call(double(n)) == n * 2
            except StoreClosed:
                return

    with ThreadPoolExecutor(10) as threads:
        callers = [threads.submit(calls) for _ in range(10)]
        time.sleep(0.05)
        portal.close()
        for caller in callers:
            caller.result(timeout=10)


def test_an_interrupted_call_is_cancelled(portal: Portal) -> None:
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        portal.call(forever())
    timer.join()
    portal.call(double(1))
    assert log == ["cancelled"]


def test_an_error_of_closing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ConnectionError("gone")

    portal = Portal(fail)
    portal.call(double(1))
    portal.close()
    assert "could not be closed" in caplog.text


def test_a_generator_that_is_not_used_up_is_closed(portal: Portal) -> None:
    async def numbers() -> AsyncGenerator[int]:
        try:
            while True:
                yield 1
        finally:
            log.append("generator closed")

    async def first(generator: AsyncGenerator[int]) -> int:
        return await anext(generator)

    generator = numbers()
    portal.call(first(generator))
    portal.discard(generator)
    portal.close()
    portal.discard(numbers())
    assert log == ["generator closed", "closed"]
