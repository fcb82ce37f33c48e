"""One run: facts, steps in pages, one step, errors with frames; redacted, on two stores."""

from datetime import timedelta
from typing import Any

import pytest

from perdure import Runtime
from perdure.errors import InvalidArgument, RunNotFound
from perdure.insights.failures import frames_of
from perdure.insights.insights import Insights
from perdure.insights.preview import SIZE, preview
from perdure.insights.redaction import MASK, NOTHING_REDACTED, Redact
from perdure.store import NewMessage
from perdure.stores import MemoryStore
from perdure.stores._shell import StoreShell
from perdure.testing import TestClock
from tests.unit.insights.runs import live_worker, order, run_order


async def test_a_run_has_its_redacted_payload_and_output(
    store: StoreShell[Any], clock: TestClock
) -> None:
    await run_order(store, "r", clock=clock, password="x")
    facts = await Insights(store, clock=clock).run("r")
    assert facts.payload == {"does": "", "password": MASK}
    assert (facts.output, facts.run.status, facts.error) == ("done", "completed", None)


async def test_a_failed_run_names_its_error_its_cause_and_its_steps(
    store: StoreShell[Any], clock: TestClock
) -> None:
    await run_order(store, "r", "fail", clock)
    facts = await Insights(store, clock=clock).run("r")
    assert facts.error_steps == ("ship",)
    assert facts.error is not None
    assert facts.error.cause is not None
    assert (facts.error.type, facts.error.message) == ("CarrierDown", "503 from carrier")
    assert facts.error.cause.message == f"cannot reach https://ana:{MASK}@carrier"


async def test_frames_show_where_an_error_was_raised(store: StoreShell[Any]) -> None:
    await run_order(store, "r", "fail")
    error = (await Insights(store).step("r", "ship")).error
    assert error is not None
    first, *_, last = error.frames
    assert (last.function, last.is_engine) == ("ship", False)
    assert last.code == 'raise CarrierDown("503 from carrier") from error'
    assert last.file.endswith("runs.py")
    assert first.is_engine


async def test_what_was_being_handled_is_shown_as_a_cause() -> None:
    store = MemoryStore()
    await run_order(store, "r", "handle")
    error = (await Insights(store).step("r", "ship")).error
    assert error is not None
    assert error.cause is not None
    assert (error.type, error.cause.type) == ("CarrierDown", "KeyError")
    assert error.cause.message == "'parcel'"
    assert [frame.function for frame in error.cause.frames] == ["_handle"]


def test_secrets_in_the_code_of_a_frame_are_redacted() -> None:
    stack = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g("a://b:c@d")\n'
    (frame,) = frames_of(stack, Redact())
    assert (frame.line, frame.code) == (3, f'g("a://b:{MASK}@d")')


async def test_a_group_has_its_members() -> None:
    store = MemoryStore()
    await run_order(store, "r", "group")
    error = (await Insights(store).run("r")).error
    assert error is not None
    assert [member.type for member in error.members] == ["CarrierDown", "ValueError"]


async def test_a_returned_error_is_shown_as_its_value(store: StoreShell[Any]) -> None:
    await run_order(store, "r", "refuse")
    insights = Insights(store)
    error = (await insights.step("r", "charge")).error
    assert error is not None
    assert (error.type, error.value, error.cause) == ("Err", {"code": 7, "secret": MASK}, None)
    assert (await insights.steps("r")).steps[-1].error == f'Err: {{"code": 7, "secret": "{MASK}"}}'


async def test_steps_come_in_pages(store: StoreShell[Any]) -> None:
    await run_order(store, "r", "fail")
    insights = Insights(store)
    first = await insights.steps("r", limit=3)
    assert ([step.key for step in first.steps], first.total) == (
        ["reserve", "pack[0]", "pack[1]"],
        4,
    )
    rest = await insights.steps("r", after=first.after, limit=3)
    assert ([step.key for step in rest.steps], rest.after) == (["ship"], None)


async def test_a_row_has_times_attempts_and_a_redacted_preview(store: StoreShell[Any]) -> None:
    await run_order(store, "r", "fail")
    reserve, _, packed, ship = (await Insights(store).steps("r")).steps
    assert reserve.value == f'{{"parcel": 7, "token": "{MASK}"}}'
    assert (packed.name, packed.branch, packed.value) == ("pack", "pack", "2")
    assert (ship.ok, ship.attempts, ship.error) == (False, 2, "CarrierDown: 503 from carrier")
    assert ship.started_at is not None
    assert ship.ended_at == ship.started_at + (ship.duration or timedelta(0))


async def test_a_step_has_its_full_value_and_its_position(store: StoreShell[Any]) -> None:
    await run_order(store, "r")
    detail = await Insights(store).step("r", "reserve")
    assert detail.value == {"parcel": 7, "token": MASK}
    assert (detail.position, detail.later) == (1, 2)
    full_step = await Insights(store, redact=NOTHING_REDACTED).step("r", "reserve")
    assert full_step.value["token"] == "abc"


async def test_equal_calls_are_folded(store: StoreShell[Any]) -> None:
    await run_order(store, "r", "fail")
    groups = (await Insights(store).run("r")).groups
    counts = [(each.name, each.count, each.failed) for each in groups]
    assert counts == [("reserve", 1, 0), ("pack", 2, 0), ("ship", 1, 1)]


async def test_waits_and_the_inbox_are_shown(store: StoreShell[Any], clock: TestClock) -> None:
    await run_order(store, "r", "wait", clock)
    await Runtime(store, workflows=[order]).signal("r", "aproved", {"by": "ana", "token": 1})
    await store.send([NewMessage("r", "~other", b"1")])
    facts = await Insights(store, clock=clock).run("r")
    (wait,), (message,) = facts.waits, facts.inbox
    assert (wait.kind, wait.event) == ("event", "approved")
    assert (wait.since, wait.wake_at) == (clock.now(), clock.now() + timedelta(days=3))
    assert (message.event, message.payload) == ("aproved", {"by": "ana", "token": MASK})


async def test_acts_and_forks_are_read_from_the_metadata() -> None:
    store = MemoryStore()
    await run_order(store, "r")
    snapshot: Any = await store.load("r")
    acts = [
        {"at": f"2026-11-0{day}T09:00:00Z", "by": "ana", "via": "cli", "verb": "pause", "step": ""}
        for day in (1, 2)
    ]
    snapshot["metadata"] |= {"acts": [*acts, "broken"], "actCount": 205}
    snapshot["metadata"]["forkedFrom"] = {"run": "r0", "at": "ship"}
    await store.save("r", snapshot)
    facts = await Insights(store).run("r")
    assert [(act.at.day, act.run_id) for act in facts.acts] == [(2, "r"), (1, "r")]
    assert facts.act_count == 205
    assert facts.forked_from is not None
    assert (facts.forked_from.run_id, facts.forked_from.at) == ("r0", "ship")


async def test_workers_that_know_the_run_are_named(clock: TestClock) -> None:
    store = MemoryStore(clock=clock)
    await run_order(store, "r", "wait", clock)
    await live_worker(store, clock.now())
    await live_worker(store, clock.now(), "w-2", workflows=())
    assert (await Insights(store, clock=clock).run("r")).known_by == ("w-1",)


async def test_a_changed_run_is_read_again(store: StoreShell[Any], clock: TestClock) -> None:
    await run_order(store, "r", "wait", clock)
    insights = Insights(store, clock=clock)
    assert (await insights.steps("r")).total == 3
    runtime = Runtime(store, workflows=[order], clock=clock)
    await runtime.signal("r", "approved")
    await runtime.resume("r")
    assert (await insights.steps("r")).total == 4


async def test_missing_runs_and_steps_are_refused(store: StoreShell[Any]) -> None:
    await run_order(store, "r")
    insights = Insights(store)
    for missing in (insights.run("x"), insights.steps("x"), insights.why("x")):
        with pytest.raises(RunNotFound):
            await missing
    with pytest.raises(InvalidArgument, match="the key of a record"):
        await insights.step("r", "x")


HOSTILE = ("<script>alert(1)</script>", "\x1b[2J", "a\nb", "émoji 🐍", "x" * 2000, "{{7*7}}")


@pytest.mark.parametrize("text", HOSTILE)
async def test_unusual_values_are_returned_unchanged(store: StoreShell[Any], text: str) -> None:
    fields: dict[str, Any] = {"note": text, text[:50]: 1}
    await run_order(store, "r", "wait", **fields)
    insights = Insights(store)
    facts = await insights.run("r")
    assert facts.payload == {"does": "wait", "note": text, text[:50]: 1}
    assert len((await insights.steps("r")).steps) == 3


async def test_long_names_are_cut_in_sentences(clock: TestClock) -> None:
    store = MemoryStore(clock=clock)
    await run_order(store, "r", "wait", clock)
    snapshot: Any = await store.load("r")
    snapshot["execution"]["pending"][0]["event"] = "e" * 500
    await store.save("r", snapshot)
    assert len((await Insights(store, clock=clock).why("r")).sentence) < 200


async def test_a_run_that_another_program_wrote_is_shown(store: StoreShell[Any]) -> None:
    snapshot: Any = {
        "formatVersion": 1,
        "steps": {
            "a": {"ok": True},
            "b": {"ok": False, "error": "NOT_FOUND", "cause": None, "meta": None},
        },
        "execution": {"status": "failed", "lastUpdated": "2026-01-01T00:00:00Z", "pending": None},
        "metadata": None,
        "warnings": None,
    }
    await store.save("r", snapshot)
    insights = Insights(store)
    first, second = (await insights.steps("r")).steps
    assert (first.value, first.started_at, second.error) == ("null", None, "Error: NOT_FOUND")
    assert (await insights.run("r")).why.situation == "failed"
    assert (await insights.export("r")).redacted is False


def test_previews_are_short_and_hide_what_is_cut() -> None:
    value = {"text": "a" * 60 + "postgres://ana:hunter2@db", "deep": [[[{"b": 1}]]] * 50}
    text = preview(value, Redact(), ("payload",))
    assert len(text) == SIZE
    assert "hunt" not in preview("a" * 59 + "postgres://ana:hunter2@db", Redact(), ("payload",))
    assert preview([], Redact(), ()) == "[]"
    assert preview({"a": [1, "x", None, {}]}, Redact(), ()) == '{"a": [1, "x", null, {}]}'
