"""More memory stores with one bug each: in queues, versions, headers, batches and searches."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

from perdure.clock import Clock
from perdure.store import (
    Count,
    Delivery,
    Due,
    Entry,
    Grant,
    LeaseRequest,
    Message,
    NewMessage,
    NewRun,
    Query,
    Receipt,
    Rest,
    RunSummary,
    Stats,
    SupportedVersions,
    Verdict,
)
from perdure.stores._backend import PruneRequest
from perdure.stores._reading import Granted
from perdure.stores._searching import Position, SearchResult
from perdure.stores.memory import MemoryStore
from perdure.stores.memory.backend import MemoryBackend
from perdure.stores.memory.rows import Run, Runs
from tests.stores.mutants import Drives, caught_by


class ClaimsOtherwise(MemoryBackend):
    """Changes the filters of a claim, or what it answers."""

    def filters(
        self, supports: Drives, queues: Mapping[str, int]
    ) -> tuple[Drives, Mapping[str, int]]:
        return supports, queues

    def answer(self, grants: Sequence[Granted]) -> Sequence[Granted]:
        return grants

    async def claim(
        self, owner: str, ttl: timedelta, limit: int, supports: Drives, queues: Mapping[str, int]
    ) -> Sequence[Granted]:
        filters = self.filters(supports, queues)
        return self.answer(await super().claim(owner, ttl, limit, *filters))


@caught_by("test_a_claim_without_queues_takes_only_runs_in_no_queue")
class ClaimsFromAnyQueue(ClaimsOtherwise):
    def filters(
        self, supports: Drives, queues: Mapping[str, int]
    ) -> tuple[Drives, Mapping[str, int]]:
        return supports, dict.fromkeys(self.runs.index._queues, 100)


@caught_by("test_a_claim_respects_the_limit_of_each_queue")
class IgnoresQueueLimits(ClaimsOtherwise):
    def filters(
        self, supports: Drives, queues: Mapping[str, int]
    ) -> tuple[Drives, Mapping[str, int]]:
        return supports, dict.fromkeys(queues, 100)


@caught_by("test_a_claim_from_several_queues_takes_the_earliest")
class ClaimsQueueByQueue(ClaimsOtherwise):
    def answer(self, grants: Sequence[Granted]) -> Sequence[Granted]:
        return sorted(grants, key=lambda grant: grant.queue if isinstance(grant, Grant) else "")


@caught_by("test_every_lease_of_a_claim_from_several_queues_is_valid")
class GrantsOtherEpochs(ClaimsOtherwise):
    def answer(self, grants: Sequence[Granted]) -> Sequence[Granted]:
        several = len({grant.queue for grant in grants if isinstance(grant, Grant)}) > 1
        return [
            replace(each, lease=replace(each.lease, epoch=each.lease.epoch + several))
            for each in grants
            if isinstance(each, Grant)
        ]


@caught_by("test_due_is_restricted_to_queues")
class FindsDueRunsOfAnyQueue(MemoryBackend):
    async def due(
        self, now: datetime, limit: int, supports: Drives, queues: Mapping[str, int]
    ) -> Sequence[Due]:
        everything = dict.fromkeys(self.runs.index._queues, limit)
        return await super().due(now, limit, supports, everything)


@caught_by("test_a_grant_names_the_queue_and_the_version")
class GrantsWithoutAQueue(ClaimsOtherwise):
    def answer(self, grants: Sequence[Granted]) -> Sequence[Granted]:
        return [replace(each, queue="") if isinstance(each, Grant) else each for each in grants]


@caught_by("test_a_run_stays_in_its_queue")
class LeavesTheQueueAtRest(MemoryBackend):
    def _rest(self, run: Run, snapshot: bytes, rest: Rest) -> None:
        run.queue = ""
        super()._rest(run, snapshot, rest)


@caught_by("test_queues_are_listed_by_name")
class ListsQueuesInAnyOrder(MemoryBackend):
    async def queues(self, now: datetime, limit: int, low: str, high: str | None) -> Sequence[str]:
        return sorted(await super().queues(now, limit, low, high), key=str.lower)


@caught_by("test_only_queues_with_due_runs_are_listed")
class ListsQueuesOfLaterRuns(MemoryBackend):
    async def queues(self, now: datetime, limit: int, low: str, high: str | None) -> Sequence[str]:
        return await super().queues(now + timedelta(days=1), limit, low, high)


@caught_by("test_system_queues_are_listed_by_their_prefix_alone")
class ListsSystemQueues(MemoryStore):
    async def queues(
        self, now: datetime, limit: int, /, *, prefix: str = "", after: str = ""
    ) -> Sequence[str]:
        return await self._backend.queues(now, limit, max(prefix, after + "\x01"), None)


@caught_by(
    "test_a_claim_skips_versions_that_are_not_supported", "test_a_rest_determines_the_version"
)
class ClaimsAnyVersion(ClaimsOtherwise):
    def filters(
        self, supports: Drives, queues: Mapping[str, int]
    ) -> tuple[Drives, Mapping[str, int]]:
        if supports is not None:
            supports = [SupportedVersions(each.workflow, 0, 1_000_000) for each in supports]
        return supports, queues


@caught_by("test_a_version_belongs_to_its_workflow")
class MixesVersionsOfWorkflows(ClaimsOtherwise):
    def filters(
        self, supports: Drives, queues: Mapping[str, int]
    ) -> tuple[Drives, Mapping[str, int]]:
        if supports is not None:
            supports = [
                SupportedVersions(one.workflow, other.first, other.last)
                for one in supports
                for other in supports
            ]
        return supports, queues


@caught_by("test_skipped_runs_hide_no_other")
class FiltersAfterTheLimit(MemoryBackend):
    async def claim(
        self, owner: str, ttl: timedelta, limit: int, supports: Drives, queues: Mapping[str, int]
    ) -> Sequence[Granted]:
        now = self.clock.now()
        first = self.runs.index.due(now, limit, None, queues, self.prefix)
        due = self.runs.index.due(now, 1_000, supports, dict.fromkeys(queues, 1_000), self.prefix)
        return [self._grant(run, owner, now, ttl) for run in due if run in first]


@caught_by("test_runs_of_one_call_become_due_in_its_order")
class EnqueuesInReverse(MemoryBackend):
    async def enqueue(self, runs: Sequence[NewRun]) -> Sequence[bool]:
        alike = [replace(run, head_start=runs[0].head_start) for run in runs]
        self.runs.index._entries = iter(range(10_000, 0, -1))  # type: ignore[assignment]
        return await super().enqueue(alike)


@caught_by("test_a_head_start_orders_a_run_as_if_it_had_been_enqueued_earlier")
class IgnoresHeadStarts(MemoryBackend):
    def _enqueue(self, new: NewRun, now: datetime) -> bool:
        return super()._enqueue(replace(new, head_start=timedelta(0)), now)


@caught_by("test_a_run_with_a_wake_time_never_starts_early")
class StartsEarly(MemoryBackend):
    def _enqueue(self, new: NewRun, now: datetime) -> bool:
        if new.wake_at is not None:
            new = replace(new, wake_at=new.wake_at - new.head_start)
        return super()._enqueue(new, now)


@caught_by("test_an_enqueued_run_is_queued_until_it_is_claimed")
class EnqueuesAsRunning(MemoryBackend):
    def _enqueue(self, new: NewRun, now: datetime) -> bool:
        created = super()._enqueue(new, now)
        run = self._find(new.id)
        if created and run is not None and new.rest is None:
            run.status = "running"
        return created


@caught_by("test_a_run_may_be_created_at_rest")
class IgnoresTheFirstRest(MemoryBackend):
    def _enqueue(self, new: NewRun, now: datetime) -> bool:
        return super()._enqueue(replace(new, rest=None), now)


@caught_by("test_a_new_run_has_the_header_of_its_request", "test_an_enqueued_run_has_its_header")
class CreatesWithoutAHeader(MemoryBackend):
    def _create(self, id: str, *arguments: Any) -> Run:
        run = super()._create(id, *arguments)
        run.tags, run.summary = (), b""
        return run


@caught_by("test_a_request_for_an_existing_run_does_not_change_its_header")
class OverwritesTheHeader(MemoryBackend):
    def _acquire(self, request: LeaseRequest, now: datetime) -> Granted | None:
        run = self._find(request.id)
        if run is not None:
            run.tags = request.tags
        return super()._acquire(request, now)


@caught_by("test_a_rest_replaces_the_header", "test_tags_follow_the_last_rest")
class KeepsTheFirstHeader(MemoryBackend):
    def _rest(self, run: Run, snapshot: bytes, rest: Rest) -> None:
        super()._rest(run, snapshot, replace(rest, version=None, tags=None, summary=None))


@caught_by("test_a_rest_without_a_header_leaves_it_as_it_is")
class ClearsTheHeader(MemoryBackend):
    def _rest(self, run: Run, snapshot: bytes, rest: Rest) -> None:
        super()._rest(run, snapshot, replace(rest, tags=rest.tags or ()))


@caught_by("test_an_entry_does_not_change_the_header")
class ChangesTheHeaderByEntries(MemoryBackend):
    def _append(self, entry: Entry) -> Verdict:
        verdict = super()._append(entry)
        run = self._find(entry.id)
        if run is not None and entry.rest is None:
            run.version += 1
        return verdict


@caught_by("test_save_replaces_the_header")
class KeepsTheQueueOnSave(MemoryBackend):
    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None:
        run = self._find(id)
        queue = "" if run is None else run.queue
        await super().save(id, data, workflow, rest)
        if run is not None:
            run.queue = queue


@caught_by("test_the_time_of_creation_stays")
class CreatesAgainAtRest(MemoryBackend):
    def _rest(self, run: Run, snapshot: bytes, rest: Rest) -> None:
        super()._rest(run, snapshot, rest)
        run.created_at = self.clock.now()


@caught_by("test_a_header_that_cannot_be_stored_is_refused")
class AcceptsAnyHeader(MemoryStore):
    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        return await self._backend.enqueue(runs)


@caught_by("test_each_message_of_a_batch_has_its_own_receipt")
class AnswersForTheWholeBatch(MemoryBackend):
    async def send(self, messages: Sequence[NewMessage]) -> Sequence[Receipt]:
        receipts = await super().send(messages)
        return [receipts[0]] * len(receipts)


@caught_by("test_messages_of_one_call_are_in_its_order")
class SendsBackwards(MemoryBackend):
    async def send(self, messages: Sequence[NewMessage]) -> Sequence[Receipt]:
        receipts = await super().send(messages[::-1])
        return receipts[::-1]


@caught_by("test_no_message_of_a_refused_call_is_written")
class ChecksEachMessageInTurn(MemoryStore):
    async def send(self, messages: Sequence[NewMessage], /) -> Sequence[Receipt]:
        receipts: list[Receipt] = []
        for message in messages:
            receipts += await super().send([message])
        return receipts


@caught_by("test_a_batch_wakes_every_run_that_awaits_one_of_its_messages")
class WakesOnlyTheFirst(MemoryBackend):
    async def send(self, messages: Sequence[NewMessage]) -> Sequence[Receipt]:
        receipts = []
        for number, message in enumerate(messages):
            run = self._find(message.to)
            if run is not None and number:
                run.awaits = ()
            receipts.append(self._send(message))
        return receipts


@caught_by(
    "test_a_receipt_counts_the_unconsumed_messages",
    "test_receipts_count_all_messages_of_concurrent_senders",
)
class CountsBeforeDelivery(MemoryBackend):
    def _send(self, message: NewMessage) -> Receipt:
        run = self._find(message.to)
        unconsumed = 0 if run is None else len(run.inbox)
        receipt = super()._send(message)
        if receipt.delivery is Delivery.DELIVERED:
            return replace(receipt, unconsumed=unconsumed)
        return Receipt(receipt.delivery)


class CountsConsumedIds(MemoryBackend):
    """Takes the messages that were sent minus the ids in entries for the unconsumed ones."""

    def __init__(self, runs: Runs, prefix: str, clock: Clock) -> None:
        super().__init__(runs, prefix, clock)
        self.sent = 0
        self.consumed: list[str] = []

    def _append(self, entry: Entry) -> Verdict:
        self.consumed += entry.consumes
        return super()._append(entry)

    def count(self) -> int:
        raise NotImplementedError

    def _send(self, message: NewMessage) -> Receipt:
        self.sent += 1
        return replace(super()._send(message), unconsumed=self.sent - self.count())


@caught_by(
    "test_a_receipt_counts_a_message_as_consumed_only_once",
    "test_a_receipt_does_not_count_what_was_consumed_before",
)
class CountsUnknownIds(CountsConsumedIds):
    def count(self) -> int:
        return len({*self.consumed})


@caught_by(
    "test_a_receipt_counts_a_message_as_consumed_only_once",
    "test_a_receipt_does_not_count_what_was_consumed_before",
)
class CountsAMessageTwice(CountsConsumedIds):
    def count(self) -> int:
        return sum(each.isdecimal() and int(each) <= self.sent for each in self.consumed)


@caught_by("test_pages_neither_skip_nor_repeat_a_message")
class RepeatsTheLastMessage(MemoryBackend):
    async def inbox(self, id: str, after: str | None, limit: int | None) -> Sequence[Message]:
        return await super().inbox(id, None if after is None else str(int(after) - 1), limit)


@caught_by("test_a_page_may_begin_after_a_consumed_message")
class NeedsTheLastMessage(MemoryBackend):
    async def inbox(self, id: str, after: str | None, limit: int | None) -> Sequence[Message]:
        messages = await super().inbox(id, None, None)
        message_ids = [message.id for message in messages]
        first = message_ids.index(after) + 1 if after in message_ids else 0
        if after is not None and after not in message_ids:
            return []
        return messages[first:][:limit]


@caught_by("test_a_grant_has_the_first_page_of_the_inbox")
class GrantsWithTheWholeInbox(MemoryBackend):
    def _grant(self, run: Run, *arguments: Any, **options: Any) -> Granted:
        granted = super()._grant(run, *arguments, **options)
        assert isinstance(granted, Grant)
        return replace(granted, inbox=tuple(run.inbox.values()))


@caught_by("test_a_log_is_a_run_that_is_never_leased")
class WakesRunsThatAwaitNothing(MemoryBackend):
    def _send(self, message: NewMessage) -> Receipt:
        receipt = super()._send(message)
        run = self._find(message.to)
        if run is not None:
            self._wake(run, self.clock.now())
        return receipt


class FindsOtherwise(MemoryBackend):
    """Changes a query before it is answered."""

    def changed(self, query: Query) -> Query:
        raise NotImplementedError

    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        return await super().search(self.changed(query), limit, after)


@caught_by("test_a_search_finds_what_a_scan_finds")
class FindsByAnyTag(FindsOtherwise):
    def changed(self, query: Query) -> Query:
        return replace(query, tags=query.tags[:1])


@caught_by("test_a_search_finds_what_a_scan_finds")
class IgnoresQueues(FindsOtherwise):
    def changed(self, query: Query) -> Query:
        return replace(query, queue=None)


@caught_by("test_a_search_finds_what_a_scan_finds")
class IgnoresTheTimeRange(FindsOtherwise):
    def changed(self, query: Query) -> Query:
        return replace(query, until=None)


@caught_by("test_a_search_finds_what_a_scan_finds")
class AlwaysNewestFirst(FindsOtherwise):
    def changed(self, query: Query) -> Query:
        return replace(query, oldest_first=False)


@caught_by("test_a_search_continues_where_the_page_ended")
class SearchesFromTheStart(MemoryBackend):
    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        return await super().search(query, limit, None)


@caught_by("test_a_found_run_is_described")
class DescribesTooLittle(MemoryBackend):
    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        page = await super().search(query, limit, after)
        return SearchResult([replace(run, summary=b"", wake_at=None) for run in page.runs])


@caught_by("test_lists_and_searches_leave_out_system_runs")
class ShowsSystemRuns(MemoryBackend):
    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        page = await super().search(query, limit, after)
        hidden = await super().search(replace(query, prefix="~"), limit, after)
        return SearchResult([*page.runs, *hidden.runs][:limit])


@caught_by("test_a_search_takes_no_lease_and_writes_nothing")
class LeasesWhatItFinds(MemoryBackend):
    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        page = await super().search(query, limit, after)
        for run in page.runs:
            await self.acquire([LeaseRequest(run.id, "search", timedelta(hours=1))])
        return page


@caught_by("test_a_bad_query_is_refused")
class AcceptsAnyQuery(MemoryStore):
    async def counts(self, query: Query, cap: int, /) -> Sequence[Count]:
        return []


@caught_by("test_a_deleted_run_is_not_found_by_its_tags")
class KeepsTagsOfDeletedRuns(MemoryBackend):
    def __init__(self, runs: Runs, prefix: str, clock: Clock) -> None:
        super().__init__(runs, prefix, clock)
        self.tags: dict[str, tuple[str, ...]] = {}

    def _create(self, id: str, *arguments: Any) -> Run:
        run = super()._create(id, *arguments)
        run.tags = self.tags.setdefault(id, run.tags) or run.tags
        return run


@caught_by("test_tags_may_have_any_characters")
class FoldsTheCaseOfTags(MemoryBackend):
    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        runs = (await super().search(replace(query, tags=()), 1_000, None)).runs
        wanted = {tag.lower() for tag in query.tags}
        return SearchResult(
            [run for run in runs if wanted <= {tag.lower() for tag in run.tags}][:limit]
        )


@caught_by("test_summaries_are_in_the_order_of_the_ids")
class LeavesOutMissingRuns(MemoryBackend):
    async def summaries(self, ids: Sequence[str]) -> Sequence[RunSummary | None]:
        return [run for run in await super().summaries(ids) if run is not None]


@caught_by("test_a_revision_differs_after_every_write")
class RevisesAtRestsAlone(MemoryBackend):
    async def summaries(self, ids: Sequence[str]) -> Sequence[RunSummary | None]:
        runs = await super().summaries(ids)
        return [run and replace(run, revision=run.revision.partition(".")[0]) for run in runs]


@caught_by("test_counts_are_by_workflow_and_status")
class CountsStatusesOfAnyWorkflow(MemoryBackend):
    async def counts(self, query: Query, cap: int) -> Sequence[Count]:
        return await super().counts(replace(query, workflows=()), cap)


@caught_by("test_counts_stop_at_the_cap")
class CountsEverything(MemoryBackend):
    async def counts(self, query: Query, cap: int) -> Sequence[Count]:
        return await super().counts(query, 1_000_000)


@caught_by("test_prune_may_be_restricted_to_a_workflow_and_tags")
class PrunesAnyWorkflow(MemoryBackend):
    async def prune(self, request: PruneRequest) -> int:
        return await super().prune(request._replace(workflow=None))


@caught_by("test_prune_may_be_restricted_to_a_workflow_and_tags")
class PrunesAnyTags(MemoryBackend):
    async def prune(self, request: PruneRequest) -> int:
        return await super().prune(request._replace(tags=request.tags[:1]))


@caught_by("test_a_dry_run_of_prune_deletes_nothing")
class PrunesInEarnest(MemoryBackend):
    async def prune(self, request: PruneRequest) -> int:
        return await super().prune(request._replace(dry_run=False))


@caught_by("test_prune_leaves_system_runs_alone")
class PrunesSystemRuns(MemoryBackend):
    async def prune(self, request: PruneRequest) -> int:
        system = [run.id for run in self.runs if run.id.startswith("~")]
        return await super().prune(request) + sum(map(self.runs.remove, system))


@caught_by("test_stats_count_the_runs_of_queues")
class CountsKeysApart(MemoryBackend):
    async def stats(self) -> Stats:
        stats = await super().stats()
        return replace(stats, by_queue={f"{name}/": each for name, each in stats.by_queue.items()})


@caught_by("test_queues_and_tags_belong_to_the_prefix")
class ListsQueuesOfAllPrefixes(MemoryBackend):
    async def queues(self, now: datetime, limit: int, low: str, high: str | None) -> Sequence[str]:
        return [name for name in self.runs.index.queues(now, "") if name >= low][:limit]
