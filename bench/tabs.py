"""Dashboards that are open while something else is measured: `python -m bench.tabs URL TABS`.

This process serves a dashboard on the store at URL and opens TABS tabs on it. A tab does what a
browser does: it listens, and fetches its page again when that changes, at most once a second. The
process prints a line when the tabs are open, and ends when its standard input does.
"""

import asyncio
import re
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from html import unescape
from itertools import cycle, islice
from pathlib import Path
from subprocess import PIPE

import httpx
import uvicorn

from perdure.dashboard import Dashboard, allow_all
from perdure.stores import open_store

PAGES = ("/", "/runs", "/runs?q=status:suspended,waiting", "/workers", "/acts")
ROOT = Path(__file__).parents[1]


@asynccontextmanager
async def opened(url: str, tabs: int) -> AsyncGenerator[None]:
    """Keep this many tabs open on the store at `url`, in another process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.tabs", url, str(tabs), stdin=PIPE, stdout=PIPE, cwd=ROOT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"open\n"
        yield
    finally:
        process.stdin.close()
        await process.wait()


async def follow(base: str, path: str, loaded: asyncio.Semaphore) -> None:
    """Act as a tab: listen to the topics of a page, and fetch it again when one changes."""
    # Each tab is a session of its own: a session may open only three streams.
    async with httpx.AsyncClient(base_url=base, timeout=None) as client:
        page = await client.get(path)
        page.raise_for_status()
        [topics] = re.findall(r'data-topics="([^"]*)"', page.text)
        async with client.stream("GET", f"/live?{unescape(topics)}") as stream:
            assert stream.status_code == 200, "204 would mean that nothing is sent"
            loaded.release()
            async for line in stream.aiter_lines():
                if line.startswith("data:"):
                    tag = page.headers.get("etag", "")
                    page = await client.get(path, headers={"If-None-Match": tag})
                    await asyncio.sleep(1)


async def main(url: str, tabs: int) -> None:
    """Serve, open the tabs, and wait for the end of standard input."""
    async with open_store(url) as store, asyncio.TaskGroup() as tasks:
        app = Dashboard(store, auth=allow_all)
        server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="error"))
        serving = tasks.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        loaded = asyncio.Semaphore(0)
        following = [
            tasks.create_task(follow(f"http://127.0.0.1:{port}", path, loaded))
            for path in islice(cycle(PAGES), tabs)
        ]
        for _ in following:
            await loaded.acquire()
        print("open", flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)
        for task in following:
            task.cancel()
        server.should_exit = True
        await serving


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
