"""Commands that change runs."""

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Perdure

BANK = """
from dataclasses import dataclass
from perdure import Runtime, workflow

@dataclass
class Transfer:
    cents: int
    to: str

@workflow("transfer")
async def transfer(step, payload: Transfer) -> None:
    pass

runtime = Runtime("sqlite:///shop.db", workflows=[transfer])
"""


def status(perdure: Perdure, run_id: str) -> str:
    run: dict[str, str] = json.loads(perdure("ls", run_id, "-o", "jsonl").stdout)
    return run["status"]


def test_a_verb_says_what_it_did_and_who_is_recorded(perdure: Perdure) -> None:
    result = perdure("cancel", "asleep", "--why", "ordered twice")
    assert (result.stdout, result.stderr) == ("asleep: Cancelled.\n", "Recorded as ana.\n")
    assert status(perdure, "asleep") == "cancelled"


def test_an_act_has_by_via_and_why(perdure: Perdure) -> None:
    perdure("pause", "asleep", "--why", "outage", "--by", "eva")
    [act] = json.loads(perdure("acts", "-o", "json").stdout)["acts"]
    assert (act["by"], act["via"], act["verb"], act["why"]) == ("eva", "cli", "pause", "outage")


def test_ids_come_from_stdin(perdure: Perdure) -> None:
    result = perdure("cancel", "-", "-o", "ids", input="asleep\nasking\n")
    assert result.stdout == "asleep\nasking\n"


def test_a_refusal_among_many_does_not_stop_the_others(perdure: Perdure) -> None:
    result = perdure("retry", "done", "broken", code=5)
    assert result.stdout.startswith("broken: ")
    assert "done: retry was refused" in result.stderr


def test_a_refusal_is_code_5(perdure: Perdure) -> None:
    assert "it is completed" in perdure("cancel", "done", code=5).stderr


def test_a_refusal_names_the_command(perdure: Perdure) -> None:
    error = perdure("resume", "done", code=5).stderr
    assert error == "perdure: resume was refused for run 'done': it is completed, not paused\n"
    assert "asleep: resume was refused" in perdure("resume", "asleep", "done", code=5).stderr


def test_pause_and_resume(perdure: Perdure) -> None:
    perdure("pause", "asleep")
    assert status(perdure, "asleep") == "paused"
    perdure("resume", "asleep")
    assert status(perdure, "asleep") == "queued"


def test_signal_takes_pairs(perdure: Perdure) -> None:
    perdure("signal", "asking", "approved", "by=ana", "rank:=3")
    steps = json.loads(perdure("show", "asking", "-o", "json").stdout)["steps"]
    assert steps[-1]["value"] == '{"by": "ana", "rank": 3}'


def test_complete_step_takes_json(perdure: Perdure) -> None:
    result = perdure("complete-step", "broken", "ship", '"parcel 8"', "--why", "ticket 4411")
    text = "broken: Step 'ship' completed by hand. A worker will continue the run.\n"
    assert result.stdout == text
    step = json.loads(perdure("show", "broken", "--step", "ship", "-o", "json").stdout)
    assert (step["value"], step["step"]["by"]) == ("parcel 8", "ana")


def test_completing_a_step_that_has_no_record_says_so(perdure: Perdure) -> None:
    result = perdure("complete-step", "asleep", "shipp", "1", "--why", "a typing error")
    assert "It had no record, so this is used when the run calls it" in result.stdout


def test_a_string_without_quotes_is_explained(perdure: Perdure) -> None:
    error = perdure("complete-step", "broken", "ship", "parcel", "--why", "x", code=2).stderr
    assert """value: expected JSON, got 'parcel' (str). Write a string as '"parcel"'""" in error


@pytest.mark.parametrize("verb", ["skip-step", "retry-step", "rewind"])
def test_verbs_on_a_step(perdure: Perdure, verb: str) -> None:
    assert perdure(verb, "broken", "ship", "--why", "ticket").stdout.startswith("broken: ")


def test_fail_step_takes_a_message(perdure: Perdure) -> None:
    perdure("fail-step", "broken", "ship", "lost at sea", "--why", "ticket")
    assert "lost at sea" in perdure("show", "broken").stdout


@pytest.mark.parametrize("arguments", [("delete", "done"), ("rewind", "done", "charge")])
def test_a_reason_is_required_where_data_is_overridden(
    perdure: Perdure, arguments: tuple[str, ...]
) -> None:
    assert "--why" in perdure(*arguments, code=2).stderr


def test_delete_removes_the_run(perdure: Perdure) -> None:
    perdure("delete", "done", "--why", "asked for by the customer")
    perdure("show", "done", code=4)


def test_a_dry_run_changes_nothing(perdure: Perdure) -> None:
    assert "1 dropped" in perdure("rewind", "done", "ship", "--dry-run").stdout
    assert status(perdure, "done") == "completed"


def test_start_creates_a_run(perdure: Perdure) -> None:
    perdure("start", "order", "carrier=up", "--id", "new", "--tag", "customer=acme")
    facts = json.loads(perdure("show", "new", "-o", "json").stdout)["facts"]
    assert (facts["payload"], facts["run"]["tags"]) == ({"carrier": "up"}, {"customer": "acme"})


def test_start_warns_if_no_worker_knows_the_workflow(perdure: Perdure) -> None:
    result = perdure("start", "ordr", "{}", "--id", "new")
    assert (result.stdout, "No worker is running" in result.stderr) == ("Started new.\n", True)


def test_start_waits_until_a_timeout(perdure: Perdure) -> None:
    perdure("start", "order", "{}", "--wait", "--timeout", "0.1s", code=124)


def test_an_existing_id_is_refused(perdure: Perdure) -> None:
    result = perdure("start", "order", "x=1", "--id", "done", code=5)
    assert "choose another --id" in result.stderr


def test_with_an_app_the_payload_is_checked_first(perdure: Perdure) -> None:
    app = ("--app", "tests.unit.cli.shop:runtime")
    assert "payload" in perdure(*app, "start", "order", "[1]", code=2).stderr


def test_a_string_in_place_of_a_number_gets_the_advice_to_write_json(
    perdure: Perdure, tmp_path: Path
) -> None:
    (tmp_path / "bank.py").write_text(BANK)
    app = ("--app", "bank:runtime", "start", "transfer")
    error = perdure(*app, "cents=42", "to=ana", code=2).stderr
    assert error.endswith("; write cents:=42 for a value that is not a string\n")
    assert "; write" not in perdure(*app, "cents=much", "to=7", code=2).stderr


def test_with_an_app_a_misspelled_workflow_is_not_started(perdure: Perdure) -> None:
    app = ("--app", "tests.unit.cli.shop:runtime")
    result = perdure(*app, "start", "ordr", "{}", code=4)
    assert "has no workflow 'ordr'; did you mean order?" in result.stderr


def test_fork_keeps_the_records_before_a_step(perdure: Perdure) -> None:
    perdure("fork", "broken", "--at", "ship", "--id", "again", "--payload", "{}", "--why", "x")
    facts = json.loads(perdure("show", "again", "-o", "json").stdout)
    assert [step["key"] for step in facts["steps"]] == ["charge"]


def test_edit_payload_replaces_the_input_of_a_new_run(perdure: Perdure) -> None:
    perdure("start", "order", "{}", "--id", "new")
    perdure("edit-payload", "new", "carrier=up", "--why", "typo")
    assert '"carrier": "up"' in perdure("show", "new", "-o", "json").stdout


def test_wake_ends_a_sleep(perdure: Perdure) -> None:
    perdure("wake", "asleep")
    assert "Due" in perdure("why", "asleep").stdout


@pytest.mark.parametrize(
    "arguments",
    [("cancel",), ("cancel", "a", "--where", "b"), ("signal", "asking"), ("rewind", "a")],
)
def test_wrong_arguments_are_explained(perdure: Perdure, arguments: tuple[str, ...]) -> None:
    assert "Usage: perdure" in perdure(*arguments, code=2).stderr


def test_a_run_is_cancelled_without_undoing_its_steps(perdure: Perdure) -> None:
    result = perdure("cancel", "asleep", "--no-undo")
    assert result.stdout == "asleep: Cancelled.\n"
