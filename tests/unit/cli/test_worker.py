"""`perdure worker` as a process."""

import json
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.unit.cli.processes import background, run, wait_for, write_app


@pytest.fixture(autouse=True)
def _app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_app(tmp_path)
    monkeypatch.chdir(tmp_path)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_once_continues_what_is_due_and_stops(tmp_path: Path) -> None:
    run("start", "order", "{}", "--id", "one")
    result = run("worker", "orders:runtime", "--once")
    assert (result.returncode, (tmp_path / "shipped").read_text()) == (0, "1\n")


def test_until_idle_waits_for_runs_that_become_due(tmp_path: Path) -> None:
    for number in range(3):
        run("start", "order", "{}", "--id", f"run-{number}")
    assert run("worker", "orders:runtime", "--until-idle").returncode == 0
    assert (tmp_path / "shipped").read_text() == "1\n" * 3


def test_the_first_sigterm_drains(tmp_path: Path) -> None:
    run("start", "slow", "0.5", "--id", "slow")
    with background("worker", "orders:runtime") as worker:
        wait_for((tmp_path / "began").exists)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
    assert "completed" in run("ls", "slow").stdout


def test_the_second_sigterm_releases_runs_at_once(tmp_path: Path) -> None:
    run("start", "slow", "60", "--id", "slow")
    with background("worker", "orders:runtime") as worker:
        wait_for((tmp_path / "began").exists)
        worker.send_signal(signal.SIGTERM)
        time.sleep(0.5)  # two signals that arrive together are one
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(5) == 0
    assert json.loads(run("ls", "slow", "-o", "jsonl").stdout)["owner"] is None


def test_health_is_answered_until_the_worker_drains(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    run("start", "slow", "1", "--id", "slow")
    with background("worker", "orders:runtime", "--health", address) as worker:
        wait_for((tmp_path / "began").exists)
        with urllib.request.urlopen(f"http://{address}/") as response:
            assert response.status == 200
        worker.send_signal(signal.SIGTERM)
        with pytest.raises(urllib.error.HTTPError, match="503") as caught:
            wait_for(lambda: bool(urllib.request.urlopen(f"http://{address}/").close()))
        caught.value.close()


def test_a_worker_object_keeps_its_own_concurrency(tmp_path: Path) -> None:
    path = tmp_path / "orders.py"
    path.write_text(path.read_text() + "\nfrom perdure import Worker\nworker = Worker(runtime)\n")
    assert run("worker", "orders:worker", "--until-idle").returncode == 0
    assert run("worker", "orders:worker", "--concurrency", "3").returncode == 2


def test_a_wrong_health_address_is_usage() -> None:
    assert run("worker", "orders:runtime", "--health", "9000").returncode == 2
