"""Ask a run a question and wait for its answer."""

import asyncio
from datetime import timedelta
from typing import Any

from perdure import codec
from perdure.clock import Clock
from perdure.engine.questions import answer_key
from perdure.store import SearchStore

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25
"""The polling interval for an answer, in seconds."""


async def wait_for_answer(
    store: SearchStore, clock: Clock, question_id: str, timeout: timedelta | None
) -> Any:
    """Return the answer to a question, or raise `TimeoutError`."""
    key, documents = answer_key(question_id), store.documents
    end = None if timeout is None else clock.monotonic() + timeout.total_seconds()
    pause = FIRST_PAUSE
    while (answer := await documents.get(key)) is None:
        remaining = pause if end is None else end - clock.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"no answer came within {timeout}; the run may still answer")
        await clock.sleep(min(pause, remaining))
        pause = min(pause * 1.5, LONGEST_PAUSE)
    await asyncio.shield(documents.delete(key))
    return codec.decode(codec.loads(answer.encode()))
