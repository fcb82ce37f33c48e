"""Writing journal entries and rests: which statement a batch takes, and the verdicts it gives."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from perdure import codec
from perdure.store import Entry, Rest, Verdict
from perdure.stores._postgres_errors import Doubled
from perdure.stores._postgres_sql import Statements

# The bare INSERT raises when an entry is there already, which happens only when it is sent again.
# ON CONFLICT would cost every batch a quarter more.
APPEND_ONE = """
    WITH held AS MATERIALIZED (
        SELECT epoch = $2 AS newest, owner IS NULL AND clean AS at_rest,
            (folded_epoch, folded_n) >= ($2, $3) AS folded
        FROM {runs} WHERE id = $1 FOR NO KEY UPDATE
    ), written AS (
        INSERT INTO {journal} (run, epoch, n, data)
        SELECT $1, $2, $3, $4 FROM held WHERE newest AND NOT at_rest AND NOT folded
    )
    SELECT newest, at_rest FROM held
"""

# What is deleted hangs on what the fenced statement gives: by itself it would see the fence as it
# was before another owner came.
REST_ONE = """
    WITH rested AS (
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
        WHERE run.id = $1 AND run.epoch = $2 AND NOT (run.owner IS NULL AND run.clean)
            AND (run.folded_epoch, run.folded_n) < ($2, $3)
        RETURNING run.id, {hint_if_due}
    ), emptied AS (
        DELETE FROM {journal} AS entry USING rested WHERE entry.run = rested.id
    )
    SELECT id FROM rested
"""

FORGET_ONE = """
    WITH forgotten AS (
        DELETE FROM {runs} AS run
        WHERE run.id = $1 AND run.epoch = $2 AND NOT (run.owner IS NULL AND run.clean)
            AND (run.folded_epoch, run.folded_n) < ($2, $3)
        RETURNING run.id
    ), emptied AS (
        DELETE FROM {journal} AS entry USING forgotten WHERE entry.run = forgotten.id
    ), unread AS (
        DELETE FROM {inbox} AS message USING forgotten WHERE message.run = forgotten.id
    )
    SELECT id FROM forgotten
"""

APPEND = """
    WITH held AS MATERIALIZED (
        SELECT entry.*, run.epoch = entry.epoch AS newest, run.at_rest,
            (run.folded_epoch, run.folded_n) >= (entry.epoch, entry.n) AS folded
        FROM unnest(
            (SELECT $1::text[]), (SELECT $2::bigint[]), (SELECT $3::bigint[]), (SELECT $4::bytea[])
        ) WITH ORDINALITY AS entry (id, epoch, n, data, i)
        CROSS JOIN LATERAL (
            SELECT epoch, owner IS NULL AND clean AS at_rest, folded_epoch, folded_n
            FROM {runs} AS run
            WHERE run.id = entry.id FOR NO KEY UPDATE
        ) AS run
    ), written AS (
        INSERT INTO {journal} (run, epoch, n, data)
        SELECT id, epoch, n, data FROM held WHERE newest AND NOT at_rest AND NOT folded
    )
    {verdicts}
"""

WRITE = """
    WITH held AS MATERIALIZED (
        SELECT entry.*, run.epoch = entry.epoch AS newest, run.at_rest,
            (run.folded_epoch, run.folded_n) >= (entry.epoch, entry.n) AS folded
        FROM unnest(
            (SELECT $1::text[]), (SELECT $2::bigint[]), (SELECT $3::bigint[]), (SELECT $4::bytea[]),
            (SELECT $5::text[]), (SELECT $6::timestamptz[]), (SELECT $7::text[]),
            (SELECT $8::boolean[])
        ) WITH ORDINALITY AS entry (id, epoch, n, data, status, wake_at, awaits, gone, i)
        CROSS JOIN LATERAL (
            SELECT epoch, owner IS NULL AND clean AS at_rest, folded_epoch, folded_n
            FROM {runs} AS run
            WHERE run.id = entry.id FOR NO KEY UPDATE
        ) AS run
    ), fit AS MATERIALIZED (
        SELECT * FROM held WHERE newest AND NOT at_rest AND NOT folded
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
        RETURNING wanted.id
    ), marked AS (
        UPDATE {inbox} AS message SET taken = true, payload = '' FROM wanted
        WHERE message.seq = wanted.seq AND message.run = wanted.id
            AND message.dedup IS NOT NULL AND NOT message.taken
        RETURNING wanted.id
    ), less AS MATERIALIZED (
        SELECT id, count(*) AS mail
        FROM (SELECT id FROM taken UNION ALL SELECT id FROM marked) AS message
        GROUP BY id
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
    """Writes entries, those of one call in one statement."""

    def __init__(self, fetch: Fetch, statements: Statements, prefix: str) -> None:
        self._fetch = fetch
        self._statements = statements
        self._prefix = prefix

    async def write(self, entries: Sequence[Entry]) -> list[Verdict]:
        """Give a verdict for each entry, in order."""
        if len(entries) == 1 and not entries[0].takes:
            verdict = await self._write_one(entries[0])
            if verdict is not None:
                return [verdict]
        return await self._write_many(entries) if entries else []

    async def _write_many(self, entries: Sequence[Entry]) -> list[Verdict]:
        batch = Batch(entries, self._prefix)
        try:
            answer = await self._send(batch)
        except Doubled:
            answer = await self._send(batch, again=True)
        if resting := batch.keys(answer["resting"]):
            # A crash after it is harmless: it only says that the journals may hold something.
            await self._fetch(self._statements[REOPEN], resting)
        verdicts = batch.verdicts(answer)
        left = [place for place, verdict in enumerate(verdicts) if verdict is None]
        late = iter(await self.write([entries[place] for place in left]) if left else ())
        return [next(late) if verdict is None else verdict for verdict in verdicts]

    async def _write_one(self, entry: Entry) -> Verdict | None:
        """Write one entry in the quickest way; None when it takes another to tell what it met."""
        key = self._prefix + entry.id
        if entry.rest is not None:
            statement, values = _rest_alone(entry, entry.rest)
            rested = await self._fetch(self._statements[statement], key, *values)
            return Verdict.ACCEPTED if rested else None
        values = (entry.epoch, entry.n, entry.data)
        try:
            rows = await self._fetch(self._statements[APPEND_ONE], key, *values)
        except Doubled:
            # It was written only if the fence let it, and lies there: as good as written now.
            return Verdict.ACCEPTED
        if not rows:
            return Verdict.UNKNOWN
        newest, at_rest = rows[0]
        if at_rest:
            return None
        return Verdict.ACCEPTED if newest else Verdict.FENCED

    async def _send(self, batch: "Batch", *, again: bool = False) -> Any:
        if again:
            statement = self._statements.extended(WRITE, "ON CONFLICT DO NOTHING")
            columns = batch.columns() + batch.rest_columns()
        elif batch.is_mixed:
            statement = self._statements[WRITE]
            columns = batch.columns() + batch.rest_columns()
        else:
            statement = self._statements[APPEND]
            columns = batch.columns()
        [answer] = await self._fetch(statement, *columns)
        return answer


class Batch:
    """Entries of one call as columns, by id, so that all lock the runs in the same order.

    Entries before a rest of their run go with it, for the rest holds what they hold. Those after it
    are left for another statement.
    """

    def __init__(self, entries: Sequence[Entry], prefix: str) -> None:
        self._entries = entries
        self._prefix = prefix
        self._fates = _fates(entries)
        self.is_mixed = self._fates is not None or any(entry.takes for entry in entries)
        ids = [entry.id for entry in entries]
        places: Sequence[int] = range(len(ids))
        if self._fates is not None:
            places = [place for place, fate in enumerate(self._fates) if fate == place]
        self._sent = sorted(places, key=ids.__getitem__)

    def columns(self) -> list[list[Any]]:
        """Give what every entry has."""
        entries = [self._entries[place] for place in self._sent]
        return [
            [self._prefix + entry.id for entry in entries],
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

    def keys(self, positions: Sequence[int] | None) -> list[str]:
        """Give the stored ids of entries that the statement knows by their positions, from 1."""
        return [self._prefix + self._entries[self._sent[at - 1]].id for at in positions or ()]

    def verdicts(self, answer: Any) -> list[Verdict | None]:
        """Give a verdict for each entry; None when another statement must give it."""
        accepted, fenced, resting = answer
        verdicts: list[Verdict | None] = [Verdict.UNKNOWN] * len(self._entries)
        for verdict, positions in ((Verdict.ACCEPTED, accepted), (Verdict.FENCED, fenced)):
            for position in positions or ():
                verdicts[self._sent[position - 1]] = verdict
        for position in resting or ():
            verdicts[self._sent[position - 1]] = None
        for place, fate in enumerate(self._fates or ()):
            verdicts[place] = verdicts[fate] if fate >= place else None
        return verdicts

    def _takes(self) -> Iterator[tuple[int, int]]:
        position = {place: number for number, place in enumerate(self._sent, 1)}
        for place, entry in enumerate(self._entries):
            fate = place if self._fates is None else self._fates[place]
            if fate >= place:
                yield from ((position[fate], int(id)) for id in entry.takes if id.isdecimal())


def _fates(entries: Sequence[Entry]) -> list[int] | None:
    """Give for each place the one whose verdict it shares: its run's first rest, or its own.

    None when there is no rest: each then stands for itself.
    """
    rests: dict[tuple[str, int], int] = {}
    for place, entry in enumerate(entries):
        if entry.rest is not None:
            rests.setdefault((entry.id, entry.epoch), place)
    if not rests:
        return None
    return [rests.get((entry.id, entry.epoch), place) for place, entry in enumerate(entries)]


def _rest_alone(entry: Entry, rest: Rest) -> tuple[str, Sequence[object]]:
    if rest.gone:
        return FORGET_ONE, (entry.epoch, entry.n)
    status, wake_at, awaits, _ = _columns_of(rest)
    return REST_ONE, (entry.epoch, entry.n, entry.data, status, wake_at, awaits)


def _columns_of(rest: Rest | None) -> tuple[object, ...]:
    if rest is None:
        return None, None, None, False
    return rest.status, rest.wake_at, names_as_json(rest.awaits), rest.gone


def names_as_json(names: Sequence[str]) -> str:
    """Give the names of events as a JSON array."""
    return codec.dumps(list(names)).decode()
