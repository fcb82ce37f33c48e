"""`Insights`: everything an operator can ask about the runs of a store."""

from perdure.clock import Clock, SystemClock, check_clock
from perdure.errors import InvalidArgument
from perdure.insights.completion import Candidate, complete
from perdure.insights.model import RunsPage
from perdure.insights.query import ParsedQuery, parse_query
from perdure.insights.redaction import DEFAULT_REDACTION, Redact
from perdure.insights.search import Search
from perdure.store import Store, check_store, require_search
from perdure.validation import check_int


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
        search = Search(self._store, parsed, self._redact, self._clock, {})
        return await search.page(limit, after)

    async def complete(self, query: str, cursor: int | None = None) -> tuple[Candidate, ...]:
        """Return what the word at the cursor of a query could become."""
        return complete(query, cursor)
