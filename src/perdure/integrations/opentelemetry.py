"""OpenTelemetry: spans of runs and steps, linked through the store, and metrics.

runtime = Runtime(url, workflows=[welcome], around=[OpenTelemetry()])

A run may last for months and be executed by many processes, so each activation is a separate trace:
a root span, linked to the span in which the run was triggered and to the previous activation. Their
contexts are stored in the run's metadata. Only executed steps have spans; replayed ones do not.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, TypeAlias, get_args

from perdure.clock import Clock, Duration, parse_duration
from perdure.engine.contexts import RunContext, SentSignal, StepContext, WorkerContext
from perdure.engine.middleware import EVERYWHERE, Call, Middleware
from perdure.engine.tasks import cancel_and_wait, detached
from perdure.errors import Cancelled, InvalidArgument, MissingDependency, StoreError, Suspended
from perdure.result import Err
from perdure.runtime import Client
from perdure.snapshot import RunStatus, is_over

try:
    from opentelemetry import metrics, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise MissingDependency("opentelemetry-api", "otel") from error

__all__ = ["OpenTelemetry", "PerdureInstrumentor", "instrument"]

logger = logging.getLogger(__name__)

Attributes: TypeAlias = dict[str, str | int | float]

PREVIOUS = "previous_traceparent"
"""The name in a run's metadata of the context of its previous activation."""

# Not the configured propagator: baggage can exceed the size of metadata, and both sides are ours.
_PROPAGATOR = TraceContextTextMapPropagator()

# In seconds: steps take milliseconds to minutes, runs may take weeks.
_STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)
_RUN_BUCKETS = (0.05, 0.1, 0.5, 1, 5, 10, 60, 300, 900, 3600, 21600, 86400, 604800, 2592000)


class OpenTelemetry(Middleware):
    """Middleware that creates spans and metrics for what is executed.

    The providers are the global ones unless others are passed. With `trace="link"` each activation
    is a separate trace, linked to the trace in which the run was triggered; with `"continue"` each
    activation is part of that trace. A worker counts the runs of the store every `stats_every`, or
    never with `None`.
    """

    def __init__(
        self,
        *,
        trace: Literal["link", "continue"] = "link",
        tracer_provider: "trace.TracerProvider | None" = None,
        meter_provider: metrics.MeterProvider | None = None,
        stats_every: Duration | None = 30,
    ) -> None:
        if trace not in ("link", "continue"):
            raise InvalidArgument("trace", trace, "'link' or 'continue'")
        self._continues = trace == "continue"
        self._tracer = _tracer(tracer_provider)
        self._metrics = _Metrics(metrics.get_meter("perdure", meter_provider=meter_provider))
        self._stats_every = None if stats_every is None else _period(stats_every)
        self._spans: dict[RunContext, Span] = {}

    def metadata(self, workflow: str, run_id: str) -> Mapping[str, Any]:
        """Create a span for the start of a run, and store its context with the run."""
        attributes = {"perdure.workflow.name": workflow, "perdure.run.id": run_id}
        name = f"trigger {workflow}"
        carrier: dict[str, str] = {}
        with self._tracer.start_as_current_span(
            name, kind=SpanKind.PRODUCER, attributes=attributes
        ):
            _PROPAGATOR.inject(carrier)
        return carrier

    async def around_signal(self, signals: Sequence[SentSignal], call: Call) -> Any:
        """Create a span for sending events, and count them by delivery."""
        attributes: Attributes = {"perdure.signals": len(signals)}
        if len(signals) == 1:
            attributes = {"perdure.run.id": signals[0].run_id, "perdure.event": signals[0].event}
        events = dict.fromkeys(each.event for each in signals)
        name = "signal" if len(events) != 1 else f"signal {next(iter(events))}"
        with self._tracer.start_as_current_span(
            name, kind=SpanKind.PRODUCER, attributes=attributes
        ):
            results = await call()
        for result in results:
            self._metrics.events.add(1, {"delivery": result.delivery.value})
        return results

    async def around_run(self, run: RunContext, call: Call) -> Any:
        """Create a span for an activation; `after_run` ends it."""
        self._metrics.begin(run)
        span = self._spans[run] = self._start_activation(run)
        _store_context(run, span)
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            try:
                value = await call()
            except Exception as error:
                _fail(span, error)
                raise
        _fail_if_err(span, value)
        return value

    def _start_activation(self, run: RunContext) -> Span:
        trigger_context = _context_of(run.metadata, "traceparent")
        previous = _context_of(run.metadata, PREVIOUS)
        links = [(previous, "previous")]
        if not self._continues:
            links.append((trigger_context, "trigger"))
        return self._tracer.start_span(
            f"run {run.workflow}",
            # The current context belongs to the process, not to the run.
            context=trigger_context if self._continues else Context(),
            kind=SpanKind.CONSUMER,
            attributes=_run_attributes(run),
            links=[link for context, name in links for link in _link(context, name)],
        )

    def after_run(self, run: RunContext, status: RunStatus | None) -> None:
        """End the span of an activation, and count the run if it has ended."""
        self._metrics.end(run, status)
        span = self._spans.pop(run, None)
        if span is None:
            return
        span.set_attribute("perdure.run.replayed_steps", run.replayed)
        if status is not None:
            span.set_attribute("perdure.run.status", status)
        interruption = run.interrupted_by
        if interruption is not None and not isinstance(interruption, Suspended | Cancelled):
            _fail(span, interruption)
        span.end()

    async def around_step(self, step: StepContext, call: Call) -> Any:
        """Create a span for an executed step."""
        started_at, outcome = step.run.now, "interrupted"
        with self._tracer.start_as_current_span(
            f"step {step.id}",
            attributes=_step_attributes(step),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                value = await call()
                outcome = "error" if isinstance(value, Err) else "ok"
            except Exception as error:
                outcome = "error"
                _fail(span, error)
                raise
            finally:
                span.set_attribute("perdure.step.attempt", step.attempt)
                self._metrics.count_step(step, outcome, step.run.now - started_at)
            _fail_if_err(span, value)
            return value

    def on_retry(self, step: StepContext, error: Exception, delay: timedelta) -> None:
        """Add the failed attempt to the span of the step, and count it."""
        facts: Attributes = {
            "perdure.step.name": step.id,
            "perdure.step.attempt": step.attempt,
            "perdure.step.delay": delay.total_seconds(),
            "error.type": _type_of(error),
            "exception.message": str(error),
        }
        trace.get_current_span().add_event("perdure.attempt_failed", facts)
        self._metrics.retries.add(1, _labels(step))

    async def around_worker(self, worker: WorkerContext, call: Call) -> Any:
        """Measure a worker and the runs of its store while it runs."""
        self._metrics.workers.append(worker)
        worker.observe_appends(self._metrics.appends.record)
        counting = [detached(self._count_runs(worker))]
        try:
            return await call()
        finally:
            self._metrics.workers.remove(worker)
            await cancel_and_wait(counting)

    async def _count_runs(self, worker: WorkerContext) -> None:
        while self._stats_every is not None:
            try:
                self._metrics.count(await worker.stats(), worker.clock)
            except StoreError as error:
                logger.debug("the runs of the store could not be counted (%s)", error)
            await worker.clock.sleep(self._stats_every)


class _Metrics:
    """The instruments. None of them has the id of a run as an attribute."""

    def __init__(self, meter: metrics.Meter) -> None:
        def counter(name: str, unit: str, text: str) -> metrics.Counter:
            return meter.create_counter(f"perdure.{name}", unit, text)

        def histogram(name: str, buckets: Sequence[float], text: str) -> metrics.Histogram:
            name = f"perdure.{name}"
            return meter.create_histogram(
                name, "s", text, explicit_bucket_boundaries_advisory=buckets
            )

        self.started = counter("runs.started", "{run}", "Runs that began")
        self.finished = counter("runs.finished", "{run}", "Runs that ended, by status")
        self.taken_over = counter("runs.taken_over", "{run}", "Runs whose owner had died")
        self.steps = counter("steps.executed", "{step}", "Steps whose function was called")
        self.replayed = counter("steps.replayed", "{step}", "Steps answered from their records")
        self.retries = counter("step.retries", "{attempt}", "Failed attempts that were retried")
        self.events = counter("events.sent", "{event}", "Events sent to runs, by delivery")
        self.run_duration = histogram("run.duration", _RUN_BUCKETS, "From trigger to end")
        self.step_duration = histogram("step.duration", _STEP_BUCKETS, "All attempts of a step")
        self.lateness = histogram("run.lateness", _STEP_BUCKETS, "From due to claimed")
        self.appends = histogram("store.append.duration", _STEP_BUCKETS, "Writes of records")
        self.runs = meter.create_gauge("perdure.runs", "{run}", "Runs in the store, by status")
        self.oldest_due = meter.create_gauge(
            "perdure.oldest_due.age", "s", "How long the oldest due run has been due"
        )
        # Read by the exporter's thread.
        self.workers: list[WorkerContext] = []
        meter.create_observable_gauge(
            "perdure.worker.running", [lambda _: self._observe("running")], "{run}", "Driven here"
        )
        meter.create_observable_gauge(
            "perdure.worker.capacity", [lambda _: self._observe("concurrency")], "{run}", "At most"
        )

    def _observe(self, name: str) -> Iterable[metrics.Observation]:
        workers = tuple(self.workers)
        if workers:
            yield metrics.Observation(sum(getattr(each, name) for each in workers))

    def begin(self, run: RunContext) -> None:
        """Count an activation that begins."""
        labels = {"workflow": run.workflow}
        if run.takeovers:
            self.taken_over.add(1, labels)
        elif run.is_first and PREVIOUS not in run.metadata:
            self.started.add(1, labels)
        if run.due_at is not None:
            self.lateness.record(max((run.now - run.due_at).total_seconds(), 0), labels)

    def end(self, run: RunContext, status: RunStatus | None) -> None:
        """Count an activation that has ended."""
        if run.replayed:
            self.replayed.add(run.replayed, {"workflow": run.workflow})
        if status is not None and is_over(status):
            labels = {"workflow": run.workflow, "status": status}
            self.finished.add(1, labels)
            if run.created_at is not None:
                self.run_duration.record((run.now - run.created_at).total_seconds(), labels)

    def count_step(self, step: StepContext, outcome: str, duration: timedelta) -> None:
        """Count a step that was executed."""
        labels = _labels(step)
        self.steps.add(1, {**labels, "outcome": outcome})
        self.step_duration.record(duration.total_seconds(), labels)

    def count(self, stats: Any, clock: Clock) -> None:
        """Set the numbers of runs; a status without runs is set to zero."""
        if stats is None:
            return
        for status in get_args(RunStatus):
            self.runs.set(stats.by_status.get(status, 0), {"status": status})
        due = stats.oldest_due
        self.oldest_due.set(0 if due is None else max((clock.now() - due).total_seconds(), 0))


def instrument(runtime: Client, **options: Any) -> OpenTelemetry:
    """Add an `OpenTelemetry` with these options to an existing runtime or client.

    If it already has an `OpenTelemetry`, a warning is logged and nothing is added: two would count
    everything twice.
    """
    for each in runtime.around:
        if isinstance(each, OpenTelemetry):
            logger.warning("instrument: this %s is already instrumented", type(runtime).__name__)
            return each
    telemetry = OpenTelemetry(**options)
    runtime.add_middleware(telemetry)
    return telemetry


class PerdureInstrumentor:
    """Adds `OpenTelemetry` to every runtime and client that is created from now on.

    The command `opentelemetry-instrument` calls it.
    """

    def instrument(
        self,
        *,
        tracer_provider: "trace.TracerProvider | None" = None,
        meter_provider: metrics.MeterProvider | None = None,
        **_: Any,
    ) -> None:
        """Start instrumenting; a second call changes nothing."""
        if not any(isinstance(each, OpenTelemetry) for each in EVERYWHERE):
            EVERYWHERE.append(
                OpenTelemetry(tracer_provider=tracer_provider, meter_provider=meter_provider)
            )

    def uninstrument(self, **_: Any) -> None:
        """Stop instrumenting; existing runtimes are not changed."""
        EVERYWHERE[:] = [each for each in EVERYWHERE if not isinstance(each, OpenTelemetry)]


def _period(duration: Duration) -> timedelta:
    period = parse_duration(duration, "stats_every")
    if not period:
        raise InvalidArgument("stats_every", duration, "a positive duration, or None")
    return period


def _tracer(provider: "trace.TracerProvider | None") -> "trace.Tracer":
    return trace.get_tracer("perdure", tracer_provider=provider)


def _store_context(run: RunContext, span: Span) -> None:
    """Store the context of an activation, so that the next one can link to it."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    if "traceparent" in carrier:
        # If the metadata is full, the next activation has no link to this one.
        with suppress(InvalidArgument):
            run.update_metadata(**{PREVIOUS: carrier["traceparent"]})


def _context_of(metadata: Mapping[str, Any], name: str) -> Context:
    """Return the context stored under a name, or an empty one."""
    carrier = {"traceparent": metadata.get(name), "tracestate": metadata.get("tracestate")}
    texts = {key: value for key, value in carrier.items() if isinstance(value, str)}
    return _PROPAGATOR.extract(texts, Context())


def _link(context: Context, name: str) -> list[Link]:
    span_context = trace.get_current_span(context).get_span_context()
    return [Link(span_context, {"perdure.link": name})] if span_context.is_valid else []


def _run_attributes(run: RunContext) -> Attributes:
    return {
        "perdure.workflow.name": run.workflow,
        "perdure.workflow.version": run.version,
        "perdure.run.id": run.run_id,
        "perdure.run.epoch": run.epoch,
        "perdure.run.takeovers": run.takeovers,
    }


def _step_attributes(step: StepContext) -> Attributes:
    return {
        "perdure.workflow.name": step.run.workflow,
        "perdure.run.id": step.run.run_id,
        "perdure.step.name": step.id,
        "perdure.step.key": step.key,
        "perdure.step.branch": step.branch,
        "perdure.step.kind": step.kind,
    }


def _labels(step: StepContext) -> Attributes:
    return {"workflow": step.run.workflow, "step": step.id}


def _fail(span: Span, error: object) -> None:
    """Mark a span as failed with an exception, or with the error of an `Err`."""
    span.set_attribute("error.type", _type_of(error))
    span.set_status(Status(StatusCode.ERROR, str(error)))
    if isinstance(error, BaseException):
        span.record_exception(error)


def _fail_if_err(span: Span, value: object) -> None:
    if isinstance(value, Err):
        _fail(span, value.error)


def _type_of(error: object) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
