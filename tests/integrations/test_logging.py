"""Log lines that say which run they belong to, and that a replay does not repeat."""

import asyncio
import logging
from collections.abc import Iterator
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any

import pytest
import structlog
from structlog.testing import CapturingLogger

from perdure import Retry, Runtime, Step, Worker, durable, workflow
from perdure.errors import InvalidArgument
from perdure.integrations.logging import RunFilter, RunProcessor
from perdure.stores import MemoryStore
from perdure.testing import TestClock

logger = logging.getLogger("shop.orders")


class Lines(logging.Handler):
    """Keeps the records that its filters let through."""

    def __init__(self, *filters: logging.Filter) -> None:
        super().__init__()
        self.records: list[Any] = []
        for each in filters:
            self.addFilter(each)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def shop() -> Iterator[logging.Logger]:
    shop = logging.getLogger("shop")
    shop.setLevel(logging.INFO)
    yield shop
    shop.handlers.clear()


async def charge(step: Step, fails: int = 0) -> str:
    logger.info("charging")
    if step.attempt <= fails:
        raise OSError("refused")
    return "receipt"


@workflow("order")
async def order(step: Step) -> str:
    logger.info("begin")
    await step("charge", charge, step, 1, retry=Retry(2, delay=0))
    logger.info("charged")
    await step.sleep("night", "8h")
    logger.info("morning")
    await step("thank", logger.info, "thanking")
    return "end"


async def run_over_a_night() -> None:
    clock = TestClock()
    runtime = Runtime(MemoryStore(clock=clock), workflows=[order], clock=clock)
    await runtime.trigger(order, run_id="order-1")
    await clock.advance("8h")
    (run,) = await runtime.sweep()
    assert run.output == "end"


ONCE = ["begin", "charging", "charging", "charged", "morning", "thanking"]
REPEATED = ["begin", "charging", "charging", "charged", "begin", "charged", "morning", "thanking"]


async def test_lines_of_a_replay_are_marked(shop: logging.Logger) -> None:
    shop.addHandler(lines := Lines(RunFilter()))
    await run_over_a_night()
    assert lines.texts == REPEATED
    assert [record.getMessage() for record in lines.records if record.replaying] == [
        "begin",
        "charged",
    ]
    assert {(record.run_id, record.workflow) for record in lines.records} == {("order-1", "order")}
    assert [(record.step, record.attempt) for record in lines.records] == [
        ("", 0),
        ("charge", 1),
        ("charge", 2),
        ("", 0),
        ("", 0),
        ("", 0),
        ("", 0),
        ("thank", 1),
    ]


async def test_lines_of_a_replay_can_be_dropped(shop: logging.Logger) -> None:
    shop.addHandler(everything := Lines(RunFilter()))
    shop.addHandler(lines := Lines(RunFilter(drop_replays=True)))
    await run_over_a_night()
    assert lines.texts == ONCE
    assert everything.texts == REPEATED


async def test_each_line_is_logged_once_however_often_the_run_is_replayed(
    shop: logging.Logger,
) -> None:
    @workflow("loop")
    async def loop(step: Step) -> None:
        async def branch(name: str) -> None:
            for n in range(3):
                logger.info("%s %d", name, n)
                await step(name, charge, step)

        await asyncio.gather(branch("left"), branch("right"))

    shop.addHandler(lines := Lines(RunFilter(drop_replays=True)))
    runtime = Runtime(MemoryStore(), workflows=[loop], always_replay=True)
    await runtime.trigger(loop, wait=False)
    await Worker(runtime).run_until_idle()
    own = [text for text in lines.texts if text != "charging"]
    assert sorted(own) == [f"{name} {n}" for name in ("left", "right") for n in range(3)]
    assert lines.texts.count("charging") == 6


async def test_a_queue_keeps_what_its_handler_added(shop: logging.Logger) -> None:
    queue: SimpleQueue[Any] = SimpleQueue()
    handler = QueueHandler(queue)
    handler.addFilter(RunFilter(drop_replays=True))
    shop.addHandler(handler)
    lines = Lines(RunFilter())
    listener = QueueListener(queue, lines)
    listener.start()
    await run_over_a_night()
    listener.stop()
    assert lines.texts == ONCE
    assert {record.run_id for record in lines.records} == {"order-1"}


async def test_steps_in_threads_and_durable_runs_are_known(shop: logging.Logger) -> None:
    shop.addHandler(lines := Lines(RunFilter()))

    def in_thread() -> None:
        logger.info("in a thread")

    async def plain(step: Step) -> None:
        await step("think", in_thread)

    await durable.run({}, plain, id="plain-1", store=MemoryStore())
    (record,) = lines.records
    assert (record.run_id, record.step, record.attempt) == ("plain-1", "think", 1)


def test_lines_outside_a_run_have_empty_names_and_their_own_values(shop: logging.Logger) -> None:
    shop.addHandler(lines := Lines(RunFilter(drop_replays=True)))
    logger.info("hello", extra={"workflow": "mine"})
    (record,) = lines.records
    assert (record.run_id, record.workflow, record.step, record.attempt) == ("", "mine", "", 0)
    assert record.replaying is False


@pytest.mark.parametrize("drops", [False, True])
async def test_structlog_knows_the_run_and_drops_replays(drops: bool) -> None:
    output = CapturingLogger()
    log: Any = structlog.wrap_logger(
        output, processors=[RunProcessor(drop_replays=drops)], wrapper_class=structlog.BoundLogger
    )
    clock = TestClock()

    async def ask() -> None:
        log.info("asking", workflow="mine")

    @workflow("structured")
    async def structured(step: Step) -> None:
        log.info("begin")
        await step("ask", ask)
        await step.sleep("night", "8h")
        log.info("end")

    log.info("outside")
    runtime = Runtime(MemoryStore(clock=clock), workflows=[structured], clock=clock)
    await runtime.trigger(structured, run_id="1")
    await clock.advance("8h")
    await runtime.sweep()
    run = {"run_id": "1", "workflow": "structured"}
    again = [] if drops else [{**run, "event": "begin", "replaying": True}]
    assert [call.kwargs for call in output.calls] == [
        {"event": "outside"},
        {**run, "event": "begin"},
        {"run_id": "1", "event": "asking", "workflow": "mine", "step": "ask", "attempt": 1},
        *again,
        {**run, "event": "end"},
    ]


def test_an_option_that_is_not_a_flag_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="drop_replays"):
        RunFilter(drop_replays="yes")  # type: ignore[arg-type]
