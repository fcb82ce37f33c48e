"""The types of patches, versions, retention and replays."""

from datetime import timedelta
from typing import assert_type

from perdure import Client, Keep, Runtime, Snapshot, Step, sync, workflow
from perdure.runtime.versions import Versions
from perdure.testing import Replay, replay_snapshot


@workflow("order", keep=Keep(completed="7d", failed=timedelta(days=9), what="result"))
async def order(step: Step) -> bool:
    assert_type(step.patched("check"), bool)
    return step.patched("again")


async def ask(runtime: Runtime, client: Client, plain: sync.Client, snapshot: Snapshot) -> None:
    assert_type(await runtime.versions(order), Versions)
    assert_type(await client.versions("order"), Versions)
    assert_type(plain.versions("order"), Versions)
    assert_type(await replay_snapshot(order, snapshot), Replay)
    Runtime(keep="result", workflows=[order])
