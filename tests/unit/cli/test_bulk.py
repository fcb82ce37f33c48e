"""Changes of all runs that match a query."""

import json

from tests.unit.cli.conftest import Perdure


def test_where_changes_all_matches(perdure: Perdure) -> None:
    result = perdure("retry", "--where", "status:failed", "--yes")
    assert result.stdout == "1 retried, 0 refused.\n"


def test_without_a_terminal_yes_is_required(perdure: Perdure) -> None:
    result = perdure("cancel", "--where", "status:waiting,suspended", code=2)
    assert "2 runs match. Cancel them? Pass --yes to do it" in result.stderr


def test_a_dry_run_lists_the_matches(perdure: Perdure) -> None:
    result = perdure("cancel", "--where", "status:waiting", "--dry-run", "-o", "ids")
    assert result.stdout == "asking\n"
    assert "1 run matches. Nothing was changed." in result.stderr
    assert perdure("ls", "status:cancelled", "-o", "ids").stdout == ""


def test_more_matches_than_the_limit_are_refused(perdure: Perdure) -> None:
    arguments = ("cancel", "--where", "workflow:order", "--yes", "--limit", "1")
    assert "more than 1 runs match: pass --limit N or --all" in perdure(*arguments, code=5).stderr
    perdure("cancel", "--where", "status:waiting,suspended", "--yes", "--all")


def test_refused_runs_are_counted_with_reasons(perdure: Perdure) -> None:
    result = perdure("retry", "--where", "status:completed,failed", "--yes", code=5)
    assert result.stdout == "1 retried, 1 refused.\n"
    assert "it is completed" in result.stderr


def test_arguments_of_the_verb_follow_the_query(perdure: Perdure) -> None:
    perdure("signal", "--where", "waiting:approved", "--yes", "approved", "by=ana")
    assert perdure("ls", "waiting:approved", "-o", "ids").stdout == ""


def test_nothing_matches(perdure: Perdure) -> None:
    result = perdure("cancel", "--where", "status:paused", "--yes")
    assert "0 runs match. Nothing was changed." in result.stderr


def test_a_rate_is_runs_per_time(perdure: Perdure) -> None:
    perdure("cancel", "--where", "status:waiting", "--yes", "--rate", "90/min")
    error = perdure("cancel", "--where", "asleep", "--yes", "--rate", "fast", code=2).stderr
    assert "--rate is like 10/s or 90/min, not 'fast'" in error


def test_bulk_operations_are_listed_and_shown(perdure: Perdure) -> None:
    perdure("retry", "--where", "status:failed", "--yes", "--why", "carrier is back")
    [bulk] = json.loads(perdure("bulk", "list", "-o", "json").stdout)
    assert (bulk["verb"], bulk["state"], bulk["done"]) == ("retry", "done", 1)
    assert "carrier is back" in perdure("bulk", "show", bulk["id"]).stdout


def test_a_bulk_operation_that_is_done_cannot_be_resumed(perdure: Perdure) -> None:
    bulk = json.loads(perdure("retry", "--where", "status:failed", "-y", "-o", "json").stdout)
    perdure("bulk", "resume", bulk["id"], code=5)


def test_an_unknown_bulk_operation_is_not_found(perdure: Perdure) -> None:
    perdure("bulk", "show", "nope", code=4)
