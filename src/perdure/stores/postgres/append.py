"""Writing journal entries and rests: which statement a batch takes, and the verdicts it gives."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

from perdure import codec
from perdure.store import Entry, Rest, Verdict
from perdure.stores.postgres.errors import Doubled
from perdure.stores.postgres.statements import Statements

# The statements that most batches take write all that fits, and say how much: what did not fit is
# looked into by `_write_of`. A run that an entry does not fit is not locked; one that another owner
# holds while this waits for it is judged again, as it is by then. An epoch is open while its run
# has an owner: a rest and a release end both.
# The bare INSERT raises when an entry is there already, which happens only when it is sent again.
# ON CONFLICT would cost every batch a quarter more.
APPEND_ONE = """
    INSERT INTO {journal} (run, epoch, n, data)
    SELECT $1, $2, $3, $4 FROM (
        SELECT FROM {runs} AS run
        WHERE run.id = $1 AND run.epoch = $2 AND run.owner IS NOT NULL
        FOR NO KEY UPDATE
    ) AS held
    RETURNING true
"""

APPEND = """
    WITH written AS (
        INSERT INTO {journal} (run, epoch, n, data)
        SELECT entry.* FROM unnest(
            (SELECT $1::text[]), (SELECT $2::bigint[]), (SELECT $3::bigint[]), (SELECT $4::bytea[])
        ) AS entry (id, epoch, n, data)
        CROSS JOIN LATERAL (
            SELECT FROM {runs} AS run
            WHERE run.id = entry.id AND run.epoch = entry.epoch AND run.owner IS NOT NULL
            FOR NO KEY UPDATE
        ) AS held
        RETURNING true
    )
    SELECT count(*) FROM written
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
        WHERE run.id = $1 AND run.epoch = $2 AND run.owner IS NOT NULL
        RETURNING run.id, {hint_if_due}
    ), emptied AS (
        DELETE FROM {journal} WHERE run = (SELECT id FROM rested)
    )
    SELECT id FROM rested
"""

FORGET_ONE = """
    WITH forgotten AS (
        DELETE FROM {runs} AS run
        WHERE run.id = $1 AND run.epoch = $2 AND run.owner IS NOT NULL
        RETURNING run.id
    ), emptied AS (
        DELETE FROM {journal} WHERE run = (SELECT id FROM forgotten)
    ), unread AS (
        DELETE FROM {inbox} WHERE run = (SELECT id FROM forgotten)
    )
    SELECT id FROM forgotten
"""

# Any batch, out of the parts it needs: planning takes its time for each.
_HELD = """
    WITH held AS MATERIALIZED (
        SELECT entry.*, run.epoch = entry.epoch AS newest, run.is_open,
            (run.folded_epoch, run.folded_n) >= (entry.epoch, entry.n) AS folded
        FROM unnest(
            (SELECT $1::text[]), (SELECT $2::bigint[]), (SELECT $3::bigint[]), (SELECT $4::bytea[]),
            (SELECT $5::text[]), (SELECT $6::timestamptz[]), (SELECT $7::text[]),
            (SELECT $8::boolean[])
        ) WITH ORDINALITY AS entry (id, epoch, n, data, status, wake_at, awaits, gone, i)
        CROSS JOIN LATERAL (
            SELECT epoch, owner IS NOT NULL AS is_open, folded_epoch, folded_n FROM {runs} AS run
            WHERE run.id = entry.id FOR NO KEY UPDATE
        ) AS run
    ), fit AS MATERIALIZED (
        SELECT * FROM held WHERE newest AND is_open
    )
"""
_WRITTEN = """
    written AS (
        INSERT INTO {journal} (run, epoch, n, data)
        SELECT id, epoch, n, data FROM fit WHERE status IS NULL
        {more}
    )
"""
_TAKES = """
    wanted AS MATERIALIZED (
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
    )
"""
_NO_TAKES = """
    wanted AS (SELECT 0 AS seq WHERE false), less AS (SELECT '' AS id, 0 AS mail WHERE false)
"""
_EMPTIED = """
    emptied AS (
        DELETE FROM {journal}
        WHERE run = ANY (ARRAY(SELECT id FROM fit WHERE status IS NOT NULL))
    )
"""
_FORGOTTEN = """
    unread AS (
        DELETE FROM {inbox}
        WHERE run = ANY (ARRAY(SELECT id FROM fit WHERE gone))
            AND seq <> ALL (ARRAY(SELECT seq FROM wanted))
    ), forgotten AS (
        DELETE FROM {runs} WHERE id = ANY (ARRAY(SELECT id FROM fit WHERE gone))
    )
"""
_RESTED = """
    rested AS (
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
"""

# Not EXISTS, for which the planner may read the whole journal.
_VERDICTS = """
    SELECT array_agg(i) FILTER (WHERE fits) AS accepted,
        array_agg(i) FILTER (WHERE NOT fits) AS fenced
    FROM (
        SELECT i, newest AND (is_open OR folded OR (
            SELECT true FROM {journal} AS entry
            WHERE entry.run = held.id AND entry.epoch = held.epoch AND entry.n = held.n
        ) IS NOT NULL) AS fits
        FROM held
    ) AS judged
"""


class Needs(NamedTuple):
    """What a batch writes: journal entries, rests, runs that are gone, messages it takes."""

    journal: bool
    rests: bool
    delete: bool
    consumes: bool


_JOURNAL = Needs(journal=True, rests=False, delete=False, consumes=False)


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
        if not entries:
            return []
        if len(entries) == 1 and await self._write_one(entries[0]):
            return [Verdict.ACCEPTED]
        batch = Batch(entries, self._prefix)
        if len(entries) > 1 and batch.needs == _JOURNAL and await self._append(batch):
            return [Verdict.ACCEPTED] * len(entries)
        return await self._write_any(batch)

    async def _write_one(self, entry: Entry) -> bool:
        """Write one entry in the quickest way; False when it takes another to tell what it met."""
        if entry.consumes:
            return False
        statement, values = _alone(entry)
        try:
            rows = await self._fetch(
                self._statements[statement], self._prefix + entry.id, entry.epoch, *values
            )
        except Doubled:
            # It was written only if the fence let it, and lies there: as good as written now.
            return True
        return bool(rows)

    async def _append(self, batch: "Batch") -> bool:
        """Write entries for the journal; False when some do not fit, or were there already."""
        try:
            [(count,)] = await self._fetch(self._statements[APPEND], *batch.columns())
        except Doubled:
            return False
        return bool(count == len(batch.entries))

    async def _write_any(self, batch: "Batch") -> list[Verdict]:
        try:
            # Of entries for the journal, some may have been written just now.
            answer = await self._send(batch, again=batch.needs == _JOURNAL)
        except Doubled:
            answer = await self._send(batch, again=True)
        verdicts = batch.verdicts(answer)
        left = [place for place, verdict in enumerate(verdicts) if verdict is None]
        late = iter(await self.write([batch.entries[place] for place in left]) if left else ())
        return [next(late) if verdict is None else verdict for verdict in verdicts]

    async def _send(self, batch: "Batch", *, again: bool) -> Any:
        more = "ON CONFLICT DO NOTHING" if again else ""
        statement = self._statements.extended(_write_of(batch.needs), more)
        columns = batch.columns() + batch.rest_columns()
        if batch.needs.consumes:
            columns += batch.take_columns()
        [answer] = await self._fetch(statement, *columns)
        return answer


class Batch:
    """Entries of one call as columns, by id, so that all lock the runs in the same order.

    Entries before a rest of their run go with it, for the rest holds what they hold. Those after it
    are left for another statement, and those before a rest that is refused, too.
    """

    def __init__(self, entries: Sequence[Entry], prefix: str) -> None:
        self.entries = entries
        self.needs = _needs_of(entries)
        self._prefix = prefix
        self._fates = _fates(entries)
        ids = [entry.id for entry in entries]
        places: Sequence[int] = range(len(ids))
        if self._fates is not None:
            places = [place for place, fate in enumerate(self._fates) if fate == place]
        self._sent = sorted(places, key=ids.__getitem__)

    def columns(self) -> list[list[Any]]:
        """Give what every entry has."""
        entries = [self.entries[place] for place in self._sent]
        return [
            [self._prefix + entry.id for entry in entries],
            [entry.epoch for entry in entries],
            [entry.n for entry in entries],
            [entry.data for entry in entries],
        ]

    def rest_columns(self) -> list[list[Any]]:
        """Give what rests have."""
        rests = [_columns_of(self.entries[place].rest) for place in self._sent]
        return [list(column) for column in zip(*rests, strict=True)]

    def take_columns(self) -> list[list[Any]]:
        """Give which entry takes which messages."""
        consumes = list(self._takes())
        return [[position for position, _ in consumes], [seq for _, seq in consumes]]

    def verdicts(self, answer: Any) -> list[Verdict | None]:
        """Give a verdict for each entry; None when another statement must give it."""
        accepted, fenced = answer
        verdicts: list[Verdict | None] = [Verdict.UNKNOWN] * len(self.entries)
        for verdict, positions in ((Verdict.ACCEPTED, accepted), (Verdict.FENCED, fenced)):
            for position in positions or ():
                verdicts[self._sent[position - 1]] = verdict
        for place, fate in enumerate(self._fates or ()):
            if fate != place:
                shares = fate > place and verdicts[fate] is Verdict.ACCEPTED
                verdicts[place] = Verdict.ACCEPTED if shares else None
        return verdicts

    def _takes(self) -> Iterator[tuple[int, int]]:
        position = {place: number for number, place in enumerate(self._sent, 1)}
        for place, entry in enumerate(self.entries):
            fate = place if self._fates is None else self._fates[place]
            if fate >= place:
                yield from ((position[fate], int(id)) for id in entry.consumes if id.isdecimal())


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


def _needs_of(entries: Sequence[Entry]) -> Needs:
    rests = [entry.rest for entry in entries]
    delete = [rest.delete for rest in rests if rest is not None]
    consumes = any(entry.consumes for entry in entries)
    return Needs(len(delete) < len(rests), not all(delete), any(delete), consumes)


@cache
def _write_of(needs: Needs) -> str:
    parts = {
        _HELD: True,
        _WRITTEN: needs.journal,
        _TAKES: needs.consumes,
        _NO_TAKES: not needs.consumes,
        _EMPTIED: needs.rests or needs.delete,
        _RESTED: needs.rests,
        _FORGOTTEN: needs.delete,
    }
    return ",".join(part for part, is_needed in parts.items() if is_needed) + _VERDICTS


def _alone(entry: Entry) -> tuple[str, Sequence[object]]:
    if entry.rest is None:
        return APPEND_ONE, (entry.n, entry.data)
    if entry.rest.delete:
        return FORGET_ONE, ()
    status, wake_at, awaits, _ = _columns_of(entry.rest)
    return REST_ONE, (entry.n, entry.data, status, wake_at, awaits)


def _columns_of(rest: Rest | None) -> tuple[object, ...]:
    if rest is None:
        return None, None, None, False
    return rest.status, rest.wake_at, names_as_json(rest.awaits), rest.delete


def names_as_json(names: Sequence[str]) -> str:
    """Give the names of events as a JSON array."""
    return codec.dumps(list(names)).decode()
