"""One run in the model that a store is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from perdure.snapshot import RunStatus, Snapshot
from perdure.store import Lease, Rest, SupportedVersions


@dataclass
class ModelRun:
    """A run in the model. A `status` of `None` means that the contract does not define it."""

    snapshot: Snapshot
    workflow: str | None
    wake_at: datetime | None = None
    status: RunStatus | None = None
    queue: str = ""
    version: int = 0
    tags: tuple[str, ...] = ()
    lease: Lease | None = None
    newest: int = 0
    takeovers: int = 0
    progressed: bool = False
    awaits: tuple[str, ...] = ()
    inbox: list[str] = field(default_factory=list)
    dedup_ids: set[str] = field(default_factory=set)
    rested_at: datetime | None = None

    def rest(self, run_snapshot: Snapshot, rest: Rest, now: datetime) -> None:
        """Apply a rest."""
        self.snapshot, self.status, self.awaits = run_snapshot, rest.status, rest.awaits
        self.lease, self.rested_at = None, now
        self.takeovers, self.progressed = 0, False
        self.wake_at = now if set(self.inbox) & set(rest.awaits) else rest.wake_at
        self.version = self.version if rest.version is None else rest.version
        self.tags = self.tags if rest.tags is None else rest.tags

    def is_owned(self, now: datetime) -> bool:
        """Return whether the run has an owner with an unexpired lease."""
        return self.lease is not None and self.lease.expires_at > now

    def next_takeovers(self, now: datetime) -> int:
        """Return the `takeovers` of a grant at this time."""
        expired = self.lease is not None and not self.is_owned(now)
        return 0 if self.progressed else self.takeovers + expired

    def due(self, now: datetime) -> bool:
        """Return whether the run may be claimed."""
        if self.lease is not None:
            return not self.is_owned(now)
        return self.wake_at is not None and self.wake_at <= now

    def is_supported(self, supports: Sequence[SupportedVersions] | None) -> bool:
        """Return whether a worker with these `supports` may claim the run."""
        return supports is None or any(
            each.workflow == self.workflow
            and (self.version == 0 or each.first <= self.version <= each.last)
            for each in supports
        )
