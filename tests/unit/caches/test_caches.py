"""Step caches: what can be used as one, and the three built-in ones."""

import logging
import multiprocessing
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure.cache import as_cache
from perdure.caches import FileCache, KeyValueCache, MemoryCache
from perdure.errors import (
    InvalidArgument,
    InvalidDuration,
    MissingAbility,
    MissingDependency,
    StoreCorrupted,
    StoreError,
)
from perdure.keyvalue import DriverKeyValue, MemoryKeyValue, as_keyvalue, glob_match
from perdure.snapshot import StepRecord
from perdure.testing.clock import TestClock

HOUR = timedelta(hours=1)
ODD_KEYS = [
    "user:1",
    "a/b",
    "a_b",
    "../up",
    "A",
    "a",
    "",
    " ",
    "é",
    "😀",
    "x" * 5000,
    "a\nb",
    "con",
]


def record(value: Any) -> StepRecord:
    return {"ok": True, "value": value}


class AsyncOnly:
    """A user's own cache with async methods and without `ttl`."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}

    async def get(self, key: str) -> Any:
        return self.entries.get(key)

    async def set(self, key: str, value: Any) -> None:
        self.entries[key] = value

    async def delete(self, key: str) -> bool:
        return self.entries.pop(key, None) is not None


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture(params=["dict", "async", "memory", "file", "keyvalue"])
def cache(request: pytest.FixtureRequest, tmp_path: Path, clock: TestClock) -> Any:
    factories: dict[str, Callable[[], Any]] = {
        "dict": dict,
        "async": AsyncOnly,
        "memory": lambda: MemoryCache(clock=clock),
        "file": lambda: FileCache(tmp_path, clock=clock),
        "keyvalue": lambda: KeyValueCache(MemoryKeyValue(clock=clock)),
    }
    return factories[request.param]()


class TestAnyCache:
    """What `as_cache` makes of any cache."""

    async def test_stores_records_by_key(self, cache: Any) -> None:
        """`get` returns what was set, until it is deleted."""
        face = as_cache(cache)
        assert await face.get("a") is None
        await face.set("a", record([1]))
        assert await face.get("a") == record([1])
        assert [await face.has("a"), await face.has("b")] == [True, False]
        assert [await face.delete("a"), await face.delete("a")] == [True, False]
        assert await face.get("a") is None

    async def test_keys_do_not_collide(self, cache: Any) -> None:
        """No two keys share an entry."""
        face = as_cache(cache)
        for key in ODD_KEYS:
            await face.set(key, record(key))
        assert [await face.get(key) for key in ODD_KEYS] == [record(key) for key in ODD_KEYS]

    async def test_changing_a_value_does_not_change_the_cache(self, cache: Any) -> None:
        """Neither one that was set nor one that was returned."""
        face = as_cache(cache)
        original: Any = record([1])
        await face.set("a", original)
        original["value"].append(2)
        returned: Any = await face.get("a")
        returned["value"].append(3)
        assert await face.get("a") == record([1])

    async def test_a_record_expires_after_its_ttl(self, cache: Any, clock: TestClock) -> None:
        """Even in a dict and in a cache that does not support `ttl`."""
        face = as_cache(cache, clock=clock)
        await face.set("a", record(1), ttl=HOUR)
        await clock.advance(HOUR - timedelta(seconds=1))
        assert await face.get("a") == record(1)
        await clock.advance("1s")
        assert await face.get("a") is None
        assert not await face.has("a")

    async def test_a_failure_is_stored(self, cache: Any) -> None:
        """With its error, cause and origin."""
        failure: StepRecord = {
            "ok": False,
            "error": "NOT_FOUND",
            "cause": {"type": "error", "name": "KeyError", "message": "'x'"},
            "meta": {"origin": "result"},
        }
        face = as_cache(cache)
        await face.set("a", failure)
        assert await face.get("a") == failure


class TestAdapting:
    async def test_the_value_in_a_dict_is_the_record(self) -> None:
        """Deleting the key from the dict makes the step run again."""
        cache: dict[str, Any] = {}
        face = as_cache(cache)
        await face.set("a", record(1))
        assert cache["a"] == record(1)
        del cache["a"]
        assert await face.get("a") is None

    async def test_an_adapted_cache_is_adapted_once(self) -> None:
        """`as_cache` returns a `StepCache` unchanged."""
        face = as_cache({})
        assert as_cache(face) is face

    async def test_clear_deletes_all_records(self, tmp_path: Path) -> None:
        """And nothing else."""
        kv = MemoryKeyValue()
        await kv.set("other", "x")
        caches: list[Any] = [{}, MemoryCache(), FileCache(tmp_path), KeyValueCache(kv)]
        for face in map(as_cache, caches):
            await face.set("a", record(1))
            await face.clear()
            assert await face.get("a") is None
        assert await kv.keys() == ["other"]

    @pytest.mark.parametrize("cache", [5, "text", [], object(), MemoryKeyValue])
    def test_anything_else_is_refused(self, cache: Any) -> None:
        """The error says what can be used as a cache."""
        with pytest.raises(InvalidArgument, match="cache: expected"):
            as_cache(cache)

    async def test_clearing_a_cache_without_clear_raises(self) -> None:
        """It is never silently ignored."""
        with pytest.raises(InvalidArgument, match="clear"):
            await as_cache(AsyncOnly()).clear()

    async def test_a_value_that_is_not_a_record_is_refused(self) -> None:
        """A dict with the user's own value under a step's key raises an error."""
        with pytest.raises(InvalidArgument, match="'user:1'"):
            await as_cache({"user:1": {"name": "Ana"}}).get("user:1")


class TestMemoryCache:
    def test_the_least_recently_used_record_is_evicted(self) -> None:
        """`get` counts as use, `has` does not."""
        cache = MemoryCache(max_size=2)
        cache.set("a", record(1))
        cache.set("b", record(2))
        cache.get("a")
        cache.has("b")
        cache.set("c", record(3))
        assert [cache.has(key) for key in "abc"] == [True, False, True]

    def test_setting_a_key_again_evicts_nothing(self) -> None:
        """A full cache has room for the keys that it contains."""
        cache = MemoryCache(max_size=2)
        for key in ("a", "b", "b", "a"):
            cache.set(key, record(key))
        assert len(cache) == 2

    async def test_expired_records_make_room(self, clock: TestClock) -> None:
        """They are not counted, and no other record is evicted instead of them."""
        cache = MemoryCache(max_size=2, ttl="1h", clock=clock)
        cache.set("long", record(1), ttl=2 * HOUR)
        cache.set("short", record(2))
        await clock.advance(HOUR)
        assert len(cache) == 1
        cache.set("new", record(3))
        assert cache.has("long")

    async def test_the_ttl_of_a_step_takes_precedence(self, clock: TestClock) -> None:
        """Whether longer or shorter; setting a record again restarts its time."""
        cache = MemoryCache(ttl=HOUR, clock=clock)
        cache.set("a", record(1), ttl=timedelta(minutes=1))
        cache.set("b", record(2), ttl=2 * HOUR)
        cache.set("c", record(3))
        await clock.advance(timedelta(minutes=30))
        cache.set("c", record(4))
        await clock.advance(timedelta(minutes=45))
        assert [cache.get(key) for key in "abc"] == [None, record(2), record(4)]

    @pytest.mark.parametrize("size", [0, -1, True, 1.5, "10"])
    def test_max_size_is_checked(self, size: Any) -> None:
        """The error names the parameter."""
        with pytest.raises(InvalidArgument, match="max_size"):
            MemoryCache(max_size=size)

    @pytest.mark.parametrize("ttl", [-1, "soon", float("nan"), True])
    def test_ttl_is_checked(self, ttl: Any, tmp_path: Path) -> None:
        """The error names the parameter, in every cache."""
        for make in (
            lambda: MemoryCache(ttl=ttl),
            lambda: FileCache(tmp_path, ttl=ttl),
            lambda: KeyValueCache(MemoryKeyValue(), ttl=ttl),
        ):
            with pytest.raises(InvalidDuration, match="ttl"):
                make()


def _write_many(directory: str, name: str) -> None:
    import asyncio

    async def write() -> None:
        cache = FileCache(directory)
        for n in range(50):
            await cache.set("shared", record([name] * (n * 100)))
            assert await cache.get("shared") is not None

    asyncio.run(write())


class TestFileCache:
    async def test_records_outlive_the_object(self, tmp_path: Path) -> None:
        """Another cache on the directory returns them."""
        await FileCache(tmp_path / "new" / "place").set("a", record(1))
        assert await FileCache(tmp_path / "new" / "place").get("a") == record(1)

    async def test_a_damaged_file_is_ignored(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is logged, and the next `set` replaces it."""
        cache = FileCache(tmp_path)
        await cache.set("a", record(1))
        (file,) = tmp_path.glob("*/*.json")
        for content in (b"", b"{", b"[]", b"5", b'{"key":"a"}', file.read_bytes()[:-5]):
            file.write_bytes(content)
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                assert await cache.get("a") is None
            assert str(file) in caplog.text
        await cache.set("a", record(2))
        assert await cache.get("a") == record(2)

    async def test_the_file_of_another_key_is_ignored(self, tmp_path: Path) -> None:
        """The key in the file counts, not the file name."""
        cache = FileCache(tmp_path)
        await cache.set("a", record(1))
        await cache.set("b", record(2))
        a, b = sorted(tmp_path.glob("*/*.json"), key=lambda path: path.name)
        b.write_bytes(a.read_bytes())
        assert await cache.get("b") is None

    async def test_prune_deletes_expired_records(self, tmp_path: Path, clock: TestClock) -> None:
        """And keeps the others."""
        cache = FileCache(tmp_path, clock=clock)
        await cache.set("short", record(1), ttl=HOUR)
        await cache.set("long", record(2))
        await clock.advance(HOUR)
        assert cache.prune() == 1
        assert cache.prune() == 0
        assert len(list(tmp_path.glob("*/*"))) == 1

    def test_two_processes_can_write_the_same_key(self, tmp_path: Path) -> None:
        """A reader always sees a whole record."""
        context = multiprocessing.get_context("spawn")
        writers = [context.Process(target=_write_many, args=(str(tmp_path), name)) for name in "ab"]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert [writer.exitcode for writer in writers] == [0, 0]
        assert not list(tmp_path.glob("*/*.tmp"))

    async def test_errors_of_the_file_system_are_store_errors(self, tmp_path: Path) -> None:
        """They name the key."""
        (tmp_path / "file").write_text("")
        cache = FileCache(tmp_path / "file")
        with pytest.raises(StoreError, match="'a'"):
            await cache.set("a", record(1))
        with pytest.raises(StoreError, match="'a'"):
            cache.delete("a")

    def test_the_directory_is_checked(self) -> None:
        """The error names the parameter."""
        with pytest.raises(InvalidArgument, match="directory"):
            FileCache(5)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:A configured store is unstable")
class TestKeyValue:
    @pytest.mark.parametrize(
        ("pattern", "key", "matches"),
        [
            ("*", "", True), ("a*", "a", True), ("a*c", "abbc", True), ("a*c", "abcd", False),
            ("a.c", "abc", False), ("a?", "ab", False), ("[a]", "a", False), ("a*", "a\nb", True),
            ("*:*", "a:b", True), ("", "a", False), ("A*", "a", False),
        ],
    )  # fmt: skip
    def test_only_the_star_is_special(self, pattern: str, key: str, matches: bool) -> None:
        """`*` matches any string, all other characters are literal."""
        assert glob_match(pattern, key) is matches

    async def test_memory_values_expire_after_their_ttl(self, clock: TestClock) -> None:
        """Setting a value again without a `ttl` removes the earlier one."""
        kv = MemoryKeyValue(clock=clock)
        await kv.set("a", "1", ttl="1h")
        await kv.set("b", "1", ttl="1h")
        await kv.set("b", "2")
        await clock.advance(HOUR)
        assert await kv.get_many(["a", "b"]) == [None, "2"]
        assert [await kv.exists("a"), await kv.delete("a")] == [False, False]
        assert await kv.keys() == ["b"]

    async def test_memory_compares_and_sets(self) -> None:
        """One of two wins; `None` means no value."""
        kv = MemoryKeyValue()
        assert [await kv.replace("a", None, "1"), await kv.replace("a", None, "2")] == [True, False]
        assert [await kv.replace("a", "1", "2"), await kv.replace("a", "1", "3")] == [True, False]
        assert [await kv.replace("a", "2", None), await kv.exists("a")] == [True, False]

    async def test_a_driver_can_be_used(self) -> None:
        """Any `py-key-value-aio` driver is a key-value store."""
        from key_value.aio.stores.simple import SimpleStore

        kv = as_keyvalue(SimpleStore())
        await kv.set("a:1", "x", ttl=100)
        await kv.set("a:2", "y", ttl=0)
        assert [await kv.get("a:1"), await kv.get("a:2"), await kv.exists("a:2")] == [
            "x",
            None,
            False,
        ]
        assert await kv.keys("a:*") == ["a:1"]
        assert [await kv.delete("a:1"), await kv.delete("a:1")] == [True, False]

    async def test_a_driver_can_be_used_by_a_cache(self) -> None:
        """`KeyValueCache` accepts a driver."""
        from key_value.aio.stores.simple import SimpleStore

        cache = as_cache(KeyValueCache(SimpleStore()))
        await cache.set("a", record(1), ttl=HOUR)
        assert await cache.get("a") == record(1)

    async def test_a_driver_that_cannot_enumerate_keys_raises(self) -> None:
        """The error names the missing method."""
        from key_value.aio.stores.null import NullStore

        with pytest.raises(MissingAbility, match="NullStore has no 'keys'"):
            await as_keyvalue(NullStore()).keys()

    async def test_values_of_other_programs_are_corrupt(self) -> None:
        """They are not treated as missing."""
        from key_value.aio.stores.simple import SimpleStore

        driver = SimpleStore()
        await driver.put("a", {"other": 1}, collection="perdure")
        with pytest.raises(StoreCorrupted, match="'a'"):
            await DriverKeyValue(driver).get("a")
        kv = MemoryKeyValue()
        await kv.set("workflow:a", "{")
        with pytest.raises(StoreCorrupted, match="delete it"):
            await KeyValueCache(kv).get("a")

    def test_the_error_for_a_missing_package_says_how_to_install_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It names the extra."""
        from key_value.aio.stores.simple import SimpleStore

        driver = SimpleStore()
        monkeypatch.setitem(sys.modules, "key_value.aio.errors", None)
        with pytest.raises(MissingDependency, match=r"pip install 'perdure\[keyvalue\]'"):
            as_keyvalue(driver)

    @pytest.mark.parametrize("store", [5, {}, object()])
    def test_anything_else_is_refused(self, store: Any) -> None:
        """The error says what can be used."""
        with pytest.raises(InvalidArgument, match="store: expected"):
            as_keyvalue(store)
