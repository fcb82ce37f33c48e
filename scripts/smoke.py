"""Try an installed perdure: a workflow, crashes, the command, the dashboard, the pytest plugin."""

import asyncio
import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

import perdure
from perdure import Runtime, Step, workflow
from perdure.stores import sqlite
from perdure.testing import explore_crashes

TEST = """
import pytest
from perdure import Step, workflow

@workflow("order")
async def order(step: Step) -> str:
    return await step("charge", lambda: "receipt")

@pytest.mark.perdure(steps={"charge": "stubbed"})
def test_order(perdure_runtime):
    import asyncio
    assert asyncio.run(perdure_runtime.trigger(order)).output == "stubbed"
"""


@workflow("nap")
async def nap(step: Step, seconds: float) -> float:
    """Sleep, and return how long."""
    await step.sleep("nap", seconds)
    return await step("double", lambda: seconds * 2)


async def run_workflow(file: Path) -> None:
    async with sqlite(str(file)) as store:
        run = await Runtime(store, workflows=[nap]).trigger(nap, 0.01)
        assert run.output == 0.02
    assert (await explore_crashes(nap, 60)).crashes > 5


def perdure_command(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main() -> None:
    source = Path(perdure.__file__).parent
    assert "site-packages" in source.parts, source
    assert (source / "py.typed").exists()
    version = perdure.__version__
    assert importlib.metadata.version("perdure") == version
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "runs.db"
        asyncio.run(run_workflow(file))
        assert version in perdure_command("perdure", "version")
        assert "nap" in perdure_command("perdure", "--store", f"sqlite:///{file}", "list")
        (Path(folder) / "test_order.py").write_text(TEST)
        assert "1 passed" in perdure_command("pytest", "-q", "-p", "no:cacheprovider", folder)
    from perdure.dashboard import Dashboard

    assert Dashboard is not None
    print(f"Python {sys.version.split()[0]}: perdure {version} from {sys.argv[1]}")


main()
