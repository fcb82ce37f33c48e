"""Random cases for async checks: hypothesis runs in a thread, and the store in its event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

T = TypeVar("T")

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


class Bridge:
    """Runs a store's coroutines in its event loop, for code in another thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


def _settings(examples: int, *, shrink: bool = True) -> settings:
    return settings(
        max_examples=examples,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        stateful_step_count=40,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


async def for_all(
    strategy: st.SearchStrategy[T], examples: int, check: Callable[[T], Coroutine[Any, Any, None]]
) -> None:
    """Run an async check on many random values, and report the simplest that fails."""
    bridge = Bridge()

    @_settings(examples)
    @given(strategy)
    def run(value: T) -> None:
        bridge(check(value))

    await asyncio.to_thread(run)


async def run_machine(
    make: Callable[[Bridge], RuleBasedStateMachine], examples: int, *, shrink: bool
) -> None:
    """Run a state machine through many random sequences of its rules."""
    bridge = Bridge()
    machine: Any = lambda: make(bridge)  # noqa: E731 - hypothesis annotates it as a class, but only calls it
    rules = _settings(examples, shrink=shrink)
    await asyncio.to_thread(run_state_machine_as_test, machine, settings=rules)
