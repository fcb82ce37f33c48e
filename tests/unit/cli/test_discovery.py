"""Finding the store and the application."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from perdure.cli.app import root

APP = """
from perdure import Runtime, Worker, workflow

@workflow("greet")
async def greet(step, name: str) -> str:
    return await step("greet", lambda: "hello " + name)

runtime = Runtime("sqlite:///shop.db", workflows=[greet])
same = runtime

def make():
    return Worker(runtime)

async def make_async():
    return runtime

number = 7

class Asgi:
    async def __call__(self, scope, receive, send): ...

web = Asgi()
"""
SECRET = "postgresql://ana:s3cret@127.0.0.1:1/shop"


def call(*arguments: str, input: str | None = None) -> Result:
    """Call the command, and forget the modules that it imports from the working directory."""
    path = list(sys.path)
    try:
        return CliRunner().invoke(root, arguments, env={"NO_COLOR": "1"}, input=input)
    finally:
        sys.path[:] = path
        for name in ("orders", "perdure_app", "workflows", "app", "main"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "app", ["orders:runtime", "orders:make", "orders:make_async", "orders", "orders:make.__call__"]
)
def test_an_app_is_a_runtime_a_worker_or_a_function(url: str, tmp_path: Path, app: str) -> None:
    (tmp_path / "orders.py").write_text(APP)
    assert call("--app", app, "start", "greet", '"ana"').exit_code == 0
    assert call("--app", app, "worker", "--once").exit_code == 0


@pytest.mark.parametrize("module", ["perdure_app", "workflows", "app", "main"])
def test_the_only_runtime_of_a_usual_module_is_found(url: str, tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text(APP)
    result = call("worker", "--once")
    assert result.exit_code == 0
    assert f"Using {module}:same; pass --app to choose another." in result.stderr


def test_pyproject_names_app_and_store(url: str, tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text(APP)
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.perdure]\napp = "orders:runtime"\nstore = "{url}"\n'
    )
    assert call("worker", "--once").exit_code == 0
    assert call("ls", "-o", "ids", "done").stdout == "done\n"


@pytest.mark.parametrize("url", ["sqlite:///shp.db", "file:///nowhere/runs"])
def test_reading_creates_no_store(tmp_path: Path, url: str) -> None:
    result = call("--store", url, "ls")
    assert (result.exit_code, f"there is no store {url}" in result.stderr) == (3, True)
    assert not [*tmp_path.iterdir()]


def test_without_a_store_that_of_the_app_is_used(url: str, tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text(APP)
    assert call("--app", "orders:runtime", "ls", "-o", "ids", "done").stdout == "done\n"


def test_every_part_of_doctor_works_on_the_store_of_the_app(url: str, tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text(APP)
    result = call("--app", "orders:runtime", "doctor")
    assert (result.exit_code, result.stderr) == (0, "")


def test_without_a_store_that_of_the_app_in_this_folder_is_used(url: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    result = call("ls", "-o", "ids", "done")
    assert (result.stdout, "Using app:same" in result.stderr) == ("done\n", True)
    assert "Expected `str`, got `int`" in call("start", "greet", "7").stderr


def test_a_store_in_memory_cannot_be_inspected(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP.replace("sqlite:///shop.db", "memory://"))
    assert "only its own process sees its runs" in call("ls").stderr


def test_a_program_without_a_runtime_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("open('imported', 'w')\n")
    assert "PERDURE_STORE" in call("ls").stderr
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("app", "code", "text"),
    [
        ("nope:runtime", 4, "there is no module 'nope'"),
        ("orders:nope", 4, "has no attribute 'nope'"),
        ("orders:number", 2, "orders:number is not an application but 'int'"),
        ("orders:web", 2, "orders:web is not an application but 'Asgi'"),
        ("orders:web", 2, "orders has orders:same"),
        ("orders:greet", 2, "orders:greet is not an application but 'Definition'"),
    ],
)
def test_a_wrong_app_is_explained(tmp_path: Path, app: str, code: int, text: str) -> None:
    (tmp_path / "orders.py").write_text(APP)
    result = call("worker", app)
    assert (result.exit_code, text in result.stderr) == (code, True)


def test_code_that_cannot_be_imported_shows_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text("import carrier\n")
    (tmp_path / "carrier.py").write_text("from perdure import Runtime\nRuntime(workflows=7)\n")
    result = call("worker", "orders:runtime")
    traceback = result.stderr.splitlines()
    assert 'orders.py", line 1' in traceback[1]
    assert 'carrier.py", line 2' in traceback[3]
    assert "orders cannot be imported" in result.stderr


def test_a_script_gets_advice_on_how_to_become_a_module(tmp_path: Path) -> None:
    script = """
import asyncio

main = asyncio.sleep(0)
try:
    asyncio.run(main)
finally:
    main.close()
"""
    (tmp_path / "orders.py").write_text(script)
    assert 'if __name__ == "__main__":' in call("worker", "orders").stderr


def test_without_app_and_store_the_error_says_what_to_do() -> None:
    assert "PERDURE_APP" in call("worker").stderr
    result = call("ls")
    assert (result.exit_code, "PERDURE_STORE" in result.stderr) == (2, True)


def test_a_broken_pyproject_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool")
    assert "pyproject.toml cannot be read" in call("ls").stderr


def test_the_store_comes_from_a_file_or_stdin(url: str, tmp_path: Path) -> None:
    (tmp_path / "url").write_text(f"{url}\n")
    assert call("--store", "@url", "ls", "done", "-o", "ids").stdout == "done\n"
    assert call("--store", "-", "ls", "done", "-o", "ids", input=url).stdout == "done\n"


def test_ids_may_follow_the_url_on_stdin(url: str) -> None:
    result = call("--store", "-", "cancel", "-", "-o", "ids", input=f"{url}\nasleep\nasking\n")
    assert result.stdout == "asleep\nasking\n"


def test_a_path_is_not_a_url() -> None:
    assert "A SQLite file is sqlite:///shop.db" in call("--store", "shop.db", "ls").stderr


def test_options_may_follow_the_command(url: str) -> None:
    assert call("ls", "done", "--store", url, "-o", "ids").stdout == "done\n"


@pytest.mark.parametrize(
    "url",
    [SECRET, "redis://:s3cret@host", "libsql://host?authToken=s3cret", "a://b?password=s3cret"],
)
def test_a_password_in_an_argument_is_refused_and_not_printed(url: str) -> None:
    result = call("ls", "--store", url)
    assert (result.exit_code, "s3cret" in result.output) == (2, False)
    assert "PERDURE_STORE" in result.stderr


def test_a_password_is_never_printed() -> None:
    result = CliRunner().invoke(
        root, ["ls"], env={"PERDURE_STORE": SECRET.replace("postgresql", "nope")}
    )
    assert (result.exit_code, "s3cret" in result.output) == (2, False)


def test_a_store_that_cannot_be_reached_is_code_3() -> None:
    result = CliRunner().invoke(root, ["ls"], env={"PERDURE_STORE": SECRET})
    assert (result.exit_code, "s3cret" in result.output) == (3, False)
