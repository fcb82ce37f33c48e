"""Steps whose writes are committed together with their records."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from perdure.engine.attempts import attempts
from perdure.engine.call import StepCall
from perdure.engine.execution import Execution
from perdure.engine.host import NO_STORE, Host
from perdure.engine.records import EncodedRecord
from perdure.engine.tasks import POSITION, Interrupted
from perdure.engine.unawaited import call_named
from perdure.errors import MissingAbility, RunOver
from perdure.result import Err, Ok


@call_named("step.transaction")
async def transact(run: Execution, call: StepCall) -> Any:
    """Run a step whose writes are committed with its record."""
    recorded_call = run.find_record(call)
    if recorded_call is not None:
        return await run.answer(call, *recorded_call)
    if run.host is None:
        raise MissingAbility(NO_STORE, "transaction", f"step.transaction({call.id!r})")
    async with run.in_flight(call):
        try:
            record = await attempts(run, call, partial(_transact_once, run, run.host, call))
        except Interrupted as interruption:
            run.publish(call, interruption.answer)
            raise interruption.plain() from None
        except Exception as error:  # noqa: BLE001  # the user's function, or what stopped the run
            # In a separate write, because the transaction of the record was rolled back.
            return await run.fail(call, error)
        if isinstance(record, Err):
            return await run.fail(call, record)
        run.publish(call, record)
        if run.host.always_replay:
            await run.host.halt(record.key)
    run.tell_success(call, record)
    return record.value


async def _transact_once(run: Execution, host: Host, call: StepCall) -> EncodedRecord | Err[Any]:
    """Return the committed record, or the outcome of the user's function if it failed."""
    try:
        return await host.transact(call, _work(run, call))
    except _RolledBack as rolled_back:
        failure = rolled_back.failure
    except RunOver:
        raise
    except Exception as error:  # noqa: BLE001  # the store: it may or may not have committed
        raise run.stop_unsure(error) from error.__cause__
    if isinstance(failure, Err):
        return failure
    raise failure


def _work(run: Execution, call: StepCall) -> Callable[[Any], Coroutine[Any, Any, EncodedRecord]]:
    async def work(connection: Any) -> EncodedRecord:
        token = POSITION.set(call)
        try:
            if run.around is None:
                value = await call.fn(connection, *call.args)
            else:
                value = await run.around.step(call, partial(call.fn, connection, *call.args))
        except Exception as error:  # the user's function
            raise _RolledBack(error) from error
        finally:
            POSITION.reset(token)
        if isinstance(value, Err):
            raise _RolledBack(value)
        return run.encode(call, value.value if type(value) is Ok else value)

    return work


class _RolledBack(Exception):
    """Carries a failure of the user's function out of the store's transaction."""

    def __init__(self, failure: Exception | Err[Any]) -> None:
        self.failure = failure
