"""Handle runs that cannot be read: name them in errors, and leave them out of claims."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol, TypeAlias, cast

from perdure.errors import (
    CodecError,
    SnapshotFormatError,
    StateFormatError,
    StoreCorrupted,
    StoreError,
)
from perdure.snapshot import Snapshot, is_merged, merge_snapshots
from perdure.store import Grant, Lease, Message

logger = logging.getLogger(__name__)

# How long an unreadable run is not claimed. The first delay is short, because the run may be
# repaired, or a newer process of a rolling deployment may be able to read it; the longest delay is
# so long that retries cost nothing.
FIRST_SETBACK, LONGEST_SETBACK = timedelta(seconds=10), timedelta(hours=1)
_MOST_SETBACKS = 10_000

_UNREADABLE: tuple[type[Exception], ...] = (CodecError, SnapshotFormatError, StateFormatError)


class Unreadable(NamedTuple):
    """A granted lease whose run cannot be read, and the error. `now` is the time of the grant."""

    lease: Lease
    now: datetime
    error: StoreCorrupted


Granted: TypeAlias = Grant | Unreadable


class Release(Protocol):
    """Releases leases, like `LeaseStore.release`."""

    async def __call__(
        self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None
    ) -> None: ...


class reading:  # noqa: N801  # a context manager, like contextlib.suppress
    """Raises `StoreCorrupted`, naming the run, if its data cannot be read.

    `errors` are the driver's exceptions for unreadable data.
    """

    __slots__ = ("_errors", "_id")

    def __init__(self, id: str, *errors: type[Exception]) -> None:
        self._id = id
        self._errors = errors

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and isinstance(error, _UNREADABLE + self._errors):
            raise StoreCorrupted(f"run {self._id!r} cannot be read: {error}") from error


def merge_journal(snapshot: object, *deltas: object) -> Snapshot:
    """Return a stored snapshot with its journal applied, or raise `SnapshotFormatError`.

    The snapshot belongs to the caller, and may be returned as it is.
    """
    if not deltas and is_merged(snapshot):
        return cast("Snapshot", snapshot)
    merged_snapshot = merge_snapshots(
        cast("Snapshot", snapshot), *cast("Sequence[Mapping[str, object]]", deltas)
    )
    if "execution" not in merged_snapshot:
        raise SnapshotFormatError(["execution is missing"])
    return merged_snapshot


def read_grant(
    lease: Lease,
    read: Callable[[], Snapshot],
    now: datetime,
    inbox: tuple[Message, ...] = (),
    takeovers: int = 0,
    created: bool = False,
    *,
    queue: str = "",
    version: int = 0,
) -> Granted:
    """Return the grant of a leased run, or `Unreadable` if it cannot be read."""
    try:
        return Grant(lease, read(), now, inbox, takeovers, created, queue, version)
    except StoreCorrupted as error:
        return Unreadable(lease, now, error)


class Setbacks:
    """Runs that this process could not read, and the last delay of each."""

    def __init__(self) -> None:
        self._delays: dict[str, timedelta] = {}

    async def postpone(self, unreadable: Sequence[Unreadable], release: Release) -> bool:
        """Release unreadable runs for later, logging new ones; return whether that succeeded."""
        for lease, now, error in unreadable:
            delay = self._next_delay(lease.id, error)
            try:
                await release([lease], wake_at=now + delay)
            except StoreError as failure:
                # The readable runs of the same claim must not be lost. The leases of the others
                # will expire.
                logger.warning("unreadable runs stay leased until their leases expire: %s", failure)
                return False
        return True

    def _next_delay(self, id: str, error: StoreCorrupted) -> timedelta:
        last = self._delays.pop(id, None)
        if last is None:
            logger.error("%s; it is left out of claims for a while", error, exc_info=error)
        delay = FIRST_SETBACK if last is None else min(2 * last, LONGEST_SETBACK)
        self._delays[id] = delay
        if len(self._delays) > _MOST_SETBACKS:
            del self._delays[next(iter(self._delays))]
        return delay


async def claim_readable(
    claim: Callable[[int, Mapping[str, int]], Awaitable[Sequence[Granted]]],
    limit: int,
    queues: Mapping[str, int],
    postpone: Callable[[Sequence[Unreadable]], Awaitable[bool]],
) -> list[Grant]:
    """Claim up to `limit` readable runs, within the limits of their queues."""
    grants: list[Grant] = []
    quotas = dict(queues)
    while len(grants) < limit and quotas:
        answers = await claim(limit - len(grants), quotas)
        readable = [each for each in answers if isinstance(each, Grant)]
        grants += readable
        unreadable = [each for each in answers if isinstance(each, Unreadable)]
        if not unreadable or not await postpone(unreadable):
            break
        for grant in readable:
            quotas[grant.queue] -= 1
        quotas = {queue: most for queue, most in quotas.items() if most > 0}
    return grants
