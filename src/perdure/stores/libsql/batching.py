"""Rounds of statements that many tasks ask for at the same time, sent as one transaction."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import TypeAlias

from perdure.errors import StoreError, StoreUnavailable
from perdure.stores.libsql.http import Unanswered
from perdure.stores.sqlite.statements import Outcome, Statement

Send: TypeAlias = Callable[[Sequence[Statement], bool], Awaitable[Sequence[Outcome]]]

_MOST_TOGETHER = 500


class _Round:
    """Statements that belong together, and who waits for what they give."""

    __slots__ = ("outcomes", "repeatable", "statements")

    def __init__(self, statements: Sequence[Statement], repeatable: bool) -> None:
        self.statements = statements
        self.repeatable = repeatable
        self.outcomes: asyncio.Future[Sequence[Outcome]] = (
            asyncio.get_running_loop().create_future()
        )

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        if not self.outcomes.done():
            self.outcomes.set_result(outcomes)

    def fail(self, error: Exception) -> None:
        if not self.outcomes.done():
            self.outcomes.set_exception(error)


class Rounds:
    """While one request is on its way, rounds gather; the next request takes them all.

    `send` sends statements as one transaction, and tries again by itself what may be done twice.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[_Round] = []
        self._sending: asyncio.Task[None] | None = None
        self._home: asyncio.AbstractEventLoop | None = None

    async def put(self, statements: Sequence[Statement], repeatable: bool) -> Sequence[Outcome]:
        """Give what the statements give, once they are committed."""
        turn = _Round(statements, repeatable)
        if self._home is not asyncio.get_running_loop():
            # What waited in a loop that has ended waits no more.
            self._home, self._waiting, self._sending = asyncio.get_running_loop(), [], None
        self._waiting.append(turn)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())
        return await turn.outcomes

    async def drained(self) -> None:
        """Wait until nothing is on its way."""
        if self._home is asyncio.get_running_loop() and self._sending is not None:
            await self._sending

    async def _send_all(self) -> None:
        while self._waiting:
            rounds = self._waiting[:_MOST_TOGETHER]
            del self._waiting[:_MOST_TOGETHER]
            await self._send_together(rounds)

    async def _send_together(self, rounds: Sequence[_Round]) -> None:
        statements = [statement for turn in rounds for statement in turn.statements]
        repeatable = all(turn.repeatable for turn in rounds)
        try:
            outcomes = iter(await self._send(statements, repeatable))
        except StoreUnavailable as error:
            await self._after_silence(rounds, error)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits
            await self._after_refusal(rounds, error)
        else:
            for turn in rounds:
                turn.settle([*islice(outcomes, len(turn.statements))])

    async def _after_silence(self, rounds: Sequence[_Round], error: StoreError) -> None:
        doubtful = isinstance(error, Unanswered) and error.sent
        again = [turn for turn in rounds if turn.repeatable]
        if not doubtful or len(again) == len(rounds):
            again = []
        for turn in rounds:
            if turn not in again:
                turn.fail(error)
        if again:
            await self._send_together(again)

    async def _after_refusal(self, rounds: Sequence[_Round], error: Exception) -> None:
        if len(rounds) == 1:
            rounds[0].fail(error)
            return
        # Nothing was committed. One by one, the bad one harms only itself.
        for turn in rounds:
            await self._send_together([turn])
