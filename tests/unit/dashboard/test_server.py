"""The server of the commands."""

import asyncio
from urllib.parse import urlsplit

import httpx
import pytest

from perdure.dashboard import allow_all, serve
from perdure.errors import InvalidArgument
from perdure.stores import MemoryStore


async def test_the_url_lets_its_browser_in() -> None:
    async with serve(MemoryStore(), port=0, person="ana") as url:
        async with httpx.AsyncClient(follow_redirects=True) as browser:
            page = await browser.get(url)
            assert page.status_code == 200
            assert "token" not in str(page.url)
        async with httpx.AsyncClient(follow_redirects=True) as stranger:
            assert (await stranger.get(url)).status_code == 403


async def test_another_host_name_of_this_server_is_refused() -> None:
    async with serve(MemoryStore(), port=0) as url, httpx.AsyncClient() as browser:
        response = await browser.get(url, headers={"Host": "evil.test"})
    assert response.status_code == 421


async def test_other_machines_need_a_hook() -> None:
    with pytest.raises(InvalidArgument, match="auth="):
        async with serve(MemoryStore(), host="0.0.0.0", port=0):
            pass


async def test_with_a_hook_the_url_has_no_token() -> None:
    served = serve(MemoryStore(), port=0, auth=allow_all)
    async with served as url, httpx.AsyncClient() as browser:
        assert (await browser.get(url)).status_code == 200
    assert urlsplit(url).query == ""


async def test_a_port_in_use_is_named() -> None:
    async with serve(MemoryStore(), port=0) as url:
        port = urlsplit(url).port
        with pytest.raises(InvalidArgument, match=f"port.*{port}"):
            async with serve(MemoryStore(), port=port or 0):
                pass


async def test_the_server_stops_while_a_browser_listens() -> None:
    async with httpx.AsyncClient(follow_redirects=True) as browser:
        async with asyncio.timeout(10):
            async with serve(MemoryStore(), port=0, auth=allow_all) as url:
                request = browser.build_request("GET", f"{url}live?topic=counts")
                response = await browser.send(request, stream=True)
                assert response.status_code == 200
            await response.aclose()
