"""What each verb does to a run at rest, and when it is refused."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from perdure import Retry, Runtime, Step, StepFailed, workflow
from perdure.errors import InvalidArgument, Refused, RunConflict, RunNotFound, StoreUnavailable
from perdure.insights import Insights, to_json
from perdure.operations import Operations
from perdure.snapshot import Snapshot
from perdure.stores.memory import MemoryStore
from perdure.testing import FaultyStore, TestClock

attempts: list[str] = []


async def note(name: str) -> str:
    attempts.append(name)
    return f"did {name}"


async def break_down() -> str:
    attempts.append("ship")
    raise ConnectionError("503 from carrier")


@workflow("order")
async def order(step: Step) -> list[str]:
    charged = await step("charge", note, "charge")
    shipped = await step("ship", break_down)
    return [charged, shipped, await step("notify", note, "notify")]


@workflow("patient")
async def patient(step: Step) -> Any:
    await step("before", note, "before")
    await step.sleep("pause", "7 days")
    return await step.wait_for_event("answer", "approved", timeout="1 day")


@pytest.fixture
def clock() -> TestClock:
    attempts.clear()
    return TestClock()


@pytest.fixture
def store(clock: TestClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def runtime(store: MemoryStore, clock: TestClock) -> Runtime:
    return Runtime(store, workflows=[order, patient], clock=clock)


@pytest.fixture
def operations(store: MemoryStore, clock: TestClock) -> Operations:
    return Operations(store, via="test", clock=clock)


async def stored(store: MemoryStore, run_id: str = "run") -> Snapshot:
    snapshot = await store.load(run_id)
    assert snapshot is not None
    return snapshot


async def acts(store: MemoryStore, run_id: str = "run") -> list[dict[str, Any]]:
    metadata: Any = (await stored(store, run_id)).get("metadata") or {}
    return [{k: v for k, v in act.items() if k not in ("at", "id")} for act in metadata["acts"]]


async def test_complete_step_records_a_value_for_a_failed_step(
    runtime: Runtime, operations: Operations, store: MemoryStore
) -> None:
    await runtime.trigger(order, run_id="run")
    outcome = await operations.complete_step("run", "ship", "parcel 7", by="ana", why="by phone")
    assert (outcome.state, outcome.status, outcome.kept) == ("done", "queued", 1)
    [run] = await runtime.sweep()
    assert run.output == ["did charge", "parcel 7", "did notify"]
    assert attempts == ["charge", "ship", "notify"]
    assert await acts(store) == [
        {
            "by": "ana",
            "via": "test",
            "verb": "complete_step",
            "step": "ship",
            "why": "by phone",
            "was": "ConnectionError: 503 from carrier",
        }
    ]


async def test_skip_step_returns_none(runtime: Runtime, operations: Operations) -> None:
    await runtime.trigger(order, run_id="run")
    await operations.skip_step("run", "ship", by="ana")
    [run] = await runtime.sweep()
    assert run.output == ["did charge", None, "did notify"]


async def test_fail_step_raises_what_the_operator_entered(
    runtime: Runtime, operations: Operations
) -> None:
    @workflow("catching")
    async def catching(step: Step) -> object:
        try:
            return await step("ship", break_down)
        except StepFailed as failed:
            return failed.error

    runtime.register(catching)
    await operations.start("catching", run_id="run", by="ana")
    await operations.fail_step("run", "ship", "LOST", by="ana")
    [run] = await runtime.sweep()
    assert run.output == "LOST"
    assert attempts == []


async def test_a_step_that_succeeded_is_not_replaced(
    runtime: Runtime, operations: Operations, store: MemoryStore
) -> None:
    await runtime.trigger(order, run_id="run")
    before = await stored(store)
    with pytest.raises(Refused, match="step 'charge' succeeded; rewind the run to it"):
        await operations.complete_step("run", "charge", "free", by="ana")
    assert await stored(store) == before


async def test_a_step_that_has_not_run_yet_can_be_completed(
    runtime: Runtime, operations: Operations
) -> None:
    """It may be the step that kills its processes."""
    await operations.start("order", run_id="run", by="ana")
    await operations.complete_step("run", "ship", "parcel 7", by="ana")
    [run] = await runtime.sweep()
    assert run.status == "completed"
    assert attempts == ["charge", "notify"]


async def test_a_step_between_two_attempts_can_be_completed(
    runtime: Runtime, operations: Operations
) -> None:
    @workflow("retrying")
    async def retrying(step: Step) -> list[str]:
        async def branch() -> str:
            return await step("ship", break_down, retry=Retry(attempts=3, delay="1h"))

        return list(await step.all(branch(), branch()))

    runtime.register(retrying)
    run = await runtime.trigger(retrying, run_id="run")
    assert [wait.attempt for wait in run.pending] == [1, 1]
    await operations.complete_step("run", run.pending[1].id, "second", by="ana")
    await operations.complete_step("run", run.pending[0].id, "first", by="ana")
    [run] = await runtime.sweep()
    assert run.output == ["first", "second"]


@dataclass
class Parcel:
    number: int


async def test_a_value_entered_by_hand_becomes_the_type_of_the_step(
    runtime: Runtime, operations: Operations
) -> None:
    async def pack() -> Parcel:
        raise ConnectionError

    @workflow("packing")
    async def packing(step: Step) -> int:
        return (await step("pack", pack)).number + 1

    runtime.register(packing)
    await runtime.trigger(packing, run_id="run")
    await operations.complete_step("run", "pack", {"number": 7}, by="ana")
    [run] = await runtime.sweep()
    assert run.output == 8


async def test_a_value_that_does_not_fit_pauses_the_run_with_the_reason(
    runtime: Runtime, operations: Operations
) -> None:
    async def count() -> int:
        raise ConnectionError

    @workflow("counting")
    async def counting(step: Step) -> int:
        return await step("count", count)

    runtime.register(counting)
    await runtime.trigger(counting, run_id="run")
    await operations.complete_step("run", "count", "seven", by="ana")
    [run] = await runtime.sweep()
    assert run.status == "paused"
    assert "the value that ana entered for step 'count' does not fit" in run.reason
    with pytest.raises(Refused, match="succeeded"):
        await operations.complete_step("run", "count", 7, by="ana")
    await operations.rewind("run", "count", by="ana")
    await operations.complete_step("run", "count", 7, by="ana")
    await operations.unpause("run", by="ana")
    [run] = await runtime.sweep()
    assert run.output == 7


async def test_a_manual_record_for_a_race_pauses_the_run_with_the_reason(
    runtime: Runtime, operations: Operations
) -> None:
    @workflow("racing later")
    async def racing_later(step: Step) -> Any:
        return await step.race("fastest", {"a": lambda: step("a", note, "a")})

    runtime.register(racing_later)
    await operations.start("racing later", run_id="run", by="ana")
    await operations.complete_step("run", "fastest", "a", by="ana")
    [run] = await runtime.sweep()
    assert run.status == "paused"
    assert run.reason.startswith("ana entered it: step 'fastest' is recorded as a step")
    await operations.rewind("run", "fastest", by="ana")
    await operations.unpause("run", by="ana")
    [run] = await runtime.sweep()
    assert run.output == ("a", "did a")


async def test_retry_step_runs_one_failed_step_again(
    runtime: Runtime, operations: Operations
) -> None:
    await runtime.trigger(order, run_id="run")
    await operations.retry_step("run", "ship", by="ana")
    await runtime.sweep()
    assert attempts == ["charge", "ship", "ship"]


async def test_completing_a_step_of_a_failed_race_lets_the_race_decide_again(
    runtime: Runtime, operations: Operations
) -> None:
    @workflow("racing")
    async def racing(step: Step) -> Any:
        return await step.race(
            "fastest",
            {"a": lambda: step("a", break_down), "b": lambda: step("b", break_down)},
        )

    runtime.register(racing)
    run = await runtime.trigger(racing, run_id="run")
    assert run.status == "failed"
    await operations.complete_step("run", "a", "by hand", by="ana")
    [run] = await runtime.sweep()
    assert run.output == ("a", "by hand")


async def test_retry_continues_a_failed_run(runtime: Runtime, operations: Operations) -> None:
    await runtime.trigger(order, run_id="run")
    assert (await operations.retry("run", by="ana")).dropped == ("ship",)
    await runtime.sweep()
    assert attempts == ["charge", "ship", "ship"]


async def test_pause_keeps_what_a_run_waits_for(
    runtime: Runtime, operations: Operations, clock: TestClock
) -> None:
    await runtime.trigger(patient, run_id="run")
    await operations.pause("run", by="ana", why="carrier outage")
    await clock.advance("8 days")
    assert await runtime.sweep() == []
    paused = await runtime.get_run("run")
    assert paused is not None
    assert (paused.status, paused.reason) == ("paused", "by ana: carrier outage")
    await operations.unpause("run", by="ben")
    [run] = await runtime.sweep()
    assert [wait.event for wait in run.pending] == ["approved"]
    assert attempts == ["before"]


async def test_an_event_that_comes_while_a_run_is_paused_is_received_later(
    runtime: Runtime, operations: Operations, clock: TestClock
) -> None:
    await runtime.trigger(patient, run_id="run")
    await clock.advance("7 days")
    await runtime.sweep()
    await operations.pause("run", by="ana")
    await runtime.signal("run", "approved", {"by": "ben"})
    assert await runtime.sweep() == []
    await operations.unpause("run", by="ana")
    [run] = await runtime.sweep()
    assert run.output == {"by": "ben"}


async def test_a_run_that_is_to_start_later_still_does_so_after_a_pause(
    runtime: Runtime, operations: Operations, clock: TestClock
) -> None:
    await runtime.trigger(order, run_id="run", delay="1 day")
    await operations.pause("run", by="ana")
    await operations.unpause("run", by="ana")
    assert await runtime.sweep() == []
    await clock.advance("1 day")
    assert [run.id for run in await runtime.sweep()] == ["run"]


@pytest.mark.parametrize("verb", ["pause", "unpause", "wake", "cancel", "retry"])
async def test_a_completed_run_refuses_verbs(
    verb: str, runtime: Runtime, operations: Operations, store: MemoryStore
) -> None:
    await runtime.trigger(order, run_id="run")
    await operations.complete_step("run", "ship", "parcel", by="ana")
    await runtime.sweep()
    before = await stored(store)
    with pytest.raises(Refused, match=f"{verb} was refused for run 'run': it is completed"):
        await getattr(operations, verb)("run", by="ana")
    assert await stored(store) == before


async def test_wake_ends_a_sleep(
    runtime: Runtime, operations: Operations, clock: TestClock
) -> None:
    await runtime.trigger(patient, run_id="run")
    await operations.wake("run", by="ana")
    [run] = await runtime.sweep()
    assert [wait.event for wait in run.pending] == ["approved"]


async def test_wake_lets_a_wait_for_an_event_time_out(
    runtime: Runtime, operations: Operations, clock: TestClock
) -> None:
    await runtime.trigger(patient, run_id="run")
    await clock.advance("7 days")
    [run] = await runtime.sweep()
    await operations.wake("run", run.pending[0].id, by="ana")
    [run] = await runtime.sweep()
    assert (run.status, run.output) == ("completed", None)


async def test_wake_names_the_waits_if_there_is_none_with_this_id(
    runtime: Runtime, operations: Operations
) -> None:
    await runtime.trigger(patient, run_id="run")
    with pytest.raises(Refused, match="it waits for 'pause', not for 'paus'"):
        await operations.wake("run", "paus", by="ana")


async def test_signal_delivers_an_event_once(
    runtime: Runtime, operations: Operations, clock: TestClock, store: MemoryStore
) -> None:
    await runtime.trigger(patient, run_id="run")
    await operations.signal("run", "approved", {"by": "ana"}, dedup_id="m1", by="ana")
    with pytest.raises(Refused, match="this request was already applied"):
        await operations.signal("run", "approved", {"by": "eve"}, dedup_id="m1", by="eve")
    await clock.advance("7 days")
    [run] = [run for run in await runtime.sweep() if run.over]
    assert run.output == {"by": "ana"}
    assert [act["verb"] for act in await acts(store)] == ["signal"]


async def test_rewind_drops_a_record_and_all_later_ones(
    runtime: Runtime, operations: Operations
) -> None:
    await runtime.trigger(order, run_id="run")
    outcome = await operations.rewind("run", "charge", by="ana")
    assert outcome.dropped == ("charge", "ship")
    await runtime.sweep()
    assert attempts == ["charge", "ship"] * 2


async def test_a_rewind_over_a_success_changes_idempotency_keys_and_no_derived_value(
    runtime: Runtime, operations: Operations
) -> None:
    keys: list[str] = []
    observations: list[str] = []

    async def pay(id: str, key: str) -> None:
        observations.append(id)
        keys.append(key)

    @workflow("paying")
    async def paying(step: Step) -> None:
        id = str(step.uuid())
        await step("create", note, id)
        await step("pay", lambda: pay(id, step.idempotency_key))

    runtime.register(paying)
    await runtime.trigger(paying, run_id="run")
    await operations.rewind("run", "pay", by="ana")
    [run] = await runtime.sweep()
    assert run.status == "completed", run.error
    assert len(set(keys)) == 2
    assert len(set(observations)) == 1
    assert len(observations) == 2


async def test_a_completed_run_can_be_rewound(runtime: Runtime, operations: Operations) -> None:
    await runtime.trigger(order, run_id="run")
    await operations.complete_step("run", "ship", "parcel", by="ana")
    await runtime.sweep()
    await operations.rewind("run", "notify", by="ana")
    [run] = await runtime.sweep()
    assert run.status == "completed"
    assert attempts == ["charge", "ship", "notify", "notify"]


async def test_fork_starts_a_new_run_with_the_records_before_a_step(
    runtime: Runtime, operations: Operations, store: MemoryStore
) -> None:
    await runtime.trigger(order, run_id="run", tags={"customer": "acme"})
    before = await stored(store)
    outcome = await operations.fork("run", "ship", new_id="copy", by="ana")
    assert (outcome.run_id, outcome.kept, outcome.dropped) == ("copy", 1, ("ship",))
    await runtime.sweep()
    assert attempts == ["charge", "ship", "ship"]
    assert await stored(store) == before
    fork = await stored(store, "copy")
    metadata: Any = fork.get("metadata")
    assert metadata["forkedFrom"] == {"run": "run", "at": "ship"}
    assert metadata["tags"] == {"customer": "acme", "~fork": "run"}


async def test_a_fork_can_have_another_payload_and_other_values(
    runtime: Runtime, operations: Operations
) -> None:
    @workflow("adding")
    async def adding(step: Step, payload: int) -> int:
        first = await step("first", lambda: 1)
        return first + payload

    runtime.register(adding)
    await runtime.trigger(adding, 10, run_id="run")
    with pytest.raises(InvalidArgument, match="keys of kept steps: there are none"):
        await operations.fork("run", values={"first": 5}, by="ana")
    await runtime.trigger(order, run_id="order")
    await operations.fork("order", "ship", new_id="b", values={"charge": "free"}, by="ana")
    await operations.complete_step("b", "ship", "sent", by="ana")
    await operations.fork("run", new_id="a", payload=20, by="ana")
    runs = {run.id: run.output for run in await runtime.sweep()}
    assert runs == {"a": 21, "b": ["free", "sent", "did notify"]}


async def test_edit_payload_needs_a_run_without_records(
    runtime: Runtime, operations: Operations
) -> None:
    @workflow("echo")
    async def echo(step: Step, payload: int) -> int:
        return await step("echo", lambda: payload)

    runtime.register(echo)
    await runtime.trigger(echo, 1, run_id="run", delay="1h")
    await operations.edit_payload("run", 2, by="ana")
    assert await runtime.sweep() == []
    # The call that triggered the run recognizes it.
    await runtime.trigger(echo, 1, run_id="run", delay="1h")
    run = await runtime.resume("run")
    assert run.output == 2
    await operations.rewind("run", "echo", by="ana")
    await operations.edit_payload("run", 3, by="ana")


async def test_a_known_definition_checks_payloads(store: MemoryStore) -> None:
    @workflow("typed")
    async def typed(step: Step, payload: Parcel) -> None: ...

    operations = Operations(store, workflows=[typed])
    with pytest.raises(Exception, match="number"):
        await operations.start("typed", {"number": "seven"}, by="ana")
    await operations.start("typed", {"number": 7}, run_id="run", by="ana")


async def test_start_refuses_an_id_that_is_taken(runtime: Runtime, operations: Operations) -> None:
    await operations.start("order", run_id="run", by="ana")
    with pytest.raises(RunConflict):
        await operations.start("order", run_id="run", by="ana")


async def test_delete_leaves_the_act(
    runtime: Runtime, operations: Operations, store: MemoryStore
) -> None:
    await runtime.trigger(order, run_id="run")
    await operations.delete("run", by="ana", why="a test")
    assert await store.load("run") is None
    [key] = await store.documents.keys("act:*")
    document = await store.documents.get(key) or ""
    assert '"verb":"delete"' in document
    assert '"run":"run"' in document


async def test_prune_counts_first(
    runtime: Runtime, operations: Operations, clock: TestClock
) -> None:
    await runtime.trigger(order, run_id="run")
    await clock.advance("8 days")
    assert await operations.prune("7 days", dry_run=True, by="ana") == 1
    assert await operations.prune("7 days", by="ana") == 1
    assert await operations.prune(timedelta(days=7), by="ana") == 0


async def test_prune_says_how_far_it_is(
    runtime: Runtime, operations: Operations, clock: TestClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each batch, with the number of runs that were counted before."""
    monkeypatch.setattr("perdure.operations.operations._PRUNE_BATCH", 2)
    for number in range(5):
        await runtime.trigger(order, run_id=f"run-{number}")
    await clock.advance("8 days")
    progress: list[tuple[int, int | None]] = []
    await operations.prune(
        "7 days", by="ana", on_progress=lambda done, total: progress.append((done, total))
    )
    assert progress == [(0, 5), (2, 5), (4, 5), (5, 5)]


async def test_a_prune_whose_process_dies_is_recorded(
    runtime: Runtime, clock: TestClock, store: MemoryStore
) -> None:
    """The act is written before the first run is deleted."""
    await runtime.trigger(order, run_id="run")
    await clock.advance("8 days")
    # The first call counts.
    faulty = FaultyStore(store, fail_at=2, verbs={"prune"})
    with pytest.raises(StoreUnavailable):
        await Operations(faulty, clock=clock).prune("7 days", by="ana")
    [key] = await store.documents.keys("act:*")
    assert '"verb":"prune"' in (await store.documents.get(key) or "")


@pytest.mark.parametrize("verb", ["pause", "cancel", "retry", "delete"])
async def test_an_unknown_run_is_not_found(verb: str, operations: Operations) -> None:
    with pytest.raises(RunNotFound):
        await getattr(operations, verb)("nothing", by="ana")


@pytest.mark.parametrize("by", ["", None, "a" * 201, 7])
async def test_an_operator_has_a_name(by: Any, operations: Operations) -> None:
    with pytest.raises(InvalidArgument, match="by: expected"):
        await operations.pause("run", by=by)


async def test_a_value_is_json(runtime: Runtime, operations: Operations) -> None:
    await runtime.trigger(order, run_id="run")
    with pytest.raises(InvalidArgument, match="value: expected JSON"):
        await operations.complete_step("run", "ship", object(), by="ana")


async def test_the_last_200_acts_are_kept_and_all_are_counted(
    runtime: Runtime, operations: Operations, store: MemoryStore
) -> None:
    await runtime.trigger(patient, run_id="run")
    for _ in range(101):
        await operations.pause("run", by="ana")
        await operations.unpause("run", by="ana")
    metadata: Any = (await stored(store)).get("metadata")
    assert (len(metadata["acts"]), metadata["actCount"]) == (200, 202)


async def test_preview_writes_nothing(
    runtime: Runtime, operations: Operations, store: MemoryStore
) -> None:
    await runtime.trigger(order, run_id="run")
    before = await stored(store)
    preview = await operations.preview("run", "rewind", "ship")
    assert (preview.kept, preview.dropped) == (("charge",), ("ship",))
    assert await stored(store) == before


async def test_an_exported_run_is_imported_paused(
    runtime: Runtime, operations: Operations, clock: TestClock
) -> None:
    await runtime.trigger(patient, run_id="run")
    await runtime.signal("run", "approved", {"by": "ben"})
    bundle = to_json(await Insights(runtime.store, clock=clock).export("run"))
    other = MemoryStore(clock=clock)
    outcome = await Operations(other, clock=clock).import_run(bundle, by="ana")
    assert (outcome.run_id, outcome.status, outcome.kept) == ("run", "paused", 1)
    elsewhere = Runtime(other, workflows=[patient], clock=clock)
    assert await elsewhere.sweep() == []
    await Operations(other, clock=clock).unpause("run", by="ana")
    await elsewhere.sweep()
    await clock.advance("7 days")
    [run] = await elsewhere.sweep()
    assert run.output == {"by": "ben"}


async def test_a_bundle_that_was_changed_is_not_imported(
    runtime: Runtime, operations: Operations, clock: TestClock
) -> None:
    await runtime.trigger(order, run_id="run")
    bundle = to_json(await Insights(runtime.store, clock=clock).export("run"))
    bundle["status"] = "completed"
    with pytest.raises(InvalidArgument, match="Its checksum does not match"):
        await operations.import_run(bundle, run_id="copy", by="ana")


@pytest.mark.parametrize(("verb", "other"), [("retry", "failed"), ("unpause", "paused")])
async def test_a_refusal_says_that_the_run_is_running(
    store: MemoryStore, verb: str, other: str
) -> None:
    """As lists of runs do, although the verb could be applied as if the run was queued."""

    async def refused() -> str:
        with pytest.raises(Refused) as caught:
            await getattr(Operations(store), verb)("run", by="ana")
        return caught.value.reason

    @workflow("busy")
    async def busy(step: Step) -> str:
        return await step("ask", refused)

    run = await Runtime(store, workflows=[busy]).trigger(busy, run_id="run")
    assert run.output == f"it is running, not {other}"
