"""Commands about workflows, queues and workers."""

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Perdure
from tests.unit.cli.processes import background, run, wait_for, write_app

EMAILS = 'EMAILS = Queue("emails", concurrency=50, rate=Rate(10, per="1m"))'


def test_workflows_are_listed_with_counts(perdure: Perdure) -> None:
    [row] = json.loads(perdure("workflows", "list", "-o", "json").stdout)
    assert (row["name"], row["counts"]["failed"]["count"]) == ("order", 1)
    assert perdure("workflows", "list").stdout.startswith("order\t0\t0\t1\t1\t1\t1\t")


def test_a_workflow_is_shown(perdure: Perdure) -> None:
    output = perdure("workflows", "show", "order").stdout.splitlines()
    assert output[:2] == ["name        order", "counts"]
    assert "  completed  1" in output
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


def test_a_queue_is_paused_and_resumed(perdure: Perdure) -> None:
    result = perdure("queues", "pause", "emails", "--why", "spam")
    assert "Queue emails is paused. Takes effect within 10 seconds." in result.stdout
    assert "paused spam" in perdure("queues", "list").stdout
    assert json.loads(perdure("queues", "show", "emails", "-o", "json").stdout)["paused"]
    perdure("queues", "resume", "emails")
    assert "paused" not in perdure("queues", "list").stdout


def test_a_limit_is_changed_and_restored(perdure: Perdure) -> None:
    assert "is 20." in perdure("queues", "limit", "emails", "20").stdout
    result = perdure("queues", "limit", "emails", "--of", "key_rate", "--why", "as before")
    assert "The limit key_rate of emails is as declared." in result.stdout
    perdure("queues", "limit", "emails", "0", code=2)
    perdure("queues", "limit", "emails/acme", "1", code=2)


def test_limits_of_live_workers_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_app(tmp_path)
    app = tmp_path / "orders.py"
    text = app.read_text().replace('@workflow("order"', '@workflow("order", queue=EMAILS', 1)
    app.write_text(f"from perdure import Queue, Rate\n{EMAILS}\n{text}")
    monkeypatch.chdir(tmp_path)
    with background("worker", "orders:runtime"):
        wait_for(lambda: run("queues", "limits").stdout)
        assert run("queues", "limits").stdout == (
            "emails\tconcurrency 0/50\t50\nemails\trate 0/10 per 60 s\t10\n"
        )
        assert "concurrency 0/50, rate 0/10 per 60 s" in run("queues", "list").stdout


@pytest.mark.parametrize("group", ["workflows", "queues", "schedules", "workers", "bulk"])
def test_a_group_without_a_subcommand_lists(perdure: Perdure, group: str) -> None:
    assert perdure(group, "-o", "json").stdout == perdure(group, "list", "-o", "json").stdout
    assert f"Usage: perdure {group}" in perdure(group, "--help").stdout


def test_without_workers_the_list_is_empty(perdure: Perdure) -> None:
    assert perdure("workers", "list").stdout == ""
    assert perdure("workers", "--color", "always").stderr == "There are none.\n"
    perdure("workers", "show", "nope", code=4)
    perdure("workers", "drain", "nope", code=5)


def test_a_worker_is_shown_and_drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_app(tmp_path)
    monkeypatch.chdir(tmp_path)
    with background("worker", "orders:runtime") as worker:
        wait_for(lambda: run("workers", "list").stdout)
        [row] = json.loads(run("workers", "list", "-o", "json").stdout)
        assert (row["state"], row["pid"], row["slots"]) == ("live", worker.pid, 100)
        output = run("workers", "show", row["id"]).stdout
        assert f"id          {row['id']}\nstate       live\n" in output
        assert run("workers", "drain", row["id"], "--why", "deploy").returncode == 0
        assert worker.wait(30) == 0
