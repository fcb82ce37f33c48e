"""Every program in `examples/` does what its docstring says."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / name), *arguments]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output_of(name: str, *arguments: str) -> str:
    process = subprocess.run(
        command(name, *arguments), capture_output=True, text=True, check=False, timeout=60
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.slow
def test_the_first_program_of_the_readme_survives(here: Path) -> None:
    """After it was killed behind the charge, it only ships, as the page shows."""
    readme = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"```python\n(import asyncio, os.*?)```", readme, re.DOTALL)
    Path("shop.py").write_text(program)
    killed = subprocess.run(
        [sys.executable, "shop.py", "--crash"], capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert killed.stdout == b"charging 4200\n"
    finished = subprocess.run([sys.executable, "shop.py"], capture_output=True, check=True)
    assert finished.stdout.decode() in readme
    assert finished.stdout == b"shipping, with receipt 1\nOk('parcel 7')\n"
    again = subprocess.run([sys.executable, "shop.py"], capture_output=True, check=True)
    assert again.stdout == b"Ok('parcel 7')\n"


@pytest.mark.slow
def test_checkout_survives_being_killed(here: Path) -> None:
    """It is killed while it charges, and does not reserve a second time."""
    process = subprocess.Popen(command("checkout.py"), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as lines:
        assert next(lines) == "reserving a bicycle\n"
        assert next(lines) == "charging 499.00\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert output_of("checkout.py").splitlines() == [
        "charging 499.00",
        "shipping, with receipt 1001",
        "done: parcel 7",
    ]


@pytest.mark.slow
def test_approval_waits_across_processes(here: Path) -> None:
    """Submitting, approving and showing each run in their own process."""
    assert output_of("approval.py", "submit", "train", "120") == "report-1: waiting\n"
    approved = output_of("approval.py", "approve", "report-1", "--by", "eva").splitlines()
    assert approved[:2] == ["approved by eva", "paying out 120 €"]
    assert approved[2] == "report-1: completed transfer of 120 €"
    assert output_of("approval.py", "show", "report-1") == approved[2] + "\n"
    assert "report-2: completed" in output_of("approval.py", "submit", "coffee", "5")


@pytest.mark.slow
def test_many_workers_execute_each_run_once(here: Path) -> None:
    assert output_of("many_workers.py").startswith("100 pictures, 1 time each; shared as (")


@pytest.mark.slow
def test_shop_prints_the_runs_by_status(here: Path) -> None:
    lines = output_of("shop.py", "1").splitlines()
    assert any(re.search(r"\d+ completed .* \d+ waiting", line) for line in lines)
    assert any(re.fullmatch(r"worker \d+ started", line) for line in lines)
