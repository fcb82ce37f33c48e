"""Many questions, ten callers each, while the workers are killed: one answer counts for each.

python -m tests.durability.answer_chaos sqlite:////tmp/answers.db --waits 1000
"""

import argparse
import asyncio
import logging
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from perdure import AlreadyAnswered, Client, Runtime, Step, TooLate, Worker, workflow
from perdure.store import Store
from perdure.stores import open_store
from tests.durability.forked import forked

LEASE = 1.0
CALLERS = 10


async def tell(request: Any) -> None:
    assert request.token


@workflow("answered")
async def answered(step: Step, timeout: float | None) -> str:
    answer = await step.approval("ask", "Go?", to="ops", timeout=timeout, notify=tell)
    await step("after", str, answer.by)
    return "expired" if answer.expired else answer.by


async def main(url: str, options: dict[str, str]) -> None:
    store = open_store(url, **options)
    runtime = Runtime(store, workflows=[answered], lease_ttl=LEASE, suspend_after=0.05)
    async with Worker(runtime, concurrency=50, poll=0.1, max_crashes=1000) as worker:
        await worker.serve()
    await store.close()


def work(url: str, options: dict[str, str]) -> None:
    """Run a worker in this process until it is killed."""
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(main(url, options))


@dataclass
class Tally:
    """The replies to the callers of each run, and what the runs recorded."""

    accepted: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    kills: int = 0

    def check(self) -> None:
        """Raise unless callers and records agree: one answer counts, all others were refused."""
        for run_id, output in self.outputs.items():
            accepted, refused = self.accepted.get(run_id, []), self.refused.get(run_id, [])
            replies = len(accepted) + len(refused) + self.late.get(run_id, 0)
            assert replies == CALLERS, (run_id, replies)
            if output == "expired":
                assert not accepted, (run_id, accepted)
                assert not refused, (run_id, refused)
            else:
                assert accepted == [output], (run_id, accepted, output)
                assert set(refused) == {output}, (run_id, refused, output)


async def ask_and_answer(
    store: Store, waits: int, workers: "Workers | None" = None, kills: int = 0
) -> Tally:
    """Start runs, answer each of them ten times while workers are killed, and wait for all."""
    tally, client = Tally(), Client(store)
    timeouts = [1.0 if n % 4 == 0 else None for n in range(waits)]
    runs = [f"run-{n}" for n in range(waits)]
    killing = asyncio.create_task(_kill(workers, kills, tally))
    answers = []
    for run_id, timeout in zip(runs, timeouts, strict=True):
        await client.trigger("answered", timeout, run_id=run_id)
        answers.append(asyncio.create_task(_answer(client, run_id, tally)))
    await asyncio.gather(*answers)
    for run_id in runs:
        tally.outputs[run_id] = await client.result(run_id, timeout=60)
    killing.cancel()
    await asyncio.wait([killing])
    return tally


async def _kill(workers: "Workers | None", kills: int, tally: Tally) -> None:
    while workers is not None and tally.kills < kills:
        await asyncio.sleep(0.5)
        workers.kill_one()
        tally.kills += 1


async def _answer(client: Client, run_id: str, tally: Tally) -> None:
    while not (token := await _token(client, run_id)):
        await asyncio.sleep(0.2)
    # Some come while the question expires.
    await asyncio.gather(
        *(_call(client, run_id, token, f"{run_id} {n}", tally) for n in range(CALLERS))
    )


async def _token(client: Client, run_id: str) -> str:
    run = await client.get_run(run_id)
    if run is None or run.over or not run.pending:
        # It may have expired before it was seen: nothing to answer.
        if run is not None and run.over:
            return "over"
        return ""
    return run.pending[0].token


async def _call(client: Client, run_id: str, token: str, by: str, tally: Tally) -> None:
    await asyncio.sleep(random.random() * 1.2)
    try:
        if token == "over":
            raise TooLate(run_id, "over")
        await client.approve(token, by=by)
    except AlreadyAnswered as refused:
        tally.refused.setdefault(run_id, []).append(refused.by)
    except TooLate:
        tally.late[run_id] = tally.late.get(run_id, 0) + 1
    else:
        tally.accepted.setdefault(run_id, []).append(by)


class Workers:
    """Worker processes; one that is killed is replaced."""

    def __init__(self, url: str, options: dict[str, str], count: int = 2) -> None:
        self._processes = forked()
        self._processes.set_forkserver_preload([__name__])
        self._arguments = (url, options)
        self._alive = [self._start() for _ in range(count)]

    def _start(self) -> BaseProcess:
        process = self._processes.Process(target=work, args=self._arguments)
        process.start()
        return process

    def kill_one(self) -> None:
        victim = self._alive.pop(0)
        victim.kill()
        victim.join()
        self._alive.append(self._start())

    def stop(self) -> None:
        for process in self._alive:
            process.kill()
            process.join()


async def _run(url: str, waits: int) -> Tally:
    store, workers = open_store(url), Workers(url, {}, 3)
    try:
        return await ask_and_answer(store, waits, workers, waits // 10)
    finally:
        workers.stop()
        await store.close()


def _lines(tally: Tally, seconds: float) -> Iterable[str]:
    expired = sum(output == "expired" for output in tally.outputs.values())
    yield f"{len(tally.outputs)} questions in {seconds:.1f} s, {tally.kills} workers killed"
    yield f"{len(tally.accepted)} answered once, {expired} expired"
    yield f"{sum(map(len, tally.refused.values()))} callers told that it was answered before"
    yield f"{sum(tally.late.values())} callers told that they are too late"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--waits", type=int, default=1000)
    chosen = parser.parse_args()
    began = time.monotonic()
    result = asyncio.run(_run(chosen.url, chosen.waits))
    result.check()
    print("\n".join(_lines(result, time.monotonic() - began)))
