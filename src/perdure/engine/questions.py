"""Questions that programs ask a run, and the run's answers."""

from typing import Any, Generic, TypeVar

import msgspec

from perdure.engine.call import StepCall, step_call
from perdure.engine.children import children_of
from perdure.engine.execution import Execution
from perdure.engine.unawaited import call_named
from perdure.errors import InvalidArgument

T = TypeVar("T")


class Question(msgspec.Struct, Generic[T], frozen=True):
    """An event that a program sent with `ask`, waiting for the answer.

    A run receives it with `step.wait_for_event(id, name, returns=Question[Item])` and answers with
    `step.reply(question, value)`.
    """

    id: str
    payload: T


def answer_key(question_id: str) -> str:
    """Return the key of the document that contains the answer to a question."""
    return f"answer:{question_id}"


def reply_call(run: Execution, question: object, value: object) -> StepCall:
    """Return the call of the step that answers a question; its id is derived from the question."""
    children_of(run, "step.reply")
    if not isinstance(question, Question):
        expected = "a Question that step.wait_for_event(…, returns=Question[…]) returned"
        raise InvalidArgument("question", question, expected)
    branch = run.branches.current(run.run_id, "step.reply")
    return step_call(f"~reply:{question.id}", branch, None, _reply, (value,))


def _reply() -> Any:
    """A placeholder for the function of an answer, which has no return type."""


@call_named("step.reply")
async def reply(run: Execution, call: StepCall, question: Question[Any]) -> None:
    """Record that a question was answered; the answer is delivered once that is durable."""
    recorded_call = run.find_record(call)
    if recorded_call is not None:
        await run.answer(call, *recorded_call)
        return
    children = children_of(run, "step.reply")
    async with run.in_flight(call):
        item = children.answer(answer_key(question.id), call.args[0])
        run.history.outbox.put(f"answer:{question.id}", item)
        await run.succeed(call, None)
