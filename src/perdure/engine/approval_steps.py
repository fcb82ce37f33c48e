"""The part of the user's handle that asks people and other systems.

answer = await step.approval("ship", "Ship 40 t to Oslo?", to="ops", timeout="3d", notify=post)
body = await step.callback("signed", timeout="7d", start=lambda callback: sign(callback.url))
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, overload

from perdure.clock import Duration
from perdure.engine.approvals import (
    Approval,
    ApprovalAsk,
    ApprovalRequest,
    Ask,
    Callback,
    check_question,
)
from perdure.engine.execution import Execution
from perdure.engine.token_waits import ask, host_of

T = TypeVar("T")


class ApprovalSteps:
    """A base class of `Step`."""

    __slots__ = ()

    _run: Execution

    @overload
    def approval(
        self,
        id: str,
        question: str,
        /,
        *,
        to: str = ...,
        data: object = ...,
        options: Sequence[str] = ...,
        timeout: Duration | None = ...,
        remind: Duration | None = ...,
        returns: type[T],
        notify: Callable[[ApprovalRequest], object] | None = ...,
    ) -> Coroutine[object, None, Approval[T]]: ...
    @overload
    def approval(
        self,
        id: str,
        question: str,
        /,
        *,
        to: str = ...,
        data: object = ...,
        options: Sequence[str] = ...,
        timeout: Duration | None = ...,
        remind: Duration | None = ...,
        returns: None = ...,
        notify: Callable[[ApprovalRequest], object] | None = ...,
    ) -> Coroutine[object, None, Approval[Any]]: ...
    def approval(
        self,
        id: str,
        question: str,
        /,
        *,
        to: str = "",
        data: object = None,
        options: Sequence[str] = (),
        timeout: Duration | None = None,
        remind: Duration | None = None,
        returns: type[Any] | None = None,
        notify: Callable[[ApprovalRequest], object] | None = None,
    ) -> Coroutine[object, None, Approval[Any]]:
        """Ask a person, and wait for the answer, which has `expired` after the timeout.

        ```python
        answer = await step.approval("discount", "Grant 20 %?", to="sales", timeout="3d")
        cents = 3360 if answer.approved else 4200
        ```

        `to` is the addressee, by which open approvals can be listed. `data` is shown with the
        question. With `options`, the person chooses one of them. `returns` is the type of
        `Approval.value`. Once the question is durable, `notify` is called with it, as a step whose
        idempotency key is the token, and again after each `remind`. The first answer counts.
        """
        facts = check_question(question, to, options, data)
        host = host_of(self._run, "step.approval")
        request = ApprovalAsk(
            facts=facts, timeout=timeout, remind=remind, tell=notify, returns=returns
        )
        call = self._run.call(id, self.approval if notify is None else notify)
        call.kind, call.gate = "approval", None
        # Not `Approval[None]`: without a type, the value may be anything.
        call.returns = Approval if returns is None else Approval[returns]  # type: ignore[valid-type]
        return ask(self._run, call, host, request)

    @overload
    def callback(
        self,
        id: str,
        /,
        *,
        timeout: Duration | None = ...,
        returns: type[T],
        start: Callable[[Callback], object] | None = ...,
    ) -> Coroutine[object, None, T]: ...
    @overload
    def callback(
        self,
        id: str,
        /,
        *,
        timeout: Duration | None = ...,
        returns: None = ...,
        start: Callable[[Callback], object] | None = ...,
    ) -> Coroutine[object, None, Any]: ...
    def callback(
        self,
        id: str,
        /,
        *,
        timeout: Duration | None = None,
        returns: type[Any] | None = None,
        start: Callable[[Callback], object] | None = None,
    ) -> Coroutine[object, None, Any]:
        """Wait for the answer of another system, and return it; raise `StepTimeout` after the
        timeout.

        Once the wait is durable, `start` is called with the `Callback`, which has the token or URL
        for the other system, as a step whose idempotency key is the token.
        """
        host = host_of(self._run, "step.callback")
        facts = {"id": "", "kind": "event", "ask": "callback"}
        request = Ask(facts=facts, timeout=timeout, tell=start, returns=returns)  # type: ignore[arg-type]
        call = self._run.call(id, self.callback if start is None else start)
        call.kind, call.gate = "callback", None
        call.returns = object if returns is None else returns
        return ask(self._run, call, host, request)
