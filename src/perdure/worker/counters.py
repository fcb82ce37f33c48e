"""The counters of a worker."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What a worker has done so far.

    `claimed` counts claims of runs, `finished` counts runs that ended or were suspended. `failed`
    and `cancelled` are runs that ended with that status; `retried` counts steps that failed and
    were attempted again. `failed_to_continue` are runs that it could not continue, `taken_over`
    those whose previous owner had died, `delayed` and `paused` those that may have killed their
    owners, and `released` those that were left to other workers when it stopped.
    """

    claimed: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    failed_to_continue: int = 0
    taken_over: int = 0
    delayed: int = 0
    paused: int = 0
    released: int = 0
