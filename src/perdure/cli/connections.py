"""What commands ask and change: `Insights` and `Operations` on the store that was found."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from perdure.cli.context import Settings
from perdure.cli.discovery import opened_app, opened_store, runtime_of, store_url
from perdure.insights import NOTHING_REDACTED, Insights, Redact
from perdure.operations import Operations


@asynccontextmanager
async def insights(settings: Settings, *, reveal: bool = False) -> AsyncGenerator[Insights, None]:
    """Open the store for questions."""
    async with opened_store(settings) as store:
        redact = NOTHING_REDACTED if reveal else Redact()
        yield Insights(store, redact=redact, url=store_url(settings) or "")


@asynccontextmanager
async def operations(settings: Settings) -> AsyncGenerator[Operations, None]:
    """Open the store for changes; with `--app`, payloads are checked before they are written."""
    if settings.app is None:
        async with opened_store(settings) as store:
            yield Operations(store, via="cli")
        return
    async with opened_app(settings) as app:
        runtime, url = runtime_of(app), store_url(settings)
        act = Operations(url or runtime.store, via="cli", workflows=runtime.registry.definitions)
        async with act:
            yield act
