"""Lease a run with the message that makes it due, in the write that embeds the message.

The lease is in the run's document, as are small messages (see `embedding`), so one update writes
both. It leases the run before it embeds the messages, and only if it embeds them: so a lease that
was granted comes with the messages, and these wake no other process, because a run with an owner
awaits nothing.

If the run contains too many messages already, these have documents, and a second update leases the
run. All other messages are sent as by `send`, and their runs become due.

If the reply is lost, the run has an owner that does not know of it, until the lease expires. Then
it is claimed with its messages, like every run whose owner crashed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from bson.objectid import ObjectId

from perdure.store import NewMessage, Receipt
from perdure.stores._handoff import Claimant
from perdure.stores._reading import Granted
from perdure.stores.mongo.embedding import are_embeddable, embed, has_room
from perdure.stores.mongo.grants import Grants
from perdure.stores.mongo.journal import Positions
from perdure.stores.mongo.leases import Epochs, inflate
from perdure.stores.mongo.schedule import is_claimable
from perdure.stores.mongo.schema import Collections, update_once
from perdure.stores.mongo.sending import send, send_documents
from perdure.stores.mongo.updates import (
    IS_DUE,
    IS_UNOWNED,
    Document,
    awaits_any,
    lease_if,
)


class _Offer(NamedTuple):
    """The names of the messages of a call, its claimant, and what marks the run that it leases."""

    events: Sequence[str]
    claimant: Claimant
    claim: ObjectId


class Handoffs:
    """Sends messages and leases the run that they make due."""

    def __init__(self, prefix: str, positions: Positions, epochs: Epochs) -> None:
        self._prefix = prefix
        self._epochs = epochs
        self._grants = Grants(prefix, positions)

    async def send_and_claim(
        self, db: Collections, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        """Send messages; if they can be embedded, also lease their run."""
        if not are_embeddable(messages):
            return await send(db, self._prefix, messages), ()
        offer = _Offer([message.name for message in messages], claimant, ObjectId())
        lease = self._lease(offer, has_room(len(messages)))
        # Read as a whole: to leave out the snapshot of a run that is not leased took 75 µs of each
        # call. With server and client on one machine, it paid only for hundreds of kilobytes.
        receipts, run = await embed(db, self._prefix, messages, [lease], fields=None)
        if not receipts:
            receipts = await send_documents(db, self._prefix, messages, run)
            run = await self._lease_due(db, run, offer)
        return receipts, await self._granted(db, run, offer)

    async def _lease_due(self, db: Collections, run: Any, offer: _Offer) -> Any:
        """Lease a run that had no room for the messages, which now have documents.

        After a crash before this write, the run is due. It is not leased if another process claimed
        it in the meantime, because that may have consumed the messages.
        """
        # Most runs without room have an owner and await nothing: they need no further round trip.
        if run is None or not run.get("awaits"):
            return None
        same_run = {name: run.get(name) for name in ("_id", "incarnation", "epoch")}
        return await update_once(db.runs, {**same_run, **IS_DUE}, [self._lease(offer)])

    def _lease(self, offer: _Offer, *conditions: Document) -> Document:
        """Return the stage that leases a run that awaits one of the messages."""
        owner, ttl, _, supports = offer.claimant
        is_waiting = [IS_UNOWNED, awaits_any({"$literal": offer.events}), is_claimable(supports)]
        condition = {"$and": [*is_waiting, *conditions]}
        return lease_if(condition, {"$literal": owner}, ttl, offer.claim, self._epochs.next())

    async def _granted(self, db: Collections, run: Any, offer: _Offer) -> Sequence[Granted]:
        if run is None or run.get("claim") != offer.claim:
            return ()
        key = run["_id"]
        grants = await self._grants.read(db, {key: inflate(run)}, {key: offer.claimant.ttl})
        return [*grants.values()]
