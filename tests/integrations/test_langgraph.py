"""PerdureSaver fulfills the contract of LangGraph's checkpointers, and graphs run on it."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, TypedDict
from uuid import uuid4

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from perdure.errors import InvalidArgument, StoreCorrupted
from perdure.integrations.langgraph import PerdureSaver
from perdure.keyvalue import KeyValueStore, MemoryKeyValue
from perdure.stores import MemoryStore
from perdure.stores.sqlite import SqliteKeyValue


@pytest.fixture(params=["memory", "sqlite"])
async def new_store(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncGenerator[Callable[[], KeyValueStore]]:
    async with AsyncExitStack() as opened:

        def new() -> KeyValueStore:
            if request.param == "memory":
                return MemoryKeyValue()
            store = SqliteKeyValue(tmp_path / f"{uuid4()}.db")
            opened.push_async_callback(store.close)
            return store

        yield new


async def test_the_conformance_suite_passes(new_store: Callable[[], KeyValueStore]) -> None:
    @checkpointer_test(name=f"PerdureSaver {uuid4()}")
    async def saver() -> AsyncGenerator[BaseCheckpointSaver[str]]:
        yield PerdureSaver(new_store())

    report = await validate(saver)
    assert report.passed_all(), report.to_dict()
    assert report.conformance_level() == "FULL"


def add(old: list[str], new: list[str]) -> list[str]:
    return [*old, *new]


class State(TypedDict):
    log: Annotated[list[str], add]


def graph(saver: PerdureSaver) -> Any:
    async def draft(state: State) -> State:
        return {"log": ["draft"]}

    async def approve(state: State) -> State:
        return {"log": [f"approved by {interrupt('approve?')}"]}

    builder = StateGraph(State)
    builder.add_node(draft)
    builder.add_node(approve)
    builder.add_edge(START, "draft")
    builder.add_edge("draft", "approve")
    builder.add_edge("approve", END)
    return builder.compile(checkpointer=saver)


HOSTILE = ["1", "a/b*c", "é 🎉", "x" * 600, "%2F", "~"]


@pytest.mark.parametrize("thread", HOSTILE, ids=range(len(HOSTILE)))
async def test_an_interrupted_graph_continues_in_another_process(thread: str) -> None:
    store = MemoryKeyValue()
    config = {"configurable": {"thread_id": thread}}
    first = await graph(PerdureSaver(store)).ainvoke({"log": []}, config)
    assert first["__interrupt__"][0].value == "approve?"
    state = await graph(PerdureSaver(store)).ainvoke(Command(resume="ana"), config)
    assert state["log"] == ["draft", "approved by ana"]


async def test_threads_with_similar_names_are_separate() -> None:
    saver = PerdureSaver(MemoryKeyValue())
    for thread in ("a", "a/b", "a*", "a%2Fb"):
        await graph(saver).ainvoke({"log": [thread]}, {"configurable": {"thread_id": thread}})
    await saver.adelete_thread("a")
    assert await saver.aget_tuple({"configurable": {"thread_id": "a"}}) is None
    for thread in ("a/b", "a*", "a%2Fb"):
        state = await graph(saver).aget_state({"configurable": {"thread_id": thread}})
        assert state.values["log"] == [thread, "draft"]


async def test_a_thread_can_be_forked_at_an_earlier_checkpoint() -> None:
    compiled = graph(PerdureSaver(MemoryKeyValue()))
    config = {"configurable": {"thread_id": "1"}}
    await compiled.ainvoke({"log": []}, config)
    await compiled.ainvoke(Command(resume="ana"), config)
    history = [state async for state in compiled.aget_state_history(config)]
    drafted = next(state for state in history if state.next == ("approve",))
    fork = await compiled.aupdate_state(drafted.config, {"log": ["checked"]})
    await compiled.ainvoke(None, fork)
    final_state = await compiled.ainvoke(Command(resume="bob"), config)
    assert final_state["log"] == ["draft", "checked", "approved by bob"]
    assert history[0].values["log"] == ["draft", "approved by ana"]


async def test_the_functional_api_does_not_repeat_finished_tasks() -> None:
    calls = []

    @task
    async def pay(amount: int) -> str:
        calls.append(amount)
        return f"paid {amount}"

    @entrypoint(checkpointer=PerdureSaver(MemoryKeyValue()))
    async def order(amount: int) -> str:
        paid = await pay(amount)
        return f"{paid}, {interrupt('ship?')}"

    config: Any = {"configurable": {"thread_id": "1"}}
    await order.ainvoke(5, config)
    assert await order.ainvoke(Command(resume="shipped"), config) == "paid 5, shipped"
    assert calls == [5]


async def test_pruning_keeps_what_the_latest_checkpoint_needs() -> None:
    store = MemoryKeyValue()
    saver = PerdureSaver(store)
    config: Any = {"configurable": {"thread_id": "1"}}
    await graph(saver).ainvoke({"log": []}, config)
    before = len(await store.keys())
    await saver.aprune(["1"])
    assert len(await store.keys()) < before
    state = await graph(saver).ainvoke(Command(resume="ana"), config)
    assert state["log"] == ["draft", "approved by ana"]
    await saver.aprune(["1"], strategy="delete")
    assert await store.keys() == []
    with pytest.raises(InvalidArgument, match="keep_latest"):
        await saver.aprune(["1"], strategy="some")


async def test_a_crash_between_two_writes_leaves_no_broken_checkpoint() -> None:
    """Whatever was written so far, the thread can be read and continued."""

    class Crashing(MemoryKeyValue):
        left = 0

        async def set(self, key: str, value: str, /, **options: Any) -> None:
            if self.left == 0:
                raise ConnectionError
            self.left -= 1
            await super().set(key, value, **options)

    config: Any = {"configurable": {"thread_id": "1"}}
    crashes = 0
    while True:
        store = Crashing()
        store.left = crashes
        try:
            await graph(PerdureSaver(store)).ainvoke({"log": ["begin"]}, config)
        except ConnectionError:
            crashes += 1
        else:
            break
        store.left = -1
        compiled = graph(PerdureSaver(store))
        is_begun = await PerdureSaver(store).aget_tuple(config) is not None
        await compiled.ainvoke(None if is_begun else {"log": ["begin"]}, config)
        state = await compiled.ainvoke(Command(resume="ana"), config)
        assert state["log"] == ["begin", "draft", "approved by ana"]
    assert crashes >= 8


async def test_a_foreign_value_is_reported_with_its_key() -> None:
    store = MemoryKeyValue()
    await store.set("langgraph/c/1//x", "no JSON")
    with pytest.raises(StoreCorrupted, match="langgraph/c/1//x"):
        await PerdureSaver(store).aget_tuple({"configurable": {"thread_id": "1"}})


def test_synchronous_calls_say_what_to_call() -> None:
    compiled = graph(PerdureSaver(MemoryKeyValue()))
    config = {"configurable": {"thread_id": "1"}}
    with pytest.raises(NotImplementedError, match="call ainvoke"):
        compiled.invoke({"log": []}, config)
    with pytest.raises(NotImplementedError, match="call ainvoke"):
        compiled.get_state(config)


def test_a_store_of_runs_is_refused() -> None:
    store: Any = MemoryStore()
    with pytest.raises(InvalidArgument, match="SqliteKeyValue"):
        PerdureSaver(store)
