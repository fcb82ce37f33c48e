"""Runs that cannot be read: named in an error, and left out of what is claimed."""

import logging
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol, TypeAlias, cast

from perdure.errors import (
    CodecError,
    SnapshotFormatError,
    StateFormatError,
    StoreCorrupted,
    StoreError,
)
from perdure.snapshot import Snapshot, merge_snapshots
from perdure.store import Grant, Lease, Message

logger = logging.getLogger(__name__)

# How long a run that cannot be read is not claimed: often enough for one that was repaired, and
# for a deployment whose newer processes can read it; seldom enough to cost nothing.
SETBACK = timedelta(hours=1)


_UNREADABLE: tuple[type[Exception], ...] = (CodecError, SnapshotFormatError, StateFormatError)


class Unreadable(NamedTuple):
    """A lease that was given, and why its run cannot be read. `now` is the time of the lease."""

    lease: Lease
    now: datetime
    error: StoreCorrupted


Granted: TypeAlias = Grant | Unreadable


class Release(Protocol):
    """Gives leases up, as `LeaseStore.release` does."""

    async def __call__(
        self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None
    ) -> None: ...


@contextmanager
def reading(id: str, *errors: type[Exception]) -> Generator[None]:
    """Raise `StoreCorrupted`, naming the run, when what is stored cannot be read.

    `errors` are those of the driver that mean so.
    """
    try:
        yield
    except _UNREADABLE + errors as error:
        raise StoreCorrupted(f"run {id!r} cannot be read: {error}") from error


def merged(snapshot: object, *deltas: object) -> Snapshot:
    """Return a stored snapshot with its journal applied, or raise `SnapshotFormatError`."""
    whole = merge_snapshots(
        cast("Snapshot", snapshot), *cast("Sequence[Mapping[str, object]]", deltas)
    )
    if "execution" not in whole:
        raise SnapshotFormatError(["execution is missing"])
    return whole


def read_grant(
    lease: Lease,
    read: Callable[[], Snapshot],
    now: datetime,
    inbox: tuple[Message, ...] = (),
    takeovers: int = 0,
    created: bool = False,
) -> Granted:
    """Return the grant of a leased run, or that the run cannot be read."""
    try:
        return Grant(lease, read(), now, inbox, takeovers, created)
    except StoreCorrupted as error:
        return Unreadable(lease, now, error)


async def claim_readable(
    claim: Callable[[int], Awaitable[Sequence[Granted]]], limit: int, release: Release
) -> list[Grant]:
    """Return up to `limit` claimed runs that can be read; log the others and put them off."""
    grants: list[Grant] = []
    while len(grants) < limit:
        claimed = await claim(limit - len(grants))
        grants += (each for each in claimed if isinstance(each, Grant))
        unreadable = [each for each in claimed if isinstance(each, Unreadable)]
        for each in unreadable:
            logger.error("%s; it is put off for an hour", each.error, exc_info=each.error)
        if not unreadable or not await _put_off(unreadable, release):
            break
    return grants


async def acquire_readable(
    answers: Sequence[Granted | None], release: Release
) -> list[Grant | None]:
    """Return the grants; raise the error of a run that cannot be read, which is put off."""
    unreadable = [each for each in answers if isinstance(each, Unreadable)]
    if unreadable:
        await _put_off(unreadable, release)
        raise unreadable[0].error
    return [each for each in answers if not isinstance(each, Unreadable)]


async def _put_off(unreadable: Sequence[Unreadable], release: Release) -> bool:
    """Release the runs, to be claimed again after a while; return whether that succeeded."""
    later = max(each.now for each in unreadable) + SETBACK
    try:
        await release([each.lease for each in unreadable], wake_at=later)
    except StoreError as error:
        # Those that were claimed with them must not be lost over it: the leases end by themselves.
        logger.warning("runs that cannot be read stay leased until their leases end: %s", error)
        return False
    return True
