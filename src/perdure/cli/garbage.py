"""The garbage collector of a process that only executes runs.

By default it examines new objects whenever there are 700 more of them (2,000 since Python 3.13). A
thousand runs that wait for the same commit have more than that at every step, none of them garbage,
and collecting took 60 % of the CPU time of ten thousand concurrent runs. Only a program may change
this for its process, so `Worker` leaves it alone; the commands that are the process change it.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager

OBJECTS_PER_RUN = 10
"""How many more objects per run start a collection.

With ten, garbage of the user's code is at most a few objects per run before it is looked for. With
twenty, the collector's share of the CPU time of ten thousand runs is 12 % instead of 14 %.
"""


@contextmanager
def collector_for(runs: int) -> Generator[None]:
    """Let the garbage collector examine objects rarely enough for this number of concurrent runs.

    What was imported is not examined at all.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    # Every thirteenth collection is a full one, not every 130th: only a full one finds cycles that
    # were in use for a while, which would otherwise accumulate.
    gc.set_threshold(max(thresholds[0], runs * OBJECTS_PER_RUN), 2, 2)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
