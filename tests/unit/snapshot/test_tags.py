"""The tags that a user sets on a run."""

from typing import Any

import pytest

from perdure.errors import InvalidArgument
from perdure.snapshot import check_tags, tags_of


def test_tags_that_pass_the_check_are_all_stored() -> None:
    tags = {"plan": "pro", "größe": "", "x" * 255: "", "note": "a=b ~ 'c' 🎈"}
    assert tags_of({"tags": check_tags(tags)}) == tuple(sorted(f"{n}={v}" for n, v in tags.items()))


def test_checked_tags_are_a_copy() -> None:
    tags = {"plan": "pro"}
    checked = check_tags(tags)
    tags["plan"] = "free"
    assert checked == {"plan": "pro"}


@pytest.mark.parametrize("name", ["", "a=b", "~cancel", 1, None, "x" * 256, "a\0", "\ud800"])
def test_a_name_that_cannot_be_a_tag_is_refused(name: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"tags"):
        check_tags({name: "value"})


@pytest.mark.parametrize("value", [1, None, True, b"x", "x" * 252, "a\0", "\ud800"])
def test_a_value_that_cannot_be_stored_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"tags\['plan'\]"):
        check_tags({"plan": value})


@pytest.mark.parametrize("tags", [["plan=pro"], "plan=pro", None, {str(n): "" for n in range(17)}])
def test_anything_but_a_mapping_of_at_most_16_tags_is_refused(tags: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"tags: expected a mapping of at most 16"):
        check_tags(tags)
