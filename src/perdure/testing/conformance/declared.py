"""Checks that a store declares exactly the abilities that it has."""

import inspect
from collections.abc import Iterator
from typing import Any

from perdure.store import Capabilities, Store, capabilities
from perdure.testing.conformance.harness import Harness

BASE_METHODS = ("save", "load", "delete", "list", "close")
METHODS = {
    "journal": ("append",),
    "lease": ("acquire", "renew", "release"),
    "schedule": ("enqueue", "due", "claim"),
    "inbox": ("send", "inbox"),
    "handoff": ("send_and_claim",),
    "transaction": ("transact",),
    "transactional_enqueue": ("enqueue_in",),
    "notify": ("notifications",),
    "maintenance": ("prune", "stats"),
}
REQUIRES = {
    "journal": "lease",
    "schedule": "lease",
    "inbox": "lease",
    "handoff": "inbox",
    "transaction": "journal",
    "transactional_enqueue": "schedule",
    "notify": "schedule",
}


def has(declared: Capabilities, ability: str) -> bool:
    """Return whether an ability is declared."""
    return getattr(declared, ability) not in {False, "none"}


def missing_methods(store: Store, verbs: tuple[str, ...]) -> Iterator[str]:
    """Return the methods that the store does not have."""
    for verb in verbs:
        if not callable(getattr(store, verb, None)):
            yield verb


class DeclaredChecks(Harness):
    """The capabilities that a store declares."""

    async def test_the_five_methods_exist(self, store: Store) -> None:
        """A store needs five methods, and they are coroutine functions."""
        assert list(missing_methods(store, BASE_METHODS)) == []
        for verb in BASE_METHODS:
            method: Any = getattr(store, verb)
            assert inspect.iscoroutinefunction(method), f"{verb} is not a coroutine function"

    async def test_a_declared_ability_has_its_methods(self, store: Store) -> None:
        """A store declares which abilities it has: each declared one has its methods."""
        declared = capabilities(store)
        for ability, verbs in METHODS.items():
            if has(declared, ability):
                assert list(missing_methods(store, verbs)) == [], (
                    f"declares {ability!r} without them"
                )

    async def test_an_undeclared_ability_has_no_methods(self, store: Store) -> None:
        """The engine never guesses: undeclared methods would never be used."""
        declared = capabilities(store)
        for ability, verbs in METHODS.items():
            if not has(declared, ability):
                existing = set(verbs) - set(missing_methods(store, verbs))
                assert not existing, f"has these without declaring {ability!r}"

    async def test_an_ability_is_declared_with_those_it_requires(self, store: Store) -> None:
        """An entry is fenced by the epoch of a lease; notifications are about due runs."""
        declared = capabilities(store)
        for ability, required in REQUIRES.items():
            if has(declared, ability):
                assert has(declared, required), f"declares {ability!r} without {required!r}"

    async def test_the_declaration_does_not_change(self, store: Store) -> None:
        """Declared once: always the same value."""
        before = capabilities(store)
        await store.load("run")
        assert capabilities(store) == before
        assert before.max_value_size > 0
