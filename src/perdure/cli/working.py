"""`perdure worker`: execute runs of an application until a signal arrives."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import click

from perdure.cli.context import Settings, command, option, show_log
from perdure.cli.discovery import opened_app
from perdure.cli.failures import USAGE, Failure
from perdure.cli.garbage import collector_for
from perdure.runtime import Runtime
from perdure.worker import Worker

CONCURRENCY = 100


@command
@click.argument("app", required=False, metavar="[MODULE:NAME]")
@option("--concurrency", type=click.IntRange(1), help="How many runs at once, by default 100.")
@option("--until-idle", is_flag=True, help="Stop when nothing is due and nothing is running.")
@option("--once", is_flag=True, help="Continue the runs that are due now, then stop.")
@option(
    "--health", metavar="HOST:PORT", help="Answer health checks here: 200, or 503 while draining."
)
async def worker(
    settings: Settings,
    app: str | None,
    concurrency: int | None,
    until_idle: bool,
    once: bool,
    health: str | None,
) -> None:
    """Run a worker for an application.

    The first SIGTERM or Ctrl-C drains the worker; the second releases its runs at once.
    """
    settings.app = app or settings.app
    if not settings.quiet:
        show_log(logging.INFO)
    async with AsyncExitStack() as stack:
        worker = make_worker(await stack.enter_async_context(opened_app(settings)), concurrency)
        stack.enter_context(collector_for(worker.concurrency))
        if health is not None:
            await stack.enter_async_context(answering(worker, *_address(health)))
        if once:
            await worker.runtime.sweep()
        elif until_idle:
            await worker.run_until_idle()
        else:
            await worker.serve()


def make_worker(app: Runtime | Worker, concurrency: int | None = None) -> Worker:
    """Return the application's worker, or a new one for its runtime."""
    if isinstance(app, Runtime):
        return Worker(app, concurrency=concurrency or CONCURRENCY)
    if concurrency is not None:
        raise Failure("--concurrency: this application has a Worker, which sets it", USAGE)
    return app


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise Failure(f"--health is HOST:PORT, such as 127.0.0.1:9000, not {text!r}", USAGE)
    return host.strip("[]"), int(port)


@asynccontextmanager
async def answering(worker: Worker, host: str, port: int) -> AsyncGenerator[None, None]:
    """Answer every HTTP request with 200, and with 503 once the worker drains."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            state = b"503 Service Unavailable" if worker.is_draining else b"200 OK"
            head = b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            writer.write(b"HTTP/1.1 " + state + head)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client left, or does not speak HTTP
        finally:
            writer.close()

    try:
        server = await asyncio.start_server(answer, host, port)
    except OSError as error:
        raise Failure(f"--health {host}:{port}: {error}") from error
    async with server:
        yield
