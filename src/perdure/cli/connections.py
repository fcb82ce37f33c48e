"""`Insights` and `Operations` for commands, on the store that was found."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import unquote

from perdure.cli.context import Settings
from perdure.cli.discovery import NO_STORE, opened_app, opened_store, runtime_of, store_url
from perdure.cli.failures import UNREACHABLE, Failure
from perdure.insights import NOTHING_REDACTED, Insights, Redact
from perdure.operations import Operations
from perdure.store import Store


@asynccontextmanager
async def insights(settings: Settings, *, reveal: bool = False) -> AsyncGenerator[Insights, None]:
    """Open the store for reading."""
    async with existing_store(settings) as (store, name):
        yield Insights(store, redact=NOTHING_REDACTED if reveal else Redact(), url=name)


@asynccontextmanager
async def existing_store(settings: Settings) -> AsyncGenerator[tuple[Store, str], None]:
    """Open the store, without creating a file, and yield it with its URL."""
    if (url := store_url(settings)) is not None:
        _check_exists(url)
    async with opened_store(settings) as store_and_name:
        yield store_and_name


@asynccontextmanager
async def operations(settings: Settings) -> AsyncGenerator[Operations, None]:
    """Open the store for changes; with an application, payloads are checked before they are
    written.
    """
    url = store_url(settings)
    if url and settings.app is None:
        async with opened_store(settings) as (store, _):
            yield Operations(store, via="cli")
        return
    async with opened_app(settings, NO_STORE) as app:
        runtime = runtime_of(app)
        act = Operations(url or runtime.store, via="cli", workflows=runtime.registry.definitions)
        async with act:
            yield act


def _check_exists(url: str) -> None:
    """Raise if the URL refers to a missing file or directory: it may be misspelled."""
    scheme, _, path = url.partition("://")
    if scheme == "sqlite":
        path = path.removeprefix("/")
    if scheme in ("sqlite", "file") and path and not Path(unquote(path)).exists():
        text = f"there is no store {url}; commands that start runs or workers create one"
        raise Failure(text, UNREACHABLE)
