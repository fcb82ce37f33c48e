"""The outside of one run: it triggers, signals, pauses, cancels, retries and reads the run."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import dropwhile
from random import Random
from typing import Any

from perdure import Runtime
from perdure.errors import Refused, RollbackFailed
from perdure.operations import Operations
from perdure.runtime.run import Run, Wait
from perdure.snapshot import Snapshot, is_over
from perdure.store import Delivery
from tests.durability.verifier import language as lang
from tests.durability.verifier.checker import OVER, End
from tests.durability.verifier.generator import EVENTS
from tests.durability.verifier.interpreter import NAME
from tests.durability.verifier.log import UNDO, Line, Log, tokens_in, undone_in
from tests.durability.verifier.model import OK, Model

_RETRIES = 12


class Outside:
    """Everything that happens to a run from outside, determined by a seed."""

    def __init__(
        self,
        runtime: Runtime,
        run: str,
        program: lang.Body,
        log: Log,
        *,
        heal: Callable[[str], object],
        random: Random,
        poll: float = 0.1,
    ) -> None:
        self.runtime = runtime
        self.run = run
        self.program = program
        self.ends: list[End] = []
        self.over = False
        self.children: list[str] = []
        self._log = log
        self._heal = heal
        self._random = random
        self._poll = poll
        self._operations = Operations(runtime.store, clock=runtime.clock, random=random)
        self._retrying: asyncio.Task[Run] | None = None
        self._model = Model(program)
        self._events = 0
        self._retries = 0

    async def see_to_the_end(self, trouble: float, deadline: float) -> None:
        """Trigger the run, do what the seed says, and stop when it is finally over."""
        await self.runtime.trigger(NAME, lang.dumps(self.program), run_id=self.run, wait=False)
        doing: list[asyncio.Task[Any]] = [
            asyncio.ensure_future(each)
            for each in (self._send(), self._answer(), self._cancel(), self._pause())
        ]
        try:
            async with asyncio.timeout(deadline):
                await self._until_over(trouble)
        except TimeoutError:
            await self.read()
        finally:
            doing += [self._retrying] if self._retrying else []
            for task in doing:
                task.cancel()
            await asyncio.wait(doing)

    async def _until_over(self, trouble: float) -> None:
        """Wait for the end; send what an idle run waits for, and retry a failed one."""
        clock = self.runtime.clock
        quiet = clock.monotonic() + trouble
        while True:
            await clock.sleep(self._poll)
            run = await self._get()
            if run.over:
                if run.status != "failed" or not await self._retry():
                    break
                # An owner that died before it gave up the run keeps it for a while.
                await clock.sleep(0.5)
            elif clock.monotonic() > quiet:
                if run.status == "paused":
                    await self._operate("unpause")
                # Not the engine's own, which come from child runs.
                waited = {wait.event for wait in run.pending}
                for event in (event for event in EVENTS if event in waited):
                    await self._signal(event, None)
                for wait in (wait for wait in run.pending if wait.token):
                    await self._call_back(wait)
                await clock.sleep(0.5)
        await self._children_over()
        await self.read()
        self.over = True

    async def _children_over(self) -> None:
        """Wait until the child runs are over, or long enough."""
        for _ in range(100):
            runs = await self.runtime.list_runs(prefix=f"{self.run}/", limit=1000)
            self.children = [run.id for run in runs if not is_over(run.status)]
            if not self.children:
                return
            await self.runtime.clock.sleep(self._poll)

    async def _send(self) -> None:
        """Send each wait its event, early or late, some of them twice."""
        random = self._random
        waits = [each for each in self._model.commands.values() if isinstance(each, lang.Wait)]
        for number, wait in enumerate(waits):
            if random.random() < 0.2:
                continue
            await self.runtime.clock.sleep(random.choice((0, 0, 0.01, 0.1, 0.4)))
            dedup_id = random.choice((None, f"event-{number}"))
            await self._signal(wait.event, dedup_id)
            if dedup_id is not None and random.random() < 0.5:
                await self._signal(wait.event, dedup_id)

    async def _signal(self, event: str, dedup_id: str | None) -> None:
        self._events += 1
        token = f"<e{self.run}.{self._events}>"
        result = await self.runtime.signal(
            self.run, event, {"x": token}, dedup_id=dedup_id, wait=False
        )
        if result.delivery is Delivery.DELIVERED:
            self._log.write(Line("sent", "op", self.run, path=event, tokens=(token,)))

    async def _answer(self) -> None:
        """Answer most of the questions, each by up to three callers at once."""
        if not any(isinstance(each, lang.Ask) for each in self._model.commands.values()):
            return
        random, clock, known = self._random, self.runtime.clock, set[str]()
        while True:
            await clock.sleep(random.choice((0.02, 0.05, 0.2)))
            for wait in (await self._get()).pending:
                if wait.token and wait.token not in known:
                    known.add(wait.token)
                    callers = random.choice((0, 1, 2, 3))
                    await asyncio.gather(*(self._call_back(wait) for _ in range(callers)))

    async def _call_back(self, wait: Wait) -> None:
        self._events += 1
        token = f"<e{self.run}.{self._events}>"
        try:
            if wait.question:
                verb = self._random.choice((self.runtime.approve, self.runtime.reject))
                await verb(wait.token, by=token)
            else:
                await self.runtime.answer(wait.token, {"x": token}, by=token)
        except Refused:
            self._log.write(Line("refused", "op", self.run, text=wait.token, tokens=(token,)))
        else:
            self._log.write(Line("answered", "op", self.run, text=wait.token, tokens=(token,)))

    async def _cancel(self) -> None:
        if self._random.random() < 0.1:
            await self.runtime.clock.sleep(self._random.random() * 2)
            self._log.write(Line("cancel", "op", self.run))
            await self.runtime.cancel(self.run, reason="enough")

    async def _pause(self) -> None:
        """Pause and resume the run, at rest or through its owner, up to three times."""
        random, clock = self._random, self.runtime.clock
        for _ in range(random.choice((0, 0, 1, 3))):
            await clock.sleep(random.random())
            await self._operate("pause")
            await clock.sleep(random.choice((0, 0.05, 0.5, 1.5)))
            await self._operate("unpause")

    async def _operate(self, verb: str) -> None:
        # It may be over, in the hands of a dead process, or not what it was a moment ago.
        with suppress(Refused):
            await getattr(self._operations, verb)(self.run, by="verifier")

    async def _retry(self) -> bool:
        """Heal what can be healed and retry; return False if a retry is useless."""
        if self._retrying is not None and not self._retrying.done():
            return True
        useful = self._model.outcomes(healed=True) == OK
        if self._retries >= (_RETRIES if useful else 1):
            return False
        self._retries += 1
        self._heal(self.run)
        steps = (await self._snapshot())["steps"]
        undone = undone_in(steps)
        later = [*dropwhile(lambda key: key not in undone, steps)]
        tokens = tokens_in(repr([steps[key] for key in later]).encode())
        self._log.write(Line("retry", "op", self.run, tokens=tokens))
        self._retrying = asyncio.ensure_future(self.runtime.retry(self.run))
        return True

    async def _snapshot(self) -> Snapshot:
        snapshot = await self.runtime.store.load(self.run)
        assert snapshot is not None
        return snapshot

    async def _get(self) -> Run:
        run = await self.runtime.get_run(self.run)
        assert run is not None
        return run

    async def read(self) -> None:
        """Add a reading of the run to `ends`."""
        run, snapshot = await self._get(), await self._snapshot()
        # In the order of their keys: records of concurrent branches are in another order in the
        # journal, which is read until the run that has ended is at rest.
        steps = dict(sorted(snapshot["steps"].items()))
        self.ends.append(
            End(
                status=run.status,
                output=repr(run.output) if run.status == "completed" else "",
                error=str(run.error) if run.status in OVER[1:] else "",
                history=repr(sorted(run.history, key=lambda step: step.key)),
                records=tuple(
                    (record.get("branch", ""), record.get("call", key))
                    for key, record in steps.items()
                ),
                tokens=frozenset(tokens_in(repr((steps, snapshot.get("metadata"))).encode())),
                marked=_marked(steps),
                undone=frozenset(undone_in(steps)),
                tried=frozenset(key.removeprefix(UNDO) for key in steps if key.startswith(UNDO)),
                reported=_reported(run.error),
                scopes=_scopes(steps),
            )
        )


def _marked(steps: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the key and the token of each recorded step that can be undone."""
    marked = [(key, record) for key, record in steps.items() if record.get("undo") and record["ok"]]
    return tuple((key, tokens_in(repr(record).encode())[0]) for key, record in marked)


def _reported(error: object) -> frozenset[str]:
    """Return the keys of the steps of which the error of a run says that they were not undone."""
    return frozenset(error.failures if isinstance(error, RollbackFailed) else ())


def _scopes(steps: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys of the steps that were to be undone by the scope of a saga."""
    sagas = [record["value"] for record in steps.values() if record.get("kind") == "saga"]
    return frozenset(key for saga in sagas for key in saga["undoes"])
