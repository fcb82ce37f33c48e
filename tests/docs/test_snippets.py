"""Every `python` block of the documentation runs, in the order of its page."""

import ast
import asyncio
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis

from tests.servers.process import Server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# URLs in the pages, and the fixtures whose live servers replace them.
SERVERS = {
    "postgresql://localhost/shop": "postgres_url",
    "mysql://root@localhost/shop": "mysql_url",
    "mongodb://localhost/shop": "mongo_url",
    "redis://localhost/0": "emptied_redis_url",
    "http://localhost:8080": "sqld_url",
}

# Blocks marked `python no-run`, as (page, first line of the block), and why they cannot run.
NOT_RUN: dict[tuple[str, str], str] = {}

FENCE = re.compile(
    r"^(?P<indent>[ \t]*)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block: its code, and the line of its opening fence."""

    info: str
    code: str
    line: int

    @property
    def runs(self) -> bool:
        return self.info == "python"


def blocks_of(text: str) -> list[Block]:
    """Return the Python blocks of a page, in order."""
    return [
        Block(
            info=match["info"].strip(),
            code=textwrap.dedent(match["code"]),
            line=text.count("\n", 0, match.start("code")),
        )
        for match in FENCE.finditer(text)
        if match["info"].split()[:1] == ["python"]
    ]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def pages() -> list[Any]:
    parameters = []
    for page in PAGES:
        text = page.read_text()
        if blocks_of(text):
            needs_server = any(url in text for url in SERVERS)
            marks = [pytest.mark.server] if needs_server else []
            parameters.append(pytest.param(page, id=name_of(page), marks=marks))
    return parameters


@pytest.fixture
def emptied_redis_url(redis_server: Server) -> Iterator[str]:
    """Return the URL of an empty Redis database: the examples choose their own keys."""
    url = redis_server.url.rpartition("/")[0] + "/9"
    yield url
    with redis.Redis.from_url(url) as client:
        client.flushdb()


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Return the namespace that the blocks of a page share.

    It is that of a module, so that annotations of classes in it can be resolved.
    """
    module = ModuleType("documentation_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return vars(module)


@pytest.mark.parametrize("page", pages())
def test_the_blocks_of_a_page_run(
    page: Path,
    namespace: dict[str, object],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = page.read_text()
    for url, fixture in SERVERS.items():
        if url in text:
            text = text.replace(url, request.getfixturevalue(fixture))
    monkeypatch.chdir(tmp_path)
    with asyncio.Runner() as runner:
        for block in blocks_of(text):
            if block.runs:
                run(block, page, namespace, runner)


def run(block: Block, page: Path, namespace: dict[str, object], runner: asyncio.Runner) -> None:
    """Run one block; `await` may stand at its top level, as in an asyncio REPL."""
    code = compile(
        "\n" * block.line + block.code,
        page,
        "exec",
        flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
        dont_inherit=True,
    )
    result = eval(code, namespace)
    if inspect.iscoroutine(result):
        runner.run(result)


def test_a_block_that_does_not_run_has_a_reason() -> None:
    """Each `no-run` block is in `NOT_RUN`, and each block in `NOT_RUN` exists."""
    blocks = {
        (name_of(page), block.code.partition("\n")[0])
        for page in PAGES
        for block in blocks_of(page.read_text())
        if not block.runs
    }
    assert blocks == set(NOT_RUN)


def test_blocks_share_a_page_and_may_await(namespace: dict[str, object]) -> None:
    first = "```python\nimport asyncio\nn = 1\n```\n"
    second = "- item\n\n  ```python\n  await asyncio.sleep(0)\n  n += 1\n  ```\n"
    with asyncio.Runner() as runner:
        for block in blocks_of(first + second):
            run(block, Path("page.md"), namespace, runner)
    assert namespace["n"] == 2


def test_a_failing_block_points_at_its_line_of_the_page(namespace: dict[str, object]) -> None:
    (block,) = blocks_of("one\ntwo\n```python\n1 / 0\n```\n")
    with asyncio.Runner() as runner, pytest.raises(ZeroDivisionError) as raised:
        run(block, Path("page.md"), namespace, runner)
    assert raised.traceback[-1].lineno + 1 == 4
