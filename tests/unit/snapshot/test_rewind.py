"""Which records are kept before a step."""

from perdure.snapshot.rewind import kept_before

START = {"ok": True, "kind": "start", "branch": "m", "value": {"base": "run/1/m", "count": 2}}
RESULTS = {"ok": True, "kind": "map", "branch": "m", "value": []}
STEP = {"ok": True}


def test_the_records_before_a_step_are_kept() -> None:
    assert kept_before({"a": STEP, "b": STEP, "c": STEP}, "c") == ["a", "b"]


def test_the_runs_of_a_map_that_have_not_ended_are_kept() -> None:
    assert kept_before({"a": STEP, "start[0]": START, "b": STEP}, "b") == ["a", "start[0]"]


def test_a_map_is_kept_as_a_whole_or_not_at_all() -> None:
    """Its runs have reported their ends, and do not do so again."""
    steps = {"a": STEP, "start[0]": START, "b": STEP, "results[0]": RESULTS, "c": STEP}
    assert kept_before(steps, "b") == ["a"]
    assert kept_before(steps, "c") == ["a", "start[0]", "b", "results[0]"]
