"""The plugin for pytest, in projects that use pytest-asyncio or anyio's plugin."""

import sys

import pytest

from tests.unit.testing.conftest import Run, plugin


def test_time_passes_when_the_test_says_so(run_tests: Run) -> None:
    result = run_tests("""
async def test_order(perdure_runtime, perdure_clock):
    run = await perdure_runtime.trigger(order, 1)
    assert run.status == "suspended"
    await perdure_clock.advance("1 day")
    (run,) = await perdure_runtime.sweep()
    assert run.output == "real receipt"
""")
    result.assert_outcomes(passed=1)


def test_stubs_stand_in_for_steps(run_tests: Run) -> None:
    """A value, an exception, or a function of the step's arguments, which may be async."""
    result = run_tests("""
async def free(cents):
    return f"free instead of {cents}"

pytestmark = pytest.mark.perdure(steps={"charge": free, "ship": None})

async def test_function(perdure_runtime, perdure_clock):
    await perdure_runtime.trigger(order, 7)
    await perdure_clock.advance("1 day")
    (run,) = await perdure_runtime.sweep()
    assert (run.output, calls) == ("free instead of 7", [])

@pytest.mark.perdure(steps={"charge": "stubbed", "ship": ShippingDown("closed")})
async def test_value_and_exception(perdure_runtime, perdure_clock):
    await perdure_runtime.trigger(order, 7)
    await perdure_clock.advance("1 day")
    (run,) = await perdure_runtime.sweep()
    assert run.status == "failed" and "closed" in str(run.error)
    assert run.history[0].value == "stubbed"

@pytest.mark.perdure(steps={"charge": ShippingDown})
async def test_exception_class(perdure_runtime):
    assert (await perdure_runtime.trigger(order, 7)).status == "failed"
""")
    result.assert_outcomes(passed=3)


def test_a_misspelled_marker_is_refused(run_tests: Run) -> None:
    result = run_tests("""
@pytest.mark.perdure(stubs={})
async def test_order(perdure_runtime): pass
""")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*use @pytest.mark.perdure(steps=*"])


def test_a_stub_for_a_misspelled_step_is_a_warning(run_tests: Run) -> None:
    """Otherwise the step itself would run unnoticed. A module's stubs are for some of its tests."""
    result = run_tests("""
pytestmark = pytest.mark.perdure(steps={"elsewhere": None})

@pytest.mark.perdure(steps={"chrge": None})
async def test_order(perdure_runtime):
    await perdure_runtime.trigger(order, 1)

@pytest.mark.perdure(steps={"charge": None})
async def test_another(perdure_runtime):
    await perdure_runtime.trigger(order, 1)

@pytest.mark.perdure(steps={"chrge": None})
async def test_crashes(perdure_crashes):
    await perdure_crashes(order, 1)
""")
    result.assert_outcomes(passed=3, errors=2)  # warnings are errors in these projects
    result.stdout.fnmatch_lines(["*stubs that no step used: 'chrge'; *without a stub: 'charge'*"])


def test_a_worker_drives_the_workflows_of_the_marker(run_tests: Run) -> None:
    result = run_tests("""
@pytest.mark.perdure(workflows=[order], steps={"charge": "stubbed"})
async def test_order(perdure_runtime, perdure_worker, perdure_clock):
    run = await perdure_runtime.trigger(order, 1, wait=False)
    await perdure_worker.run_until_idle()
    await perdure_clock.advance("1 day")
    await perdure_worker.run_until_idle()
    assert (await perdure_runtime.get_run(run.id)).output == "stubbed"
""")
    result.assert_outcomes(passed=1)


def test_crashes_are_explored_with_stubs(run_tests: Run) -> None:
    result = run_tests("""
@pytest.mark.perdure(steps={"charge": "stubbed"})
async def test_order(perdure_crashes):
    report = await perdure_crashes(order, 1)
    assert report.crashes > 10 and 1 not in calls
    with pytest.raises(AssertionError, match="'ship' ran again"):
        report.assert_once("ship")
""")
    result.assert_outcomes(passed=1)


def test_dependencies_come_from_a_fixture_of_the_user(run_tests: Run) -> None:
    result = run_tests("""
@workflow("buy")
async def buy(step: Step) -> int:
    return step.deps["book"]

@pytest.fixture
def perdure_deps():
    return {"book": 7}

async def test_buy(perdure_runtime, perdure_crashes):
    assert (await perdure_runtime.trigger(buy)).output == 7
    await perdure_crashes(buy)
""")
    result.assert_outcomes(passed=1)


def test_always_replay_finds_code_that_is_not_deterministic(run_tests: Run) -> None:
    source = """
numbers = iter(range(100))

@workflow("random")
async def random(step: Step) -> list[int]:
    before = next(numbers)
    await step("charge", charge, 1)
    return [before, next(numbers)]

async def test_random(perdure_runtime):
    assert (await perdure_runtime.trigger(random)).output == [0, 1]
"""
    run_tests(source).assert_outcomes(passed=1)
    run_tests(source, "--perdure-always-replay").assert_outcomes(failed=1)


def test_stored_runs_must_fit_the_code(run_tests: Run) -> None:
    """Stored at a wait and at the end. A step whose arguments have changed does not fit."""
    source = """
import json
from pathlib import Path

async def test_write(perdure_runtime, perdure_store, perdure_clock):
    await perdure_runtime.trigger(order, 1, run_id="a")
    Path("runs").mkdir()
    Path("runs/waiting.json").write_text(json.dumps(await perdure_store.load("a")))
    await perdure_clock.advance("1 day")
    await perdure_runtime.sweep()
    Path("runs/completed.json").write_text(json.dumps(await perdure_store.load("a")))
    calls.clear()

@workflow("order")
async def changed(step: Step, cents: int) -> str:
    return await step("charge", charge, cents + 1)

def test_unchanged(perdure_replay):
    perdure_replay("runs/*.json", order)
    assert not calls

def test_changed(perdure_replay):
    perdure_replay("runs/*.json", changed)

def test_missing(perdure_replay):
    perdure_replay("gone/*.json", order)
"""
    result = run_tests(source)
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*2 of 2 stored runs*", "*completed.json: *charge*", "*waiting*"])
    result.stdout.fnmatch_lines(["*no file in * matches 'gone/*"])


def test_each_test_has_an_empty_store_and_leaves_it_empty(
    run_tests: Run, pytester: pytest.Pytester
) -> None:
    """The store is closed in the test's own event loop, after fixtures that use it."""
    url = f"sqlite:///{pytester.path / 'shop.db'}"
    source = """
@pytest.fixture
async def later(perdure_runtime):
    yield
    assert await perdure_runtime.trigger(order, 2, run_id="later")

@pytest.mark.parametrize("n", [1, 2])
async def test_order(perdure_runtime, perdure_store, n):
    assert not await perdure_store.list()
    assert await perdure_runtime.trigger(order, 1, run_id="order-1")

async def test_fixture(perdure_store, later):
    assert not await perdure_store.list()

def test_without_a_loop(perdure_runtime):
    assert asyncio.run(perdure_runtime.trigger(order, 1)).status == "suspended"

def test_nothing_is_left():
    from perdure.stores import sqlite
    assert not asyncio.run(sqlite("shop.db").list())
"""
    leaks = ("-W", "error::ResourceWarning", "-W", "error::pytest.PytestUnraisableExceptionWarning")
    run_tests(source, *leaks, "--perdure-store", url).assert_outcomes(passed=5)


def test_stores_with_their_own_time_skip_tests_that_advance_it(run_tests: Run) -> None:
    result = run_tests(
        "async def test_order(perdure_runtime, perdure_clock): pass",
        *("--perdure-store", "postgresql://localhost/none"),
    )
    result.assert_outcomes(skipped=1)


def test_the_plugin_imports_nothing_of_perdure_before_it_is_used(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
import sys
def test_nothing():
    ours = sorted(name for name in sys.modules if name.startswith("perdure"))
    assert ours == ["perdure", "perdure.testing", "perdure.testing.pytest_plugin"]
    assert "msgspec" not in sys.modules
""")
    result = pytester.run(
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", *plugin())
    )
    result.assert_outcomes(passed=1)
