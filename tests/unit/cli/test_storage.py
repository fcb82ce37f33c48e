"""Commands about the store, and small ones."""

import json
import re
import sqlite3
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Perdure


def test_info_says_what_the_store_is(perdure: Perdure) -> None:
    lines = perdure("store", "info").stdout.splitlines()
    assert lines[0] == "sqlite:///shop.db (sqlite)"
    assert "One process at a time executes a run." in lines


def test_a_healthy_store_prints_nothing(perdure: Perdure) -> None:
    for command in (["store", "check"], ["doctor"]):
        result = perdure(*command)
        assert (result.stdout, result.stderr) == ("", "")


def test_doctor_prints_findings_with_their_fix(perdure: Perdure) -> None:
    perdure("workflows", "pause", "order", "--why", "outage")
    assert "perdure workflows resume order" in perdure("doctor", code=1).stderr
    [finding] = json.loads(perdure("doctor", "-o", "json", code=1).stdout)
    assert finding["code"] == "workflow_paused"


def test_an_unreachable_store_is_a_finding(perdure: Perdure, tmp_path: Path) -> None:
    (tmp_path / "bad.db").write_text("not a database, but long enough to be read as one" * 100)
    env = {"PERDURE_STORE": "sqlite:///bad.db"}
    assert "The store cannot be used" in perdure("store", "check", code=1, env=env).stderr


def test_migrate_creates_the_tables(perdure: Perdure, tmp_path: Path) -> None:
    perdure("store", "migrate", env={"PERDURE_STORE": "sqlite:///new.db"})
    with sqlite3.connect(tmp_path / "new.db") as database:
        names = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    database.close()
    assert "perdure_runs" in names


def test_sql_is_the_whole_schema(perdure: Perdure, tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "new.db")
    database.executescript(perdure("store", "sql", "sqlite").stdout)
    before = set(database.execute("SELECT name FROM sqlite_master"))
    env = {"PERDURE_STORE": "sqlite:///new.db"}
    assert perdure("ls", env=env).stdout == ""
    perdure("start", "order", "{}", env=env)
    assert set(database.execute("SELECT name FROM sqlite_master")) == before
    database.close()


@pytest.mark.parametrize("database", ["postgres", "mysql", "mariadb"])
def test_sql_has_the_names_of_the_tables(perdure: Perdure, database: str) -> None:
    script = perdure("store", "sql", database, "--table", "jobs").stdout
    assert "jobs_journal" in script
    assert re.search(r"\{\w+\}", script) is None


def test_prune_deletes_old_runs(perdure: Perdure) -> None:
    arguments = ("store", "prune", "--older-than", "30d", "--status", "completed")
    assert perdure(*arguments, "--dry-run").stdout == "1 run would be deleted.\n"
    assert "Missing option '--why'" in perdure(*arguments, code=2).stderr
    assert perdure(*arguments, "--why", "old").stdout == "1 run deleted.\n"
    perdure("show", "done", code=4)


def test_a_run_is_exported_and_imported(perdure: Perdure, tmp_path: Path) -> None:
    bundle = perdure("export", "broken", "--reveal").stdout
    result = perdure("import", "-", "--id", "copy", input=bundle)
    assert "copy" in result.stdout
    assert "CarrierDown" in perdure("show", "copy").stdout


def test_a_bundle_that_was_changed_is_refused(perdure: Perdure) -> None:
    bundle = perdure("export", "broken").stdout.replace("broken", "br0ken")
    perdure("import", "-", input=bundle, code=2)
    perdure("import", "-", input="{", code=2)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(perdure: Perdure, shell: str) -> None:
    assert "_PERDURE_COMPLETE" in perdure("completion", shell).stdout


def test_version_names_perdure_and_python(perdure: Perdure) -> None:
    assert perdure("version").stdout.startswith("perdure 0.")


def test_runs_are_copied_to_another_store(perdure: Perdure) -> None:
    """Those that are not over are paused there; a second time, nothing is left to do."""
    other = {"PERDURE_STORE": "sqlite:///other.db"}
    arguments = ("store", "copy", "--to", "sqlite:///other.db", "--where", "done")
    assert perdure(*arguments).stdout == "1 copied, 0 already existed, 0 skipped.\n"
    assert perdure(*arguments).stdout == "0 copied, 1 already existed, 0 skipped.\n"
    assert "completed" in perdure("show", "done", env=other).stdout


def test_a_store_is_not_copied_to_itself(perdure: Perdure) -> None:
    itself = perdure("store", "copy", "--to", "sqlite:///shop.db", code=2)
    assert "pass another one" in itself.stderr
