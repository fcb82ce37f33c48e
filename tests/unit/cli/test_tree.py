"""The command tree: help, lazy imports, and one command for every question and verb."""

import os
import resource
import subprocess
import sys

import click
import pytest

from perdure.cli.app import COMMANDS, SECTIONS, load
from perdure.insights import Insights
from perdure.operations import Operations
from tests.unit.cli.conftest import Perdure

HEAVY = ("asyncpg", "perdure.engine", "perdure.insights", "rich", "starlette")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_begins_the_help(name: str) -> None:
    help = load(COMMANDS[name]).help or ""
    assert help.partition("\n")[0].startswith(COMMANDS[name].summary.rstrip("."))


def test_help_lists_every_command(perdure: Perdure) -> None:
    text = perdure("--help").stdout
    assert [name for name in COMMANDS if f"  {name}  " not in text] == []
    assert [section for section in SECTIONS if f"{section}:\n" not in text] == []


def test_help_imports_neither_the_engine_nor_rich() -> None:
    code = f"""
import sys
from perdure.cli.app import root
root(["--help"], standalone_mode=False)
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stderr == "[]\n"


@pytest.mark.alone
def test_help_is_fast() -> None:
    # As an installed package has it, the bytecode is on disk after the first call.
    env = {name: value for name, value in os.environ.items() if "BYTECODE" not in name}

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "perdure", "--help"]
        subprocess.run(command, env=env, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) < 0.15


def test_an_option_has_a_variable(perdure: Perdure) -> None:
    assert "PERDURE_STORE" in perdure("--help").stdout
    assert "PERDURE_LIST_LIMIT" in perdure("list", "--help").stdout
    assert perdure("list", "-o", "ids", env={"PERDURE_LIST_LIMIT": "1"}).stdout == "asking\n"


def test_an_option_before_the_command_is_kept(perdure: Perdure) -> None:
    env = {"PERDURE_OUTPUT": "json"}
    assert perdure("-o", "ids", "list", "done", env=env).stdout == "done\n"


def test_an_unknown_command_is_usage(perdure: Perdure) -> None:
    assert "No such command 'nope'" in perdure("nope", code=2).stderr


def words_of(command: click.Command, name: str) -> set[str]:
    """Return the names of a command and its own commands, as methods would be called."""
    if isinstance(command, click.Group):
        return {f"{sub}_{name.rstrip('s')}" for sub in command.commands} | {name}
    return {name}


KNOWN_AS = {
    "runs": "list",
    "run": "show",
    "steps": "show",
    "step": "show",
    "overview": "top",
    "changes": "top",
    "download": "export",
    "expand": "list",
    "restore_acts": "doctor",
    "check": "doctor",
    "bulks": "bulk",
    "queue": "queues",
    "limits": "limits_queue",
    "set_limit": "limit_queue",
    "schedule": "schedules",
    "worker": "workers",
    "workflow": "workflows",
    "unpause": "resume",
    "unpause_workflow": "resume_workflow",
    "unpause_queue": "resume_queue",
    "unpause_schedule": "resume_schedule",
    "prune": "prune_store",
    "copy_from": "copy_store",
    "import_run": "import",
    "preview": "rewind",
    "count_bulk": "bulk",
    "retention": "prune_store",
}
# Not for operators: parts of other answers, and of the machinery behind them.
WITHOUT_COMMAND = {
    *("act", "close", "complete", "history", "new_id", "note", "note_reveal", "parse", "revisions"),
}


@pytest.mark.parametrize("asked", [Insights, Operations])
def test_every_question_and_verb_has_a_command(asked: type) -> None:
    names = {word for name in COMMANDS for word in words_of(load(COMMANDS[name]), name)}
    methods = {
        name for name in dir(asked) if not name.startswith("_") and callable(getattr(asked, name))
    }
    missing = {KNOWN_AS.get(name, name).replace("_", "-") for name in methods - WITHOUT_COMMAND}
    assert missing - {name.replace("_", "-") for name in names} == set()
