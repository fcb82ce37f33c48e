"""Open approvals and answers, as plain calls."""

from collections.abc import Coroutine
from typing import Any, TypeVar

from perdure.runtime import client as asynchronous
from perdure.runtime.answers import ApprovalPage, OpenApproval

T = TypeVar("T")


class ApprovalCalls:
    """A base class of `perdure.sync.Client`."""

    @property
    def _client(self) -> asynchronous.Client:
        raise NotImplementedError

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    def approvals(
        self, *, to: str | None = None, limit: int = 100, after: str | None = None
    ) -> ApprovalPage:
        """Return open approvals of up to `limit` runs, all of them or those addressed to `to`."""
        return self._call(self._client.approvals(to=to, limit=limit, after=after))

    def find_approval(self, token: str) -> OpenApproval:
        """Return the approval that a token belongs to; raise the same errors as an answer."""
        return self._call(self._client.find_approval(token))

    def approve(
        self,
        token: str,
        *,
        by: str = "",
        note: str = "",
        choice: str | None = None,
        value: object = None,
    ) -> OpenApproval:
        """Approve a request of a run, and return the request.

        The first answer counts: afterwards, `AlreadyAnswered` or `TooLate` is raised.
        """
        return self._call(self._client.approve(token, by=by, note=note, choice=choice, value=value))

    def reject(self, token: str, *, by: str = "", note: str = "") -> OpenApproval:
        """Reject a request of a run, and return the request."""
        return self._call(self._client.reject(token, by=by, note=note))

    def answer(self, token: str, payload: Any = None, *, by: str = "") -> OpenApproval:
        """Answer a callback, or approve with a value; return the request."""
        return self._call(self._client.answer(token, payload, by=by))
