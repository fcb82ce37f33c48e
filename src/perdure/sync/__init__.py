"""perdure without an event loop: for Flask, Django views and scripts.

client = sync.Client("postgresql://db/app")
run = client.trigger("welcome", {"email": "a@b.c"}, run_id="welcome-1")
print(client.result(run, timeout="10s"))
"""

from perdure.sync.client import Client, RunHandle, ScheduleHandle

__all__ = ["Client", "RunHandle", "ScheduleHandle"]
