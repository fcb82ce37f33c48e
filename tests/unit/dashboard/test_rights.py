"""Route by method by right: what a person may not do is refused in one place."""

from typing import Any, get_args

import pytest

from perdure.dashboard import Right
from perdure.dashboard.access import ALL_RIGHTS
from perdure.dashboard.routes import ROUTES, Route
from perdure.errors import StoreUnavailable
from perdure.insights import Insights
from perdure.operations.verbs import VERBS
from perdure.stores import MemoryStore
from perdure.testing import TestClock
from tests.unit.dashboard.visitor import SAME_ORIGIN, Visitor, dashboard, failed_run

RIGHTS: tuple[Right, ...] = get_args(Right)
REFUSED = (403, 404)


def cases() -> list[Any]:
    """Return each path with a form, and the right that it needs."""
    cases_found = []
    for route in ROUTES:
        for verb in VERBS.values() if "{verb}" in route.path else [None]:
            path = path_of(route, verb.name if verb else "")
            params = route.match(path)
            assert params is not None
            right = route.right_for(params, {})
            if right is not None:
                cases_found.append(pytest.param(route, path, right, id=path))
    return cases_found


def path_of(route: Route, verb: str) -> str:
    place = VERBS[verb].place if verb else ""
    path = route.path.replace("{verb}", verb).replace("{place}", place or "runs")
    for name in ("run", "name", "workflow", "queue", "schedule", "worker", "bulk"):
        path = path.replace("{" + name + "}", "order-1")
    return path


WITH_FORM = [case for case in cases() if case.values[0].post is not None]


@pytest.mark.parametrize(("route", "path", "right"), WITH_FORM)
async def test_a_form_needs_exactly_its_right(route: Route, path: str, right: Right) -> None:
    """With the right the missing token is the reason; without it the right is."""
    for right_held in RIGHTS:
        visitor = Visitor(dashboard(MemoryStore(), "view", right_held))
        response = await visitor.http.post(path, headers=SAME_ORIGIN)
        assert response.status_code == 403
        is_allowed = right in ("view", right_held)
        assert ("This form has expired" in response.text) == is_allowed


@pytest.mark.parametrize(("route", "path", "right"), cases())
async def test_nothing_is_shown_without_the_right_to_view(
    route: Route, path: str, right: Right
) -> None:
    others = ALL_RIGHTS - {"view"}
    visitor = Visitor(dashboard(MemoryStore(), *others))
    assert (await visitor.get(path)).status_code == 403
    assert (await visitor.http.post(path, headers=SAME_ORIGIN)).status_code == 403


@pytest.mark.parametrize(("route", "path", "right"), cases())
@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_other_methods_are_refused(
    route: Route, path: str, right: Right, method: str
) -> None:
    visitor = Visitor(dashboard(MemoryStore()))
    assert (await visitor.http.request(method, path)).status_code == 405


@pytest.mark.parametrize(("route", "path", "right"), cases())
async def test_reading_a_page_writes_nothing(route: Route, path: str, right: Right) -> None:
    store = MemoryStore()
    await failed_run(store)
    before = (await store.load("order-1"), await store.documents.keys("*"))
    await Visitor(dashboard(store)).get(path + "?verb=retry&q=&run=order-1&older_than=1d")
    assert (await store.load("order-1"), await store.documents.keys("*")) == before


async def test_the_live_stream_needs_the_right_to_view() -> None:
    visitor = Visitor(dashboard(MemoryStore(), "operate"))
    assert (await visitor.get("/live?topic=counts")).status_code == 403


@pytest.mark.parametrize(("limit", "needs_admin"), [("", False), ("1000", False), ("1001", True)])
async def test_a_bulk_above_the_limit_needs_admin(limit: str, needs_admin: bool) -> None:
    visitor = Visitor(dashboard(MemoryStore(), "view", "operate"))
    response = await visitor.post(
        "/bulk/all/retry", {"q": "status:failed", "limit": limit}, form="/bulk/all?verb=retry"
    )
    assert (response.status_code == 403) == needs_admin


@pytest.mark.parametrize(
    "path",
    [
        "/runs/order-1/do/pause_workflow",
        "/workflows/order/do/retry",
        "/bulk/all/fork",
        "/bulk/selected/drain_worker",
        "/runs/order-1/do/close",
    ],
)
async def test_a_verb_in_the_wrong_place_does_not_exist(path: str) -> None:
    visitor = Visitor(dashboard(MemoryStore()))
    assert (await visitor.http.post(path, headers=SAME_ORIGIN)).status_code == 404


async def reveals(store: MemoryStore) -> list[tuple[str, str]]:
    page = await Insights(store).acts("verb:reveal")
    return [(act.by, act.run_id) for act in page.acts]


@pytest.mark.parametrize(
    "path",
    [
        "?reveal=1",
        "?reveal=1&format=json",
        "/steps?reveal=1&key=ship",
        "/value?reveal=1",
        "/export?reveal=1",
        "/do/edit_payload",
    ],
)
async def test_showing_secrets_is_recorded_if_it_should_be(path: str) -> None:
    store = MemoryStore()
    await failed_run(store)
    before = await store.load("order-1")
    await Visitor(dashboard(store)).get(f"/runs/order-1{path}")
    assert await reveals(store) == []
    await Visitor(dashboard(store, audit_reveals=True)).get(f"/runs/order-1{path}")
    assert await reveals(store) == [("ana", "order-1")]
    assert await store.load("order-1") == before


async def test_a_page_that_stays_open_is_recorded_once_per_hour() -> None:
    store, clock = MemoryStore(), TestClock()
    await failed_run(store)
    visitor = Visitor(dashboard(store, audit_reveals=True, clock=clock))
    for _ in range(3):
        await visitor.get("/runs/order-1?reveal=1")
    assert len(await store.documents.keys("act:*")) == 1
    await clock.advance(3600)
    await visitor.get("/runs/order-1?reveal=1")
    assert len(await store.documents.keys("act:*")) == 2


@pytest.mark.parametrize("path", ["/runs/order-1", "/runs/order-9?reveal=1"])
async def test_what_shows_no_secrets_is_not_recorded(path: str) -> None:
    store = MemoryStore()
    await failed_run(store)
    await Visitor(dashboard(store, audit_reveals=True)).get(path)
    assert await reveals(store) == []


async def test_without_the_record_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **options: object) -> None:
        raise StoreUnavailable("connection refused")

    store = MemoryStore()
    await failed_run(store, api_key="s3cret")
    monkeypatch.setattr(type(store.documents), "set", fail)
    page = await Visitor(dashboard(store, audit_reveals=True)).get("/runs/order-1?reveal=1")
    assert page.status_code == 503
    assert "s3cret" not in page.text


async def test_secrets_need_the_right_to_see_them() -> None:
    store = MemoryStore()
    await failed_run(store, api_key="s3cret")
    path = "/runs/order-1?step=charge&reveal=1"
    others = ALL_RIGHTS - {"payloads"}
    assert "s3cret" not in (await Visitor(dashboard(store, *others)).get(path)).text
    assert "s3cret" in (await Visitor(dashboard(store)).get(path)).text
    assert "s3cret" not in (await Visitor(dashboard(store)).get("/runs/order-1?step=charge")).text
