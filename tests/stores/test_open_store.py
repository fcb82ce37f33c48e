"""`open_store` opens a store by its URL; stores are imported when they are first used."""

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
    """A store that records how it was opened."""

    def __init__(self, *arguments: str, **options: Any) -> None:
        self.opened_with = (arguments, options)


@pytest.fixture
def _openers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace every store by `Opened`."""
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
    """The function of each scheme is called with a URL or path that it understands."""
    store: Any = open_store(url, prefix="orders:")
    assert store.opened_with == (arguments, {"prefix": "orders:"})


async def test_options_are_passed_to_the_store() -> None:
    """`options` are arguments of its constructor."""
    store = open_store("memory://", max_value_size=99)
    assert isinstance(store, MemoryStore)
    assert capabilities(store).max_value_size == 99


async def test_four_slashes_are_an_absolute_path(tmp_path: Path) -> None:
    """The SQLite file is created there."""
    store = open_store(f"sqlite:///{tmp_path}/runs.db")
    await store.list()
    await store.close()
    assert (tmp_path / "runs.db").exists()


@pytest.mark.parametrize("url", ["oracle://h", "runs.db", "", "http://host", "sqlite"])
def test_an_unknown_scheme_is_refused_with_the_known_ones(url: str) -> None:
    """The error names every scheme."""
    with pytest.raises(InvalidArgument) as refused:
        open_store(url)
    for scheme in ("memory://", "file://", "sqlite://", "postgresql://", "mongodb://", "redis://"):
        assert scheme in str(refused.value)


def test_a_url_of_sqlalchemy_is_refused_with_the_right_one() -> None:
    """The error does not contain the password."""
    with pytest.raises(InvalidArgument, match=r"Leave out the driver: postgresql://…") as refused:
        open_store("postgresql+asyncpg://shop:secret@db/shop")
    assert "postgresql+asyncpg://shop:…@db/shop" in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["file:///runs?prefix=a", "sqlite:///runs.db#x"])
def test_a_path_with_a_query_is_refused(url: str) -> None:
    """What looks like an option is refused, instead of becoming part of a file name."""
    with pytest.raises(InvalidArgument, match="%3F"):
        open_store(url)


def test_an_unknown_name_raises_attribute_error() -> None:
    """As in any module."""
    with pytest.raises(AttributeError, match="oracle"):
        _ = perdure.stores.oracle  # type: ignore[attr-defined]


def test_importing_a_module_does_not_replace_its_function() -> None:
    """`perdure.stores.sqlite` stays the function, although a module has the same name."""
    import perdure.stores.sqlite

    again = perdure.stores.sqlite
    assert again is sqlite
    assert not isinstance(again, ModuleType)
    assert isinstance(sys.modules["perdure.stores.sqlite"], ModuleType)


def test_stores_are_imported_when_they_are_used() -> None:
    """Importing `perdure.stores` imports no store and no driver."""
    program = (
        "import sys, perdure.stores as stores\n"
        "loaded = [m for m in sys.modules if m.startswith('perdure.stores.')]\n"
        "drivers = {'asyncpg', 'psycopg', 'asyncmy', 'pymongo', 'redis', 'libsql', 'sqlite3'}\n"
        "sys.exit(repr(loaded) if loaded or drivers & set(sys.modules) else 0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
