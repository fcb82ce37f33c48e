"""Names that the user chose: the engine's own are refused with a clear error."""

import pytest

from perdure.errors import InvalidArgument
from perdure.validation import check_event, check_id, check_unreserved, check_user_id


@pytest.mark.parametrize("name", ["a", "a~", "-~", " ~a", "\u02dca", "∼a"])
def test_only_names_that_begin_with_a_tilde_are_reserved(name: str) -> None:
    assert check_unreserved(name, "name") == check_user_id(name) == check_event(name, "n") == name


@pytest.mark.parametrize("name", ["~", "~cancel", "~log:x", "~~"])
def test_a_reserved_name_is_refused(name: str) -> None:
    """The error says which parameter, which name, and what to do."""
    with pytest.raises(InvalidArgument) as refused:
        check_user_id(name, "run_id")
    assert str(refused.value) == (
        f"run_id: expected a name that does not begin with '~', got {name!r} (str). "
        "Names that begin with '~' are reserved for perdure: choose another one"
    )


def test_stores_accept_the_ids_of_the_engine() -> None:
    """What a store checks an id for does not depend on who chose it."""
    assert check_id("~log:x") == "~log:x"
