"""`perdure demo`: a running sample shop, with its dashboard."""

import tempfile
import webbrowser
from functools import partial
from pathlib import Path

import click

from perdure.cli.context import Settings, command, message
from perdure.cli.formatting import printable
from perdure.cli.serving import PORT, until_signalled
from perdure.demo.living import living_shop, seed_past
from perdure.stores import open_store


@command
@PORT
async def demo(settings: Settings, port: int) -> None:
    """Run a sample shop with the dashboard.

    Its store is a temporary SQLite file. Every minute a worker is killed; the others continue.
    """
    from perdure.dashboard.server import serve

    with tempfile.TemporaryDirectory(prefix="perdure-demo-") as folder:
        url = f"sqlite:///{Path(folder) / 'shop.db'}"
        # The dashboard comes first: a port in use is reported before the shop is filled.
        server = partial(serve, port=port, person=settings.by, url=url)
        async with open_store(url) as store, server(store) as address:
            message(settings, "Filling the shop with a day and a half of orders.")
            await seed_past(url)
            async with living_shop(url, say=lambda text: message(settings, printable(text))):
                click.echo(f"Dashboard     {address}")
                click.echo("Press Ctrl-C to stop.")
                webbrowser.open(address)
                await until_signalled()
