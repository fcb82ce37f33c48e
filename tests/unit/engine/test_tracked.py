"""Named values that a run changes, and what its next write contains."""

from perdure.engine.tracked import Tracked


def test_a_change_is_written_once() -> None:
    waits: Tracked[str] = Tracked({"stored": "a"})
    waits.put("new", "b")
    assert (dict(waits), waits.take_changes()) == ({"stored": "a", "new": "b"}, {"new": "b"})
    assert waits.take_changes() == {}


def test_a_removal_is_written_if_the_store_has_the_value() -> None:
    """It has what was loaded, and what an earlier write contained."""
    waits: Tracked[str] = Tracked({"loaded": "a"})
    waits.put("written", "b")
    waits.take_changes()
    assert [waits.remove("loaded"), waits.remove("written")] == ["a", "b"]
    assert (dict(waits), waits.take_changes()) == ({}, {"loaded": None, "written": None})


def test_a_value_that_is_set_and_removed_between_two_writes_is_not_written() -> None:
    waits: Tracked[str] = Tracked()
    waits.put("short", "a")
    waits.remove("short")
    assert (dict(waits), waits.take_changes()) == ({}, {})


def test_a_value_that_returns_after_its_removal_is_written() -> None:
    waits: Tracked[str] = Tracked({"again": "a"})
    waits.remove("again")
    waits.put("again", "b")
    assert waits.take_changes() == {"again": "b"}


def test_a_later_change_is_not_part_of_an_earlier_write() -> None:
    """Not even if that write contained no changes: an outbox would deliver it too early."""
    values: Tracked[int] = Tracked()
    first = values.take_changes()
    values.put("a", 1)
    values.remove("a")
    second = values.take_changes()
    values.put("b", 2)
    assert (first, second) == ({}, {})
    assert values.take_changes() == {"b": 2}


def test_values_that_are_put_together_are_changes() -> None:
    """As if they had been put one by one."""
    values = Tracked({"a": 1})
    values.put_all({"a": 2, "b": 3})
    assert values == values.take_changes() == {"a": 2, "b": 3}
