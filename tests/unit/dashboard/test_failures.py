"""Errors are shown on pages of the dashboard that say what failed, and nothing confidential."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from starlette.exceptions import HTTPException

from perdure.dashboard import Access, Dashboard
from perdure.errors import StoreError, StoreUnavailable
from perdure.stores import MemoryStore
from perdure.testing import FaultyStore
from tests.unit.dashboard.visitor import Visitor, dashboard, failed_run, text_of

SECRET = "postgres://ana:s3cret@db/shop"


def broken(error: Callable[[str], BaseException]) -> FaultyStore:
    """Return a store whose first read fails with this error."""
    return FaultyStore(MemoryStore(), fail_at=1, verbs={"summaries"}, error=error)


async def test_an_unreachable_store_is_a_page_without_the_password() -> None:
    store = broken(lambda verb: StoreUnavailable(f"{SECRET}: connection refused"))
    page = await Visitor(dashboard(store)).get("/runs/order-1")
    assert page.status_code == 503
    assert "Could not read from the store: postgres://ana:" in text_of(page)
    assert "connection refused" in text_of(page)
    assert "s3cret" not in page.text


async def test_one_region_that_cannot_be_read_says_so_without_the_password() -> None:
    store = FaultyStore(
        MemoryStore(), fail_at=1, verbs={"counts"}, error=lambda verb: StoreUnavailable(SECRET)
    )
    page = await Visitor(dashboard(store)).get("/")
    assert "Could not read from the store" in text_of(page)
    assert "s3cret" not in page.text


async def test_an_unexpected_error_is_a_page_with_all_headers() -> None:
    page = await Visitor(dashboard(broken(lambda verb: KeyError(SECRET)))).get("/runs/order-1")
    assert page.status_code == 500
    assert "This page failed with KeyError." in text_of(page)
    assert 'aria-label="Pages"' in page.text
    assert "s3cret" not in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert page.headers["cache-control"] == "no-store"


async def test_an_unexpected_error_is_logged_once_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await Visitor(dashboard(broken(lambda verb: KeyError("x")))).get("/runs/order-1")
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert record.getMessage() == "GET /runs/order-1 failed"
    assert record.exc_info is not None


async def test_an_auth_hook_that_fails_lets_no_one_in() -> None:
    async def auth(request: object) -> Access:
        raise LookupError(SECRET)

    response = await Visitor(Dashboard(MemoryStore(), auth=auth)).get("/runs")
    assert response.status_code == 500
    assert response.text == "This page failed with LookupError. The server's log says more."
    assert "content-security-policy" in response.headers


async def test_an_auth_hook_may_raise_its_refusal() -> None:
    async def auth(request: object) -> Access:
        raise HTTPException(401, "Sign in.", {"WWW-Authenticate": "Bearer"})

    response = await Visitor(Dashboard(MemoryStore(), auth=auth)).get("/runs")
    assert (response.status_code, response.text) == (401, "Sign in.\n")
    assert response.headers["www-authenticate"] == "Bearer"


async def test_a_change_that_the_store_refuses_is_a_page_too() -> None:
    inner = MemoryStore()
    await failed_run(inner)
    visitor = Visitor(dashboard(FaultyStore(inner, fail_at=1, verbs={"acquire"}, error=StoreError)))
    page = await visitor.post("/runs/order-1/do/retry")
    assert page.status_code == 503
    assert "Could not write to the store" in text_of(page)


async def test_a_read_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.dashboard.board._MAX_SECONDS", 0.05)
    store = FaultyStore(MemoryStore(), fail_at=1, how="hang", verbs={"summaries"})
    page = await Visitor(dashboard(store)).get("/runs/order-1")
    assert page.status_code == 503
    assert "Could not read from the store: it did not answer within" in text_of(page)


@pytest.mark.parametrize("verb", ["counts", "due"])
async def test_a_slow_region_does_not_take_the_page_with_it(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.dashboard.board._MAX_SECONDS", 0.4)
    store = FaultyStore(MemoryStore(), fail_at=1, how="hang", verbs={verb})
    page = await Visitor(dashboard(store)).get("/")
    assert page.status_code == 200
    assert "Could not read from the store: it did not answer within 0.3 s" in text_of(page)
    assert "No worker has reported in this period." in text_of(page)


class SlowStore(FaultyStore):
    """Answers `summaries` when the test permits it, and counts how many calls wait for that."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.answers = asyncio.Event()
        self.reads = 0

    async def summaries(self, ids: Sequence[str], /) -> list[None]:
        self.reads += 1
        await self.answers.wait()
        return [None for _ in ids]


async def test_four_requests_read_from_the_store_at_once() -> None:
    store = SlowStore()
    visitor = Visitor(dashboard(store))
    pages = [asyncio.ensure_future(visitor.get(f"/runs/order-{n}")) for n in range(6)]
    async with asyncio.timeout(1):
        while store.reads < 4:
            await asyncio.sleep(0)
    for _ in range(50):
        await asyncio.sleep(0)
    assert store.reads == 4
    store.answers.set()
    assert {page.status_code for page in await asyncio.gather(*pages)} == {404}
    assert store.reads == 6
