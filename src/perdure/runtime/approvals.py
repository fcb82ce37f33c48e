"""The part of a client that lists open approvals and answers them.

page = await client.approvals(to="ops")
await client.approve(page.approvals[0].token, by="ana", note="the harbour is free")
"""

from typing import Any

from msgspec.structs import replace

from perdure.runtime.answers import (
    Answer,
    ApprovalPage,
    OpenApproval,
    check_answer,
    find_approval,
    list_approvals,
    send_answer,
)
from perdure.runtime.schedules import ScheduleClient
from perdure.runtime.starter import encode_payload


class ApprovalClient(ScheduleClient):
    """A base class of `Client`."""

    async def approvals(
        self, *, to: str | None = None, limit: int = 100, after: str | None = None
    ) -> ApprovalPage:
        """Return open approvals, all of them or those addressed to `to`.

        A page has the approvals of up to `limit` runs, newest runs first; `after` is the cursor of
        the previous page. A run is listed once it is suspended: while other work keeps the run
        busy, an approval is not listed yet, but its token is valid.
        """
        return await list_approvals(self.store, self.clock, to, limit, after)

    async def find_approval(self, token: str) -> OpenApproval:
        """Return the approval that a token belongs to; raise the same errors as an answer."""
        return await find_approval(self.store, token)

    async def approve(
        self,
        token: str,
        *,
        by: str = "",
        note: str = "",
        choice: str | None = None,
        value: object = None,
    ) -> OpenApproval:
        """Approve a request of a run, and return the request.

        The first answer counts: afterwards `AlreadyAnswered` is raised, or `TooLate` if the wait
        ended without an answer. If the question has options, `choice` is one of them.
        """
        return await self._answer(token, Answer(True, choice, value, by, note))

    async def reject(self, token: str, *, by: str = "", note: str = "") -> OpenApproval:
        """Reject a request of a run, and return the request."""
        return await self._answer(token, Answer(False, by=by, note=note))

    async def answer(self, token: str, payload: Any = None, *, by: str = "") -> OpenApproval:
        """Answer a callback, or approve with a value; return the request."""
        return await self._answer(token, Answer(True, None, payload, by))

    async def _answer(self, token: str, answer: Answer) -> OpenApproval:
        check_answer(answer.by, answer.note)
        return await send_answer(
            self.store, token, replace(answer, value=encode_payload(answer.value))
        )
