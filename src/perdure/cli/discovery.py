"""Find the store and the application that a command works with."""

import os
import sys
import tomllib
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import reduce
from importlib import import_module
from inspect import isawaitable, signature
from pathlib import Path
from traceback import format_exception
from types import TracebackType
from typing import Any

import click

from perdure.cli.context import Settings, message
from perdure.cli.failures import NOT_FOUND, USAGE, Failure
from perdure.runtime import Runtime
from perdure.store import Store, capabilities
from perdure.stores import open_store
from perdure.worker import Worker

MODULES = ("perdure_app", "workflows", "app", "main")
"""The modules of the working directory that are searched for a runtime."""

NO_STORE = (
    "no store: pass --store URL, set PERDURE_STORE, or write it to pyproject.toml as store under "
    "[tool.perdure]; or use that of an application: pass --app MODULE:NAME"
)
NO_APP = (
    "no application: pass --app MODULE:NAME, set PERDURE_APP, or write it to pyproject.toml as app "
    f"under [tool.perdure]; there is no Runtime in {', '.join(f'{name}.py' for name in MODULES)}"
)
MAIN_GUARD = '; write what it runs below if __name__ == "__main__":'


def configured(name: str) -> str | None:
    """Return a setting of `[tool.perdure]` in the nearest pyproject.toml."""
    current = Path.cwd()
    for folder in (current, *current.parents):
        if (path := folder / "pyproject.toml").is_file():
            try:
                tool = tomllib.loads(path.read_text("utf-8")).get("tool", {})
            except (OSError, ValueError) as error:
                raise Failure(f"{path} cannot be read: {error}", USAGE) from error
            value = tool.get("perdure", {}).get(name)
            return value if isinstance(value, str) else None
    return None


def store_url(settings: Settings) -> str | None:
    """Return the URL of the store, which may be in a file or on stdin."""
    text = settings.store or configured("store")
    if text == "-":
        # Ids may follow on stdin.
        settings.store = sys.stdin.readline().strip()
        return settings.store
    return url_in(text, "--store") if text else text


def url_in(text: str, option: str) -> str:
    """Return the URL in the value of an option, which may be `@` and the name of a file."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).expanduser().read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise Failure(f"{option} {text}: {error}", USAGE) from error


@asynccontextmanager
async def opened_store(settings: Settings) -> AsyncGenerator[tuple[Store, str], None]:
    """Open the store, and yield it with its URL; the default is the application's store."""
    if url := store_url(settings):
        async with open_store(url) as store:
            yield store, url
    else:
        async with opened_app(settings, NO_STORE) as app:
            runtime = runtime_of(app)
            check_shared(runtime)
            yield runtime.store, runtime.url


def check_shared(runtime: Runtime) -> None:
    """Raise if other processes cannot see the runs of an application."""
    if capabilities(runtime.store).survives == "nothing":
        text = "the application's store is in memory, and only its own process sees its runs"
        raise Failure(text, USAGE)


def runtime_of(app: Runtime | Worker) -> Runtime:
    """Return the runtime of an application."""
    return app.runtime if isinstance(app, Worker) else app


@asynccontextmanager
async def opened_app(
    settings: Settings, missing: str = NO_APP
) -> AsyncGenerator[Runtime | Worker, None]:
    """Import the application, call or enter it if needed, and close its runtime at the end.

    `missing` is the error if there is none.
    """
    name, target = find_app(settings, missing)
    settings.app = name
    if callable(target) and _is_factory(target):
        target = target()
    if isawaitable(target):
        target = await target
    if isinstance(target, Runtime | Worker):
        try:
            yield target
        finally:
            await runtime_of(target).close()
    elif isinstance(target, AbstractAsyncContextManager):
        async with target as app:
            yield _check_app(name, app)
    else:
        _check_app(name, target)


def _is_factory(target: Callable[..., Any]) -> bool:
    """Return whether a target is to be called; an ASGI app or a workflow requires arguments."""
    if isinstance(target, AbstractAsyncContextManager):
        return False
    try:
        signature(target).bind()
    except (TypeError, ValueError):  # ValueError: a built-in without a signature
        return False
    return True


def _check_app(name: str, target: object) -> Runtime | Worker:
    if not isinstance(target, Runtime | Worker):
        kind, module = type(target).__name__, name.partition(":")[0]
        names = ", ".join(f"{module}:{each}" for each in _runtimes_in(_module(module)))
        raise Failure(
            f"{name} is not an application but {kind!r}: expected a Runtime, a Worker, or a "
            "function without arguments or async context manager that returns one"
            + (f". {module} has {names}" if names else ""),
            USAGE,
        )
    return target


def find_app(settings: Settings, missing: str = NO_APP) -> tuple[str, object]:
    """Return the application's name and the object behind it, not called or entered yet."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    if name := settings.app or configured("app"):
        return name, imported(name)
    for module in MODULES:
        if _mentions_runtime(Path(f"{module}.py")):
            names = _runtimes_in(_module(module))
            if len(names) == 1:
                name = f"{module}:{names[0]}"
                message(settings, f"Using {name}; pass --app to choose another.")
                return name, imported(name)
    raise Failure(missing, USAGE)


def is_default_app(name: str) -> bool:
    """Return whether commands without `--app` find this application."""
    if default := os.environ.get("PERDURE_APP") or configured("app"):
        return name == default
    return name.partition(":")[0] in MODULES


def _mentions_runtime(path: Path) -> bool:
    """Return whether a file, which may belong to any program, is worth importing."""
    return path.is_file() and b"runtime" in path.read_bytes().lower()


def imported(name: str) -> object:
    """Return the object that `MODULE:NAME` names."""
    module, _, attribute = name.partition(":")
    module_object = _module(module)
    if not attribute:
        apps = _runtimes_in(module_object)
        if len(apps) != 1:
            names = ", ".join(f"{module}:{each}" for each in apps) or "none"
            raise Failure(f"{module} has {len(apps)} runtimes ({names}): pass MODULE:NAME", USAGE)
        [attribute] = apps
    try:
        lookup: Callable[[Any, str], Any] = getattr
        return reduce(lookup, attribute.split("."), module_object)
    except AttributeError as error:
        raise Failure(f"--app {name}: {error}", NOT_FOUND) from error


def _module(module: str) -> object:
    try:
        return import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and module.startswith(error.name or " "):
            text = f"there is no module {module!r} in {Path.cwd()} or among the installed packages"
            raise Failure(text, NOT_FOUND) from error
        # The user's code is wrong, not the command: the traceback shows where.
        click.echo("".join(format_exception(error.with_traceback(_users_part(error)))), err=True)
        hint = MAIN_GUARD if "asyncio.run()" in str(error) else ""
        raise Failure(f"{module} cannot be imported{hint}") from error


def _users_part(error: Exception) -> TracebackType | None:
    """Return the traceback without the leading frames of perdure and the import system."""
    traceback = error.__traceback__
    while traceback is not None and _is_internal(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    return traceback


def _is_internal(file: str) -> bool:
    own = (__file__, import_module.__code__.co_filename)
    return file.startswith("<frozen importlib") or file in own


def _runtimes_in(module: object) -> list[str]:
    """Return the names of the runtimes in a module, one name for each."""
    names = {id(value): name for name, value in vars(module).items() if isinstance(value, Runtime)}
    return list(names.values())
