"""Who gets a run, and when: leases, claims and messages of the file store, blocking."""

import logging
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import islice

import msgspec

from perdure.errors import StoreCorrupted
from perdure.snapshot import is_over
from perdure.store import Delivery, Due, Grant, Lease, LeaseRequest, Message, NewRun
from perdure.stores._reading import SETBACK, Granted, Unreadable
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.file.disk import locked_now, opened, read_lines
from perdure.stores.file.layout import (
    Header,
    Mail,
    Mark,
    RunFiles,
    Standing,
    head_content,
    mail_line,
    mark_content,
    message_of,
    read_inbox,
)
from perdure.stores.file.runs import Shelf
from perdure.stores.file.wakes import Scan, Wake

logger = logging.getLogger(__name__)

_MICROSECOND = timedelta(microseconds=1)


class FileDesk(Shelf):
    """The runs of a directory, and those who ask for them."""

    def acquire(self, requests: Sequence[LeaseRequest], now: int) -> list[Granted | None]:
        """Give each want its lease and the run read under it, or None."""
        with self.gate():
            # An orphan is found by its wake line, which is therefore there before the lease.
            likely = [
                self._is_free(self.files(request.id).standing(), request, now)
                for request in requests
            ]
            self.wakes.add(
                Wake(
                    now + request.ttl // _MICROSECOND,
                    self.prefix + request.id,
                    self._workflow(request),
                )
                for request, free in zip(requests, likely, strict=True)
                if free
            )
            free = [request for request, is_free in zip(requests, likely, strict=True) if is_free]
            grants = iter(self.by_run(lambda mine: [self._acquire(w, now) for w in mine], free))
        return [next(grants) if is_free else None for is_free in likely]

    def _acquire(self, request: LeaseRequest, now: int) -> Granted | None:
        files = self.files(request.id)
        with self.guard(files):
            standing = files.standing()
            if not self._is_free(standing, request, now):
                return None
            if standing is not None:
                return self._grant(files, standing, request.owner, request.ttl, now)
            wake_at = now + request.ttl // _MICROSECOND
            made = self._create(files, request.create or b"", request.workflow, wake_at, now)
            return self._grant(files, made, request.owner, request.ttl, now, created=True)

    def renew(self, leases: Sequence[Lease], ttl: timedelta, now: int) -> list[Lease | None]:
        """Move the ends of leases, and give None for each that was lost."""
        with self.gate():
            until = now + ttl // _MICROSECOND
            return self.by_run(lambda mine: [self._renew(lease, until) for lease in mine], leases)

    def _renew(self, lease: Lease, until: int) -> Lease | None:
        files = self.files(lease.id)
        with self.guard(files):
            standing = files.standing()
            if standing is None or standing.mark is None:
                return None
            if not standing.holds(lease.owner, lease.epoch):
                return None
            if until < standing.mark.until:
                self.wakes.add([Wake(until, files.id, standing.header.workflow)])
            mark = Mark(lease.owner, lease.epoch, until, standing.mark.takeovers)
            self.disk.overwrite(files.lease, mark_content(mark))
            mail = bool(files.mail(standing.header))
            return Lease(lease.id, lease.owner, lease.epoch, from_microseconds(until), mail)

    def release(self, leases: Sequence[Lease], wake_at: int, now: int) -> None:
        """Give leases up without a rest."""
        with self.gate():
            self.announce((self.files(lease.id), wake_at) for lease in leases)
            self.by_run(lambda mine: self._release_all(mine, wake_at), leases)

    def _release_all(self, leases: Sequence[Lease], wake_at: int) -> list[None]:
        for lease in leases:
            self._release(lease, wake_at)
        return [None] * len(leases)

    def _release(self, lease: Lease, wake_at: int) -> None:
        files = self.files(lease.id)
        with self.guard(files):
            standing = files.standing()
            if standing is None or standing.mark is None:
                return
            if standing.holds(lease.owner, lease.epoch):
                mark = Mark(None, lease.epoch, wake_at, standing.mark.takeovers)
                self.disk.overwrite(files.lease, mark_content(mark))

    def enqueue(self, runs: Sequence[NewRun], now: int) -> list[bool]:
        """Create runs that wait for a claim; those without a time are due at once."""
        with self.gate():
            likely = [not self.files(run.id).head.exists() for run in runs]
            new = [run for run, is_new in zip(runs, likely, strict=True) if is_new]
            self.wakes.add(
                Wake(_wake_at(run, now), self.prefix + run.id, run.workflow) for run in new
            )
            made = iter(self.by_run(lambda mine: [self._enqueue(run, now) for run in mine], new))
        return [is_new and next(made) for is_new in likely]

    def _enqueue(self, run: NewRun, now: int) -> bool:
        files = self.files(run.id)
        with self.guard(files):
            if files.head.exists():
                return False
            self._create(files, run.snapshot, run.workflow, _wake_at(run, now), now)
        return True

    def due(self, now: int, limit: int, workflows: Sequence[str] | None) -> list[Due]:
        """Find the runs that want a worker, earliest first."""
        found = islice(self._due(self.wakes.scan(now), now, workflows), limit)
        return [Due(self._id(wake.id), from_microseconds(wake.at)) for wake in sorted(found)]

    def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None, now: int
    ) -> list[Granted]:
        """Lease and load the runs that want a worker, earliest first."""
        scan = self.wakes.scan(now)
        grants: list[Granted] = []
        with self.gate():
            due = self._due(scan, now, workflows)
            while chosen := list(islice(due, limit - len(grants))):
                end = now + ttl // _MICROSECOND
                self.wakes.add(wake._replace(at=end) for wake in chosen)
                found = self.by_run(
                    lambda mine: [self._claim(wake, owner, ttl, now) for wake in mine], chosen
                )
                grants.extend(grant for grant in found if grant is not None)
                for wake in chosen:
                    scan.untrue(wake)
        self._tidy(scan, now)
        return grants

    def _claim(self, wake: Wake, owner: str, ttl: timedelta, now: int) -> Granted | None:
        files = self.files(self._id(wake.id))
        with self.guard(files):
            standing = files.standing()
            if standing is None or standing.wake_at is None or standing.wake_at > now:
                return None
            return self._grant(files, standing, owner, ttl, now)

    def send(self, id: str, name: str, payload: bytes, dedup_id: str | None, now: int) -> Delivery:
        """Put an event in a run's inbox, and wake a run at rest that awaits it."""
        files = self.files(id)
        with self.gate(), self.guard(files):
            standing = files.standing()
            if standing is None:
                return Delivery.UNKNOWN
            known = (mail.dedup_id for mail in read_inbox(files.inbox))
            if dedup_id is not None and dedup_id in known:
                return Delivery.DUPLICATE
            if is_over(standing.status):
                return Delivery.OVER
            if standing.mark is None and name in standing.header.awaits:
                self.wakes.add([Wake(now, files.id, standing.header.workflow)])
            number = str(self.next_epoch(now))
            self._post(files, Mail(number, name, payload.decode(), now, dedup_id))
        return Delivery.DELIVERED

    def inbox(self, id: str) -> list[Message]:
        """Read a run's messages that were not taken."""
        files = self.files(id)
        with self.guard(files, shared=True):
            standing = files.standing()
            mail = [] if standing is None else files.mail(standing.header)
        return [message_of(each) for each in mail]

    def _post(self, files: RunFiles, mail: Mail) -> None:
        created = not files.inbox.exists()
        with opened(files.inbox, os.O_RDWR | os.O_CREAT | os.O_APPEND) as descriptor:
            lines = read_lines(files.inbox)
            if lines.torn:
                logger.warning("%s ends in a line that a crash tore; it is cut off", files.inbox)
                self.disk.truncate(descriptor, lines.size)
            self.disk.append(descriptor, mail_line(mail))
            self.disk.sync(descriptor)
        if created:
            self.disk.sync_directory(files.inbox.parent)

    def _create(
        self, files: RunFiles, data: bytes, workflow: str | None, wake_at: int, now: int
    ) -> Standing:
        self.clear(files)
        header = Header(
            id=files.id,
            workflow=workflow,
            status="running",
            wake_at=wake_at,
            awaits=(),
            epoch=self.next_epoch(now),
            n=0,
            updated_at=now,
        )
        self.disk.replace(files.head, head_content(header, data))
        return Standing(header, None, ())

    def _grant(
        self,
        files: RunFiles,
        standing: Standing,
        owner: str,
        ttl: timedelta,
        now: int,
        *,
        created: bool = False,
    ) -> Granted:
        until = now + ttl // _MICROSECOND
        takeovers = _takeovers(files, standing, now)
        mark = Mark(owner, self.next_epoch(now), until, takeovers)
        self.disk.overwrite(files.lease, mark_content(mark))
        lease = Lease(self._id(files.id), owner, mark.epoch, from_microseconds(until))
        try:
            whole = files.whole()
            assert whole is not None, "the run's lock is held, and it was there"
            mail = tuple(map(message_of, files.mail(whole[0])))
        except StoreCorrupted as error:
            return Unreadable(lease, from_microseconds(now), error)
        lease = msgspec.structs.replace(lease, has_messages=bool(mail))
        return Grant(lease, whole[1], from_microseconds(now), mail, takeovers, created)

    def _is_free(self, standing: Standing | None, request: LeaseRequest, now: int) -> bool:
        if standing is None:
            return request.create is not None
        mine = standing.mark is not None and standing.mark.owner == request.owner
        return request.existing and (mine or not standing.is_held(now))

    def _workflow(self, request: LeaseRequest) -> str | None:
        standing = self.files(request.id).standing()
        return request.workflow if standing is None else standing.header.workflow

    def _due(self, scan: Scan, now: int, workflows: Sequence[str] | None) -> Iterator[Wake]:
        found: set[str] = set()
        for wake in scan:
            chosen = workflows is None or wake.workflow in workflows
            if not chosen or wake.id in found or not wake.id.startswith(self.prefix):
                continue
            true = self._plan(wake, now)
            if true is None or true.at > now:
                scan.untrue(wake)
            elif workflows is None or true.workflow in workflows:
                found.add(wake.id)
                yield true

    def _plan(self, wake: Wake, now: int) -> Wake | None:
        """Give when a run really wants a worker, and of which workflow it is by now."""
        try:
            standing = RunFiles(self.runs, wake.id).standing()
        except StoreCorrupted:
            logger.exception("run %r cannot be read and is put off for an hour", wake.id)
            return wake._replace(at=now + SETBACK // _MICROSECOND)
        if standing is None or standing.wake_at is None:
            return None
        return Wake(standing.wake_at, wake.id, standing.header.workflow)

    def _tidy(self, scan: Scan, now: int) -> None:
        if not scan.to_deal() and not scan.to_sweep():
            return
        with locked_now(self.gate_path) as alone:
            if alone:
                for path in scan.to_sweep():
                    self.wakes.sweep(path, lambda wake: self._plan(wake, now))
                for path in scan.to_deal():
                    if path.exists():
                        self.wakes.deal(path)

    def _id(self, stored_id: str) -> str:
        return stored_id[len(self.prefix) :]


def _wake_at(run: NewRun, now: int) -> int:
    return now if run.wake_at is None else to_microseconds(run.wake_at, "wake_at")


def _takeovers(files: RunFiles, standing: Standing, now: int) -> int:
    mark = standing.mark
    if mark is None or any(entry.epoch == mark.epoch for entry in files.entries(standing.header)):
        return 0
    return mark.takeovers + (mark.owner is not None and mark.until <= now)
