"""Spans, links and metrics, with the OpenTelemetry SDK's in-memory exporters."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from perdure import Client, Err, Result, Retry, Runtime, Step, StepFailed, Worker, sync, workflow
from perdure.engine.middleware import EVERYWHERE
from perdure.engine.user_metadata import MAX_METADATA
from perdure.errors import InvalidArgument, StoreError
from perdure.integrations.opentelemetry import OpenTelemetry, PerdureInstrumentor, instrument
from perdure.store import Store
from perdure.stores import MemoryStore
from perdure.testing import FaultyStore, TestClock
from perdure.testing.faults import How


class Backend:
    """What arrives at the other end, from all processes."""

    def __init__(self) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers, self.meters = TracerProvider(), MeterProvider([self.reader])
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))

    def telemetry(self, **options: Any) -> OpenTelemetry:
        return OpenTelemetry(tracer_provider=self.tracers, meter_provider=self.meters, **options)

    @property
    def spans(self) -> list[ReadableSpan]:
        """The spans in the order in which they began."""
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def metrics(self) -> dict[tuple[str, ...], Any]:
        """Return values by name and labels; those of histograms are counts and sums."""
        data = self.reader.get_metrics_data()
        points = [
            (metric.name, point)
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        ]
        return {
            (name.removeprefix("perdure."), *map(str, (point.attributes or {}).values())): (
                point.value if isinstance(point, NumberDataPoint) else (point.count, point.sum)
            )
            for name, point in points
        }


@pytest.fixture
def backend() -> Iterator[Backend]:
    backend = Backend()
    yield backend
    backend.meters.shutdown()


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def links_of(span: ReadableSpan) -> dict[Any, int]:
    return {(link.attributes or {})["perdure.link"]: link.context.span_id for link in span.links}


def value_of(span: ReadableSpan, name: str) -> Any:
    return (span.attributes or {}).get(f"perdure.{name}")


async def do(what: str) -> str:
    return what


@workflow("ship")
async def ship(step: Step) -> str:
    return await step("pack", do, "pack")


@workflow("order")
async def order(step: Step) -> str:
    await step("charge", do, "charge")
    await step.call("ship", ship)
    return await step("notify", do, "notify")


@pytest.mark.parametrize("dies_at", ["the first write", "the second write"])
async def test_three_activations_a_crash_and_a_child_have_exact_spans(
    backend: Backend, dies_at: str
) -> None:
    clock = TestClock()
    store = MemoryStore(clock=clock)

    def process(store: Store) -> Runtime:
        return Runtime(store, workflows=[order, ship], around=[backend.telemetry()], clock=clock)

    with backend.tracers.get_tracer("web").start_as_current_span("POST /orders"):
        await process(store).trigger(order, run_id="order-1")
    await process(store).sweep()
    # The process dies before it has recorded the end of the child, or before that of `notify`.
    is_early = dies_at == "the first write"
    dying = FaultyStore(
        store, fail_at=2 - is_early, verbs={"append"}, error=StoreError, stays_down=True
    )
    await process(dying).sweep()
    await clock.advance("1h")
    await process(store).sweep()

    died_in = [] if is_early else ["step notify"]
    assert [span.name for span in backend.spans] == [
        "POST /orders",
        "trigger order",
        "run order",
        "step charge",
        "trigger ship",
        "run ship",
        "step pack",
        "run order",
        *died_in,
        "run order",
        "step notify",
    ]
    web, trigger, first, _, trigger_ship, run_ship, pack, second, *_ = backend.spans
    *_, third, notify = backend.spans
    parents = {id_of(span): span.parent.span_id for span in backend.spans if span.parent}
    assert parents[id_of(trigger)] == id_of(web)
    assert parents[id_of(trigger_ship)] == id_of(first)
    assert parents[id_of(pack)] == id_of(run_ship)
    assert parents[id_of(notify)] == id_of(third)
    assert links_of(first) == {"trigger": id_of(trigger)}
    assert links_of(run_ship) == {"trigger": id_of(trigger_ship)}
    assert links_of(second) == {"trigger": id_of(trigger), "previous": id_of(first)}
    last_stored = first if is_early else second
    assert links_of(third) == {"trigger": id_of(trigger), "previous": id_of(last_stored)}
    assert len({span.context.trace_id for span in (web, first, run_ship, second, third)}) == 5
    assert [value_of(span, "run.status") for span in (first, second, third)] == [
        "waiting",
        None,
        "completed",
    ]
    assert [value_of(span, "run.replayed_steps") for span in (first, second, third)] == [
        0,
        1,
        1 if is_early else 2,
    ]
    taken_over: dict[tuple[str, ...], Any] = {("runs.taken_over", "order"): 1}
    assert backend.metrics() == {
        ("runs.started", "order"): 1,
        ("runs.started", "ship"): 1,
        ("runs.finished", "order", "completed"): 1,
        ("runs.finished", "ship", "completed"): 1,
        # An owner that died after it had made progress does not count.
        **(taken_over if is_early else {}),
        ("steps.executed", "order", "charge", "ok"): 1,
        ("steps.executed", "ship", "pack", "ok"): 1,
        ("steps.executed", "order", "notify", "ok"): 1 if is_early else 2,
        ("steps.replayed", "order"): 2 if is_early else 3,
        ("step.duration", "order", "charge"): (1, 0),
        ("step.duration", "ship", "pack"): (1, 0),
        ("step.duration", "order", "notify"): (1 if is_early else 2, 0),
        ("run.duration", "order", "completed"): (1, 3600),
        ("run.duration", "ship", "completed"): (1, 0),
        ("run.lateness", "ship"): (1, 0),
    }


async def die_and_continue(fail_at: int, how: How, backend: Backend, calls: list[str]) -> bool:
    """Run a workflow in a process that dies at one call of the store, and then in another one;
    return whether it died.
    """
    clock = TestClock()
    store = MemoryStore(clock=clock)
    dying = FaultyStore(store, fail_at=fail_at, how=how, error=StoreError, stays_down=True)

    @workflow("crashing")
    async def crashing(step: Step) -> None:
        await step("first", calls.append, "first")
        await step.sleep("night", "8h")
        await step("second", calls.append, "second")

    def process(store: Store) -> Runtime:
        around = [backend.telemetry()]
        return Runtime(store, workflows=[crashing], around=around, clock=clock)

    await process(store).trigger(crashing, wait=False)
    for each in (dying, dying, store, store):
        with suppress(StoreError):
            await process(each).sweep()
        await clock.advance("9h")
    return dying.failed


@pytest.mark.parametrize("how", ["before", "after"])
async def test_nothing_is_counted_twice_whichever_write_a_process_dies_at(how: How) -> None:
    for fail_at in range(1, 100):
        backend, calls = Backend(), list[str]()
        has_died = await die_and_continue(fail_at, how, backend, calls)
        metrics = backend.metrics()
        backend.meters.shutdown()
        for step in ("first", "second"):
            executed = calls.count(step)
            assert metrics["steps.executed", "crashing", step, "ok"] == executed
            assert len(backend.named(f"step {step}")) == executed
        # One that dies between the claim and the first line has not counted it, either.
        started = metrics.get(("runs.started", "crashing"), 0)
        assert started == 1 or (how == "after" and ("runs.taken_over", "crashing") in metrics)
        finished = metrics.get(("runs.finished", "crashing", "completed"), 0)
        # A process that dies after the last write has not counted it.
        assert finished == 1 or (how == "after" and len(calls) == 2)
        if not has_died:
            assert started == finished == 1
            assert fail_at > 6
            return


@pytest.mark.parametrize("always_replay", [False, True])
async def test_each_step_has_one_span_however_often_it_is_replayed(
    backend: Backend, always_replay: bool
) -> None:
    @workflow("many")
    async def many(step: Step) -> None:
        for n in range(5):
            await step("do", do, f"{n}")

    runtime = Runtime(
        MemoryStore(), workflows=[many], around=[backend.telemetry()], always_replay=always_replay
    )
    await runtime.trigger(many, wait=False)
    await Worker(runtime).run_until_idle()
    assert len(backend.named("run many")) == (6 if always_replay else 1)
    assert len(backend.named("step do")) == 5
    metrics = backend.metrics()
    assert metrics["runs.started", "many"] == metrics["runs.finished", "many", "completed"] == 1
    assert metrics["steps.executed", "many", "do", "ok"] == 5


async def test_a_run_can_be_part_of_the_trace_that_started_it(backend: Backend) -> None:
    runtime = Runtime(workflows=[ship], around=[backend.telemetry(trace="continue")])
    with backend.tracers.get_tracer("web").start_as_current_span("POST /parcels"):
        await runtime.trigger(ship)
    assert len({span.context.trace_id for span in backend.spans}) == 1
    (trigger,), (run,) = backend.named("trigger ship"), backend.named("run ship")
    assert run.parent is not None
    assert run.parent.span_id == id_of(trigger)
    assert not run.links


async def test_spans_of_the_user_are_inside_those_of_steps_and_runs(backend: Backend) -> None:
    tracer = backend.tracers.get_tracer("user")

    def in_thread() -> None:
        tracer.start_span("in step").end()

    @workflow("traced")
    async def traced(step: Step) -> None:
        tracer.start_span("in workflow").end()
        await step("ask", in_thread)

    await Runtime(workflows=[traced], around=[backend.telemetry()]).trigger(traced)
    outer = {span.name: span.parent and span.parent.span_id for span in backend.spans}
    assert outer["in workflow"] == id_of(*backend.named("run traced"))
    assert outer["in step"] == id_of(*backend.named("step ask"))


async def test_attempts_are_events_of_the_span_and_failures_have_a_type(backend: Backend) -> None:
    async def fail() -> None:
        raise ConnectionError("refused")

    @workflow("failing")
    async def failing(step: Step) -> None:
        await step("connect", fail, retry=Retry(3, delay=0))

    runtime = Runtime(workflows=[failing], around=[backend.telemetry()])
    assert (await runtime.trigger(failing)).status == "failed"
    (step,), (run,) = backend.named("step connect"), backend.named("run failing")
    attempts = [event for event in step.events if event.name == "perdure.attempt_failed"]
    assert [(each.attributes or {})["perdure.step.attempt"] for each in attempts] == [1, 2]
    assert value_of(step, "step.attempt") == 3
    for span in (step, run):
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "ConnectionError"
    metrics = backend.metrics()
    assert metrics["step.retries", "failing", "connect"] == 2
    assert metrics["steps.executed", "failing", "connect", "error"] == 1
    assert metrics["runs.finished", "failing", "failed"] == 1


async def test_a_returned_err_is_an_error(backend: Backend) -> None:
    async def refuse() -> Result[str, str]:
        return Err("no stock")

    @workflow("refused")
    async def refused(step: Step) -> Result[str, str]:
        try:
            return await step("reserve", refuse)
        except StepFailed:
            return Err("sold out")

    await Runtime(workflows=[refused], around=[backend.telemetry()]).trigger(refused)
    (step,), (run,) = backend.named("step reserve"), backend.named("run refused")
    assert (step.status.description, run.status.description) == ("no stock", "sold out")


async def test_the_attributes_of_a_step_identify_it(backend: Backend) -> None:
    @workflow("parallel")
    async def parallel(step: Step) -> None:
        async def branch(what: str) -> None:
            await step("do", do, what)

        await asyncio.gather(branch("a"), branch("b"))

    runtime = Runtime(MemoryStore(), workflows=[parallel], around=[backend.telemetry()])
    await runtime.trigger(parallel, run_id="1")
    attributes = [dict(span.attributes or {}) for span in backend.named("step do")]
    assert {each["perdure.step.key"] for each in attributes} == {"do", "do#2"}
    assert len({each["perdure.step.branch"] for each in attributes}) == 2
    assert {each["perdure.run.id"] for each in attributes} == {"1"}
    assert {each["perdure.step.kind"] for each in attributes} == {"step"}


async def test_events_are_counted_by_delivery(backend: Backend) -> None:
    @workflow("approval")
    async def approval(step: Step) -> None:
        await step.wait_for_event("answer", "answer")

    runtime = Runtime(MemoryStore(), workflows=[approval], around=[backend.telemetry()])
    await runtime.trigger(approval, run_id="1")
    client = Client(runtime.store, around=[backend.telemetry()])
    await client.signal("1", "answer", dedup_id="a")
    await client.signal("1", "answer", dedup_id="a")
    await client.signal("2", "answer")
    spans = backend.named("signal answer")
    assert [span.kind for span in spans] == [SpanKind.PRODUCER] * 3
    metrics = backend.metrics()
    counts = [metrics["events.sent", each] for each in ("delivered", "duplicate", "unknown")]
    assert counts == [1, 1, 1]


async def test_a_worker_is_measured_and_counts_the_runs_of_its_store(backend: Backend) -> None:
    seen: dict[tuple[str, ...], Any] = {}

    async def look() -> None:
        seen.update(backend.metrics())

    @workflow("looking")
    async def looking(step: Step) -> None:
        await step("look", look)

    runtime = Runtime(MemoryStore(), workflows=[looking], around=[backend.telemetry()])
    await runtime.trigger(looking, wait=False)
    await Worker(runtime, concurrency=7).run_until_idle()
    assert (seen["worker.running",], seen["worker.capacity",]) == (1, 7)
    assert seen["runs", "failed"] == 0
    assert seen["oldest_due.age",] == 0
    assert sum(value for (name, *_), value in seen.items() if name == "runs") == 1
    after = backend.metrics()
    assert ("worker.running",) not in after
    assert after["store.append.duration",][0] == 2
    # The store's polling makes no spans.
    names = {span.name for span in backend.spans}
    assert names == {"trigger looking", "run looking", "step look"}


async def test_no_metric_is_labelled_with_a_run(backend: Backend) -> None:
    runtime = Runtime(MemoryStore(), workflows=[ship], around=[backend.telemetry()])
    await runtime.trigger(ship, run_id="secret-id")
    await Worker(runtime).run_until_idle()
    assert not any("secret-id" in labels for labels in backend.metrics())


def test_a_client_without_an_event_loop_passes_the_context(backend: Backend) -> None:
    web = backend.tracers.get_tracer("web")
    client = sync.Client(MemoryStore(), around=[backend.telemetry()])
    with client, web.start_as_current_span("POST /parcels"):
        run = client.trigger("ship")
    (request,), (trigger,) = backend.named("POST /parcels"), backend.named("trigger ship")
    assert trigger.parent is not None
    assert trigger.parent.span_id == id_of(request)
    assert run.metadata["traceparent"].split("-")[2] == f"{id_of(trigger):016x}"


async def test_large_metadata_of_the_user_only_loses_a_link(backend: Backend) -> None:
    runtime = Runtime(workflows=[order, ship], around=[backend.telemetry()])
    large = {"a": "x" * (MAX_METADATA - 10)}
    run = await runtime.trigger(order, metadata=large)
    assert run.status == "waiting"
    assert run.metadata.keys() == {"a", "traceparent"}


async def test_an_existing_runtime_can_be_instrumented(backend: Backend) -> None:
    runtime = Runtime(workflows=[ship])
    instrument(runtime, tracer_provider=backend.tracers, meter_provider=backend.meters)
    await runtime.trigger(ship)
    assert [span.name for span in backend.spans] == ["trigger ship", "run ship", "step pack"]


async def test_a_runtime_is_instrumented_once(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = backend.telemetry()
    runtime = Runtime(workflows=[ship], around=[telemetry])
    assert instrument(runtime) is telemetry
    await runtime.trigger(ship)
    assert len(backend.named("run ship")) == 1
    assert "already instrumented" in caplog.text


async def test_every_new_runtime_can_be_instrumented_once(backend: Backend) -> None:
    instrumentor = PerdureInstrumentor()
    for _ in range(2):
        instrumentor.instrument(tracer_provider=backend.tracers, skip_dep_check=True)
    try:
        runtime = Runtime(workflows=[ship])
        chosen = Runtime(workflows=[ship], around=[backend.telemetry()])
    finally:
        instrumentor.uninstrument()
    assert not EVERYWHERE
    assert [len(each.around) for each in (runtime, chosen, Runtime())] == [1, 1, 0]
    await runtime.trigger(ship)
    assert len(backend.named("run ship")) == 1


async def test_without_an_sdk_nothing_is_stored_and_nothing_breaks() -> None:
    run = await Runtime(workflows=[ship], around=[OpenTelemetry()]).trigger(ship)
    assert (run.status, run.metadata) == ("completed", {})


def test_bad_options_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="'link' or 'continue'"):
        OpenTelemetry(trace="both")  # type: ignore[arg-type]
    for never in (0, -1, "often"):
        with pytest.raises(InvalidArgument, match="stats_every"):
            OpenTelemetry(stats_every=never)
