"""The simple model of a store, and the machine that plays the same verbs on both."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from perdure.snapshot import RunStatus, Snapshot, is_over, merge_snapshots
from perdure.store import (
    Delivery,
    Entry,
    Grant,
    Lease,
    LeaseRequest,
    NewRun,
    Rest,
    Verdict,
    rest_of,
)
from perdure.testing.conformance.harness import Everything, Harness, store_time
from perdure.testing.conformance.random_cases import Bridge
from perdure.testing.conformance.samples import as_json, snapshot, with_step

HOUR = timedelta(hours=1)
NAMES = ("a", "A")
IDS = st.sampled_from([*NAMES, NAMES[0]])
KEYS = st.sampled_from(["s", "S", "10", "9", "t"])
OWNERS = st.sampled_from(["ana", "bob"])
WORKFLOWS = st.sampled_from(["order", "Order"])
EVENTS = st.sampled_from(["paid", "Paid"])
DEDUP_IDS = st.sampled_from([None, "x"])
RESTS = st.sampled_from(
    ["waiting", "waiting", "waiting", "suspended", "paused", "completed", "cancelled"]
)
TTLS = st.sampled_from([HOUR, 3 * HOUR])
WAKES = st.sampled_from([None, -HOUR, 2 * HOUR])
PICKS = st.integers(-6, -1)
MOSTLY = st.sampled_from([True, True, True, False])


@dataclass
class Ran:
    """A run as the model knows it. A `status` of None is one that the contract does not fix."""

    snapshot: Snapshot
    workflow: str | None
    wake_at: datetime | None = None
    status: RunStatus | None = None
    lease: Lease | None = None
    newest: int = 0
    takeovers: int = 0
    progressed: bool = False
    awaits: tuple[str, ...] = ()
    mail: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    rested_at: datetime | None = None

    def rest(self, whole: Snapshot, rest: Rest, now: datetime) -> None:
        """Lie as a rest says."""
        self.snapshot, self.status, self.awaits = whole, rest.status, rest.awaits
        self.lease, self.rested_at = None, now
        self.takeovers, self.progressed = 0, False
        self.wake_at = now if set(self.mail) & set(rest.awaits) else rest.wake_at

    def alive(self, now: datetime) -> bool:
        """Tell whether somebody owns the run."""
        return self.lease is not None and self.lease.expires_at > now

    def taken_over(self, now: datetime) -> int:
        """Return the takeovers of the owner that is given the run now."""
        expired = self.lease is not None and not self.alive(now)
        return 0 if self.progressed else self.takeovers + expired

    def due(self, now: datetime) -> bool:
        """Tell whether the run may be claimed."""
        if self.lease is not None:
            return not self.alive(now)
        return self.wake_at is not None and self.wake_at <= now


class StoreMachine(RuleBasedStateMachine):
    """Plays verbs on a store and on the model, and compares what they answer."""

    def __init__(self, store: Everything, do: Bridge, harness: Harness) -> None:
        super().__init__()
        self.store = store
        self.do = do
        self.clock = harness.clock
        self.runs: dict[str, Ran] = {}
        self.leases: list[Lease] = []
        self.sent: list[Entry] = []
        self.numbers = count(1)
        # Where the clock cannot be moved, a game takes less time than any time in it.
        self.begun_at = do(store_time(store))

    @property
    def now(self) -> datetime:
        """The store's time, as far as the model minds it."""
        return self.begun_at if self.clock is None else self.clock.now()

    def teardown(self) -> None:
        """Compare all that is left, and leave the store empty for the next game."""
        try:
            for id in NAMES:
                self.compare(id)
        finally:
            for id in NAMES:
                self.do(self.store.delete(id))

    def compare(self, id: str) -> None:
        """Check that a run is in the store as in the model, and that the same runs are due."""
        assert self.due_in_store(None) == self.due_in_model(None)
        ran = self.runs.get(id)
        loaded = self.do(self.store.load(id))
        lines = [line for line in self.do(self.store.list(prefix=id)) if line.id == id]
        mail = [message.name for message in self.do(self.store.inbox(id))]
        if ran is None or loaded is None:
            assert (loaded, lines, mail) == (ran, [], [])
            return
        assert loaded == ran.snapshot
        assert list(loaded["steps"]) == list(ran.snapshot["steps"])
        assert [line.workflow for line in lines] == [ran.workflow]
        assert ran.status in (None, lines[0].status)
        assert mail == ran.mail

    def granted(self, grant: Grant, ran: Ran) -> None:
        """Check what a grant holds, and take note of it."""
        lease = grant.lease
        assert grant.snapshot == ran.snapshot
        assert list(grant.snapshot["steps"]) == list(ran.snapshot["steps"])
        assert [message.name for message in grant.inbox] == ran.mail
        assert lease.has_messages == bool(ran.mail)
        assert all(lease.epoch > other.epoch for other in self.leases if other.id == lease.id)
        assert grant.takeovers == ran.taken_over(self.now)
        ran.takeovers, ran.progressed = grant.takeovers, False
        ran.newest, ran.lease = lease.epoch, lease
        ran.status, ran.awaits = "running", ()
        self.leases.append(lease)

    def picked(self, pick: int) -> Lease:
        """Give a lease: often one that is owned, else one of the last, good or stale."""
        owned = [ran.lease for ran in self.runs.values() if ran.lease is not None]
        if pick < -2 and owned:
            return owned[pick % len(owned)]
        return self.leases[max(pick, -len(self.leases))]

    def verdict(self, lease: Lease) -> Verdict:
        """Return the verdict on a new entry under this lease."""
        ran = self.runs.get(lease.id)
        if ran is None:
            return Verdict.UNKNOWN
        is_open = ran.lease is not None and ran.lease.epoch == lease.epoch
        return Verdict.ACCEPTED if is_open else Verdict.FENCED

    @initialize(owner=OWNERS)
    def begin(self, owner: str) -> None:
        """Begin with a run that is owned."""
        self.acquire(NAMES[0], owner, HOUR, create=True, existing=True)

    @rule(id=IDS, status=RESTS, wake=WAKES, event=EVENTS, workflow=WORKFLOWS)
    def save(
        self, id: str, status: RunStatus, wake: timedelta | None, event: str, workflow: str
    ) -> None:
        """Save a run that has no mail: the contract is silent on what becomes of it."""
        ran = self.runs.get(id)
        if ran is not None and (ran.known or ran.mail):
            return
        wake_at = None if wake is None else self.now + wake
        whole = snapshot("saved", status=status, wake_at=wake_at, event=event, workflow=workflow)
        self.do(self.store.save(id, whole))
        self.runs[id] = Ran(whole, workflow)
        self.runs[id].rest(whole, rest_of(whole), self.now)
        self.compare(id)

    @rule(id=IDS)
    def delete(self, id: str) -> None:
        """Delete a run."""
        self.do(self.store.delete(id))
        self.runs.pop(id, None)
        self.compare(id)

    @rule(id=IDS, owner=OWNERS, ttl=TTLS, create=MOSTLY, existing=MOSTLY)
    def acquire(self, id: str, owner: str, ttl: timedelta, create: bool, existing: bool) -> None:
        """Ask for a run."""
        ran = self.runs.get(id)
        first = snapshot("first")
        data = as_json(first) if create else None
        request = LeaseRequest(id, owner, ttl, create=data, workflow="order", existing=existing)
        (grant,) = self.do(self.store.acquire([request]))
        if ran is None:
            assert (grant is not None) == create
        else:
            another = ran.lease is not None and ran.lease.owner != owner
            assert (grant is not None) == (existing and not (another and ran.alive(self.now)))
        if grant is not None:
            assert grant.created == (ran is None)
            self.granted(grant, self.runs.setdefault(id, Ran(first, "order")))
        self.compare(id)

    @precondition(lambda self: self.leases)
    @rule(pick=PICKS, key=KEYS, take=MOSTLY)
    def append(self, pick: int, key: str, take: bool) -> None:
        """Append under any lease that was ever given."""
        lease = self.picked(pick)
        expected = self.verdict(lease)
        number = next(self.numbers)
        part = with_step(key, number)
        messages = self.do(self.store.inbox(lease.id))[: int(take)]
        consumes = tuple(message.id for message in messages)
        entry = Entry(lease.id, lease.epoch, number, as_json(part), consumes=consumes)
        assert list(self.do(self.store.append([entry]))) == [expected]
        if expected is Verdict.ACCEPTED:
            ran = self.runs[lease.id]
            ran.snapshot = merge_snapshots(ran.snapshot, part)
            ran.progressed = True
            del ran.mail[: len(consumes)]
            self.sent.append(entry)
        self.compare(lease.id)

    @precondition(lambda self: self.leases)
    @rule(pick=PICKS, status=RESTS, wake=WAKES, events=st.sets(EVENTS, min_size=1))
    def rest(self, pick: int, status: RunStatus, wake: timedelta | None, events: set[str]) -> None:
        """Put a run to rest under any lease that was ever given."""
        lease = self.picked(pick)
        expected = self.verdict(lease)
        sleeps = status in ("suspended", "waiting")
        wake_at = self.now + wake if sleeps and wake is not None else None
        awaits = tuple(sorted(events)) if status in ("waiting", "paused") else ()
        rest = Rest(status, wake_at, awaits)
        whole = snapshot("rested", "10", "9", status=status)
        entry = Entry(lease.id, lease.epoch, next(self.numbers), as_json(whole), rest=rest)
        assert list(self.do(self.store.append([entry]))) == [expected]
        if expected is Verdict.ACCEPTED:
            self.runs[lease.id].rest(whole, rest, self.now)
            self.sent.append(entry)
        self.compare(lease.id)

    @precondition(lambda self: self.sent)
    @rule(pick=PICKS)
    def send_entry_again(self, pick: int) -> None:
        """Send an entry again that was accepted before."""
        entry = self.sent[max(pick, -len(self.sent))]
        ran = self.runs.get(entry.id)
        if ran is None:
            expected = Verdict.UNKNOWN
        else:
            expected = Verdict.ACCEPTED if ran.newest == entry.epoch else Verdict.FENCED
        assert list(self.do(self.store.append([entry]))) == [expected]
        self.compare(entry.id)

    @precondition(lambda self: self.leases)
    @rule(pick=PICKS, ttl=TTLS)
    def renew(self, pick: int, ttl: timedelta) -> None:
        """Renew any lease that was ever given."""
        lease = self.picked(pick)
        (renewed,) = self.do(self.store.renew([lease], ttl))
        assert (renewed is not None) == (self.verdict(lease) is Verdict.ACCEPTED)
        if renewed is not None:
            ran = self.runs[lease.id]
            assert renewed.has_messages == bool(ran.mail)
            ran.lease = renewed

    @precondition(lambda self: self.leases)
    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        """Release any lease that was ever given."""
        lease = self.picked(pick)
        self.do(self.store.release([lease]))
        if self.verdict(lease) is Verdict.ACCEPTED:
            ran = self.runs[lease.id]
            ran.lease, ran.wake_at = None, self.now
        self.compare(lease.id)

    @rule(id=IDS, workflow=WORKFLOWS, wake=WAKES)
    def enqueue(self, id: str, workflow: str, wake: timedelta | None) -> None:
        """Enqueue a run."""
        whole = snapshot("new")
        wake_at = None if wake is None else self.now + wake
        (created,) = self.do(self.store.enqueue([NewRun(id, workflow, as_json(whole), wake_at)]))
        assert created == (id not in self.runs)
        if created:
            self.runs[id] = Ran(whole, workflow, wake_at or self.now)
        self.compare(id)

    @rule(owner=OWNERS, ttl=TTLS, workflows=st.none() | st.lists(WORKFLOWS, unique=True))
    def claim(self, owner: str, ttl: timedelta, workflows: Sequence[str] | None) -> None:
        """Claim all that is due."""
        expected = self.due_in_model(workflows)
        assert self.due_in_store(workflows) == expected
        grants = self.do(self.store.claim(owner, ttl, 100, workflows=workflows))
        assert sorted(grant.lease.id for grant in grants) == expected
        for grant in grants:
            self.granted(grant, self.runs[grant.lease.id])

    def due_in_store(self, workflows: Sequence[str] | None) -> list[str]:
        """Give the ids of the runs that the store says are due."""
        now = self.begun_at + HOUR / 2 if self.clock is None else self.now
        due = self.do(self.store.due(now, 100, workflows=workflows))
        return sorted(line.id for line in due)

    def due_in_model(self, workflows: Sequence[str] | None) -> list[str]:
        """Give the ids of the runs that may be claimed."""
        return sorted(
            id
            for id, ran in self.runs.items()
            if ran.due(self.now) and (workflows is None or ran.workflow in workflows)
        )

    @rule(id=IDS, names=st.lists(EVENTS, min_size=1, max_size=3), dedup_id=DEDUP_IDS)
    def send(self, id: str, names: Sequence[str], dedup_id: str | None) -> None:
        """Send events; only the last one has the dedup id."""
        for name in names[:-1]:
            self.send_one(id, name, None)
        self.send_one(id, names[-1], dedup_id)
        self.compare(id)

    def send_one(self, id: str, name: str, dedup_id: str | None) -> None:
        """Send one event."""
        ran = self.runs.get(id)
        answer = self.do(self.store.send(id, name, b"1", dedup_id=dedup_id))
        if ran is None:
            assert answer is Delivery.UNKNOWN
        elif ran.status is not None and is_over(ran.status):
            assert answer is Delivery.OVER or (dedup_id in ran.known)
        elif dedup_id in ran.known:
            assert answer is Delivery.DUPLICATE
        else:
            assert answer is Delivery.DELIVERED
            self.delivered(ran, name, dedup_id)

    def delivered(self, ran: Ran, name: str, dedup_id: str | None) -> None:
        """Take note of an event that lies in the inbox."""
        ran.mail.append(name)
        if dedup_id is not None:
            ran.known.add(dedup_id)
        if name in ran.awaits:
            ran.wake_at = self.now

    @rule()
    def stats(self) -> None:
        """Count the runs and those that are due."""
        stats = self.do(self.store.stats())
        assert sum(stats.by_status.values()) == len(self.runs)
        assert (stats.oldest_due is not None) == bool(self.due_in_model(None))

    @precondition(lambda self: self.clock is not None)
    @rule(hours=st.integers(1, 3))
    def let_time_pass(self, hours: int) -> None:
        """Move the clock."""
        if self.clock is not None:
            self.do(self.clock.advance(hours * HOUR))

    @precondition(lambda self: self.clock is not None)
    @rule(hours=st.integers(0, 2))
    def prune(self, hours: int) -> None:
        """Prune what is over."""
        before = self.now - hours * HOUR
        old = [
            id
            for id, ran in self.runs.items()
            if ran.status is not None and is_over(ran.status)
            if ran.rested_at is not None and ran.rested_at < before
        ]
        assert self.do(self.store.prune(hours * HOUR)) == len(old)
        for id in old:
            del self.runs[id]
            self.compare(id)
