"""Each violation is planted by hand and must be found."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.durability.verifier import language as lang
from tests.durability.verifier.checker import End, Evidence, Violation, check
from tests.durability.verifier.log import Kind, Line

STEP = lang.Step("a")
DONE = End("completed", "['<w1.2>']", tokens=frozenset({"<w1.2>"}))


def line(kind: Kind, path: str = "", token: str = "", process: str = "w1", **more: Any) -> Line:
    """Return a line of the run "r" in the first activation of a process."""
    activation: dict[str, Any] = {"activation": f"{process}.1", **more}
    run = "" if kind == "ask" else "r"
    return Line(kind, process, run, path=path, tokens=(token,) if token else (), **activation)


def began(process: str = "w1") -> list[Line]:
    """Return the lines of a process that acquires the run and calls the function."""
    kinds: tuple[Kind, ...] = ("ask", "grant", "activation")
    return [line(kind, process=process, n=0 if kind == "activation" else 1) for kind in kinds]


def did(path: str, token: str, process: str = "w1", key: str = "") -> list[Line]:
    """Return the lines of a step that is executed, recorded and seen."""
    return [
        line("call", path, process=process),
        line("begin", path, token, process, text=key or f"key of {path}", n=1),
        line("durable", "", token, process),
        line("saw", path, token, process, text=token),
    ]


def returned(text: str = "['<w1.2>']", process: str = "w1") -> Line:
    return line("returned", process=process, text=text)


def laws(
    program: lang.Body, lines: Sequence[Line], *ends: End, rows: Any = None
) -> dict[str, Violation]:
    """Return the laws that are found violated."""
    evidence = Evidence("r", program, lines, ends or (DONE,), rows)
    return {violation.law: violation for violation in check(evidence)}


def test_a_run_that_keeps_all_laws_has_no_violation() -> None:
    assert laws((STEP,), [*began(), *did("0", "<w1.2>"), returned()], DONE, DONE) == {}


def test_another_value_after_a_crash_is_found() -> None:
    lines = [*began(), *did("0", "<w1.2>"), *began("w2"), *did("0", "<w2.2>", "w2"), returned()]
    assert "same value" in laws((STEP,), lines)


def test_the_record_of_another_step_is_found() -> None:
    second = [line("call", "1"), line("saw", "1", "<w1.2>", text="<w1.2>")]
    assert "same value" in laws((STEP, STEP), [*began(), *did("0", "<w1.2>"), *second, returned()])


def test_steps_that_are_seen_in_another_order_are_found() -> None:
    program = (lang.Parallel("gather", ((STEP,), (STEP,))),)
    first = [*began(), *did("0.0.0", "<w1.2>"), *did("0.1.0", "<w1.3>")]
    seen = [
        line("saw", "0.0.0", "<w1.2>", "w2", text="<w1.2>"),
        line("saw", "0.1.0", "<w1.3>", "w2", text="<w1.3>"),
    ]
    assert "same order" not in laws(program, [*first, *began("w2"), *seen])
    assert "same order" in laws(program, [*first, *began("w2"), *reversed(seen)])


def test_calls_that_are_awaited_with_a_transaction_may_be_seen_in_another_order() -> None:
    calls = lang.Parallel("calls", ((STEP,), (lang.Transaction("t"),)))
    program = (lang.Parallel("gather", ((calls,), (calls,))),)
    steps = {"0.0.0.0.0": "<w1.2>", "0.1.0.0.0": "<w1.3>"}
    first = [each for path, token in steps.items() for each in did(path, token)]
    seen = [line("saw", path, token, "w2", text=token) for path, token in steps.items()]
    assert "same order" not in laws(program, [*began(), *first, *began("w2"), *reversed(seen)])


def test_a_nested_step_may_be_seen_after_one_that_is_recorded_while_its_branches_end() -> None:
    """A replay shows them in the order of their records; only a deeper one has branches to end."""
    nested = lang.Parallel("gather", ((STEP,),))
    program = (lang.Parallel("gather", ((nested,), (STEP,))),)
    deep, flat = did("0.0.0.0.0", "<w1.2>"), did("0.1.0", "<w1.3>")
    again = [
        line("saw", "0.0.0.0.0", "<w1.2>", "w2", text="<w1.2>"),
        line("saw", "0.1.0", "<w1.3>", "w2", text="<w1.3>"),
    ]
    late = [*began(), *deep[:3], *flat, deep[3], *began("w2"), *again]
    assert "same order" not in laws(program, late)
    recorded_later = [*began(), *deep[:2], *flat, *deep[2:], *began("w2"), *again]
    assert "same order" in laws(program, recorded_later)
    flat_late = [*began(), *flat[:3], *deep, flat[3], *began("w2"), *reversed(again)]
    assert "same order" in laws(program, flat_late)


def test_an_execution_after_its_value_was_seen_is_found() -> None:
    again = line("begin", "0", "<w2.2>", "w2", text="key of 0", n=1)
    lines = [*began(), *did("0", "<w1.2>"), *began("w2"), again, returned()]
    assert "executed again" in laws((STEP,), lines)


def test_an_execution_by_an_owner_that_was_paused_is_not_a_violation() -> None:
    """It requested the run before another process had seen the value: it cannot know."""
    again = line("begin", "0", "<w2.2>", "w2", text="key of 0", n=1)
    lines = [*began("w2"), *began(), *did("0", "<w1.2>"), again, returned()]
    assert laws((STEP,), lines) == {}


def test_two_executions_in_one_activation_are_found() -> None:
    twice = line("begin", "0", "<w1.9>", text="key of 0", n=1)
    lines = [*began(), twice, *did("0", "<w1.2>"), returned()]
    assert "executed again" in laws((STEP,), lines)


def test_a_value_that_is_seen_before_it_is_durable_is_found() -> None:
    call, begin, durable, saw = did("0", "<w1.2>")
    lines = [*began(), call, begin, saw, durable, returned()]
    assert "durable first" in laws((STEP,), lines)


@pytest.mark.parametrize("rows", [[], ["<w1.2>", "<w1.2>"], ["<w1.9>"]])
def test_a_transaction_that_did_not_commit_exactly_once_is_found(rows: list[str]) -> None:
    lines = [*began(), *did("0", "<w1.2>"), returned()]
    found = laws((lang.Transaction("a"),), lines, rows=[("0", token) for token in rows])
    assert "exactly once" in found


def test_a_row_of_a_transaction_that_failed_is_found() -> None:
    call, begin, durable, _ = did("0", "<w1.2>")
    failed = line("failed", "0", "<w1.2>", text="Planned: planned <w1.2>")
    lines = [*began(), call, begin, durable, failed, line("raised", text="planned <w1.2>")]
    end = End("failed", error="planned <w1.2>", tokens=frozenset({"<w1.2>"}))
    program = (lang.Transaction("a", fails=True),)
    assert "exactly once" in laws(program, lines, end, rows=[("0", "<w1.2>")])


def test_a_row_without_a_record_is_found() -> None:
    end = End("completed", "[]")
    found = laws((lang.Transaction("a"),), [returned("[]")], end, rows=[("0", "<w1.2>")])
    assert "exactly once" in found


def test_two_idempotency_keys_of_one_step_are_found() -> None:
    other = line("begin", "0", "<w2.2>", "w2", text="another key", n=1)
    lines = [*began(), *began("w2"), *did("0", "<w1.2>"), other, returned()]
    assert "identity" in laws((STEP,), lines)


def test_one_idempotency_key_of_two_steps_is_found() -> None:
    lines = [*began(), *did("0", "<w1.2>", key="k"), *did("1", "<w1.3>", key="k")]
    assert "identity" in laws((STEP, STEP), lines)


def test_a_key_is_one_identity() -> None:
    keyed = lang.Step("a", key="k")
    second = [line("call", "1"), line("saw", "1", "<w1.2>", text="<w1.2>")]
    assert laws((keyed, keyed), [*began(), *did("0", "<w1.2>"), *second, returned()]) == {}


def waited(path: str, token: str) -> list[Line]:
    """Return the lines of a wait that receives an event or times out."""
    durable = [line("durable", "", token)] if token else []
    return [line("call", path), *durable, line("saw", path, token, text=token or "None")]


def test_an_event_that_two_waits_saw_is_found() -> None:
    sent = line("sent", "go", "<e.1>")
    lines = [*began(), sent, *waited("0", "<e.1>"), *waited("1", "<e.1>"), returned()]
    assert "events" in laws((lang.Wait("a", "go"), lang.Wait("b", "go")), lines)


def test_an_event_of_a_race_that_a_retry_dropped_is_for_the_next_wait() -> None:
    """The step before the race was undone, so the race is decided again, and the wait may lose."""
    race = lang.Race("b", ((lang.Wait("c", "go"),), (lang.Sleep("d", 1),)))
    program = (lang.Step("a", undo="ok"), race, lang.Wait("e", "go"))
    won = [line("call", "1"), *waited("1.0.0", "<e.1>"), line("saw", "1", "<e.1>", text="<e.1>")]
    first = [*began(), *did("0", "<w1.2>"), line("sent", "go", "<e.1>"), *won]
    second = [*began("w2"), *waited("2", "<e.1>"), returned()]
    undone = line("retry", token="<w1.2>")
    assert "events" in laws(program, [*first, *second])
    assert "events" in laws(program, [undone, *first, *second])
    assert "events" not in laws(program, [*first, undone, *second])


def test_a_wait_that_timed_out_over_an_event_is_found() -> None:
    lines = [*began(), line("sent", "go", "<e.1>"), *waited("0", ""), returned("[None]")]
    assert "events" in laws((lang.Wait("a", "go", 0),), lines, End("completed", "[None]"))


def test_a_wait_that_began_before_the_event_may_time_out() -> None:
    call, saw = waited("0", "")
    lines = [*began(), call, line("sent", "go", "<e.1>"), saw, returned("[None]")]
    assert laws((lang.Wait("a", "go", 0),), lines, End("completed", "[None]")) == {}


def test_an_event_that_was_consumed_and_never_seen_is_found() -> None:
    race = lang.Race("a", ((lang.Wait("b", "go"),), (lang.Sleep("c", 1),)))
    consumed = [line("sent", "go", "<e.1>"), line("durable", "", "<e.1>")]
    lines = [*began(), *consumed, *waited("1", ""), returned("[]")]
    assert "events" in laws((race, lang.Wait("d", "go", 9)), lines, End("completed", "[]"))
    assert laws((race,), [*began(), *consumed, returned("[]")], End("completed", "[]")) == {}


def test_a_value_in_a_broken_run_is_found() -> None:
    lines = [*began(), line("broke", "0"), *did("1", "<w1.2>"), returned()]
    assert "broken runs" in laws((STEP, STEP), lines)


def test_a_failure_that_was_not_planned_is_found() -> None:
    lines = [*began(), line("failed", "0", text="OSError: away"), line("raised", text="away")]
    assert "unplanned failure" in laws((STEP,), lines, End("failed", error="away"))


FAILING = lang.Step("a", fails=1, heals=True)


def failed_and_healed(path: str) -> list[Line]:
    """Return the lines of a step that fails, is healed and retried, and runs again."""
    call, begin, durable, _ = did(path, "<w1.1>")
    failed = line("failed", path, "<w1.1>", text="Planned: planned <w1.1>")
    before = [*began(), call, begin, durable, failed, line("raised", text="planned <w1.1>")]
    return [*before, line("retry"), *began("w2"), *did(path, "<w1.2>", "w2")]


def test_a_retry_runs_the_failure_again_that_ended_the_run() -> None:
    assert laws((FAILING,), [*failed_and_healed("0"), returned()]) == {}


def test_a_retry_that_runs_a_handled_failure_again_is_found() -> None:
    program = (lang.Try((FAILING,), ()),)
    assert "executed again" in laws(program, [*failed_and_healed("0.0.0"), returned()])


@pytest.mark.parametrize("kind", ["saw", "failed"])
def test_a_retry_may_drop_what_a_paused_owner_has_yet_to_see(kind: Kind) -> None:
    """Its record was durable, so the retry found it; when the owner sees it does not matter."""
    program = (lang.Try((lang.Step("a", fails=9, heals=True),), ()),)
    call, begin, durable, _ = did("0.0.0", "<w1.2>")
    retry = line("retry", "", "<w1.2>", "op")
    late = line(kind, "0.0.0", "<w1.2>", text="planned <w1.2>")
    again = [*began("w2"), *did("0.0.0", "<w2.2>", "w2")]
    found = laws(program, [*began(), call, begin, durable, retry, late, *again])
    assert not {"executed again", "same value"} & found.keys()
    found = laws(program, [*began(), call, begin, durable, late, *again])
    assert "executed again" in found


def test_a_step_inside_a_step_is_found() -> None:
    lines = [*began(), *did("0", "<w1.2>"), line("nested", "0"), returned()]
    assert "steps are leaves" in laws((STEP,), lines)


@pytest.mark.parametrize("status", ["running", "waiting", "suspended", "paused"])
def test_a_run_that_does_not_end_is_found(status: str) -> None:
    assert "every run ends" in laws((STEP,), began(), End(status))


def test_an_end_that_the_program_does_not_allow_is_found() -> None:
    assert "outcome" in laws((STEP,), began(), End("failed", error="drift"))
    assert "outcome" in laws((lang.Fail(),), [*began(), returned("[]")], End("completed", "[]"))
    assert "outcome" in laws((STEP,), began(), End("cancelled"))


def test_an_output_that_the_function_did_not_return_is_found() -> None:
    lines = [*began(), *did("0", "<w1.2>"), returned("['<w1.2>']")]
    assert "outcome" in laws((STEP,), lines, End("completed", "[]", tokens=DONE.tokens))


def test_a_run_that_changes_after_its_end_is_found() -> None:
    lines = [*began(), *did("0", "<w1.2>"), returned()]
    assert "stays over" in laws((STEP,), lines, DONE, End("running"))


def test_two_records_of_one_call_are_found() -> None:
    end = End("completed", "[]", records=(("", "a"), ("", "a")))
    assert "one record" in laws((STEP,), [returned("[]")], end)


def test_an_error_in_the_log_is_found() -> None:
    lines = [*began(), *did("0", "<w1.2>"), returned(), line("error", text="run 'r' …")]
    assert "quiet" in laws((STEP,), lines)


def test_an_error_of_a_saga_that_undid_everything_is_found() -> None:
    text = "run 'r': saga 's' was rolled back after CancelledError, but …"
    lines = [*began(), *did("0", "<w1.2>"), returned(), line("error", text=text)]
    scope = frozenset({"a"})
    end = msgspec.structs.replace(DONE, marked=(("a", "<w1.2>"),), scopes=scope, tried=scope)
    undone = msgspec.structs.replace(end, undone=scope)
    assert "quiet" in laws((STEP,), lines, undone)
    assert "quiet" not in laws((STEP,), lines, end)


UNDOABLE = lang.Step("a", undo="ok")
TWO = [*began(), *did("0", "<w1.2>"), *did("1", "<w1.3>"), line("raised", text="no")]
ROLLED_BACK = End(
    "failed",
    error="no",
    marked=(("a", "<w1.2>"), ("b", "<w1.3>")),
    undone=frozenset({"a", "b"}),
    tokens=frozenset({"<w1.2>", "<w1.3>"}),
)
FAILED = (UNDOABLE, UNDOABLE, lang.Fail())


def undo(key: str, token: str, process: str = "w1", n: int = 1) -> Line:
    """Return the line of an undo that begins."""
    return line("undo", "", token, process, text=f"~undo:{key} key-of-{key}", n=n)


def test_a_rollback_keeps_the_laws() -> None:
    undos = [undo("b", "<w1.3>"), line("undone", "b"), undo("a", "<w1.2>"), line("undone", "a")]
    assert laws(FAILED, [*TWO, *undos], ROLLED_BACK) == {}


def test_an_undo_that_is_repeated_after_its_record_is_found() -> None:
    again = [undo("b", "<w1.3>"), line("undone", "b"), *began("w2"), undo("b", "<w1.3>", "w2")]
    assert "undo" in laws(FAILED, [*TWO, *again, undo("a", "<w1.2>", "w2")], ROLLED_BACK)


def test_an_undo_may_be_repeated_before_its_record() -> None:
    again = [undo("b", "<w1.3>"), *began("w2"), undo("b", "<w1.3>", "w2")]
    assert laws(FAILED, [*TWO, *again, undo("a", "<w1.2>", "w2")], ROLLED_BACK) == {}


def test_an_owner_that_was_paused_may_repeat_an_undo() -> None:
    """Its own process has recorded the undo under a later lease, which it does not know of."""
    paused, later = began("w2"), began("w3")
    other = [line("ask", process="w2", n=2), line("grant", process="w2", n=2, epoch=7)]
    undone = [undo("b", "<w1.3>", "w3"), line("undone", "b", process="w3")]
    told = [*other, line("undone", "b", process="w2", epoch=7)]
    ends = [undo("b", "<w1.3>", "w2"), undo("a", "<w1.2>", "w3")]
    lines = [*TWO, *paused[:2], *later, *undone, *told, paused[2], *ends]
    assert laws(FAILED, lines, ROLLED_BACK) == {}


def test_undos_in_the_wrong_order_are_found() -> None:
    assert "undo" in laws(FAILED, [*TWO, undo("a", "<w1.2>"), undo("b", "<w1.3>")], ROLLED_BACK)


def test_an_undo_before_the_record_of_its_step_is_found() -> None:
    call, begin, durable, saw = did("0", "<w1.2>")
    lines = [*began(), call, begin, undo("a", "<w1.2>"), durable, saw, line("raised", text="no")]
    end = End("failed", error="no", marked=(("a", "<w1.2>"),), undone=frozenset({"a"}))
    assert "undo" in laws((UNDOABLE, lang.Fail()), lines, end)


def test_a_step_that_is_neither_undone_nor_reported_is_found() -> None:
    end = msgspec.structs.replace(ROLLED_BACK, undone=frozenset({"b"}))
    lines = [*TWO, undo("b", "<w1.3>")]
    assert "undo" in laws(FAILED, lines, end)
    reported = msgspec.structs.replace(end, reported=frozenset({"a"}))
    assert laws(FAILED, lines, reported) == {}


def test_a_step_that_begins_after_the_rollback_is_found() -> None:
    late = [line("rollback"), *began("w2"), *did("2", "<w2.2>", "w2")]
    program = (UNDOABLE, UNDOABLE, STEP, lang.Fail())
    undos = [undo("b", "<w1.3>", "w2"), undo("a", "<w1.2>", "w2")]
    assert "undo" in laws(program, [*TWO, *late, *undos], ROLLED_BACK)


def test_a_handled_failure_that_is_undone_is_found() -> None:
    done = msgspec.structs.replace(DONE, marked=(("a", "<w1.2>"),), undone=frozenset({"a"}))
    lines = [*began(), *did("0.0.0", "<w1.2>"), undo("a", "<w1.2>"), returned()]
    assert "undo" in laws((lang.Try((UNDOABLE,), ()),), lines, done)
    saga = (lang.Saga("s", (UNDOABLE,)),)
    by_saga = msgspec.structs.replace(done, scopes=frozenset({"a"}), tried=frozenset({"a"}))
    assert laws(saga, lines, by_saga) == {}
    assert "undo" in laws(saga, [*lines, line("kept", "0")], by_saga)


ASK = lang.Ask("a")


def answered(kind: Kind, token: str) -> Line:
    return line(kind, "", token, "op", text="question")


def test_the_first_answer_counts() -> None:
    lines = [*began(), *waited("0", "<er.1>"), returned("['<er.1>']")]
    end = End("completed", "['<er.1>']", tokens=frozenset({"<er.1>"}))
    first, second = answered("answered", "<er.1>"), answered("refused", "<er.2>")
    assert laws((ASK,), [*lines, first, second], end) == {}
    assert "answers" in laws((ASK,), [*lines, first, answered("answered", "<er.2>")], end)
    assert "answers" in laws((ASK,), [*lines, first, answered("refused", "<er.1>")], end)


def test_an_accepted_answer_that_an_expiry_overrides_is_found() -> None:
    lines = [*began(), answered("answered", "<er.1>"), *waited("0", ""), returned("['']")]
    assert "answers" in laws((lang.Ask("a", 50),), lines, End("completed", "['']"))
