"""A simple model of a store, and a state machine that makes the same calls on both."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from perdure.snapshot import RunStatus, is_over, merge_snapshots
from perdure.store import (
    Delivery,
    Entry,
    Grant,
    Lease,
    LeaseRequest,
    NewMessage,
    NewRun,
    Query,
    Receipt,
    Rest,
    SupportedVersions,
    Verdict,
    can_hand_off,
    rest_of,
)
from perdure.testing.conformance.harness import FullStore, Harness, store_time
from perdure.testing.conformance.model_run import ModelRun
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
QUEUES = st.sampled_from(["", "", "q", "q/1"])
CLAIMED_QUEUES = st.sampled_from([None, None, {"q": 9}, {"": 9, "q": 9, "q/1": 9}, {"": 1, "q": 1}])
VERSIONS = st.sampled_from([0, 1, 2])
TAGS = st.sampled_from([(), ("a=1",), ("a=1", "b=1"), ("b=1",)])
# Mostly with a version or a workflow that is left out, as in a rolling deployment.
SUPPORTED = st.sampled_from(
    [
        None,
        [SupportedVersions("order", 1, 1)],
        [SupportedVersions("order", 2, 2)],
        [SupportedVersions("Order", 1, 2)],
        [SupportedVersions("order", 0, 2), SupportedVersions("Order", 1, 1)],
        [SupportedVersions("order", 1, 1), SupportedVersions("order", 2, 1)],
    ]
)
EVERY_QUEUE = {"": 100, "q": 100, "q/1": 100}
MOSTLY = st.sampled_from([True, True, True, False])


class StoreMachine(RuleBasedStateMachine):
    """Makes the same calls on a store and on the model, and compares the results."""

    def __init__(self, store: FullStore, do: Bridge, harness: Harness) -> None:
        super().__init__()
        self.store = store
        self.do = do
        self.clock = harness.clock
        self.runs: dict[str, ModelRun] = {}
        self.leases: list[Lease] = []
        self.accepted: list[Entry] = []
        self.numbers = count(1)
        # If the clock cannot be advanced, time stands still in the model: a test case takes less
        # time than any duration in it.
        self.started_at = do(store_time(store))

    @property
    def now(self) -> datetime:
        """The store's time, with the precision that the model needs."""
        return self.started_at if self.clock is None else self.clock.now()

    @property
    def soon(self) -> datetime:
        """A time at which everything that is due now is due, even with a real clock."""
        return self.started_at + HOUR / 2 if self.clock is None else self.now

    def teardown(self) -> None:
        """Compare all runs, and delete them for the next test case."""
        try:
            for id in NAMES:
                self.compare(id)
        finally:
            for id in NAMES:
                self.do(self.store.delete(id))

    def compare(self, id: str) -> None:
        """Check that the store and the model agree on a run and on what is due."""
        self.compare_indexes()
        run = self.runs.get(id)
        loaded = self.do(self.store.load(id))
        summaries = [each for each in self.do(self.store.list(prefix=id)) if each.id == id]
        inbox = [message.name for message in self.do(self.store.inbox(id))]
        (header,) = self.do(self.store.summaries([id]))
        if run is None or loaded is None or header is None:
            assert (loaded, summaries, inbox, header) == (run, [], [], None)
            return
        assert (header.queue, header.version, header.tags) == (run.queue, run.version, run.tags)
        assert (header.owner is None) == (run.lease is None)
        assert loaded == run.snapshot
        assert list(loaded["steps"]) == list(run.snapshot["steps"])
        assert [summary.workflow for summary in summaries] == [run.workflow]
        assert run.status in (None, summaries[0].status)
        assert inbox == run.inbox

    def compare_indexes(self) -> None:
        """Check that the store and the model agree on what is due, queued and tagged."""
        assert self.due_in_store(None, EVERY_QUEUE) == self.due_in_model(None, EVERY_QUEUE)
        queues = {run.queue for run in self.runs.values() if run.due(self.now)} - {""}
        assert list(self.do(self.store.queues(self.soon, 9))) == sorted(queues)
        tagged = self.do(self.store.search(Query(tags=("a=1",)), 9)).runs
        assert {run.id for run in tagged} == {
            id for id, run in self.runs.items() if "a=1" in run.tags
        }

    def check_grant(self, grant: Grant, run: ModelRun) -> None:
        """Compare a grant with the model, and apply it there."""
        lease = grant.lease
        assert grant.snapshot == run.snapshot
        assert list(grant.snapshot["steps"]) == list(run.snapshot["steps"])
        assert [message.name for message in grant.inbox] == run.inbox
        assert lease.has_messages == bool(run.inbox)
        assert all(lease.epoch > other.epoch for other in self.leases if other.id == lease.id)
        assert grant.takeovers == run.next_takeovers(self.now)
        assert (grant.queue, grant.version) == (run.queue, run.version)
        run.takeovers, run.progressed = grant.takeovers, False
        run.newest, run.lease = lease.epoch, lease
        run.status, run.awaits = "running", ()
        self.leases.append(lease)

    def pick_lease(self, pick: int) -> Lease:
        """Return a lease: often a current one, otherwise one of the latest, current or stale."""
        owned = [run.lease for run in self.runs.values() if run.lease is not None]
        if pick < -2 and owned:
            return owned[pick % len(owned)]
        return self.leases[max(pick, -len(self.leases))]

    def verdict(self, lease: Lease) -> Verdict:
        """Return the verdict on a new entry under this lease."""
        run = self.runs.get(lease.id)
        if run is None:
            return Verdict.UNKNOWN
        is_open = run.lease is not None and run.lease.epoch == lease.epoch
        return Verdict.ACCEPTED if is_open else Verdict.FENCED

    @initialize(owner=OWNERS)
    def begin(self, owner: str) -> None:
        """Start with a run that has an owner."""
        self.acquire(NAMES[0], owner, HOUR, create=True, existing=True)

    @rule(id=IDS, status=RESTS, wake=WAKES, event=EVENTS, workflow=WORKFLOWS)
    def save(
        self, id: str, status: RunStatus, wake: timedelta | None, event: str, workflow: str
    ) -> None:
        """Save a run without messages: the contract does not say what `save` does to the inbox."""
        run = self.runs.get(id)
        if run is not None and (run.dedup_ids or run.inbox):
            return
        wake_at = None if wake is None else self.now + wake
        run_snapshot = snapshot(
            "saved", status=status, wake_at=wake_at, event=event, workflow=workflow
        )
        self.do(self.store.save(id, run_snapshot))
        self.runs[id] = ModelRun(run_snapshot, workflow)
        self.runs[id].rest(run_snapshot, rest_of(run_snapshot), self.now)
        self.compare(id)

    @rule(id=IDS)
    def delete(self, id: str) -> None:
        """Delete a run."""
        self.do(self.store.delete(id))
        self.runs.pop(id, None)
        self.compare(id)

    @rule(id=IDS, owner=OWNERS, ttl=TTLS, create=MOSTLY, existing=MOSTLY)
    def acquire(self, id: str, owner: str, ttl: timedelta, create: bool, existing: bool) -> None:
        """Request the lease of a run."""
        run = self.runs.get(id)
        first = snapshot("first")
        data = as_json(first) if create else None
        request = LeaseRequest(id, owner, ttl, create=data, workflow="order", existing=existing)
        (grant,) = self.do(self.store.acquire([request]))
        is_granted = isinstance(grant, Grant)
        if run is None:
            assert is_granted == create
        else:
            another = run.lease is not None and run.lease.owner != owner
            assert is_granted == (existing and not (another and run.is_owned(self.now)))
        if isinstance(grant, Grant):
            assert grant.created == (run is None)
            self.check_grant(grant, self.runs.setdefault(id, ModelRun(first, "order")))
        self.compare(id)

    @precondition(lambda self: self.leases)
    @rule(pick=PICKS, key=KEYS, consume=MOSTLY)
    def append(self, pick: int, key: str, consume: bool) -> None:
        """Append under any lease that was ever granted."""
        lease = self.pick_lease(pick)
        expected = self.verdict(lease)
        number = next(self.numbers)
        part = with_step(key, number)
        messages = self.do(self.store.inbox(lease.id))[: int(consume)]
        consumes = tuple(message.id for message in messages)
        entry = Entry(lease.id, lease.epoch, number, as_json(part), consumes=consumes)
        assert list(self.do(self.store.append([entry]))) == [expected]
        if expected is Verdict.ACCEPTED:
            run = self.runs[lease.id]
            run.snapshot = merge_snapshots(run.snapshot, part)
            run.progressed = True
            del run.inbox[: len(consumes)]
            self.accepted.append(entry)
        self.compare(lease.id)

    @precondition(lambda self: self.leases)
    @rule(
        pick=PICKS,
        status=RESTS,
        wake=WAKES,
        events=st.sets(EVENTS, min_size=1),
        version=st.none() | VERSIONS,
        tags=st.none() | TAGS,
    )
    def rest(
        self,
        pick: int,
        status: RunStatus,
        wake: timedelta | None,
        events: set[str],
        version: int | None,
        tags: tuple[str, ...] | None,
    ) -> None:
        """Write a rest under any lease that was ever granted."""
        lease = self.pick_lease(pick)
        expected = self.verdict(lease)
        sleeps = status in ("suspended", "waiting")
        wake_at = self.now + wake if sleeps and wake is not None else None
        awaits = tuple(sorted(events)) if status in ("waiting", "paused") else ()
        rest = Rest(status, wake_at, awaits, version=version, tags=tags)
        run_snapshot = snapshot("rested", "10", "9", status=status)
        entry = Entry(lease.id, lease.epoch, next(self.numbers), as_json(run_snapshot), rest=rest)
        assert list(self.do(self.store.append([entry]))) == [expected]
        if expected is Verdict.ACCEPTED:
            self.runs[lease.id].rest(run_snapshot, rest, self.now)
            self.accepted.append(entry)
        self.compare(lease.id)

    @precondition(lambda self: self.accepted)
    @rule(pick=PICKS)
    def send_entry_again(self, pick: int) -> None:
        """Send an accepted entry again."""
        entry = self.accepted[max(pick, -len(self.accepted))]
        run = self.runs.get(entry.id)
        if run is None:
            expected = Verdict.UNKNOWN
        else:
            expected = Verdict.ACCEPTED if run.newest == entry.epoch else Verdict.FENCED
        assert list(self.do(self.store.append([entry]))) == [expected]
        self.compare(entry.id)

    @precondition(lambda self: self.leases)
    @rule(pick=PICKS, ttl=TTLS)
    def renew(self, pick: int, ttl: timedelta) -> None:
        """Renew any lease that was ever granted."""
        lease = self.pick_lease(pick)
        (renewed,) = self.do(self.store.renew([lease], ttl))
        assert (renewed is not None) == (self.verdict(lease) is Verdict.ACCEPTED)
        if renewed is not None:
            run = self.runs[lease.id]
            assert renewed.has_messages == bool(run.inbox)
            run.lease = renewed

    @precondition(lambda self: self.leases)
    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        """Release any lease that was ever granted."""
        lease = self.pick_lease(pick)
        self.do(self.store.release([lease]))
        if self.verdict(lease) is Verdict.ACCEPTED:
            run = self.runs[lease.id]
            run.lease, run.wake_at = None, self.now
        self.compare(lease.id)

    @rule(id=IDS, workflow=WORKFLOWS, wake=WAKES, queue=QUEUES, version=VERSIONS, tags=TAGS)
    def enqueue(
        self,
        id: str,
        workflow: str,
        wake: timedelta | None,
        queue: str,
        version: int,
        tags: tuple[str, ...],
    ) -> None:
        """Enqueue a run."""
        run_snapshot = snapshot("new")
        wake_at = None if wake is None else self.now + wake
        new = NewRun(
            id, workflow, as_json(run_snapshot), wake_at, queue=queue, version=version, tags=tags
        )
        (created,) = self.do(self.store.enqueue([new]))
        assert created == (id not in self.runs)
        if created:
            self.runs[id] = ModelRun(
                run_snapshot, workflow, wake_at or self.now, "queued", queue, version, tags
            )
        self.compare(id)

    @rule(owner=OWNERS, ttl=TTLS, supports=SUPPORTED, queues=CLAIMED_QUEUES)
    def claim(
        self,
        owner: str,
        ttl: timedelta,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int] | None,
    ) -> None:
        """Claim due runs."""
        expected = self.due_in_model(supports, queues)
        assert self.due_in_store(supports, queues) == expected
        grants = self.do(self.store.claim(owner, ttl, 100, supports=supports, queues=queues))
        claimed = Counter(grant.queue for grant in grants)
        for grant in grants:
            assert grant.lease.id in expected
            self.check_grant(grant, self.runs[grant.lease.id])
        # Which of several due runs a limit leaves out depends on their order.
        assert len(grants) == len(expected) or claimed.items() <= (queues or {}).items()

    def due_in_store(
        self, supports: Sequence[SupportedVersions] | None, queues: Mapping[str, int] | None
    ) -> list[str]:
        """Return the ids of the runs that are due in the store, ignoring the limits of queues."""
        unlimited = None if queues is None else dict.fromkeys(queues, 100)
        due = self.do(self.store.due(self.soon, 100, supports=supports, queues=unlimited))
        return sorted(run.id for run in due)

    def due_in_model(
        self, supports: Sequence[SupportedVersions] | None, queues: Mapping[str, int] | None
    ) -> list[str]:
        """Return the ids of the runs that are due in the model."""
        return sorted(
            id
            for id, run in self.runs.items()
            if run.due(self.now)
            and run.is_supported(supports)
            and run.queue in (queues or {"": 100})
        )

    @rule(messages=st.lists(st.tuples(IDS, EVENTS, DEDUP_IDS), min_size=1, max_size=4))
    def send(self, messages: Sequence[tuple[str, str, str | None]]) -> None:
        """Send several messages in one call."""
        batch = [NewMessage(id, name, b"1", dedup_id) for id, name, dedup_id in messages]
        receipts = self.do(self.store.send(batch))
        assert len(receipts) == len(batch)
        for message, receipt in zip(batch, receipts, strict=True):
            self.check_receipt(message, receipt)
        self.compare(batch[0].to)

    @precondition(lambda self: can_hand_off(self.store))
    @rule(
        messages=st.lists(st.tuples(IDS, EVENTS, DEDUP_IDS), min_size=1, max_size=4),
        owner=OWNERS,
        ttl=TTLS,
        limit=st.integers(0, 2),
        supports=SUPPORTED,
    )
    def send_and_claim(
        self,
        messages: Sequence[tuple[str, str, str | None]],
        owner: str,
        ttl: timedelta,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
    ) -> None:
        """Send several messages in one call, and claim what they make due."""
        assert can_hand_off(self.store)
        batch = [NewMessage(id, name, b"1", dedup_id) for id, name, dedup_id in messages]
        unowned = {id for id, run in self.runs.items() if run.lease is None and not run.queue}
        awaited = {id for id in unowned if run_awaits(self.runs[id], batch, id)}
        handoff = self.do(
            self.store.send_and_claim(batch, owner, ttl, limit, supports=supports or ())
        )
        for message, receipt in zip(batch, handoff.receipts, strict=True):
            self.check_receipt(message, receipt)
        assert len(handoff.grants) <= limit
        for grant in handoff.grants:
            run = self.runs[grant.lease.id]
            assert grant.lease.id in awaited
            assert run.is_supported(supports or ())
            self.check_grant(grant, run)
        self.compare(batch[0].to)

    def check_receipt(self, message: NewMessage, receipt: Receipt) -> None:
        """Compare a receipt with the model, and apply the message there."""
        run, dedup_id = self.runs.get(message.to), message.dedup_id
        if run is None:
            assert receipt == Receipt(Delivery.UNKNOWN)
        elif run.status is not None and is_over(run.status):
            assert receipt.delivery is Delivery.OVER or dedup_id in run.dedup_ids
        elif dedup_id in run.dedup_ids:
            assert receipt == Receipt(Delivery.DUPLICATE, len(run.inbox))
        else:
            self.deliver(run, message.name, dedup_id)
            assert receipt == Receipt(Delivery.DELIVERED, len(run.inbox))

    def deliver(self, run: ModelRun, name: str, dedup_id: str | None) -> None:
        """Add a message to the model's inbox."""
        run.inbox.append(name)
        if dedup_id is not None:
            run.dedup_ids.add(dedup_id)
        if name in run.awaits:
            run.wake_at = self.now

    @rule()
    def stats(self) -> None:
        """Count the runs and find the oldest due one."""
        stats = self.do(self.store.stats())
        assert sum(stats.by_status.values()) == len(self.runs)
        assert (stats.oldest_due is not None) == bool(self.due_in_model(None, EVERY_QUEUE))

    @precondition(lambda self: self.clock is not None)
    @rule(hours=st.integers(1, 3))
    def let_time_pass(self, hours: int) -> None:
        """Advance the clock."""
        if self.clock is not None:
            self.do(self.clock.advance(hours * HOUR))

    @precondition(lambda self: self.clock is not None)
    @rule(hours=st.integers(0, 2))
    def prune(self, hours: int) -> None:
        """Prune runs that are over."""
        before = self.now - hours * HOUR
        old = [
            id
            for id, run in self.runs.items()
            if run.status is not None and is_over(run.status)
            if run.rested_at is not None and run.rested_at < before
        ]
        assert self.do(self.store.prune(hours * HOUR)) == len(old)
        for id in old:
            del self.runs[id]
            self.compare(id)


def run_awaits(run: ModelRun, messages: Sequence[NewMessage], id: str) -> bool:
    """Return whether a run awaits one of the messages that are sent to it."""
    return any(message.to == id and message.name in run.awaits for message in messages)
