"""Commands on a terminal: prompts, keys and Ctrl-C."""

from pathlib import Path

import pexpect
import pytest

from tests.unit.cli.processes import on_terminal, run, wait_for, write_app


@pytest.fixture(autouse=True)
def _app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_app(tmp_path)
    monkeypatch.chdir(tmp_path)
    run("start", "order", "{}", "--id", "one")


def test_top_shows_the_overview_until_q() -> None:
    with on_terminal("top") as top:
        top.expect("1 queued")
        run("cancel", "one")
        top.expect("1 cancelled")
        top.send("q")
        top.expect(pexpect.EOF)
        top.wait()
        assert top.exitstatus == 0


def test_top_needs_a_terminal() -> None:
    assert run("top").returncode == 2


def test_watch_prints_changes_until_the_run_ends() -> None:
    with on_terminal("watch", "one") as watch:
        watch.expect("queued")
        run("worker", "orders:runtime", "--once")
        watch.expect("✓ ship")
        watch.expect("✓ completed")
        watch.expect(pexpect.EOF)
        watch.wait()
        assert watch.exitstatus == 0


def test_ctrl_c_is_code_130() -> None:
    with on_terminal("watch", "one") as watch:
        watch.expect("queued")
        watch.sendintr()
        watch.expect("interrupted")
        watch.expect(pexpect.EOF)
        watch.wait()
        assert watch.exitstatus == 130


def test_a_bulk_change_asks_first() -> None:
    with on_terminal("cancel", "--where", "status:queued") as cancel:
        cancel.expect(r"1 run matches\. Cancel it\? \[y/N\]")
        cancel.sendline("n")
        cancel.expect("nothing was changed")
        cancel.wait()
        assert cancel.exitstatus == 1
    assert "queued" in run("ls", "one").stdout
    with on_terminal("cancel", "--where", "status:queued") as cancel:
        cancel.expect(r"\[y/N\]")
        cancel.sendline("y")
        cancel.expect("1 cancelled, 0 refused")


def test_ctrl_c_leaves_a_bulk_change_to_be_continued() -> None:
    run("start", "order", "{}", "--id", "two")
    with on_terminal("cancel", "--where", "status:queued", "--yes", "--rate", "12/min") as cancel:
        wait_for(lambda: "cancelled" in run("ls").stdout)
        cancel.sendintr()
        cancel.expect(r"Stopped at \d of 2\. Continue with: (perdure bulk resume \S+)")
        resume = cancel.match[1].split()[1:]
        cancel.expect(pexpect.EOF)
        cancel.wait()
        assert cancel.exitstatus == 130
    assert run(*resume).stdout == "2 done, 0 refused.\n"


def test_a_table_has_colours_on_a_terminal() -> None:
    with on_terminal("ls") as listing:
        listing.expect("STATUS")
        listing.expect("◌ queued")


def test_pruning_shows_how_many_runs_are_deleted() -> None:
    run("cancel", "one")
    arguments = ("store", "prune", "--older-than", "1ms", "--why", "test")
    with on_terminal(*arguments) as prune:
        prune.expect("Pruning")
        prune.expect("1/1")
        prune.expect("1 run deleted")


def test_migrating_shows_the_migrations() -> None:
    """Those of the runs and of the documents."""
    with on_terminal("store", "migrate", "--store", "sqlite:///new.db") as migrate:
        migrate.expect("Migrating")
        migrate.expect("8/8")
        migrate.expect("The schema is up to date")
