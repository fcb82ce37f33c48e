"""Leasing runs with the messages that make them due; see `runs`."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from perdure.store import INBOX_PAGE, NewMessage, Receipt, SupportedVersions
from perdure.stores._handoff import Claimant
from perdure.stores.sqlite.inbox import InboxVerbs
from perdure.stores.sqlite.leases import LeasedRun, LeaseVerbs, read_lease
from perdure.stores.sqlite.runs import MICROSECOND, Verb, json_text
from perdure.stores.sqlite.statements import INBOXES, JOURNALS, Statement

SentAndLeased: TypeAlias = tuple[Sequence[Receipt], Sequence[LeasedRun]]

# Leases the unowned runs that await messages of this call. :names are the names of the messages to
# each run, :supports the ranges of versions of each workflow. The inbox is read, because a message
# may be a duplicate. With CASE, because SQLite would otherwise look for the message first.
GRANT = """
    UPDATE $runs SET $lease
    FROM (SELECT $now AS now, :owner AS new_owner, :ttl AS ttl, NULL AS instead_of) AS w
    WHERE id IN (
        SELECT r.id FROM json_each(:names) AS e CROSS JOIN $runs AS r
        WHERE r.id = e.key AND r.owner IS NULL AND r.queue = ''
            AND r.status NOT IN ('completed', 'failed', 'cancelled')
            AND EXISTS (
                SELECT 1 FROM json_each(e.value) AS n
                WHERE CASE WHEN n.value IN (SELECT value FROM json_each(r.awaits)) THEN EXISTS (
                    SELECT 1 FROM $inbox WHERE run = r.id AND taken = 0 AND name = n.value
                ) END
            )
            AND EXISTS (
                SELECT 1 FROM json_each(:supports) AS s CROSS JOIN json_each(s.value) AS v
                WHERE s.key = r.workflow AND (
                    r.version = 0 OR r.version BETWEEN
                        json_extract(v.value, '$$[0]') AND json_extract(v.value, '$$[1]')
                )
            )
        LIMIT :limit
    )
    RETURNING $leased
"""

# changes() is the number of runs that the statement before has leased. If there are some, others
# may be read that had this owner before; these are left out later.
_JUST_LEASED = """
    SELECT r.id AS key FROM json_each(:names) AS e CROSS JOIN $runs AS r
    WHERE changes() > 0 AND r.id = e.key AND r.owner = :owner
"""

NEW_JOURNALS = JOURNALS.replace("$keys", _JUST_LEASED)

NEW_INBOXES = INBOXES.replace("$keys", _JUST_LEASED)


class HandoffVerbs(LeaseVerbs, InboxVerbs):
    """The operation that sends messages and leases runs."""

    def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant, *, separately: bool = False
    ) -> Verb[SentAndLeased]:
        """Send messages, lease runs that they make due, and wake the others.

        It is one round, so an error loses no lease. With `separately`, the entries and messages of
        the leased runs are read in another round.
        """
        recipients, inserts, wakes = self._sending(messages)
        leasing = self._leasing(messages, claimant, reads=not separately)
        # The runs are woken last: those that were leased have an owner, and are left out.
        outcomes = yield [*recipients, *inserts, *leasing, *wakes]
        receipts = self._read_receipts(messages, outcomes[: len(recipients)])
        granted, *contents = outcomes[len(recipients) + len(inserts) :][: len(leasing)]
        runs = {key: self._leased(key, claimant, columns) for key, *columns in granted.rows}
        if contents:
            found = self._read_contents(contents)
            return receipts, [found.added_to(one, key) for key, one in runs.items()]
        complete = yield from self._with_journals([*runs.values()])
        return receipts, [one for one in complete if one is not None]

    def _leasing(
        self, messages: Sequence[NewMessage], claimant: Claimant, *, reads: bool
    ) -> list[Statement]:
        """Return the statements that lease runs and, with `reads`, read what these contain."""
        owner, ttl, limit, supports = claimant
        who = {"names": json_text(self._names(messages)), "owner": owner}
        times = {"ttl": ttl // MICROSECOND, "now": self._now()}
        versions = json_text(_versions(supports))
        grant = self._statement(GRANT, **who, **times, supports=versions, limit=limit)
        if not reads:
            return [grant]
        inboxes = self._statement(NEW_INBOXES, **who, page=INBOX_PAGE)
        return [grant, self._statement(NEW_JOURNALS, **who), inboxes]

    def _leased(self, key: str, claimant: Claimant, columns: Sequence[Any]) -> LeasedRun:
        return read_lease(self._id(key), claimant.owner, claimant.ttl, *columns)

    def _names(self, messages: Sequence[NewMessage]) -> Mapping[str, Sequence[str]]:
        """Return the names of the messages to each run, by key."""
        names: dict[str, list[str]] = {}
        for message in messages:
            names.setdefault(self._prefix + message.to, []).append(message.name)
        return names


def _versions(supports: Sequence[SupportedVersions]) -> Mapping[str, Sequence[tuple[int, int]]]:
    """Return the ranges of versions of each workflow."""
    versions: dict[str, list[tuple[int, int]]] = {}
    for one in supports:
        versions.setdefault(one.workflow, []).append((one.first, one.last))
    return versions
