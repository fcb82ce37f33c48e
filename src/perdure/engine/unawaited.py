"""Calls whose `await` was forgotten, and branches that the function did not wait for.

A call without `await` creates a coroutine that never starts, so no code of ours is there to notice
it. Python does notice: when it frees such a coroutine, it warns, and formats the name of the
coroutine for that warning and for little else. So that name is a `CallName`, which looks at the
coroutine and says which step it is. Calls that are awaited pay nothing.

Besides `asyncio_internals`, this is the only module that looks at frames and code objects. It
relies on two things that have been the same from Python 3.11 to 3.14, and that a test checks on
each version:

- `warnings._warn_unawaited_coroutine`, which formats the name, has the variable `coro`.
- the instructions that call a function and discard what it returns, as in an expression statement
  or a condition. No exception is in flight there. A coroutine that is freed at any other one may
  have been left behind by an exception, a cancellation or a loop that has ended early, and then
  nothing was forgotten.
"""

import dis
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TypeVar

from perdure.engine.active_run import ActiveRun
from perdure.engine.asyncio_internals import arguments_of, coroutine_of
from perdure.engine.branches import Branch, Branches
from perdure.engine.call import WAITS, StepCall
from perdure.engine.tasks import POSITION
from perdure.errors import NotAwaited

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_WARNING = warnings._warn_unawaited_coroutine.__code__  # type: ignore[attr-defined]  # private
_DISCARDS = frozenset(
    code
    for name, code in dis.opmap.items()
    # A condition, `if step(…)`, is tested by the last one since Python 3.13.
    if name == "POP_TOP" or name.startswith("POP_JUMP") or name == "TO_BOOL"
)
_CALLS = frozenset(
    code for name, code in dis.opmap.items() if name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX")
)
_CACHE = dis.opmap["CACHE"]


class CallName(str):
    """The name of the coroutines of a call. In Python's warning it is that of the step."""

    __slots__ = ()

    def __format__(self, spec: str, /) -> str:
        """Return the name; stop the run if Python warns about a coroutine that was discarded."""
        frame = sys._getframe(1)
        if frame.f_code is not _WARNING or frame.f_back is None:
            return super().__format__(spec)
        arguments = arguments_of(frame.f_locals["coro"])
        call = arguments.get("call")
        id = call.id if isinstance(call, StepCall) else str(self)
        if _discards_call(frame.f_back.f_code.co_code, frame.f_back.f_lasti):
            _stop_run(_branches_of(arguments), id, frame.f_back)
        return f'step "{id}"' if isinstance(call, StepCall) else id


def call_named(name: str) -> Callable[[F], F]:
    """Return a decorator for the function whose coroutines are calls, with the name of a method."""

    def decorate(fn: F) -> F:
        fn.__qualname__ = CallName(name)
        return fn

    return decorate


def _discards_call(code: bytes, at: int) -> bool:
    """Return whether an instruction discards what the call before it has returned."""
    before = at - 2
    # Instructions have two bytes, and some are followed by entries of the interpreter's cache.
    while before >= 0 and code[before] == _CACHE:
        before -= 2
    return code[at] in _DISCARDS and before >= 0 and code[before] in _CALLS


def _branches_of(arguments: Mapping[str, Any]) -> Branches | None:
    """Return the branches of the run that was called, from the arguments of the coroutine."""
    call, run = arguments.get("call"), arguments.get("run")
    if isinstance(call, StepCall):
        return call.branch.branches
    return run.branches if isinstance(run, ActiveRun) else None


def _stop_run(branches: Branches | None, id: str, frame: FrameType) -> None:
    position = POSITION.get()
    # Elsewhere, such as in another thread, the garbage collector may have found the coroutine.
    if branches is None or branches.handle is None or type(position) is not Branch:
        return
    # If the coroutine was passed on, the code of another run may discard it. A run can only be
    # stopped in its own event loop.
    if position.branches is branches or branches.is_in_current_loop():
        run: ActiveRun = branches.handle._run
        run.stop(NotAwaited(id, f"{frame.f_code.co_filename}:{frame.f_lineno}"))


def warn_of_unfinished(run: ActiveRun) -> None:
    """Log which steps of branches are cut off because the function has returned."""
    calls = [arguments_of(coroutine_of(task)).get("call") for task in run.branches.tasks]
    ids = [
        call.id
        for call in (*calls, *run.branches.calls)
        if isinstance(call, StepCall) and call.kind not in WAITS
    ]
    if ids:
        logger.warning(
            "run %r: the function has returned before these steps have ended: %s. They are "
            "cancelled, and not recorded. Await every task that the function starts",
            run.run_id,
            ", ".join(repr(id) for id in sorted(ids)),
        )
