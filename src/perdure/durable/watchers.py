"""Callers in this process that wait for runs, and are notified when a run is settled here."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from perdure.store import Store

_watchers: list[tuple[Store, asyncio.AbstractEventLoop, Callable[[str], None]]] = []


@contextmanager
def notified_of_settled_runs(store: Store, notify: Callable[[str], None]) -> Generator[None]:
    """Call `notify` with the id of each run of the store that is settled in this event loop.

    Callers that wait for runs would otherwise notice later, by polling.
    """
    watcher = (store, asyncio.get_running_loop(), notify)
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def notify_watchers(store: Store, run_id: str) -> None:
    """Notify callers in this event loop that a run was settled."""
    # Usually there are none, and this is called for every settled run.
    if _watchers:
        loop = asyncio.get_running_loop()
        for watched_store, watched_loop, notify in tuple(_watchers):
            if watched_store is store and watched_loop is loop:
                notify(run_id)
