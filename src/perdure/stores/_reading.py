"""Runs that cannot be read: named in an error, and left out of claims."""

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

# How long an unreadable run is not claimed: short enough for one that is repaired, or that newer
# processes of a deployment can read; long enough to cost nothing.
SETBACK = timedelta(hours=1)

_UNREADABLE: tuple[type[Exception], ...] = (CodecError, SnapshotFormatError, StateFormatError)


class Unreadable(NamedTuple):
    """A granted lease whose run cannot be read, and why. `now` is the time of the grant."""

    lease: Lease
    now: datetime
    error: StoreCorrupted


Granted: TypeAlias = Grant | Unreadable


class Release(Protocol):
    """Releases leases, like `LeaseStore.release`."""

    async def __call__(
        self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None
    ) -> None: ...


@contextmanager
def reading(id: str, *errors: type[Exception]) -> Generator[None]:
    """Raise `StoreCorrupted`, naming the run, if its data cannot be read.

    `errors` are the driver's exceptions for such data.
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
    """Return the grant of a leased run, or `Unreadable` if it cannot be read."""
    try:
        return Grant(lease, read(), now, inbox, takeovers, created)
    except StoreCorrupted as error:
        return Unreadable(lease, now, error)


async def claim_readable(
    claim: Callable[[int], Awaitable[Sequence[Granted]]], limit: int, release: Release
) -> list[Grant]:
    """Return up to `limit` claimed runs that can be read; log and postpone the others."""
    grants: list[Grant] = []
    while len(grants) < limit:
        claimed = await claim(limit - len(grants))
        grants += (each for each in claimed if isinstance(each, Grant))
        unreadable = [each for each in claimed if isinstance(each, Unreadable)]
        for each in unreadable:
            logger.error("%s; it will not be claimed for an hour", each.error, exc_info=each.error)
        if not unreadable or not await _postpone(unreadable, release):
            break
    return grants


async def acquire_readable(
    answers: Sequence[Granted | None], release: Release
) -> list[Grant | None]:
    """Return the grants; if a run cannot be read, postpone it and raise its error."""
    unreadable = [each for each in answers if isinstance(each, Unreadable)]
    if unreadable:
        await _postpone(unreadable, release)
        raise unreadable[0].error
    return [each for each in answers if not isinstance(each, Unreadable)]


async def _postpone(unreadable: Sequence[Unreadable], release: Release) -> bool:
    """Release the runs until `SETBACK` has passed; return whether that succeeded."""
    later = max(each.now for each in unreadable) + SETBACK
    try:
        await release([each.lease for each in unreadable], wake_at=later)
    except StoreError as error:
        # The readable runs of the same claim must not be lost; these leases expire without help.
        logger.warning("unreadable runs stay leased until their leases expire: %s", error)
        return False
    return True
