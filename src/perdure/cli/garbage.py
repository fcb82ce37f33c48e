"""The garbage collector of a process that only executes runs.

By default it examines new objects whenever there are 700 more of them (2,000 since Python 3.13). A
thousand runs that wait for the same commit have more than that at every step, none of them garbage,
and collecting took 60 % of the CPU time of ten thousand concurrent runs. Only a program may change
this for its process, so `Worker` leaves it alone; the commands that are the process change it.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager

OBJECTS_PER_RUN, FEW_OBJECTS_PER_RUN, MANY_OBJECTS = 40, 10, 20_000
"""How many more objects per run start a collection: 40, or 10 if that is more than 20,000 objects.

A run and its step have some 80 objects. With 40 for each of 200 runs, the CPU time of runs is 3 to
4 % less than with 10. For thousands of runs, the garbage of the user's code has to be found
earlier: with twenty for each of ten thousand, the collector's share of the CPU time is 12 % instead
of 14 %.
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
    objects = max(min(runs * OBJECTS_PER_RUN, MANY_OBJECTS), runs * FEW_OBJECTS_PER_RUN)
    gc.set_threshold(max(thresholds[0], objects), 2, 2)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
