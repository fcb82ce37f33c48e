"""Checks of the declaration: what is declared is there, and what is there is declared."""

import inspect
from collections.abc import Iterator
from typing import Any

from perdure.store import Capabilities, Store, capabilities
from perdure.testing.conformance.harness import Harness

BASE_VERBS = ("save", "load", "delete", "list", "close")
VERBS = {
    "journal": ("append",),
    "lease": ("acquire", "renew", "release"),
    "schedule": ("enqueue", "due", "claim"),
    "inbox": ("send", "inbox"),
    "transaction": ("transact",),
    "notify": ("notifications",),
    "maintenance": ("prune", "stats"),
}
STANDS_ON = {
    "journal": "lease",
    "schedule": "lease",
    "inbox": "lease",
    "transaction": "journal",
    "notify": "schedule",
}


def has(declared: Capabilities, ability: str) -> bool:
    """Tell whether an ability is declared."""
    return getattr(declared, ability) not in {False, "none"}


def missing_verbs(store: Store, verbs: tuple[str, ...]) -> Iterator[str]:
    """Give those of the verbs that the store does not have."""
    for verb in verbs:
        if not callable(getattr(store, verb, None)):
            yield verb


class DeclaredChecks(Harness):
    """What a store says of itself."""

    async def test_the_five_methods_exist(self, store: Store) -> None:
        """Five methods make a store, and they are coroutine functions."""
        assert list(missing_verbs(store, BASE_VERBS)) == []
        for verb in BASE_VERBS:
            method: Any = getattr(store, verb)
            assert inspect.iscoroutinefunction(method), f"{verb} is no coroutine function"

    async def test_a_declared_ability_has_its_methods(self, store: Store) -> None:
        """A store declares which abilities it has: each declared one has its verbs."""
        declared = capabilities(store)
        for ability, verbs in VERBS.items():
            if has(declared, ability):
                assert list(missing_verbs(store, verbs)) == [], f"declares {ability!r} without them"

    async def test_an_undeclared_ability_has_no_methods(self, store: Store) -> None:
        """The engine asks the declaration and never guesses: what is not declared is never used."""
        declared = capabilities(store)
        for ability, verbs in VERBS.items():
            if not has(declared, ability):
                there = set(verbs) - set(missing_verbs(store, verbs))
                assert not there, f"has these without declaring {ability!r}"

    async def test_an_ability_is_declared_with_those_it_requires(self, store: Store) -> None:
        """Only a lease gives the epoch that fences an entry; hints are of what is due."""
        declared = capabilities(store)
        for ability, ground in STANDS_ON.items():
            if has(declared, ability):
                assert has(declared, ground), f"declares {ability!r} without {ground!r}"

    async def test_the_declaration_does_not_change(self, store: Store) -> None:
        """Declared once: the same value whenever it is asked."""
        before = capabilities(store)
        await store.load("run")
        assert capabilities(store) == before
        assert before.max_value_size > 0
