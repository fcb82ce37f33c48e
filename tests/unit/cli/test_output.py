"""What reaches a terminal, a pipe or a program."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.cli.formatting import printable, printable_json
from tests.unit.cli.conftest import Perdure

COMMAND = (sys.executable, "-m", "perdure")
COLORS = re.compile(r"\x1b\[[0-9;]*m")
HOSTILE = "\x1b]0;owned\x07\x9b31m\u202eevil\r\n\tid"
VISIBLE = r"\x1b]0;owned\x07\x9b31m\u202eevil\r\n\tid"

TABLE = """\
ID      WORKFLOW  STATUS       UPDATED               STEPS  DETAIL
asking  order v1  ◇ waiting    2024-01-01T00:00:04Z  1      for approved
asleep  order v1  ◷ suspended  2024-01-01T00:00:02Z  1      wakes 2124-01-02T00:00:…
broken  order v1  ✗ failed     2024-01-01T00:00:01Z  2      CarrierDown: 503 from c…
done    order v1  ✓ completed  2024-01-01T00:00:00Z  2
"""


def table(text: str) -> str:
    """Return a table without colours and spaces at the ends of lines."""
    return "".join(f"{line.rstrip()}\n" for line in COLORS.sub("", text).splitlines())


@given(st.text(max_size=40))
def test_printable_text_has_no_control_characters(text: str) -> None:
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", printable(text))


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_printable_json_means_the_same(value: Any) -> None:
    text = printable_json(json.dumps(value, ensure_ascii=False, indent=1))
    assert json.loads(text) == value
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)


def test_control_characters_are_shown_not_executed(perdure: Perdure) -> None:
    perdure("start", "order", json.dumps({"note": HOSTILE}), "--id", HOSTILE, "--why", HOSTILE)
    for command in (["ls"], ["show", HOSTILE], ["acts"], ["why", HOSTILE], ["ls", "-o", "ids"]):
        result = perdure(*command)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", result.stdout.replace("\t", ""))
    assert VISIBLE in perdure("ls").stdout
    assert VISIBLE in perdure("ls", "--color", "always", env={"COLUMNS": "200"}).stdout


def test_json_keeps_control_characters_as_escapes(perdure: Perdure) -> None:
    perdure("start", "order", "--id", HOSTILE)
    text = perdure("ls", "-o", "jsonl").stdout.splitlines()[0]
    assert json.loads(text)["id"] == HOSTILE
    assert "\\u009b" in text


def test_a_terminal_gets_a_table(perdure: Perdure) -> None:
    output = perdure("ls", "--color", "always", "--time", "iso", env={"COLUMNS": "84"}, color=True)
    assert table(output.stdout) == TABLE
    assert "\x1b[31m✗ failed" in output.stdout


def test_a_narrow_terminal_shows_the_main_columns(perdure: Perdure) -> None:
    output = table(perdure("ls", "--color", "always", env={"COLUMNS": "40"}, color=True).stdout)
    assert output.splitlines()[0] == "ID      STATUS       DETAIL"
    assert max(map(len, output.splitlines())) <= 40


def test_an_id_is_not_cut_to_show_minor_columns(perdure: Perdure) -> None:
    run_id = f"order:{'0123456789' * 4}"
    perdure("start", "order", "--id", run_id)
    output = table(perdure("ls", "--color", "always", env={"COLUMNS": "80"}, color=True).stdout)
    assert f"\n{run_id}  ◌ queued" in output
    assert "CarrierDown: 503 f…" in output


def test_minor_columns_are_left_out_from_the_right(perdure: Perdure) -> None:
    options = ("--color", "always", "--time", "iso")
    output = table(perdure("ls", *options, env={"COLUMNS": "80"}, color=True).stdout)
    assert output.splitlines()[0].split() == ["ID", "WORKFLOW", "STATUS", "UPDATED", "DETAIL"]


@pytest.mark.parametrize("width", ["120", "60"])
def test_the_query_of_an_error_is_not_cut(perdure: Perdure, width: str) -> None:
    options = ("errors", "--window", "3650d")
    query = json.loads(perdure(*options, "-o", "json").stdout)["groups"][0]["query"]
    query = re.sub(r"since:.*", "since:", query)
    output = perdure(*options, "--color", "always", env={"COLUMNS": width}, color=True).stdout
    [row] = table(output).splitlines()[1:]
    assert re.search(rf'{re.escape(query)}"\S+Z"$', row)


def test_an_empty_list_of_errors_is_one_message(perdure: Perdure) -> None:
    output = perdure("errors", "--color", "always").stderr
    assert output == "No failures in the last 24h.\n"


def test_no_color_is_respected(perdure: Perdure) -> None:
    env = {"NO_COLOR": "1", "COLUMNS": "40"}
    assert "\x1b[3" not in perdure("show", "broken", env=env, color=True).stdout


def test_options_of_perdure_count_after_the_command_too(perdure: Perdure) -> None:
    assert "\x1b[" not in perdure("show", "broken", "--color", "never", color=True).stdout
    env = {**os.environ, "PERDURE_STORE": "sqlite:///shop.db"}
    logged = subprocess.run((*COMMAND, "ls", "-vv"), env=env, capture_output=True, check=True)
    assert b"DEBUG" in logged.stderr


def test_a_stream_without_utf8_shows_words(url: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PERDURE_STORE": url}
    output = subprocess.run((*COMMAND, "show", "done"), env=env, capture_output=True, check=True)
    assert b"completed charge" in output.stdout


def test_times_in_a_pipe_are_exact_and_on_a_terminal_relative(perdure: Perdure) -> None:
    assert "2024-01-01T00:00:00Z" in perdure("ls", "done").stdout
    assert "days ago" in perdure("ls", "done", "--color", "always", env={"COLUMNS": "99"}).stdout
    assert "2024-01-01 " in perdure("ls", "done", "--time", "local", env={"TZ": "UTC"}).stdout


def test_a_closed_pipe_ends_the_command_quietly(url: str) -> None:
    env = {**os.environ, "PERDURE_STORE": url}
    pipeline = f"{sys.executable} -m perdure ls | true; exit ${{PIPESTATUS[0]}}"
    process = subprocess.run(["bash", "-c", pipeline], env=env, capture_output=True, check=False)
    assert process.stderr == b""
    assert process.returncode in (0, 1)


def test_quiet_still_prints_data(perdure: Perdure) -> None:
    result = perdure("cancel", "asleep", "-q")
    assert (result.stdout.startswith("asleep: "), result.stderr) == (True, "")


def test_an_answer_in_json_is_indented(perdure: Perdure) -> None:
    assert perdure("why", "broken", "-o", "json").stdout.startswith('{\n  "situation": "failed"')
