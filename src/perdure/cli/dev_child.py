"""The process that `perdure dev` starts: worker and dashboard in one event loop."""

import asyncio
import logging
import os
import shlex
import signal
import sys
import webbrowser
from datetime import timedelta

import click

from perdure import events
from perdure.cli.context import Settings, command, option, show_log
from perdure.cli.dev import GRACE
from perdure.cli.discovery import is_default_app, opened_app
from perdure.cli.formatting import printable
from perdure.cli.garbage import collector_for
from perdure.cli.output import Output
from perdure.cli.serving import dashboard_of
from perdure.cli.working import make_worker
from perdure.clock import SystemClock
from perdure.insights import Insights
from perdure.insights.words import duration
from perdure.result import Err
from perdure.snapshot.labels import label_of
from perdure.store import capabilities
from perdure.worker import Worker

IN_MEMORY = (
    "The store is in memory: a restart loses all runs. "
    'To keep them, write Runtime("sqlite:///dev.db").'
)


@command
@option("--port", type=int, required=True)
@option("--since", type=float, help="When the restart began.")
@option("--changed", default="", help="The file that changed.")
async def dev_child(settings: Settings, port: int, since: float | None, changed: str) -> None:
    """Run worker and dashboard for `perdure dev`."""
    show_log(logging.WARNING)
    async with opened_app(settings) as app:
        parent = Pipe()
        await parent.begins.wait()
        worker, output = make_worker(app), Output(settings)
        worker.runtime.driver.bus.subscribe(lambda event: _print_event(output, event))
        async with dashboard_of(settings, worker.runtime, port) as url:
            parent.url = url
            if since is None:
                await _print_banner(settings, worker, url)
            else:
                elapsed = timedelta(seconds=SystemClock().monotonic() - since)
                reason = f"{changed} changed. " if changed.endswith(".py") else ""
                _print_line(f"{reason}Worker restarted in {duration(elapsed)}.")
            with collector_for(worker.concurrency):
                await worker.serve()


async def _print_banner(settings: Settings, worker: Worker, dashboard: str) -> None:
    runtime = worker.runtime
    url = (await Insights(runtime.store, url=runtime.url).store()).url
    names = ", ".join(f"{each.name} v{each.version}" for each in runtime.registry.definitions)
    click.echo(printable(f"perdure dev   {settings.app} on {url}"))
    click.echo(printable(f"Worker        {worker.id} with {worker.concurrency} slots: {names}"))
    click.echo(f"Dashboard     {dashboard}")
    if settings.app and not is_default_app(settings.app):
        hint = f"export PERDURE_APP={shlex.quote(settings.app)}"
        click.echo(printable(f"Elsewhere     {hint} lets other commands find it"))
    if capabilities(runtime.store).survives == "nothing":
        click.echo(f"Warning       {IN_MEMORY}")
    click.echo("Press o to open the dashboard, r to restart, q to quit.")


def _print_line(text: str) -> None:
    click.echo(f"{Output.clock()}  {printable(text)}")


def _print_event(output: Output, event: events.Event) -> None:
    if text := _event_text(output, event):
        _print_line(f"{event.run_id}  {text}")


def _event_text(output: Output, event: events.Event) -> str:
    match event:
        case events.StepComplete():
            mark = output.mark("failed" if isinstance(event.result, Err) else "completed")
            return f"{mark} {label_of(event.key)} ({duration(event.duration)})"
        case events.StepRetry():
            attempt = f"attempt {event.attempt} of {event.attempts}"
            step, delay = label_of(event.key), duration(event.delay)
            return f"{step} failed, {attempt}; again in {delay}: {event.error}"
        case events.WorkflowSuccess():
            return f"{output.mark('completed')} completed"
        case events.WorkflowError():
            return f"{output.mark('failed')} failed: {event.error}"
        case events.WorkflowSuspended():
            return f"{output.mark('suspended')} suspended"
        case _:
            return ""


class Pipe:
    """Does what the parent asks for, and ends this process when the parent ends."""

    def __init__(self) -> None:
        self.begins = asyncio.Event()
        self.url = ""
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read)

    def _read(self) -> None:
        keys = os.read(sys.stdin.fileno(), 64)
        if b"g" in keys:
            self.begins.set()
        if b"o" in keys and self.url.startswith("http"):
            webbrowser.open(self.url)
        if not keys:
            loop = asyncio.get_running_loop()
            loop.remove_reader(sys.stdin.fileno())
            for delay in (0, GRACE):
                loop.call_later(delay, os.kill, os.getpid(), signal.SIGTERM)
