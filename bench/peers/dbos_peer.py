"""DBOS, the same workloads: steps one after another, and many workflows at once."""

import json
import sys
import tempfile
import time
from importlib.metadata import version
from statistics import median

from dbos import DBOS, SetWorkflowID

store, url, lengths = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if store == "sqlite":
    url = f"sqlite:///{tempfile.mkdtemp()}/dbos.sqlite"
DBOS(
    config={
        "name": "bench",
        "system_database_url": url,
        "log_level": "ERROR",
        "run_admin_server": False,
    }
)


@DBOS.step()
def fetch(id: str) -> dict[str, str]:
    return {"id": "1", "name": "Ann", "padding": "x" * 60}


@DBOS.workflow()
def sequence(count: int) -> None:
    for _ in range(count):
        fetch("1")


DBOS.launch()
sequence(5)
A = []
for count in lengths:
    took = []
    for attempt in range(3):
        began = time.perf_counter()
        with SetWorkflowID(f"a-{count}-{attempt}-{time.time_ns()}"):
            sequence(count)
        took.append((time.perf_counter() - began) / count)
    A.append((count, median(took)))
rates = []
for _ in range(3):
    began = time.perf_counter()
    handles = [DBOS.start_workflow(sequence, 10) for _ in range(50)]
    for handle in handles:
        handle.get_result()
    rates.append(500 / (time.perf_counter() - began))
print("RESULT " + json.dumps({"version": f"DBOS {version('dbos')}", "A": A, "B": median(rates)}))
DBOS.destroy()
