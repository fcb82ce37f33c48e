"""Rounds of statements from many tasks, sent together as one transaction."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import TypeAlias

from perdure.engine.tasks import detached
from perdure.errors import StoreError, StoreUnavailable
from perdure.stores.libsql.http import NoResponse
from perdure.stores.sqlite.statements import Outcome, Statement

Send: TypeAlias = Callable[[Sequence[Statement], bool], Awaitable[Sequence[Outcome]]]

_MAX_BATCH = 500


class _Round:
    """Statements that belong together, and the future of their outcomes."""

    __slots__ = ("future", "repeatable", "statements")

    def __init__(self, statements: Sequence[Statement], repeatable: bool) -> None:
        self.statements = statements
        self.repeatable = repeatable
        self.future: asyncio.Future[Sequence[Outcome]] = asyncio.get_running_loop().create_future()

    def resolve(self, outcomes: Sequence[Outcome]) -> None:
        if not self.future.done():
            self.future.set_result(outcomes)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class RoundQueue:
    """Queues rounds while a request is in flight; the next request takes them all.

    `send` sends statements as one transaction, and retries what is safe to repeat.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._queue: list[_Round] = []
        self._sender: asyncio.Task[None] | None = None

    async def put(self, statements: Sequence[Statement], repeatable: bool) -> Sequence[Outcome]:
        """Return the outcomes of the statements, once they are committed."""
        round = _Round(statements, repeatable)
        self._queue.append(round)
        if self._sender is None or self._sender.done():
            self._sender = detached(self._send_all())
        return await round.future

    async def drain(self) -> None:
        """Wait until no request is in flight."""
        if self._sender is not None:
            await self._sender

    def forget_loop(self) -> None:
        """Drop the rounds of an event loop that has ended."""
        self._queue, self._sender = [], None

    async def _send_all(self) -> None:
        while self._queue:
            rounds = self._queue[:_MAX_BATCH]
            del self._queue[:_MAX_BATCH]
            await self._send_together(rounds)

    async def _send_together(self, rounds: Sequence[_Round]) -> None:
        statements = [statement for round in rounds for statement in round.statements]
        repeatable = all(round.repeatable for round in rounds)
        try:
            outcomes = iter(await self._send(statements, repeatable))
        except StoreUnavailable as error:
            await self._handle_unavailable(rounds, error)
        except Exception as error:  # noqa: BLE001 - raised where the rounds are awaited
            await self._handle_refusal(rounds, error)
        else:
            for round in rounds:
                round.resolve([*islice(outcomes, len(round.statements))])

    async def _handle_unavailable(self, rounds: Sequence[_Round], error: StoreError) -> None:
        # The request may have been executed, so only rounds that are safe to repeat are sent again.
        # If all rounds were repeatable, `send` has already retried them.
        to_repeat = [round for round in rounds if round.repeatable]
        if not (isinstance(error, NoResponse) and error.was_sent) or len(to_repeat) == len(rounds):
            to_repeat = []
        for round in rounds:
            if round not in to_repeat:
                round.fail(error)
        if to_repeat:
            await self._send_together(to_repeat)

    async def _handle_refusal(self, rounds: Sequence[_Round], error: Exception) -> None:
        if len(rounds) == 1:
            rounds[0].fail(error)
            return
        # Nothing was committed. Sent one at a time, only the bad round fails.
        for round in rounds:
            await self._send_together([round])
