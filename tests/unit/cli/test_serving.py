"""Commands that serve or open the dashboard, as processes."""

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

import pytest

from tests.unit.cli.processes import APP, background, run
from tests.unit.cli.test_worker import free_port


@pytest.fixture(autouse=True)
def browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the browser by a script that writes down what it is asked to open."""
    script, opened = tmp_path / "browser", tmp_path / "opened"
    script.write_text(f"#!/bin/sh\necho $1 >> {opened}\n")
    script.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(script))
    monkeypatch.chdir(tmp_path)
    return opened


def status_of(url: str) -> int:
    """Return the status of a page."""
    try:
        with urllib.request.urlopen(url) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_the_dashboard_opens_with_the_url_that_is_printed() -> None:
    with background("dashboard", "--port", str(free_port())) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        assert status_of(url.partition("?")[0]) == 403
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(url) as response:
            assert (response.status, "token" in response.url) == (200, False)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0


def test_with_an_app_the_dashboard_checks_payloads(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(APP)
    for options in ((), ("--app", "program:runtime")):
        page = page_of("/workflows/order/do/start", "dashboard", *options)
        assert ("does not know the types" in page) == (not options)


def page_of(path: str, *command: str) -> str:
    """Return a page of a dashboard."""
    with background(*command, "--port", str(free_port())) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        opener.open(url).close()
        with opener.open(urljoin(url, path)) as response:
            return str(response.read().decode())


def test_other_machines_need_auth() -> None:
    assert run("dashboard", "--host", "0.0.0.0").returncode == 2


def test_a_port_in_use_is_explained() -> None:
    with background("dashboard", "--port", str(port := free_port())) as server:
        assert server.stdout is not None
        server.stdout.readline()
        for command in ("dashboard", "demo"):
            second = run(command, "--port", str(port))
            assert (second.returncode, second.stdout) == (2, "")
            assert "Another process uses it. Choose another port" in second.stderr
            assert "Filling" not in second.stderr


def test_open_opens_the_page_of_a_run(browser: Path) -> None:
    assert run("open", "order-1", "--url", "https://ops.example/perdure").returncode == 0
    assert browser.read_text() == "https://ops.example/perdure/runs/order-1\n"


def test_an_id_may_contain_anything(browser: Path) -> None:
    run("open", "a/b?c")
    assert browser.read_text().startswith("http://127.0.0.1:8765/runs/~")


@pytest.mark.slow
def test_the_demo_runs_a_shop() -> None:
    with background("demo", "--port", str(free_port())) as demo:
        assert demo.stdout is not None
        url = demo.stdout.readline().split()[-1]
        assert status_of(url.partition("?")[0]) == 403
        demo.send_signal(signal.SIGINT)
        assert demo.wait(30) == 0


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"no {{name}}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = ["perdure", *{arguments!r}]
from perdure.cli import main
main()
"""


@pytest.mark.parametrize(
    ("missing", "arguments", "install"),
    [("click", ["ls"], "perdure[cli]"), ("starlette", ["dashboard"], "perdure[dashboard]")],
)
def test_what_is_missing_is_named(missing: str, arguments: list[str], install: str) -> None:
    code = WITHOUT.format(missing=[missing], arguments=["--store", "memory://", *arguments])
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode != 0
    assert f"pip install '{install}'" in process.stderr
    assert "Traceback" not in process.stderr
