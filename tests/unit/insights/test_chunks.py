"""Large values are written in small pieces, and are the same as if they were written at once."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import Runtime, Step, workflow
from perdure.errors import InvalidArgument
from perdure.insights import MASK, NOTHING_REDACTED, Insights, Redact, read_bundle
from perdure.insights.chunks import SIZE, JsonWriter, UserValue, chunks
from perdure.insights.model import Bundle
from perdure.stores import MemoryStore
from perdure.stores._shell import StoreShell
from perdure.testing import TestClock
from tests.unit.insights.runs import order, run_order

keys = st.sampled_from(["id", "token", "note", "~map", "url"]) | st.text()
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False)
texts = st.text() | st.just("a://b:hunter2@c") | st.just("ü" * 1000)
leaves = scalars.filter(lambda number: number not in (float("inf"), -float("inf"))) | texts
json_values = st.recursive(
    leaves | leaves.map(lambda one: [one] * 60),
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner),
    max_leaves=15,
)
REDACT = Redact(paths=("payload.*.id", "payload.3"))


@given(json_values)
def test_the_pieces_are_the_redacted_value(value: Any) -> None:
    writer = JsonWriter(REDACT)
    json = b"".join(writer.pieces(UserValue(value, ("payload",))))
    assert msgspec.json.decode(json) == REDACT.value(value, ("payload",))
    assert writer.has_hidden == (REDACT.value(value, ("payload",)) != value)


@given(json_values)
def test_sorted_pieces_are_the_sorted_value(value: Any) -> None:
    json = b"".join(JsonWriter(REDACT, is_sorted=True).pieces(UserValue(value, ("payload",))))
    expected = REDACT.value(value, ("payload",))
    assert json == msgspec.json.encode(expected, order="sorted")


def test_what_is_not_of_a_user_is_not_redacted() -> None:
    value = {"token": "x", "list": [{"token": 1}], "users": UserValue({"token": 1}, ("payload",))}
    json = b"".join(JsonWriter(REDACT).pieces(value))
    assert msgspec.json.decode(json) == {**value, "users": {"token": MASK}}


@pytest.mark.parametrize(
    "value",
    [
        "ü" * 1_000_000,
        [{"id": n, "note": "x" * 40} for n in range(20_000)],
        {"a": {"b": "x" * SIZE}},
    ],
    ids=["string", "rows", "nested"],
)
def test_a_large_value_has_many_chunks(value: Any) -> None:
    sizes = [len(each) for each in chunks(JsonWriter(NOTHING_REDACTED).pieces(value))]
    assert sum(sizes) == len(msgspec.json.encode(value))
    assert max(sizes) <= 3 * SIZE
    assert min(sizes[:-1]) >= SIZE


@workflow("heavy")
async def heavy(step: Step, count: int) -> int:
    rows = [{"id": n, "token": "t", "note": "x" * 4900} for n in range(count)]
    return len(await step("load", lambda: rows))


async def test_an_export_needs_little_memory_and_begins_before_all_is_encoded() -> None:
    store = MemoryStore()
    await Runtime(store, workflows=[heavy]).trigger(heavy, 3_100, run_id="heavy")
    insights, size = Insights(store), 0
    exported = await insights.download("heavy")
    tracemalloc.start()
    try:
        assert (await anext(exported)).startswith(b'{"run_id":"heavy"')
        async for chunk in exported:
            size += len(chunk)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert size > 15_000_000
    json = b"".join([chunk async for chunk in await insights.download("heavy")])
    assert read_bundle(msgspec.json.decode(json)).redacted


async def test_the_chunks_of_an_export_are_a_bundle_with_a_checksum(
    store: StoreShell[Any], clock: TestClock
) -> None:
    """In whatever order its keys were recorded."""
    insights = Insights(store, clock=clock)
    for run_id, does in (("b", "fail"), ("a", "wait"), ("c", "refuse")):
        await run_order(store, run_id, does, clock, zebra=1, password="x", ant=["a://b:hunter2@c"])
        await Runtime(store, workflows=[order]).signal(run_id, "other", {"token": 1, "n": 2})
        json = b"".join([chunk async for chunk in await insights.download(run_id)])
        bundle = await insights.export(run_id)
        assert read_bundle(msgspec.json.decode(json)) == bundle
        assert [*msgspec.json.decode(json)["snapshot"]["steps"]] == [*bundle.snapshot["steps"]]
        assert bundle.redacted
        assert b"hunter2" not in json


async def test_an_export_without_secrets_says_so() -> None:
    store = MemoryStore()
    await Runtime(store, workflows=[heavy]).trigger(heavy, 0, run_id="r")
    for insights in (Insights(store), Insights(store, redact=NOTHING_REDACTED)):
        json = b"".join([chunk async for chunk in await insights.download("r")])
        bundle = msgspec.json.decode(json, type=Bundle)
        assert not bundle.redacted
        assert read_bundle(msgspec.json.decode(json)) == bundle


async def test_a_value_is_downloaded_in_chunks(store: StoreShell[Any]) -> None:
    await run_order(store, "r", password="x")
    insights = Insights(store)

    async def downloaded(*arguments: Any) -> Any:
        chunks = await insights.download("r", *arguments)
        return msgspec.json.decode(b"".join([chunk async for chunk in chunks]))

    assert await downloaded("payload") == {"does": "", "password": MASK}
    assert await downloaded("output") == "done"
    assert await downloaded("step", "reserve") == {"parcel": 7, "token": MASK}
    with pytest.raises(InvalidArgument, match="the key of a record"):
        await insights.download("r", "step", "nothing")


def test_chunks_are_joined_from_pieces() -> None:
    def pieces() -> Iterator[bytes]:
        yield from (b"x" * 1000 for _ in range(100))

    assert [len(each) for each in chunks(pieces())] == [66_000, 34_000]
    assert [*chunks([])] == []
