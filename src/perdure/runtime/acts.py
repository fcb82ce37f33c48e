"""The acts of operators: who did what to a run, and why.

An act is part of the write that changes the run. It is then copied to a separate document, so that
the acts of all runs can be listed, even those of deleted runs.
"""

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from perdure import codec
from perdure.clock import isoformat
from perdure.errors import StoreError
from perdure.runtime.requests import Request
from perdure.snapshot import Metadata
from perdure.snapshot.acts import with_act
from perdure.store import Store, can_search

logger = logging.getLogger(__name__)

ACT = "act:"
"""The prefix of the keys of copied acts; the time of the act follows."""

KEPT_FOR = timedelta(days=400)
"""How long copies of acts are kept: audits usually cover the previous year."""


def new_act(request: Request, now: datetime, *, old: str = "", refusal: str = "") -> dict[str, Any]:
    """Return the act that records a request."""
    facts = {
        "at": isoformat(now),
        "by": request.by,
        "via": request.via,
        "verb": request.verb,
        "step": request.step,
        "why": request.why,
        "was": old,
        "refused": refusal,
        "id": request.id,
    }
    return {name: fact for name, fact in facts.items() if fact}


def add_act(metadata: Metadata, act: dict[str, Any]) -> None:
    """Add an act to the metadata of a run."""
    metadata.update(with_act(metadata, act))


async def copy_acts(store: Store, run_id: str, acts: Iterable[dict[str, Any]]) -> None:
    """Copy acts to documents, for lists only: a failure is logged."""
    if not can_search(store):
        return
    for act in acts:
        try:
            await write_act(store, {**act, "run": run_id})
        except StoreError as error:
            logger.warning("an act on run %r could not be copied (%s)", run_id, error)


def act_key(act: dict[str, Any]) -> str:
    """Return the key of the document with the copy of an act."""
    return f"{ACT}{act['at']}:{act['id']}"


async def write_act(store: Any, act: dict[str, Any]) -> str:
    """Write an act to a document, and return its key."""
    key = act_key(act)
    await store.documents.set(key, codec.dumps(act).decode(), ttl=KEPT_FOR)
    return key
