"""The stores on which worker processes are killed and stopped."""

from typing import NamedTuple

import pytest

PLACES = ["sqlite", "postgres", "mysql", "mongo", "mongo_standalone", "redis", "redis_cluster"]


class Place(NamedTuple):
    """The URL of a store and its options."""

    url: str
    options: dict[str, str]


def place_of(request: pytest.FixtureRequest) -> Place:
    """Return the store that a fixture's parameter names, with the URL of its own fixture."""
    name = str(request.param)
    url = str(request.getfixturevalue(f"{name}_url"))
    if name == "redis_cluster":
        url = url.replace("redis://", "redis+cluster://", 1)
    if name.startswith("redis"):
        return Place(url, {"namespace": str(request.getfixturevalue(f"{name}_prefix"))})
    return Place(url, {})
