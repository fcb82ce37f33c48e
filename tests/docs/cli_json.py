"""The examples in docs/reference/cli-json.md: what the commands print for a small store.

Run `python -m tests.docs.cli_json` to update the page after a change that is intended.
"""

import asyncio
import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from perdure import Cron, Runtime
from perdure.cli.app import root
from perdure.stores import sqlite
from tests.unit.cli import shop
from tests.unit.cli.conftest import seed

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli-json.md"
EXAMPLE = re.compile(r"^```console\n\$ (perdure .*)\n((?:.|\n)*?)^```$", re.MULTILINE)

RECENT = re.compile(r"(?!2024-|2124-)\d{4}-\d\d-\d\dT[\d:.]+Z")
RANDOM = re.compile(r"[\w-]*[0-9a-f]{12,}")
TIME, ID = "2024-01-02T03:04:05.678Z", "0123456789abcdef"


def steady(value: Any, name: str = "") -> Any:
    """Return an answer without what differs from one call, or one version, to the next."""
    if isinstance(value, dict):
        return {key: steady(each, key) for key, each in value.items()}
    if isinstance(value, list):
        frames = [each for each in value if name != "frames" or not each["is_engine"]]
        return [1] if name == "by_hour" else [steady(each) for each in frames]
    if name in ("id", "run_id") and RANDOM.fullmatch(str(value)):
        return ID
    replaced = {"line": 41, "code": "", "revision": "", "file": Path(str(value)).name}
    if name in replaced:
        return replaced[name]
    if name == "size" and isinstance(value, int) and value > 100:
        # That of a snapshot, which contains tracebacks with the paths of this machine.
        return 1024
    return RECENT.sub(TIME, value) if isinstance(value, str) else value


async def _add_schedule(path: Path) -> None:
    clock = shop.new_clock()
    async with sqlite(path, clock=clock) as store:
        runtime = Runtime(store, workflows=[shop.order], clock=clock)
        nine = Cron("0 9 * * *", tz="Europe/Berlin")
        begin = datetime(2124, 1, 1, tzinfo=UTC)
        await runtime.schedule("daily", shop.order, {"carrier": "up"}, every=nine, start_at=begin)


@contextlib.contextmanager
def small_store() -> Iterator[dict[str, str]]:
    """Create the store of the examples; yield environment variables that name it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        asyncio.run(seed(Path("shop.db")))
        asyncio.run(_add_schedule(Path("shop.db")))
        yield {"PERDURE_STORE": "sqlite:///shop.db", "PERDURE_BY": "ana", "COLUMNS": "100"}


def printed(command: str, variables: dict[str, str]) -> str:
    """Return what a command of the page prints, without what varies."""
    without_settings = {name: None for name in os.environ if name.startswith("PERDURE_")}
    result = CliRunner().invoke(root, command.split()[1:], env={**without_settings, **variables})
    if command.endswith("jsonl"):
        return "".join(
            f"{json.dumps(steady(json.loads(line)))}\n" for line in result.stdout.split("\n")[:-1]
        )
    return json.dumps(steady(json.loads(result.stdout)), ensure_ascii=False, indent=2) + "\n"


def updated(page: str) -> str:
    """Return the page with what its commands print."""
    with small_store() as variables:
        return EXAMPLE.sub(
            lambda match: f"```console\n$ {match[1]}\n{printed(match[1], variables)}```", page
        )


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
