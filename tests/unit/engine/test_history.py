"""The records of a run, and which of them the next generation keeps."""

from typing import Any

from perdure.engine.history import History


def record(**facts: Any) -> Any:
    return {"ok": True, "value": "by ana", "at": "2030-01-01T00:00:00.000Z", **facts}


def test_the_next_generation_has_no_records_and_another_input() -> None:
    """What belongs to the run as a whole stays."""
    history = History("loop")
    history.metadata.update({"input": 1, "seed": "s", "tags": {"a": "b"}})
    history.load({"step": record()})
    following = history.next_generation(2)
    assert (len(following), following.generation) == (0, 2)
    assert following.metadata["input"] == 2
    assert (following.metadata["seed"], following.metadata["tags"]) == ("s", {"a": "b"})
    assert following.next_generation(3).metadata["firstInput"] == 1


def test_the_next_generation_keeps_events_that_no_code_has_seen() -> None:
    """A call with the id of the wait that received it does not find it as its record."""
    history = History("loop")
    history.load({"approval": record(kind="event", unclaimed="approved"), "step": record()})
    following = history.next_generation(None)
    ((key, kept_record),) = following.unclaimed.items()
    assert (kept_record["unclaimed"], key) == ("approved", "~unclaimed:2:approval")
    assert following.find("", "approval") is None
    assert following.reserve("", "approval") == "approval"
