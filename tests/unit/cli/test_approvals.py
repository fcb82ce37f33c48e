"""Commands that list approvals and answer them."""

import asyncio
import json
from pathlib import Path

import pytest

from perdure import Runtime, Step, workflow
from perdure.stores import sqlite
from tests.unit.cli import shop
from tests.unit.cli.conftest import Perdure


@workflow("freight")
async def freight(step: Step, tons: int) -> str:
    answer = await step.approval("ship", f"Ship {tons} t?", to="ops", options=("road", "rail"))
    await step.callback("signed")
    return str(answer.choice)


async def seed(path: Path) -> str:
    async with sqlite(path, clock=shop.clock) as store:
        runtime = Runtime(store, workflows=[freight], clock=shop.clock)
        run = await runtime.trigger(freight, 40, run_id="freight-1")
        return run.pending[0].token


async def continue_run(path: Path) -> str:
    async with sqlite(path, clock=shop.clock) as store:
        run = await Runtime(store, workflows=[freight], clock=shop.clock).resume("freight-1")
        return str(run.output)


@pytest.fixture
def token(perdure: Perdure, tmp_path: Path) -> str:
    return asyncio.run(seed(tmp_path / "shop.db"))


def test_a_list_of_runs_shows_what_they_ask(perdure: Perdure, token: str, tmp_path: Path) -> None:
    assert "asks: Ship 40 t?" in perdure("ls").stdout
    perdure("approve", "freight-1", "--choice", "rail")
    asyncio.run(continue_run(tmp_path / "shop.db"))
    assert "asks" not in perdure("ls").stdout


def test_open_approvals_are_listed(perdure: Perdure, token: str) -> None:
    text = perdure("approvals").stdout
    assert text.startswith("freight-1\tship\tops\tShip 40 t?\troad, rail\t")
    assert perdure("approvals", "--to", "ops", "-o", "ids").stdout == "freight-1\n"
    assert "No run waits for an approval." in perdure("approvals", "--to", "x").stderr


def test_the_token_is_not_printed(perdure: Perdure, token: str) -> None:
    nonce = token.partition(".")[0]
    commands = (
        ("approvals",),
        ("show", "freight-1"),
        ("why", "freight-1"),
        ("export", "freight-1"),
    )
    for command in commands:
        assert nonce not in perdure(*command, "-o", "json").stdout


def test_a_run_is_approved_by_its_id(perdure: Perdure, token: str, tmp_path: Path) -> None:
    assert "one of 'road', 'rail'" in perdure("approve", "freight-1", code=2).stderr
    result = perdure("approve", "freight-1", "--choice", "rail", "--why", "cheaper")
    assert result.stdout == ("freight-1: Answered 'ship'. A worker will continue the run.\n")
    assert result.stderr == "Recorded as ana.\n"
    again = perdure("reject", "freight-1", code=5).stderr
    assert "it was answered by ana" in again
    asyncio.run(continue_run(tmp_path / "shop.db"))
    perdure("answer", "freight-1", "ok:=true")
    assert asyncio.run(continue_run(tmp_path / "shop.db")) == "rail"
    verbs = [act["verb"] for act in json.loads(perdure("acts", "-o", "json").stdout)["acts"]]
    assert verbs == ["answer", "approve"]


def test_a_run_is_rejected_by_a_token(perdure: Perdure, token: str) -> None:
    outcome = json.loads(perdure("reject", token, "-o", "json").stdout)
    assert (outcome["run_id"], outcome["verb"]) == ("freight-1", "reject")


def test_a_run_that_asks_nothing_is_refused(perdure: Perdure) -> None:
    assert "it is not waiting for an answer" in perdure("approve", "done", code=5).stderr
    perdure("approve", "nope", code=4)


def test_the_wait_is_shown(perdure: Perdure, token: str) -> None:
    text = perdure("show", "freight-1").stdout
    assert 'waits in "ship" for ops\'s approval: Ship 40 t?' in text
    assert 'Waiting for ops to answer "Ship 40 t?" for' in text
