"""The child runs that end with their parent."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Start(NamedTuple):
    """Runs that one call started; `branch` is the calling branch."""

    run_ids: Sequence[str]
    branch: str


class StartedRuns:
    """The runs that are cancelled when this run ends, by the prefix of their ids.

    They are known from the records of the calls that started them. Some of them may already have
    ended.
    """

    __slots__ = ("_starts",)

    def __init__(self) -> None:
        self._starts: dict[str, dict[int, Start]] = {}

    def __bool__(self) -> bool:
        """Return whether there are any started runs."""
        return bool(self._starts)

    def load(self, record: Mapping[str, Any]) -> None:
        """Add the runs of a record, or forget runs that have ended according to it."""
        if record["kind"] == "start":
            self.add(record.get("value"), record.get("branch", ""))
        else:
            # The last record of a map: its runs have ended.
            self.forget(record["run"])

    def add(self, facts: Any, branch: str) -> None:
        """Add runs; `facts` is the recorded value of their start."""
        if facts.get("cancels"):
            base, first = facts.get("base") or facts["id"], facts.get("first", 0)
            run_ids = [base]
            if "base" in facts:
                run_ids = [f"{base}/{first + n}" for n in range(facts["count"])]
            self._starts.setdefault(base, {})[first] = Start(run_ids, branch)

    def forget(self, base: str) -> list[str]:
        """Forget the runs that a call started; return their ids."""
        starts = self._starts.pop(base, {}).values()
        return [run_id for start in starts for run_id in start.run_ids]

    def __iter__(self) -> Iterator[Start]:
        """Yield the starts, in the order of the calls."""
        return (start for starts in self._starts.values() for start in starts.values())
