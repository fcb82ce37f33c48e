"""Lease runs to a worker with the messages that make them due."""

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeVar

from perdure.store import Grant, Handoff, NewMessage, Receipt, SupportedVersions
from perdure.stores._backend import Backend
from perdure.stores._checks import check_messages
from perdure.stores._reading import Granted, Unreadable
from perdure.stores._shell import StoreShell
from perdure.validation import check_id, check_limit


class Claimant(NamedTuple):
    """A worker with `limit` free slots, which gets the leases of runs that it supports."""

    owner: str
    ttl: timedelta
    limit: int
    supports: Sequence[SupportedVersions]

    def can_execute(self, workflow: str | None, version: int) -> bool:
        """Return whether the worker supports this version; 0 is a run without a version."""
        return any(
            each.workflow == workflow and (not version or each.first <= version <= each.last)
            for each in self.supports
        )


class HandoffBackend(Backend, Protocol):
    """A backend that can lease a run with the message that makes it due.

    The claimant's limit is at least 1, and it supports at least one workflow.
    """

    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]: ...


HB = TypeVar("HB", bound=HandoffBackend)


class HandoffShell(StoreShell[HB]):
    """A store that can lease a run with the message that makes it due."""

    async def send_and_claim(
        self,
        messages: Sequence[NewMessage],
        owner: str,
        ttl: timedelta,
        limit: int,
        /,
        *,
        supports: Sequence[SupportedVersions],
    ) -> Handoff:
        """Send messages, and lease up to `limit` runs that they make due, all in one write."""
        claimant = Claimant(check_id(owner, "owner"), ttl, check_limit(limit), supports)
        await self._life.ready()
        check_messages(messages, self._max_value_size)
        if not messages:
            return Handoff(())
        if not limit or not supports:
            return Handoff(tuple(await self._backend.send(messages)))
        receipts, granted = await self._backend.send_and_claim(messages, claimant)
        grants = tuple(each for each in granted if isinstance(each, Grant))
        if len(grants) < len(granted):
            await self._postpone([each for each in granted if isinstance(each, Unreadable)])
        return Handoff(tuple(receipts), grants)
