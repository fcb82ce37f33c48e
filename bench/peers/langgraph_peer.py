"""LangGraph with its SQLite checkpointer: a graph that goes round so many times."""

import asyncio
import json
import sys
import tempfile
import time
from importlib.metadata import version
from statistics import median
from typing import TypedDict

from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph

lengths = json.loads(sys.argv[3])


class State(TypedDict):
    left: int
    value: dict[str, str]


async def fetch(state: State) -> State:
    value = {"id": "1", "name": "Ann", "padding": "x" * 60}
    return {"left": state["left"] - 1, "value": value}


async def main() -> None:
    graph = StateGraph(State)
    graph.add_node("fetch", fetch)
    graph.add_edge(START, "fetch")
    graph.add_conditional_edges("fetch", lambda state: END if state["left"] <= 0 else "fetch")
    async with AsyncSqliteSaver.from_conn_string(f"{tempfile.mkdtemp()}/graph.db") as saver:
        app = graph.compile(checkpointer=saver)

        async def run(name: str, count: int) -> None:
            config = {"configurable": {"thread_id": name}, "recursion_limit": count + 10}
            await app.ainvoke({"left": count, "value": {}}, config, durability="sync")

        await run("warm", 5)
        lengths_took = []
        for count in lengths:
            took = []
            for attempt in range(3):
                began = time.perf_counter()
                await run(f"a-{count}-{attempt}", count)
                took.append((time.perf_counter() - began) / count)
            lengths_took.append((count, median(took)))
        began = time.perf_counter()
        await asyncio.gather(*(run(f"b-{n}", 10) for n in range(50)))
        rate = 500 / (time.perf_counter() - began)
    print(
        "RESULT "
        + json.dumps({"version": f"LangGraph {version('langgraph')}", "A": lengths_took, "B": rate})
    )


asyncio.run(main())
