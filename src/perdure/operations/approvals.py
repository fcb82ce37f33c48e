"""The operator's answers to approvals and callbacks."""

from perdure.errors import InvalidToken
from perdure.operations.outcome import Outcome
from perdure.operations.runs import RunOperations, check_json
from perdure.runtime.acts import copy_acts
from perdure.runtime.answers import Answer, find_approval, find_token, send_answer
from perdure.snapshot.asks import read_token
from perdure.snapshot.labels import label_of
from perdure.validation import check_id


class ApprovalOperations(RunOperations):
    """Answers approvals on behalf of operators; `Operations` can do more.

    A wait is identified by its token, or by the id of the run and the name of the wait, which can
    be omitted if the run waits for only one answer. The act is part of the write that records the
    answer. `AlreadyAnswered` or `TooLate` is raised if another answer counts, or none.
    """

    async def approve(
        self,
        run_id: str,
        wait: str | None = None,
        *,
        choice: str | None = None,
        value: object = None,
        by: str,
        why: str = "",
    ) -> Outcome:
        """Approve what a run asks for; `why` is the note, `value` is JSON."""
        answer = Answer(True, choice, value, by, why, self.via)
        return await self._answer("approve", run_id, wait, answer)

    async def reject(
        self, run_id: str, wait: str | None = None, *, by: str, why: str = ""
    ) -> Outcome:
        """Reject what a run asks for; `why` is the note."""
        return await self._answer(
            "reject", run_id, wait, Answer(False, None, None, by, why, self.via)
        )

    async def answer(
        self,
        run_id: str,
        wait: str | None = None,
        payload: object = None,
        *,
        by: str,
        why: str = "",
    ) -> Outcome:
        """Answer a callback, or approve with a value; the payload is JSON."""
        return await self._answer(
            "answer", run_id, wait, Answer(True, None, payload, by, why, self.via)
        )

    async def _answer(self, verb: str, run_id: str, wait: str | None, answer: Answer) -> Outcome:
        check_json(answer.value)
        token = await self._token(run_id, wait)
        approval = await find_approval(self.store, token)
        act = self.act(verb, answer.by, answer.note, approval.id)
        await send_answer(self.store, token, answer.with_act(act))
        await copy_acts(self.store, approval.run_id, [act])
        sentence = f"Answered {label_of(approval.id)!r}. A worker will continue the run."
        return Outcome(approval.run_id, verb, "done", None, sentence)

    async def _token(self, run_id: str, wait: str | None) -> str:
        try:
            read_token(run_id)
        except InvalidToken:
            return await find_token(self.store, check_id(run_id, "run_id"), wait)
        return run_id
