"""Commands about workflows, queues and workers."""

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Perdure
from tests.unit.cli.processes import background, run, wait_for, write_app


def test_workflows_are_listed_with_counts(perdure: Perdure) -> None:
    [row] = json.loads(perdure("workflows", "list", "-o", "json").stdout)
    assert (row["name"], row["counts"]["failed"]["count"]) == ("order", 1)
    assert perdure("workflows", "list").stdout.startswith("order\t0\t0\t1\t1\t1\t1\t")


def test_a_workflow_is_shown(perdure: Perdure) -> None:
    assert "name" in perdure("workflows", "show", "order").stdout
    perdure("workflows", "show", "nope", code=4)


def test_a_workflow_is_paused_and_resumed(perdure: Perdure) -> None:
    result = perdure("workflows", "pause", "order", "--why", "outage")
    assert "Takes effect within 10 seconds." in result.stdout
    assert "paused outage" in perdure("workflows", "list").stdout
    perdure("workflows", "resume", "order")
    assert "paused" not in perdure("workflows", "list").stdout


def test_queues_with_due_runs_are_listed(perdure: Perdure) -> None:
    perdure("start", "order", "{}")
    assert "\t1\t0\t" in perdure("queues", "list").stdout
    perdure("queues", "show", "nope", code=4)


def test_without_workers_the_list_is_empty(perdure: Perdure) -> None:
    assert perdure("workers", "list").stdout == ""
    perdure("workers", "show", "nope", code=4)
    perdure("workers", "drain", "nope", code=5)


def test_a_worker_is_shown_and_drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_app(tmp_path)
    monkeypatch.chdir(tmp_path)
    with background("worker", "orders:runtime") as worker:
        wait_for(lambda: run("workers", "list").stdout)
        [row] = json.loads(run("workers", "list", "-o", "json").stdout)
        assert (row["state"], row["pid"], row["slots"]) == ("live", worker.pid, 100)
        assert row["id"] in run("workers", "show", row["id"]).stdout
        assert run("workers", "drain", row["id"], "--why", "deploy").returncode == 0
        assert worker.wait(30) == 0
