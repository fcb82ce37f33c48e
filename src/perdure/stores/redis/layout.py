"""The layout of a namespace: checked when a store opens it, and upgraded from the first one.

The first layout had no number. A shard is marked as having the second layout before any of its runs
is moved. From then on, no older perdure can create or lease a run in it, and no run can get back
into the old layout. Each run is moved atomically, with its journal, lease and inbox, so the upgrade
may be interrupted at any point, and performed by any number of processes together. Until it is
complete, these processes do not use the namespace otherwise.

Stop all older processes before the upgrade. A process that still works on a run can record steps
until the run is moved; the run is then unknown to it, and is continued by a newer process when its
lease expires. A message that it tries to send while a shard is being upgraded is not delivered, and
its `dedup_id` may count as used. After the upgrade its reads find nothing, and its writes fail or
are refused.
"""

import logging

from perdure.stores._layout import check_layout
from perdure.stores.redis import scripts
from perdure.stores.redis.keys import LAYOUT, Keys
from perdure.stores.redis.server import Call, Server

logger = logging.getLogger(__name__)


async def ensure_layout(server: Server, keys: Keys) -> None:
    """Move all runs to the current layout; raise `StoreError` if the server's layout is newer."""
    calls = [Call([mark], ()) for mark in keys.marks]
    marks = await server.run(scripts.LAYOUT, calls)
    newest = max(int(layout) for layout, _ in marks)
    check_layout(f"Redis at {server.link.location}", newest, LAYOUT, alternative="namespace")
    moving = [call for call, (_, is_moving) in zip(calls, marks, strict=True) if is_moving]
    if moving:
        logger.info("upgrading the runs at %s to layout %d", server.link.location, LAYOUT)
        await _move(server, moving)
        logger.info("upgraded the runs at %s to layout %d", server.link.location, LAYOUT)


async def _move(server: Server, calls: list[Call]) -> None:
    while calls:
        answers = await server.run(scripts.UPGRADE, calls)
        calls = [call for call, has_more in zip(calls, answers, strict=True) if has_more]
