"""The workloads with LangGraph and a checkpointer: a graph with a loop, durability="sync".

`python -m bench.peers.langgraph postgresql://… | sqlite:///…`. It resumes from its last checkpoint
and has no durable timer, so that there is nothing to measure for those workloads.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, TypedDict

# Not installed together with perdure: this file runs in its own environment.
from langgraph.checkpoint.postgres.aio import (  # type: ignore[import-not-found,unused-ignore]
    AsyncPostgresSaver,
)
from langgraph.checkpoint.sqlite.aio import (  # type: ignore[import-not-found,unused-ignore]
    AsyncSqliteSaver,
)
from langgraph.graph import (  # type: ignore[import-not-found,unused-ignore]
    END,
    START,
    StateGraph,
)
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool  # type: ignore[import-not-found,unused-ignore]

from bench.peers.answering import VALUE, now, serve


class State(TypedDict):
    """The state of the graph."""

    left: int
    value: dict[str, str]


async def fetch(state: State) -> State:
    """Execute one iteration."""
    return {"left": state["left"] - 1, "value": VALUE}


@asynccontextmanager
async def saver_at(url: str) -> AsyncIterator[Any]:
    """Open the checkpointer of a URL; for PostgreSQL with a pool, as its manual recommends."""
    if url.startswith("sqlite:///"):
        async with AsyncSqliteSaver.from_conn_string(url.removeprefix("sqlite:///")) as saver:
            yield saver
        return
    options = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    async with AsyncConnectionPool(url, min_size=1, max_size=20, kwargs=options) as pool:
        saver = AsyncPostgresSaver(pool)
        await saver.setup()
        yield saver


async def main() -> None:
    graph = StateGraph(State)
    graph.add_node("fetch", fetch)
    graph.add_edge(START, "fetch")
    graph.add_conditional_edges("fetch", lambda state: END if state["left"] <= 0 else "fetch")
    async with saver_at(sys.argv[1]) as saver:
        app = graph.compile(checkpointer=saver)

        async def one_run(name: str, count: int) -> float:
            config = {"configurable": {"thread_id": name}, "recursion_limit": count + 10}
            began = now()
            await app.ainvoke({"left": count, "value": {}}, config, durability="sync")
            return (now() - began) / count

        async def many_runs(name: str, runs: int) -> float:
            began = now()
            await asyncio.gather(*(one_run(f"{name}-{n}", 10) for n in range(runs)))
            return runs * 10 / (now() - began)

        await one_run("warm", 50)
        await serve(f"LangGraph {version('langgraph')}", {"A": one_run, "B": many_runs})


asyncio.run(main())
