"""`Insights`: everything an operator can ask about the runs of a store."""

from perdure.clock import Clock, SystemClock, check_clock
from perdure.errors import InvalidArgument, RunNotFound
from perdure.insights.completion import Candidate, complete
from perdure.insights.model import RunFacts, RunsPage, StepDetail, StepsPage, Why
from perdure.insights.query import ParsedQuery, parse_query
from perdure.insights.redaction import DEFAULT_REDACTION, Redact
from perdure.insights.rows import row_of
from perdure.insights.run import run_facts
from perdure.insights.search import Search
from perdure.insights.state import RunState, Snapshots, read_state
from perdure.insights.steps import step_detail, steps_page
from perdure.insights.why import why
from perdure.presence import read_workers
from perdure.snapshot import Snapshot
from perdure.store import Store, check_store, require_search
from perdure.validation import check_id, check_int


class Insights:
    """Answers questions about the runs of a store, from the store alone.

    It needs no code of the application, takes no lease and writes nothing. Values are redacted as
    `redact` says.

        insights = Insights(store)
        page = await insights.runs("status:failed since:24h")
    """

    def __init__(
        self,
        store: Store,
        *,
        redact: Redact = DEFAULT_REDACTION,
        clock: Clock = SystemClock(),
    ) -> None:
        if not isinstance(redact, Redact):
            raise InvalidArgument("redact", redact, "a Redact, such as Redact(names=('iban',))")
        self._store = require_search(check_store(store), "Insights")
        self._redact = redact
        self._clock = check_clock(clock)
        self._snapshots = Snapshots(self._store)

    def parse(self, query: str) -> ParsedQuery:
        """Return what a query means now, or raise `InvalidQuery`."""
        return parse_query(query, self._clock.now())

    async def runs(
        self, query: str | ParsedQuery = "", limit: int = 50, after: str | None = None
    ) -> RunsPage:
        """Return a page of runs, the most recently updated first.

        `after` is the cursor of the previous page.
        """
        check_int(limit, "limit")
        parsed = query if isinstance(query, ParsedQuery) else self.parse(query)
        owners = await self._owners() if any(term.field == "owner" for term in parsed.terms) else {}
        search = Search(self._store, parsed, self._redact, self._clock, owners)
        return await search.page(limit, after)

    async def complete(self, query: str, cursor: int | None = None) -> tuple[Candidate, ...]:
        """Return what the word at the cursor of a query could become."""
        return complete(query, cursor)

    async def run(self, run_id: str) -> RunFacts:
        """Return everything about a run but its steps, or raise `RunNotFound`."""
        return run_facts(await self._state(run_id))

    async def why(self, run_id: str) -> Why:
        """Return why a run is where it is, in one or two sentences."""
        return why(await self._state(run_id))

    async def steps(self, run_id: str, after: str | None = None, limit: int = 200) -> StepsPage:
        """Return records of a run in the order they were made, after the record `after`."""
        check_int(limit, "limit")
        return steps_page(await self._snapshot(run_id), self._redact, after, limit)

    async def step(self, run_id: str, key: str) -> StepDetail:
        """Return one record of a run in full."""
        return step_detail(await self._snapshot(run_id), key, self._redact)

    async def _state(self, run_id: str) -> RunState:
        check_id(run_id, "run_id")
        return await read_state(self._store, self._snapshots, run_id, self._redact, self._clock)

    async def _snapshot(self, run_id: str) -> Snapshot:
        (run,) = await self._store.summaries([check_id(run_id, "run_id")])
        if run is None:
            raise RunNotFound(run_id)
        return await self._snapshots.load(run, row_of(run, self._redact).size)

    async def _owners(self) -> dict[str, frozenset[str]]:
        """Return the owner ids of the live workers."""
        return {each.id: frozenset(each.owners) for each in await read_workers(self._store)}
