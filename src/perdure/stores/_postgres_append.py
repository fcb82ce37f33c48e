"""Writing journal entries and rests: which statement a batch takes, and the verdicts it gives."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from perdure import codec
from perdure.store import Entry, Rest, Verdict
from perdure.stores._postgres_errors import Doubled
from perdure.stores._postgres_sql import Statements

# The bare INSERT raises when an entry is there already, which happens only when it is sent again.
# ON CONFLICT would cost every batch a quarter more.
APPEND_ONE = """
    WITH held AS MATERIALIZED (
        SELECT epoch, owner IS NULL AND clean AS at_rest, folded_n FROM {runs}
        WHERE id = $1 FOR NO KEY UPDATE
    ), written AS (
        INSERT INTO {journal} (run, epoch, n, data)
        SELECT $1, $2, $3, $4 FROM held WHERE epoch = $2 AND NOT at_rest
    )
    SELECT epoch = $2 AS newest, at_rest, folded_n FROM held
"""

REST_ONE = """
    WITH held AS MATERIALIZED (
        SELECT epoch, owner IS NULL AND clean AS at_rest, folded_n FROM {runs}
        WHERE id = $1 FOR NO KEY UPDATE
    ), emptied AS (
        DELETE FROM {journal} WHERE run = $1 AND (SELECT epoch = $2 AND NOT at_rest FROM held)
    ), rested AS (
        UPDATE {runs} AS run SET
            snapshot = {json_of_data}, exact = {exact_of_data}, status = $5, awaits = given.awaits,
            wake_at = CASE WHEN run.mail > 0 AND (
                SELECT count(*) <> run.mail OR bool_or(given.awaits ? message.name)
                FROM {inbox} AS message
                WHERE message.run = run.id AND message.born = run.born AND NOT message.taken
            ) THEN statement_timestamp() ELSE $6 END,
            folded_epoch = $2, folded_n = $3, updated_at = statement_timestamp(),
            owner = NULL, takeovers = 0, clean = true
        FROM (SELECT $4::bytea AS data, $7::text::jsonb AS awaits) AS given
        WHERE run.id = $1 AND (SELECT epoch = $2 AND NOT at_rest FROM held)
        RETURNING {hint_if_due}
    )
    SELECT epoch = $2 AS newest, at_rest, folded_n FROM held
"""

FORGET_ONE = """
    WITH held AS MATERIALIZED (
        SELECT epoch, owner IS NULL AND clean AS at_rest, folded_n FROM {runs}
        WHERE id = $1 FOR UPDATE
    ), emptied AS (
        DELETE FROM {journal} WHERE run = $1 AND (SELECT epoch = $2 AND NOT at_rest FROM held)
    ), unread AS (
        DELETE FROM {inbox} WHERE run = $1 AND (SELECT epoch = $2 AND NOT at_rest FROM held)
    ), forgotten AS (
        DELETE FROM {runs} WHERE id = $1 AND (SELECT epoch = $2 AND NOT at_rest FROM held)
    )
    SELECT epoch = $2 AS newest, at_rest, folded_n FROM held
"""

APPEND = """
    WITH held AS MATERIALIZED (
        SELECT entry.*, run.epoch = entry.epoch AS newest, run.at_rest, run.folded_n
        FROM unnest(
            (SELECT $1::text[]), (SELECT $2::bigint[]), (SELECT $3::bigint[]), (SELECT $4::bytea[])
        ) WITH ORDINALITY AS entry (id, epoch, n, data, i)
        CROSS JOIN LATERAL (
            SELECT epoch, owner IS NULL AND clean AS at_rest, folded_n FROM {runs} AS run
            WHERE run.id = entry.id FOR NO KEY UPDATE
        ) AS run
    ), written AS (
        INSERT INTO {journal} (run, epoch, n, data)
        SELECT id, epoch, n, data FROM held WHERE newest AND NOT at_rest
    )
    {verdicts}
"""

WRITE = """
    WITH held AS MATERIALIZED (
        SELECT entry.*, run.epoch = entry.epoch AS newest, run.at_rest, run.folded_n
        FROM unnest(
            (SELECT $1::text[]), (SELECT $2::bigint[]), (SELECT $3::bigint[]), (SELECT $4::bytea[]),
            (SELECT $5::text[]), (SELECT $6::timestamptz[]), (SELECT $7::text[]),
            (SELECT $8::boolean[])
        ) WITH ORDINALITY AS entry (id, epoch, n, data, status, wake_at, awaits, gone, i)
        CROSS JOIN LATERAL (
            SELECT epoch, owner IS NULL AND clean AS at_rest, folded_n FROM {runs} AS run
            WHERE run.id = entry.id FOR NO KEY UPDATE
        ) AS run
    ), fit AS MATERIALIZED (
        SELECT * FROM held WHERE newest AND NOT at_rest
    ), written AS (
        INSERT INTO {journal} (run, epoch, n, data)
        SELECT id, epoch, n, data FROM fit WHERE status IS NULL
        {more}
    ), wanted AS MATERIALIZED (
        SELECT fit.id, take.seq
        FROM unnest((SELECT $9::bigint[]), (SELECT $10::bigint[])) AS take (i, seq)
        JOIN fit USING (i)
    ), taken AS (
        DELETE FROM {inbox} AS message USING wanted
        WHERE message.seq = wanted.seq AND message.run = wanted.id AND message.dedup IS NULL
        RETURNING message.run
    ), marked AS (
        UPDATE {inbox} AS message SET taken = true, payload = '' FROM wanted
        WHERE message.seq = wanted.seq AND message.run = wanted.id
            AND message.dedup IS NOT NULL AND NOT message.taken
        RETURNING message.run
    ), less AS MATERIALIZED (
        SELECT run AS id, count(*) AS mail
        FROM (SELECT run FROM taken UNION ALL SELECT run FROM marked) AS message
        GROUP BY run
    ), lightened AS (
        UPDATE {runs} AS run SET mail = run.mail - less.mail FROM less
        WHERE run.id = less.id
            AND NOT EXISTS (SELECT FROM fit WHERE fit.id = less.id AND fit.status IS NOT NULL)
    ), emptied AS (
        DELETE FROM {journal} AS entry USING fit
        WHERE entry.run = fit.id AND fit.status IS NOT NULL
    ), unread AS (
        DELETE FROM {inbox} AS message USING fit
        WHERE message.run = fit.id AND fit.gone
            AND message.seq <> ALL (ARRAY(SELECT seq FROM wanted))
    ), forgotten AS (
        DELETE FROM {runs} AS run USING fit WHERE run.id = fit.id AND fit.gone
    ), rested AS (
        UPDATE {runs} AS run SET
            snapshot = {json_of_data}, exact = {exact_of_data},
            status = given.status, awaits = given.awaits,
            wake_at = CASE WHEN run.mail > given.less AND (
                SELECT count(*) <> run.mail OR bool_or(
                    given.awaits ? message.name
                    AND message.seq <> ALL (ARRAY(SELECT seq FROM wanted))
                )
                FROM {inbox} AS message
                WHERE message.run = run.id AND message.born = run.born AND NOT message.taken
            ) THEN statement_timestamp() ELSE given.wake_at END,
            folded_epoch = given.epoch, folded_n = given.n, updated_at = statement_timestamp(),
            owner = NULL, takeovers = 0, clean = true, mail = run.mail - given.less
        FROM (
            SELECT fit.id, fit.epoch, fit.n, fit.data, fit.status, fit.wake_at,
                fit.awaits::jsonb AS awaits, coalesce(less.mail, 0) AS less
            FROM fit LEFT JOIN less USING (id)
            WHERE fit.status IS NOT NULL AND NOT fit.gone
        ) AS given
        WHERE run.id = given.id
        RETURNING {hint_if_due}
    )
    {verdicts}
"""

REOPEN = """
    UPDATE {runs} SET clean = false
    WHERE id = ANY ($1::text[]) AND owner IS NULL AND clean
"""


class Fetch(Protocol):
    """Runs one statement: in a transaction of its own, or in one that is open."""

    async def __call__(self, statement: str, /, *values: object) -> Sequence[Any]: ...


class Writer:
    """Writes entries, those of one call in one statement.

    With `careful` an entry that is there already raises nothing on the way: an error would end the
    transaction that the statement is a part of.
    """

    def __init__(
        self,
        fetch: Fetch,
        statements: Statements,
        key: Callable[[str], str],
        *,
        careful: bool = False,
    ) -> None:
        self._fetch = fetch
        self._statements = statements
        self._key = key
        self._careful = careful

    async def write(self, entries: Sequence[Entry]) -> list[Verdict]:
        """Give a verdict for each entry, in order."""
        if len(entries) == 1 and not entries[0].takes and not self._careful:
            return [await self._write_one(entries[0])]
        if not entries:
            return []
        batch = Batch(entries)
        verdicts = await self._write_batch(batch)
        if batch.later:
            later = await self.write([entries[place] for place in batch.later])
            verdicts.update(zip(batch.later, later, strict=True))
        return [verdicts[place] for place in range(len(entries))]

    async def _write_one(self, entry: Entry) -> Verdict:
        statement, values = _alone(entry)
        try:
            rows = await self._fetch(self._statements[statement], self._key(entry.id), *values)
        except Doubled:
            # It was written only if the fence let it, and lies there: as good as written now.
            return Verdict.ACCEPTED
        if not rows:
            return Verdict.UNKNOWN
        newest, at_rest, folded_n = rows[0]
        if newest and at_rest and entry.n > folded_n:
            return (await self._write_after_rest([entry]))[0]
        return Verdict.ACCEPTED if newest else Verdict.FENCED

    async def _write_batch(self, batch: "Batch") -> dict[int, Verdict]:
        try:
            answer = await self._send(batch)
        except Doubled:
            answer = await self._send(batch, again=True)
        resting = [batch.entry(position) for position in answer["resting"] or ()]
        late = await self._write_after_rest(resting) if resting else []
        return batch.verdicts(answer, late)

    async def _send(self, batch: "Batch", *, again: bool = False) -> Any:
        if again or self._careful:
            statement = self._statements.extended(WRITE, "ON CONFLICT DO NOTHING")
            columns = batch.columns(self._key) + batch.rest_columns()
        elif batch.is_mixed:
            statement = self._statements[WRITE]
            columns = batch.columns(self._key) + batch.rest_columns()
        else:
            statement = self._statements[APPEND]
            columns = batch.columns(self._key)
        [answer] = await self._fetch(statement, *columns)
        return answer

    async def _write_after_rest(self, entries: Sequence[Entry]) -> list[Verdict]:
        # A crash in between is harmless: it only says that the journal may hold something.
        ids = [self._key(entry.id) for entry in entries]
        await self._fetch(self._statements[REOPEN], ids)
        return await self.write(entries)


class Batch:
    """Entries of one call as columns, by id, so that all lock the runs in the same order.

    Entries before a rest of their run go with it, for the rest holds what they hold. Those after it
    are for a `later` statement.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._rests: dict[tuple[str, int], int] = {}
        for place, entry in enumerate(entries):
            if entry.rest is not None:
                self._rests.setdefault((entry.id, entry.epoch), place)
        self.is_mixed = bool(self._rests) or any(entry.takes for entry in entries)
        places = range(len(entries))
        self.later = [place for place in places if self._fate(place) < place]
        sent = [place for place in places if self._fate(place) == place]
        self._sent = sorted(sent, key=lambda place: entries[place].id)

    def columns(self, key: Callable[[str], str]) -> list[list[Any]]:
        """Give what every entry has."""
        entries = [self._entries[place] for place in self._sent]
        return [
            [key(entry.id) for entry in entries],
            [entry.epoch for entry in entries],
            [entry.n for entry in entries],
            [entry.data for entry in entries],
        ]

    def rest_columns(self) -> list[list[Any]]:
        """Give what rests have, and which entry takes which messages."""
        rests = [_columns_of(self._entries[place].rest) for place in self._sent]
        takes = list(self._takes())
        columns = [list(column) for column in zip(*rests, strict=True)]
        return [*columns, [position for position, _ in takes], [seq for _, seq in takes]]

    def entry(self, position: int) -> Entry:
        """Give the entry that the statement knew by its position, from 1."""
        return self._entries[self._sent[position - 1]]

    def verdicts(self, answer: Any, late: Sequence[Verdict]) -> dict[int, Verdict]:
        """Give the verdict of each place that this batch decides."""
        found = dict.fromkeys(self._sent, Verdict.UNKNOWN)
        for position in answer["accepted"] or ():
            found[self._sent[position - 1]] = Verdict.ACCEPTED
        for position in answer["fenced"] or ():
            found[self._sent[position - 1]] = Verdict.FENCED
        for position, verdict in zip(answer["resting"] or (), late, strict=True):
            found[self._sent[position - 1]] = verdict
        return {
            place: found[fate]
            for place in range(len(self._entries))
            if (fate := self._fate(place)) >= place
        }

    def _fate(self, place: int) -> int:
        """Give the place whose verdict this place shares: its run's rest, or its own."""
        entry = self._entries[place]
        return self._rests.get((entry.id, entry.epoch), place) if self._rests else place

    def _takes(self) -> Iterator[tuple[int, int]]:
        position = {place: number for number, place in enumerate(self._sent, 1)}
        for place, entry in enumerate(self._entries):
            fate = self._fate(place)
            if fate >= place:
                yield from ((position[fate], int(id)) for id in entry.takes if id.isdecimal())


def _alone(entry: Entry) -> tuple[str, Sequence[object]]:
    rest = entry.rest
    if rest is None:
        return APPEND_ONE, (entry.epoch, entry.n, entry.data)
    if rest.gone:
        return FORGET_ONE, (entry.epoch,)
    status, wake_at, awaits, _ = _columns_of(rest)
    return REST_ONE, (entry.epoch, entry.n, entry.data, status, wake_at, awaits)


def _columns_of(rest: Rest | None) -> tuple[object, ...]:
    if rest is None:
        return None, None, None, False
    return rest.status, rest.wake_at, names_as_json(rest.awaits), rest.gone


def names_as_json(names: Sequence[str]) -> str:
    """Give the names of events as a JSON array."""
    return codec.dumps(list(names)).decode()
