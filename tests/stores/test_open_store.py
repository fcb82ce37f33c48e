"""`open_store` takes a URL, and the names of the stores load what they need when they are asked."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import perdure.stores
from perdure.errors import InvalidArgument
from perdure.store import capabilities
from perdure.stores import MemoryStore, open_store, sqlite


class Opened:
    """A store that only remembers how it was opened."""

    def __init__(self, *arguments: str, **options: Any) -> None:
        self.opened_with = (arguments, options)


@pytest.fixture
def _openers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put `Opened` in the place of every store."""
    for name in set(perdure.stores.__all__) - {"open_store"}:
        monkeypatch.setitem(vars(perdure.stores), name, Opened)


@pytest.mark.usefixtures("_openers")
@pytest.mark.parametrize(
    ("url", "arguments"),
    [
        ("memory://", ()),
        ("file:///var/runs", ("/var/runs",)),
        ("file://./runs", ("./runs",)),
        ("file:///var/a%20b%3F", ("/var/a b?",)),
        ("sqlite:///runs.db", ("runs.db",)),
        ("sqlite:////var/runs.db", ("/var/runs.db",)),
        ("sqlite:///:memory:", (":memory:",)),
        ("sqlite://", (":memory:",)),
        ("libsql://host", ("libsql://host",)),
        ("libsql+http://127.0.0.1:8080", ("http://127.0.0.1:8080",)),
        ("libsql+https://host", ("https://host",)),
        ("postgresql://u:p%40@h:5432/db?ssl=1", ("postgresql://u:p%40@h:5432/db?ssl=1",)),
        ("postgres://h/db", ("postgres://h/db",)),
        ("mysql://h/db", ("mysql://h/db",)),
        ("mariadb://h/db", ("mysql://h/db",)),
        ("mongodb://h/db", ("mongodb://h/db",)),
        ("mongodb+srv://h/db", ("mongodb+srv://h/db",)),
        ("redis://h:6379/0", ("redis://h:6379/0",)),
        ("rediss://h", ("rediss://h",)),
        ("redis+cluster://h:7000", ("redis+cluster://h:7000",)),
        ("rediss+cluster://h", ("rediss+cluster://h",)),
        ("REDIS://h", ("redis://h",)),
    ],
)
def test_a_url_opens_its_store(url: str, arguments: tuple[str, ...]) -> None:
    """Each scheme goes to its opener, in the form that this one knows."""
    store: Any = open_store(url, prefix="orders:")
    assert store.opened_with == (arguments, {"prefix": "orders:"})


async def test_memory_is_opened_with_its_options() -> None:
    """`options` are those of the constructor."""
    store = open_store("memory://", max_value_size=99)
    assert isinstance(store, MemoryStore)
    assert capabilities(store).max_value_size == 99


async def test_sqlite_is_opened_where_the_path_says(tmp_path: Path) -> None:
    """Four slashes are an absolute path."""
    store = open_store(f"sqlite:///{tmp_path}/runs.db")
    await store.list()
    await store.close()
    assert (tmp_path / "runs.db").exists()


@pytest.mark.parametrize("url", ["oracle://h", "runs.db", "", "http://host", "sqlite"])
def test_an_unknown_scheme_lists_what_is_there(url: str) -> None:
    """The error names every scheme."""
    with pytest.raises(InvalidArgument) as refused:
        open_store(url)
    for scheme in ("memory://", "file://", "sqlite://", "postgresql://", "mongodb://", "redis://"):
        assert scheme in str(refused.value)


@pytest.mark.parametrize("url", ["file:///runs?prefix=a", "sqlite:///runs.db#x"])
def test_a_path_has_no_query(url: str) -> None:
    """What looks like an option in a path is refused, not made part of a file's name."""
    with pytest.raises(InvalidArgument, match="%3F"):
        open_store(url)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As with any module."""
    with pytest.raises(AttributeError, match="oracle"):
        _ = perdure.stores.oracle  # type: ignore[attr-defined]


def test_a_name_stays_a_function_when_its_module_is_imported() -> None:
    """Modules that are called as their function do not take its place."""
    import perdure.stores.sqlite

    again = perdure.stores.sqlite
    assert again is sqlite
    assert not isinstance(again, ModuleType)
    assert isinstance(sys.modules["perdure.stores.sqlite"], ModuleType)


def test_names_are_loaded_when_asked() -> None:
    """Importing the stores imports no driver, nor any store."""
    program = (
        "import sys, perdure.stores as stores\n"
        "loaded = [m for m in sys.modules if m.startswith('perdure.stores.')]\n"
        "drivers = {'asyncpg', 'psycopg', 'asyncmy', 'pymongo', 'redis', 'libsql', 'sqlite3'}\n"
        "sys.exit(repr(loaded) if loaded or drivers & set(sys.modules) else 0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
