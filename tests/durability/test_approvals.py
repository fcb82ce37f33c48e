"""Approvals, callbacks and gated steps: what is asked, who may answer, and what counts."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from perdure import (
    AlreadyAnswered,
    ApprovalRequest,
    Callback,
    Client,
    Err,
    Gate,
    InvalidToken,
    PerdureError,
    Rejected,
    Runtime,
    Snapshot,
    Step,
    StepTimeout,
    TooLate,
    durable,
    workflow,
)
from perdure.errors import CodecError, InvalidArgument, LeaseLost, MissingAbility, RunNotFound
from perdure.operations import Operations
from perdure.snapshot.format import open_waits
from perdure.store import Entry, Grant, LeaseRequest, NewMessage, Query, Receipt
from perdure.stores.memory import MemoryStore
from perdure.testing import TestClock
from perdure.workflow import Workflow

HOSTILE = ['"; DROP', "a/b/../c?d#e%2F", "😀" * 128, "x" * 512, "tab\tnew\nline", "~not me"[1:]]


@dataclass
class Decision:
    berth: int


@workflow("ships")
async def ships(step: Step, tons: int) -> Any:
    answer = await step.approval(
        "ship", f"Ship {tons} t?", to="ops", timeout="3d", returns=Decision, data={"tons": tons}
    )
    berth = None if answer.value is None else answer.value.berth
    return answer.approved, answer.by, answer.note, berth, answer.expired


async def tells_once(request: ApprovalRequest) -> None:
    return None


@workflow("chooses")
async def chooses(step: Step) -> str | None:
    return (await step.approval("how", "How?", options=("road", "rail"))).choice


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def timed_store(clock: TestClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def runtime(timed_store: MemoryStore, clock: TestClock) -> Runtime:
    definitions = [ships, chooses]
    return Runtime(
        timed_store, workflows=definitions, clock=clock, callback_url="https://x.example/cb"
    )


async def pending(runtime: Client, run_id: str = "r") -> Any:
    run = await runtime.get_run(run_id)
    assert run is not None
    (wait,) = run.pending
    return wait


async def finished(runtime: Runtime, run_id: str = "r") -> Any:
    await runtime.sweep()
    run = await runtime.get_run(run_id)
    assert run is not None
    return run


async def test_a_pending_run_shows_what_it_asks(runtime: Runtime) -> None:
    run = await runtime.trigger(ships, 40, run_id="r")
    (wait,) = run.pending
    assert (wait.id, wait.question, wait.to) == ("ship", "Ship 40 t?", "ops")
    assert (wait.data, wait.event) == ({"tons": 40}, None)
    assert wait.expires_at == wait.wake_at


async def test_the_answer_has_who_and_a_typed_value(runtime: Runtime) -> None:
    await runtime.trigger(ships, 40, run_id="r")
    token = (await pending(runtime)).token
    asked = await runtime.approve(token, by="ana", note="fine", value=Decision(7))
    assert (asked.run_id, asked.question) == ("r", "Ship 40 t?")
    run = await finished(runtime)
    assert run.output == (True, "ana", "fine", 7, False)


async def test_an_approval_expires(runtime: Runtime, clock: TestClock) -> None:
    await runtime.trigger(ships, 40, run_id="r")
    token = (await pending(runtime)).token
    await clock.advance(timedelta(days=3))
    assert (await finished(runtime)).output == (False, "", "", None, True)
    with pytest.raises(TooLate, match="it has expired at 2030-01-04"):
        await runtime.approve(token, by="ana")


async def test_the_first_answer_counts(runtime: Runtime) -> None:
    await runtime.trigger(ships, 40, run_id="r")
    token = (await pending(runtime)).token
    await runtime.reject(token, by="eve", note="no")
    with pytest.raises(AlreadyAnswered) as refused:
        await runtime.approve(token, by="ana")
    assert (refused.value.by, refused.value.run_id) == ("eve", "r")
    assert (await finished(runtime)).output[:3] == (False, "eve", "no")
    with pytest.raises(AlreadyAnswered, match="by eve"):
        await runtime.approve(token, by="ana")


@pytest.mark.parametrize("run_id", HOSTILE)
async def test_a_token_works_for_any_run_id(runtime: Runtime, run_id: str) -> None:
    await runtime.trigger(ships, 1, run_id=run_id)
    token = (await pending(runtime, run_id)).token
    assert token.replace("-", "").replace("_", "").replace(".", "").isalnum()
    await runtime.approve(token, by="ana")
    assert (await finished(runtime, run_id)).output[0]


@pytest.mark.parametrize(
    "token", ["", "x", "a.b", "🙂.🙂", "." * 9, None, 7, "x" * 5000, "AAAA.AA="]
)
async def test_a_malformed_token_is_a_clear_error(runtime: Runtime, token: Any) -> None:
    with pytest.raises(InvalidToken, match="the token of an approval or callback"):
        await runtime.approve(token)


async def test_a_token_of_another_run_or_wait_is_refused(runtime: Runtime) -> None:
    await runtime.trigger(ships, 1, run_id="r")
    await runtime.trigger(ships, 2, run_id="s")
    nonce, _, own = (await pending(runtime)).token.partition(".")
    other = (await pending(runtime, "s")).token.partition(".")[2]
    with pytest.raises(TooLate, match="does not wait for this answer"):
        await runtime.approve(f"{nonce}.{other}")
    with pytest.raises(TooLate, match="does not wait for this answer"):
        await runtime.approve(f"{'a' * 32}.{own}")
    assert not await runtime.store.inbox("s")  # type: ignore[attr-defined]  # it has an inbox
    await runtime.delete("r")
    with pytest.raises(RunNotFound):
        await runtime.approve(f"{nonce}.{own}")


async def test_only_an_option_can_be_chosen(runtime: Runtime) -> None:
    await runtime.trigger(chooses, run_id="r")
    token = (await pending(runtime)).token
    for choice in (None, "sea"):
        with pytest.raises(InvalidArgument, match="one of 'road', 'rail'"):
            await runtime.approve(token, choice=choice)
    await runtime.approve(token, choice="rail")
    assert (await finished(runtime)).output == "rail"


async def test_a_value_that_does_not_fit_fails_the_call(runtime: Runtime) -> None:
    await runtime.trigger(ships, 1, run_id="r")
    await runtime.approve((await pending(runtime)).token, value={"berth": "x"})
    run = await finished(runtime)
    assert isinstance(run.error, CodecError)
    assert "the answer to step 'ship' does not fit" in str(run.error)


@pytest.mark.parametrize(
    "options",
    [
        {"question": ""},
        {"question": 7},
        {"to": 7},
        {"options": "yes"},
        {"options": ("a", "a")},
        {"options": (1,)},
        {"timeout": "soon"},
        {"remind": "0s", "notify": print},
        {"remind": "1d"},
        {"notify": 7},
        {"notify": durable.step(undo=print)(tells_once)},
    ],
)
async def test_bad_arguments_are_refused(store: MemoryStore, options: dict[str, Any]) -> None:
    @workflow("bad")
    async def bad(step: Step) -> None:
        arguments = dict(options)
        await step.approval("ask", arguments.pop("question", "Go?"), **arguments)

    run = await Runtime(store, workflows=[bad]).trigger(bad)
    assert isinstance(run.error, InvalidArgument)


async def test_it_needs_a_store() -> None:
    async def asks(step: Step) -> None:
        await step.approval("ask", "Go?")

    result = await Workflow("asks").run(asks)
    assert isinstance(result.error, MissingAbility)  # type: ignore[union-attr]  # it failed


async def test_the_wait_is_durable_before_notify_is_called(store: MemoryStore) -> None:
    keys: list[tuple[str, str]] = []

    @workflow("tells")
    async def tells(step: Step) -> bool:
        async def tell(request: ApprovalRequest) -> None:
            asked = await Client(store).find_approval(request.token)
            keys.append((asked.question, step.idempotency_key))
            assert request.url == f"https://x.example/cb/{request.token}"

        return (await step.approval("ask", "Go?", notify=tell)).approved

    runtime = Runtime(store, workflows=[tells], callback_url="https://x.example/cb")
    (wait,) = (await runtime.trigger(tells, run_id="r")).pending
    assert keys == [("Go?", wait.token)]


async def test_a_url_needs_an_address(store: MemoryStore) -> None:
    @workflow("no url")
    async def no_url(step: Step) -> None:
        await step.callback("c", start=lambda callback: callback.url)

    run = await Runtime(store, workflows=[no_url]).trigger(no_url, run_id="r")
    assert isinstance(run.error, PerdureError)
    assert "Runtime(callback_url=" in str(run.error)
    assert run.pending == ()


async def test_reminders_are_sent_until_it_is_answered(
    timed_store: MemoryStore, clock: TestClock
) -> None:
    notifications: list[int] = []

    @workflow("reminds")
    async def reminds(step: Step) -> bool:
        ask = step.approval(
            "ask",
            "Go?",
            timeout="10d",
            remind="1d",
            notify=lambda request: notifications.append(request.reminder),
        )
        return (await ask).approved

    runtime = Runtime(timed_store, workflows=[reminds], clock=clock)
    token = (await runtime.trigger(reminds, run_id="r")).pending[0].token
    for _ in range(2):
        await clock.advance(timedelta(days=1))
        await runtime.sweep()
    assert notifications == [0, 1, 2]
    await clock.advance(timedelta(days=4))  # the worker was down: the missed ones are one
    await runtime.sweep()
    assert notifications == [0, 1, 2, 6]
    assert (await pending(runtime)).token == token
    await runtime.approve(token)
    assert (await finished(runtime)).output is True


async def test_a_failed_reminder_leaves_the_question_open(
    timed_store: MemoryStore, clock: TestClock
) -> None:
    def tell(request: ApprovalRequest) -> None:
        if request.reminder:
            raise ConnectionError

    @workflow("reminds")
    async def reminds(step: Step) -> bool:
        return (await step.approval("ask", "Go?", remind="1d", notify=tell)).approved

    runtime = Runtime(timed_store, workflows=[reminds], clock=clock)
    token = (await runtime.trigger(reminds, run_id="r")).pending[0].token
    await clock.advance(timedelta(days=1))
    await runtime.sweep()
    await runtime.approve(token)
    assert (await finished(runtime)).output is True


async def test_a_failed_notify_fails_the_call_and_a_retry_asks_again(
    store: MemoryStore,
) -> None:
    is_up = False
    tokens: list[str] = []

    def tell(request: ApprovalRequest) -> None:
        tokens.append(request.token)
        if not is_up:
            raise ConnectionError("no server")

    @workflow("tells")
    async def tells(step: Step) -> bool:
        return (await step.approval("ask", "Go?", notify=tell)).approved

    runtime = Runtime(store, workflows=[tells])
    run = await runtime.trigger(tells, run_id="r")
    assert isinstance(run.error, ConnectionError)
    with pytest.raises(TooLate, match="the run is failed"):
        await runtime.approve(tokens[0])
    is_up = True
    run = await runtime.retry("r")
    assert [wait.token for wait in run.pending] == tokens[1:] != tokens[:1]


async def wire(amount: int, to: str = "ana") -> str:
    return f"{amount} to {to}"


@durable.step(approve=Gate("Pay {amount:,}?", to="finance", timeout="1d"))
async def pay(amount: int) -> int:
    return amount


@workflow("gates")
async def gates(step: Step, amount: int) -> str:
    return await step("wire", wire, amount, approve="Wire {amount} to {to}?")


@workflow("pays")
async def pays(step: Step, amount: int) -> list[int]:
    return [await pay(amount), *await step.map("more", [amount + 1], pay)]


async def test_a_gated_step_runs_when_it_is_approved(store: MemoryStore) -> None:
    runtime = Runtime(store, workflows=[gates])
    (wait,) = (await runtime.trigger(gates, 5, run_id="r")).pending
    assert wait.question == "Wire 5 to ana?"
    await runtime.approve(wait.token, by="bob")
    assert (await finished(runtime)).output == "5 to ana"


async def test_a_rejected_step_raises_an_error_with_who_and_why(store: MemoryStore) -> None:
    runtime = Runtime(store, workflows=[gates])
    (wait,) = (await runtime.trigger(gates, 5, run_id="r")).pending
    await runtime.reject(wait.token, by="eve", note="no money")
    run = await finished(runtime)
    assert isinstance(run.error, Rejected)
    assert (run.error.step, run.error.by, run.error.note) == ("wire", "eve", "no money")
    assert str(run.error) == "step 'wire' was rejected by eve: Wire 5 to ana? (no money)"
    with pytest.raises(AlreadyAnswered, match="eve"):
        await runtime.approve(wait.token)
    again = await runtime.retry("r")
    assert again.pending[0].token != wait.token


async def test_a_gate_that_expires_rejects_the_step(
    timed_store: MemoryStore, clock: TestClock
) -> None:
    runtime = Runtime(timed_store, workflows=[pays], clock=clock)
    await runtime.trigger(pays, 5000, run_id="r")
    await clock.advance(timedelta(days=1))
    run = await finished(runtime)
    assert isinstance(run.error, Rejected)
    assert run.error.expired
    assert str(run.error) == "step 'pay' was not answered in time: Pay 5,000?"


async def test_a_decorated_step_is_gated_wherever_it_is_called(store: MemoryStore) -> None:
    runtime = Runtime(store, workflows=[pays])
    await runtime.trigger(pays, 1, run_id="r")
    for question in ("Pay 1?", "Pay 2?"):
        wait = await pending(runtime)
        assert (wait.question, wait.to) == (question, "finance")
        await runtime.approve(wait.token)
        await runtime.sweep()
    assert (await finished(runtime)).output == [1, 2]


@pytest.mark.parametrize("approve", ["Wire {sum}?", "Wire {0.x}?", "Wire {", 7, Gate("")])
async def test_a_gate_names_parameters(store: MemoryStore, approve: Any) -> None:
    @workflow("bad")
    async def bad(step: Step) -> str:
        return await step("wire", wire, 5, approve=approve)

    run = await Runtime(store, workflows=[bad]).trigger(bad)
    assert isinstance(run.error, InvalidArgument)


@pytest.mark.parametrize(
    "gate", [Gate("Go?", timeout="soon"), Gate("Go?", remind="1d"), Gate("Go?", to="x" * 201)]
)
def test_a_decorator_refuses_a_bad_gate(gate: Gate) -> None:
    with pytest.raises(InvalidArgument):
        durable.step(approve=gate)


@workflow("signs")
async def signs(step: Step) -> Decision:
    return await step.callback("signed", timeout="7d", returns=Decision)


async def test_a_callback_returns_what_was_answered(store: MemoryStore) -> None:
    runtime = Runtime(store, workflows=[signs])
    (wait,) = (await runtime.trigger(signs, run_id="r")).pending
    with pytest.raises(InvalidArgument, match=r"call answer\(token, payload\)"):
        await runtime.reject(wait.token)
    await runtime.answer(wait.token, {"berth": 3})
    assert (await finished(runtime)).output == Decision(3)


async def test_a_callback_times_out(timed_store: MemoryStore, clock: TestClock) -> None:
    runtime = Runtime(timed_store, workflows=[signs], clock=clock)
    await runtime.trigger(signs, run_id="r")
    await clock.advance(timedelta(days=7))
    assert isinstance((await finished(runtime)).error, StepTimeout)


async def test_start_gets_the_token_once(store: MemoryStore) -> None:
    notifications: list[str] = []

    @workflow("starts")
    async def starts(step: Step) -> Any:
        def start(callback: Callback) -> None:
            notifications.append(callback.token)

        return await step.callback("c", start=start)

    runtime = Runtime(store, workflows=[starts], always_replay=True)
    (wait,) = (await runtime.trigger(starts, run_id="r")).pending
    await runtime.resume("r")
    assert notifications == [wait.token]


@workflow("asks many")
async def asks_many(step: Step, n: int) -> list[bool]:
    asks = [step.approval(f"ask {i}", f"{i}? " + "x" * 300, to=f"to {i}") for i in range(n)]
    return [answer.approved for answer in await asyncio.gather(*asks)]


async def test_open_approvals_are_listed_by_who_is_asked(runtime: Runtime) -> None:
    for n in range(5):
        await runtime.trigger(ships, n, run_id=f"r{n}")
    first = await runtime.approvals(to="ops", limit=3)
    rest = await runtime.approvals(to="ops", limit=3, after=first.cursor)
    listed = [each.run_id for page in (first, rest) for each in page.approvals]
    assert sorted(listed) == [f"r{n}" for n in range(5)]
    assert rest.cursor is None
    assert (await runtime.approvals(to="nobody")).approvals == ()
    one = first.approvals[0]
    await runtime.approve(one.token, by="ana")
    await runtime.sweep()
    assert one.run_id not in [each.run_id for each in (await runtime.approvals()).approvals]


async def test_an_answered_approval_is_no_longer_listed_although_no_worker_runs(
    timed_store: MemoryStore, clock: TestClock
) -> None:
    runtime = Runtime(timed_store, workflows=[ships], clock=clock)
    await runtime.trigger(ships, 1, run_id="r")
    client = Client(timed_store, clock=clock)
    (one,) = (await client.approvals()).approvals
    await client.approve(one.token)
    assert (await client.approvals()).approvals == ()


async def test_an_answered_approval_of_a_paused_run_is_not_listed(
    timed_store: MemoryStore, clock: TestClock
) -> None:
    runtime = Runtime(timed_store, workflows=[ships], clock=clock)
    await runtime.trigger(ships, 1, run_id="r")
    await Operations(timed_store, clock=clock).pause("r", by="ops", why="later")
    (one,) = (await runtime.approvals()).approvals
    await runtime.approve(one.token)
    assert (await runtime.approvals()).approvals == ()


async def test_the_list_refuses_a_name_that_cannot_be_stored(runtime: Runtime) -> None:
    with pytest.raises(InvalidArgument, match="to: expected a string"):
        await runtime.approvals(to="\ud800")


async def test_a_run_may_ask_more_than_a_list_has_room_for(store: MemoryStore) -> None:
    runtime = Runtime(store, workflows=[asks_many])
    await runtime.trigger(asks_many, 20, run_id="r")
    page = await runtime.approvals()
    assert len(page.approvals) == 20
    (one,) = (await runtime.approvals(to="to 17")).approvals
    assert one.id.endswith("ask 17")


async def test_a_long_question_is_cut_in_a_list(store: MemoryStore) -> None:
    runtime = Runtime(store, workflows=[asks_many])
    await runtime.trigger(asks_many, 1, run_id="r")
    (one,) = (await runtime.approvals()).approvals
    assert one.question.endswith("x…")
    assert len((await runtime.find_approval(one.token)).question) > 300


async def test_the_tags_of_a_run_do_not_show_who_is_asked(runtime: Runtime) -> None:
    run = await runtime.trigger(ships, 1, run_id="r", tags={"ship": "Oslo"})
    assert run.tags == {"ship": "Oslo"}
    store: Any = runtime.store
    (matching_run,) = (await store.search(Query(tags=("~asks=ops", "ship=Oslo")), 9)).runs
    assert matching_run.id == "r"
    await runtime.approve((await pending(runtime)).token)
    await runtime.sweep()
    assert (await store.search(Query(tags=("~asks=ops",)), 9)).runs == ()


async def test_an_operator_answers_by_run(store: MemoryStore) -> None:
    runtime, operations = Runtime(store, workflows=[gates]), Operations(store, via="cli")
    await runtime.trigger(gates, 5, run_id="r")
    outcome = await operations.approve("r", by="ana", why="checked")
    assert outcome.sentence == "Answered 'approval of wire'. A worker will continue the run."
    assert (await finished(runtime)).output == "5 to ana"
    snapshot: Any = await store.load("r")
    (act,) = snapshot["metadata"]["acts"]
    assert (act["by"], act["via"], act["verb"], act["why"]) == ("ana", "cli", "approve", "checked")


async def test_an_operator_must_say_which_question(store: MemoryStore) -> None:
    runtime, operations = Runtime(store, workflows=[asks_many]), Operations(store)
    run = await runtime.trigger(asks_many, 2, run_id="r")
    with pytest.raises(PerdureError, match="name one of them"):
        await operations.approve("r", by="ana")
    await operations.reject("r", run.pending[1].id, by="ana")
    await operations.approve(run.pending[0].token, by="ana")
    assert (await finished(runtime)).output == [True, False]


async def test_a_paused_run_keeps_its_question(store: MemoryStore) -> None:
    runtime, operations = Runtime(store, workflows=[ships]), Operations(store)
    token = (await runtime.trigger(ships, 1, run_id="r")).pending[0].token
    await operations.pause("r", by="ops")
    await runtime.approve(token, by="ana")
    await operations.unpause("r", by="ops")
    assert (await finished(runtime)).output[1] == "ana"


async def test_approvals_work_on_every_store(every_store: Any) -> None:
    runtime = Runtime(every_store, workflows=[ships])
    await runtime.trigger(ships, 1, run_id="r")
    (one,) = (await runtime.approvals(to="ops")).approvals
    results = await asyncio.gather(
        *(runtime.approve(one.token, by=f"caller {n}") for n in range(5)), return_exceptions=True
    )
    assert sum(isinstance(each, AlreadyAnswered) for each in results) == 4
    run = await finished(runtime)
    (winner,) = (n for n, each in enumerate(results) if not isinstance(each, Exception))
    assert run.output[1] == f"caller {winner}"
    assert (await runtime.approvals()).approvals == ()


class SlowStore(MemoryStore):
    """A store that takes a while to send messages."""

    async def send(self, messages: Sequence[NewMessage], /) -> Sequence[Receipt]:
        await asyncio.sleep(0.05)
        return await super().send(messages)


async def test_a_question_may_be_cancelled_twice_while_it_is_closed() -> None:
    """As anyio does; the function sees a cancellation, nothing else."""
    observations: list[type[BaseException]] = []

    @workflow("impatient")
    async def impatient(step: Step) -> str:
        asking = asyncio.create_task(_ask(step))
        await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.sleep(0.02)
        asking.cancel()
        try:
            await asking
        except BaseException as error:  # noqa: BLE001  # whatever the function sees
            observations.append(type(error))
        return "done"

    run = await Runtime(SlowStore(), workflows=[impatient]).trigger(impatient)
    assert (run.output, observations) == ("done", [asyncio.CancelledError])


async def _ask(step: Step) -> None:
    await step.approval("ship", "Ship?")


class RacingStore(MemoryStore):
    """A store in which something happens just before a run closes a question of its own."""

    before: Callable[[], Awaitable[object]] | None = None

    async def send(self, messages: Sequence[NewMessage], /) -> Sequence[Receipt]:
        if self.before is not None and b"closed" in messages[0].payload:
            before, self.before = self.before, None
            await before()
        return await super().send(messages)


async def test_an_answer_that_arrives_as_the_function_ends_is_recorded() -> None:
    """It was accepted: if no code sees it, an act says so."""
    store = RacingStore()
    client = Client(store)

    async def approve() -> None:
        run = await client.get_run("t")
        assert run is not None
        await client.approve(run.pending[0].token, by="ana")

    @workflow("ending")
    async def ending(step: Step) -> str:
        asking = asyncio.create_task(_ask(step))
        await asyncio.sleep(0.02)
        store.before = approve
        asking.cancel()
        await asyncio.sleep(0)
        return "done"

    assert (await Runtime(store, workflows=[ending]).trigger(ending, run_id="t")).output == "done"
    snapshot: Any = await store.load("t")
    (act,) = snapshot["metadata"]["acts"]
    assert (act["verb"], act["by"]) == ("answer", "ana")


async def test_a_run_whose_answer_another_owner_has_recorded_stops(
    timed_store: MemoryStore, clock: TestClock
) -> None:
    """Otherwise it would try to end its wait again and again, whatever cancels it."""

    async def ask(step: Step) -> bool:
        return (await step.approval("go", "Go?", timeout="1h")).expired

    store = timed_store
    call = durable.run({}, ask, id="run", store=store, clock=clock, lease_ttl="1d")
    running = asyncio.ensure_future(call)
    await clock.advance("1m")
    [wait] = open_waits(await stored_run(store))
    [summary] = await store.summaries(["run"])
    assert summary is not None
    request = LeaseRequest("run", "another", timedelta(days=1), instead_of=summary.owner)
    [grant] = await store.acquire([request])
    assert isinstance(grant, Grant)
    await store.send([NewMessage("run", wait["event"], b'{"by": "ana"}', wait["event"])])
    [message] = await store.inbox("run")
    await store.append([Entry("run", grant.lease.epoch, 1, b"{}", consumes=(message.id,))])
    await clock.advance("1h")
    async with asyncio.timeout(5):
        result = await running
    assert isinstance(result, Err)
    assert isinstance(result.error, LeaseLost)


async def stored_run(store: MemoryStore) -> Snapshot:
    snapshot = await store.load("run")
    assert snapshot is not None
    return snapshot
