"""Commands that serve or open the dashboard."""

import asyncio
import os
import signal
import webbrowser
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urljoin

import click

from perdure.cli.context import Settings, command, message, option
from perdure.cli.discovery import (
    NO_STORE,
    check_shared,
    configured,
    imported,
    opened_app,
    opened_store,
    runtime_of,
    store_url,
)
from perdure.errors import MissingDependency
from perdure.runtime import Runtime
from perdure.store import Store
from perdure.stores import open_store

LOCAL = "http://127.0.0.1:8765/"
TOKEN = "PERDURE_DEV_TOKEN"
"""The environment variable in which `perdure dev` passes the dashboard's token to its children."""

PORT = option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True)


@command
@option("--host", default="127.0.0.1", show_default=True)
@PORT
@option("--auth", metavar="MODULE:NAME", help="The hook that decides who may do what.")
@option("--read-only", is_flag=True, help="Allow no changes.")
@option("--open", "opens", is_flag=True, help="Open it in a browser.")
async def dashboard(
    settings: Settings, host: str, port: int, auth: str | None, read_only: bool, opens: bool
) -> None:
    """Serve the dashboard.

    Without --auth it can be opened on this machine alone, with the URL that is printed.
    """
    from perdure.dashboard.server import serve

    hook: Any = None if auth is None else imported(auth)
    async with (
        _opened(settings) as (source, url),
        serve(
            source,
            host=host,
            port=port,
            auth=hook,
            person=settings.by,
            read_only=read_only,
            url=url,
        ) as address,
    ):
        click.echo(address)
        if opens:
            webbrowser.open(address)
        await until_signalled()


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncGenerator[tuple[Runtime | Store, str], None]:
    """Open what the dashboard shows; with an application, payloads are checked by its workflows."""
    url = store_url(settings)
    if url and settings.app is None:
        async with opened_store(settings) as store_and_url:
            yield store_and_url
        return
    async with opened_app(settings, NO_STORE) as app:
        runtime = runtime_of(app)
        if not url:
            check_shared(runtime)
            yield runtime, runtime.url
            return
        async with open_store(url) as store:
            yield Runtime(store, workflows=runtime.registry.definitions), url


async def until_signalled() -> None:
    """Wait until SIGTERM or SIGINT arrives."""
    signal_event = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signal_event.set)
    await signal_event.wait()


@asynccontextmanager
async def dashboard_of(
    settings: Settings, runtime: Runtime, port: int
) -> AsyncGenerator[str, None]:
    """Serve the dashboard of a runtime beside a worker; return its URL, or what to install."""
    async with AsyncExitStack() as stack:
        try:
            from perdure.dashboard.server import serve

            server = serve(runtime, port=port, person=settings.by, token=os.environ.get(TOKEN))
            url = await stack.enter_async_context(server)
        except MissingDependency as error:
            url = str(error)
        yield url


@command
@click.argument("run_id", metavar="[ID]", required=False)
@option("--url", metavar="URL", help="Where the dashboard is.")
async def open_page(settings: Settings, run_id: str | None, url: str | None) -> None:
    """Open the dashboard's page of a run in a browser.

    The dashboard is at --url, or at dashboard under [tool.perdure] in pyproject.toml, or where
    `perdure dev` serves it.
    """
    from perdure.urls import encode_id

    page = f"runs/{encode_id(run_id)}" if run_id else ""
    address = urljoin((url or configured("dashboard") or LOCAL).rstrip("/") + "/", page)
    message(settings, f"Opening {address}")
    webbrowser.open(address)
