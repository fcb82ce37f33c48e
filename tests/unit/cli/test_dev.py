"""`perdure dev`: worker and reload in one command."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pexpect
import pytest

from tests.unit.cli.processes import background, on_terminal, run, wait_for, write_app

PORT = "18765"
README = Path(__file__).parents[3] / "README.md"


@pytest.fixture(autouse=True)
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BROWSER", "true")
    return write_app(tmp_path)


def edit(app: Path, version: int) -> None:
    app.write_text(app.read_text().replace("VERSION = 1", f"VERSION = {version}"))


def test_a_run_continues_across_a_reload_with_the_new_code(app: Path, tmp_path: Path) -> None:
    with on_terminal("dev", "orders:runtime", "--port", PORT) as dev:
        dev.expect("q to quit")
        run("start", "order", "settle=1d", "--id", "one")
        dev.expect("suspended")
        edit(app, 2)
        dev.expect(r"orders\.py changed\. Worker restarted in")
        # Not a sleep that ends by itself: on a busy machine, the old code would continue it.
        run("wake", "one")
        dev.expect("✓ ship")
        dev.expect("✓ completed")
    assert (tmp_path / "shipped").read_text() == "2\n"


@pytest.mark.alone
def test_a_saved_file_is_running_within_a_second(app: Path) -> None:
    with on_terminal("dev", "orders:runtime", "--port", PORT) as dev:
        dev.expect("q to quit")
        run("start", "order", "settle=2s", "--id", "one")
        dev.expect("suspended")
        time.sleep(1.9)  # the run is due while the worker restarts
        saved = time.monotonic()
        edit(app, 2)
        dev.expect("✓ ship")
        assert time.monotonic() - saved < 1


def test_the_program_of_the_readme_survives_kill_9(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an empty folder: no option names the application or the store."""
    monkeypatch.setenv("PERDURE_STORE", "")
    [program] = re.findall(r"as `app.py`:\n\n```python\n(.+?)```", README.read_text(), re.DOTALL)
    (tmp_path / "app.py").write_text(program.replace('"30s"', '"2s"'))
    with on_terminal("dev", "--port", PORT) as dev:
        dev.expect("app:runtime on sqlite:///orders.db")
        dev.expect("q to quit")
        assert run("start", "order", "4200", "--id", "one").stdout == "Started one.\n"
        dev.expect("✓ charge")
        dev.expect("suspended")
        kill_with_children(dev.pid)
    assert "suspended" in run("ls").stdout
    with on_terminal("dev", "--port", PORT) as dev:
        dev.expect("✓ ship")
        assert "charge" not in dev.before
        dev.expect("✓ completed")
    assert "parcel, with receipt for 4200" in run("show", "one").stdout


def test_what_the_engine_records_has_a_readable_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_STORE", "sqlite:///trips.db")
    program = """
from perdure import Runtime, workflow

@workflow("trip")
async def trip(step):
    await step("book", lambda: "room", undo=lambda room: None)
    raise ValueError("no funds")

runtime = Runtime("sqlite:///trips.db", workflows=[trip])
"""
    (tmp_path / "trips.py").write_text(program)
    with on_terminal("dev", "trips:runtime", "--port", PORT) as dev:
        dev.expect("q to quit")
        run("start", "trip")
        dev.expect("✓ undo of book")


@pytest.mark.parametrize(("default", "is_shown"), [("", True), ("orders:runtime", False)])
def test_other_commands_are_told_how_to_find_the_application(
    monkeypatch: pytest.MonkeyPatch, default: str, is_shown: bool
) -> None:
    monkeypatch.setenv("PERDURE_APP", default)
    with on_terminal("dev", "orders:runtime", "--port", PORT) as dev:
        dev.expect("q to quit")
        assert ("export PERDURE_APP=orders:runtime" in dev.before) == is_shown


def kill_with_children(pid: int) -> None:
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, check=True)
    for each in (pid, *map(int, children.stdout.split())):
        os.kill(each, signal.SIGKILL)


def test_keys_restart_and_quit() -> None:
    with on_terminal("dev", "orders:runtime", "--port", PORT) as dev:
        dev.expect("q to quit")
        dev.send("r")
        dev.expect("Worker restarted in")
        dev.send("q")
        dev.expect(pexpect.EOF)
        dev.wait()
        assert dev.exitstatus == 0


def test_broken_code_waits_for_a_change(app: Path) -> None:
    good = app.read_text()
    with on_terminal("dev", "orders:runtime", "--port", PORT) as dev:
        dev.expect("q to quit")
        app.write_text("def broken(:\n")
        dev.expect("SyntaxError")
        dev.expect("starts again when a file changes")
        app.write_text(good)
        dev.expect("Worker restarted in")


def test_a_port_in_use_ends_it() -> None:
    with background("dashboard", "--port", PORT) as server:
        assert server.stdout is not None
        server.stdout.readline()
        dev = run("dev", "orders:runtime", "--port", PORT)
    assert (dev.returncode, "Another process uses it" in dev.stderr) == (2, True)


def test_a_memory_store_is_a_warning(app: Path) -> None:
    app.write_text(app.read_text().replace("sqlite:///shop.db", "memory://"))
    with on_terminal("dev", "orders:runtime", "--port", PORT) as dev:
        dev.expect("a restart loses all runs")


def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    run("start", "slow", "60", "--id", "slow")
    with background("dev", "orders:runtime", "--port", PORT) as dev:
        wait_for((tmp_path / "began").exists)
        os.kill(dev.pid, signal.SIGKILL)
        dev.wait()
        wait_for(lambda: json.loads(run("ls", "slow", "-o", "jsonl").stdout)["owner"] is None)


def test_events_cannot_control_the_terminal(app: Path) -> None:
    with on_terminal("dev", "orders:runtime", "--port", PORT) as dev:
        dev.expect("q to quit")
        run("start", "order", "{}", "--id", "evil\x1b[31m")
        dev.expect_exact(r"evil\x1b[31m")
