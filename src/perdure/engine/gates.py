"""Steps that need a person's approval before they run."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from perdure.clock import Duration
from perdure.engine.approvals import Approval, ApprovalAsk, ApprovalRequest, check_question
from perdure.engine.call import StepCall
from perdure.engine.execution import Execution
from perdure.engine.token_waits import ask, host_of
from perdure.errors import InvalidArgument, Rejected
from perdure.snapshot.asks import APPROVE

_MAX_QUESTION = 2000


class Gate(msgspec.Struct, frozen=True):
    """The approval that a step needs before it runs: `step(…, approve=Gate("Wire {amount}?"))`.

    The names in braces are parameters of the step's function. The other fields are the same as in
    `step.approval`. A step whose approval is rejected, or not given in time, raises `Rejected`.
    """

    question: str
    to: str = ""
    timeout: Duration | None = None
    remind: Duration | None = None
    notify: Callable[[ApprovalRequest], object] | None = None


class GateAsk(ApprovalAsk):
    """The question before a step."""

    def value(self, call: StepCall, answer: Mapping[str, Any], at: datetime) -> Any:
        """Return the answer, or raise `Rejected`."""
        approval: Approval[Any] = super().value(call, answer, at)
        if approval.approved:
            return approval
        question, step = self.facts.get("question", ""), call.id.partition(":")[2]
        raise Rejected(step, question, approval.by, approval.note, at, approval.expired)


def gate_of(approve: object) -> Callable[[Execution, StepCall], Awaitable[object]]:
    """Return a function that awaits the approval of a step, for its option `approve`."""
    gate = Gate(approve) if isinstance(approve, str) else approve
    if not isinstance(gate, Gate):
        raise InvalidArgument("approve", approve, "a question, or a Gate(question, …)")
    # Checked now; the arguments are filled in when the step is called.
    _question_of(gate, gate.question)
    return partial(_await_gate, gate)


def _question_of(gate: Gate, question: str) -> GateAsk:
    """Return the question of a gate, or raise `InvalidArgument`."""
    facts = check_question(question, gate.to, (), None)
    return GateAsk(facts=facts, timeout=gate.timeout, remind=gate.remind, tell=gate.notify)


async def _await_gate(gate: Gate, run: Execution, call: StepCall) -> None:
    """Ask for the approval of a step; raise `Rejected` if it is not given."""
    host = host_of(run, "approve=")
    # A transaction is approved before it has a connection, so `None` stands for it.
    fn = partial(call.fn, None) if call.kind == "transaction" else call.fn
    question = fill_in(gate.question, fn, call.args)
    approval = call.on_behalf(f"{APPROVE}:{call.call}", _approval)
    approval.kind, approval.returns = "approval", Approval
    await ask(run, approval, host, _question_of(gate, question))


def _approval() -> Any:
    """A placeholder for the function of an approval; only its return type matters."""


def fill_in(template: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Fill the arguments of a step's function into a question."""
    values = {}
    if "{" in template:
        binding = inspect.signature(fn).bind(*args)
        binding.apply_defaults()
        values = dict(binding.arguments)
    try:
        question = template.format(*args, **values)
    except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
        names = ", ".join(f"{{{name}}}" for name in values) or "it has none"
        expected = f"a question with the names of the function's parameters in braces ({names})"
        hint = f"Write a brace that is part of the text twice, {{{{ or }}}}: {error!r}"
        raise InvalidArgument("approve", template, expected, hint) from None
    return question if len(question) <= _MAX_QUESTION else question[: _MAX_QUESTION - 1] + "…"
