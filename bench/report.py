"""The results as JSON, as ratios with their targets, as tables, and as plots."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from bench import migrate, plots, search
from bench.numbers import BULK, PERDURE, RAW, SHARED, TURN, WORKS, Numbers, format_value

# In the units that are shown: milliseconds, and percents of a core.
WAKE_UPS = {"wake": 5, "across": 25, "across95": 80, "idle": 1, "restart": 300}
NOISE = 64
SHARES = {"sqlite": 0.4, "postgres": 0.55, "redis": 0.7, "mysql": 0.5, "mongo": 0.55}
"""The targets of B: shares of the rows per second that the raw driver writes in shared commits."""
MICROSECONDS_OF_ENDS = 80
OURS = (PERDURE, RAW, SHARED, BULK, TURN)


@dataclass
class About:
    """Where and with what the values were measured."""

    date: str
    perdure: str
    python: str
    cores: int
    repeats: int
    places: dict[str, str] = field(default_factory=dict)
    peers: dict[str, str] = field(default_factory=dict)


class Ratio(NamedTuple):
    """One ratio and its target; `least` is whether more is better."""

    what: str
    value: float
    target: float
    least: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.target if self.least else self.value <= self.target


class Ratios:
    """The ratios of a run of the suite; those that were not measured are left out."""

    def __init__(self, numbers: Numbers, cores: int) -> None:
        self._numbers = numbers
        self._cores = cores

    def all(self, places: list[str]) -> Iterator[Ratio]:
        """Yield every ratio that has a target."""
        for place in ("engine", "memory", *places):
            for ratio in self._of(place):
                if ratio is not None:
                    yield ratio

    def _of(self, place: str) -> Iterator[Ratio | None]:
        if place == "engine":
            yield from self._engine()
        elif place == "memory":
            turn = (place, "D", 1000, TURN)
            yield self._ratio("memory: D, a step, in loop turns", (place, "D", 1000), turn, 5)
            step = (place, "D", 1000)
            yield self._ratio("memory: D, a plain call", (place, "call", 1000), step, 1.1)
            for size in self._numbers.sizes(place, "ends"):
                seconds = self._numbers.get(place, "ends", size)
                if seconds is not None:
                    what = f"memory: D, start and end of a run, of {size} at once, µs"
                    yield Ratio(what, seconds * 1e6, MICROSECONDS_OF_ENDS)
            what = "F, bytes a step handed to any store, 1,000 steps against 10"
            yield self._ratio(what, (place, "bytes", 1000), (place, "bytes", 10), 1.3)
            yield from self._wake_up(place)
        else:
            yield from self._latency(place)
            yield from self._throughput(place)
            yield from self._footprint(place)
            yield from self._wake_up(place)
            yield from self._migration(place)
            yield from self._searches(place)
            for peer in self._numbers.contenders(place):
                if peer not in OURS:
                    yield from self._peer(place, peer)

    def _engine(self) -> Iterator[Ratio | None]:
        turn = ("engine", "engine", 500, TURN)
        step, replay = ("engine", "engine", 500), ("engine", "replay", 500)
        yield self._ratio("engine: a step without a store, in loop turns", step, turn, 3)
        yield self._ratio("engine: a replayed step, in loop turns", replay, turn, 2)
        short, long = ("engine", "engine", 10), ("engine", "engine", 5000)
        yield self._ratio("engine: a step of 5,000 against one of 10", long, short, 1.3)

    def _latency(self, place: str) -> Iterator[Ratio | None]:
        sizes = self._numbers.sizes(place, "A")
        for size in sizes:
            if size <= 1000:
                what = f"{place}: A, a step of {size:,} against a raw write"
                limit = 1.4 if place == "sqlite" else 1.3
                yield self._ratio(what, (place, "A", size), (place, "A", size, RAW), limit)
        if sizes:
            what = f"{place}: A, a step of {sizes[-1]:,} against one of {sizes[0]:,}"
            flat = 1.5 if place == "mongo" else 1.3
            yield self._ratio(what, (place, "A", sizes[-1]), (place, "A", sizes[0]), flat)
        what = f"{place}: start to first step against a raw write"
        yield self._ratio(what, (place, "start", 1), (place, "start", 1, RAW), 2.5)
        if place in ("sqlite", "postgres"):
            what = f"{place}: C, a resumed step, in loop turns"
            yield self._ratio(what, (place, "C", 1000), (place, "C", 1000, TURN), 3)

    def _throughput(self, place: str) -> Iterator[Ratio | None]:
        what = f"{place}: B, 200 runs against the shared-commit limit"
        yield self._ratio(
            what, (place, "B", 200), (place, "B", 200, SHARED), SHARES.get(place, 0.5), True
        )
        if place in ("sqlite", "postgres"):
            for size in self._numbers.sizes(place, "due"):
                what = f"{place}: E, {size:,} due runs against the shared-commit limit"
                limit = (place, "due", size, SHARED)
                yield self._ratio(what, (place, "due", size), limit, 0.08, True)
        what = f"{place}: G, two worker processes against one, {self._cores} cores with the server"
        yield self._ratio(what, (place, "workers", 2), (place, "workers", 1), 1.5, True)
        for size in self._numbers.sizes(place, "twice"):
            twice = self._numbers.get(place, "twice", size)
            if twice is not None:
                yield Ratio(f"{place}: G, steps executed twice by {size} processes", twice, 0)

    def _footprint(self, place: str) -> Iterator[Ratio | None]:
        what = f"{place}: F, bytes a step written to disk, 1,000 steps against 10"
        yield self._ratio(what, (place, "disk", 1000), (place, "disk", 10), 1.3)
        for work, name in {"sleeping": "sleeping run", "retrying": "run between attempts"}.items():
            for size in self._numbers.sizes(place, work):
                measured_bytes = self._numbers.get(place, work, size)
                if measured_bytes is not None:
                    what = f"{place}: F, bytes a {name} holds (of {size:,}; {NOISE} is noise)"
                    # The target is 0. Between two measurements, memory grew or shrank by up to
                    # 220 kB, so that one cannot distinguish 0 from some tens of bytes per run.
                    yield Ratio(what, measured_bytes, NOISE)
        if sizes := self._numbers.sizes(place, "round"):
            what = f"{place}: L, the last of {sizes[-1]:,} rounds against those of {sizes[0]:,}"
            yield self._ratio(what, (place, "round", sizes[-1]), (place, "round", sizes[0]), 1.2)
        what = f"{place}: F, signal to next step against a raw write"
        yield self._ratio(what, (place, "react", 1), (place, "react", 1, RAW), 5)

    def _wake_up(self, place: str) -> Iterator[Ratio | None]:
        for work, target in WAKE_UPS.items():
            value = self._numbers.get(place, work, 1)
            if value is not None:
                label, unit, scale = WORKS[work]
                yield Ratio(f"{place}: {label}, {unit}", value * scale, target)

    def _migration(self, place: str) -> Iterator[Ratio]:
        for size in self._numbers.sizes(place, "migrate"):
            seconds = self._numbers.get(place, "migrate", size)
            if seconds is not None:
                what = f"{place}: H, seconds to migrate {size:,} runs"
                yield Ratio(what, seconds, migrate.TARGETS[place])

    def _searches(self, place: str) -> Iterator[Ratio | None]:
        for work, target in search.TARGETS.items():
            sizes = self._numbers.sizes(place, work)
            seconds = self._numbers.get(place, work, sizes[-1]) if sizes else None
            if seconds is not None:
                label = WORKS[work].label.format(size=sizes[-1])
                yield Ratio(f"{place}: {label}, ms", seconds * 1e3, target * 1e3)
        if sizes := self._numbers.sizes(place, "counts"):
            what = f"{place}: J, counts of {sizes[-1]:,} runs against {sizes[0]:,}"
            large, small = (place, "counts", sizes[-1]), (place, "counts", sizes[0])
            yield self._ratio(what, large, small, search.MOST_GROWTH)

    def _peer(self, place: str, peer: str) -> Iterator[Ratio | None]:
        for size in self._numbers.sizes(place, "A", peer):
            what = f"{place}: A, {size:,} steps, times as fast as {peer}"
            ours, theirs = (place, "A", size), (place, "A", size, peer)
            yield self._ratio(what, theirs, ours, 4 if peer == "dbos" else 1, True)
        for size in self._numbers.sizes(place, "B", peer):
            if size >= 50:
                what = f"{place}: B, {size:,} runs, times as fast as {peer}"
                ours, theirs = (place, "B", size), (place, "B", size, peer)
                yield self._ratio(what, ours, theirs, 50 if peer == "dbos" else 3, True)

    def _ratio(
        self,
        what: str,
        over: tuple[str, str, int] | tuple[str, str, int, str],
        under: tuple[str, str, int] | tuple[str, str, int, str],
        target: float,
        least: bool = False,
    ) -> Ratio | None:
        above, below = self._numbers.get(*over), self._numbers.get(*under)
        return Ratio(what, above / below, target, least) if above is not None and below else None


def write(about: About, numbers: Numbers, folder: Path) -> str:
    """Write all results, and return the table of ratios."""
    folder.mkdir(parents=True, exist_ok=True)
    day = about.date[:10]
    ratios = list(Ratios(numbers, about.cores).all(list(about.places)))
    data = {
        **asdict(about),
        "numbers": [
            {
                **key._asdict(),
                "unit": WORKS[key.work].unit,
                "median": (numbers.get(*key) or 0) * WORKS[key.work].scale,
                "values": [value * WORKS[key.work].scale for value in numbers.values(key)],
            }
            for key in numbers
        ],
        "ratios": [{**ratio._asdict(), "holds": ratio.holds} for ratio in ratios],
    }
    (folder / f"{day}.json").write_text(json.dumps(data, indent=1) + "\n")
    table = "\n".join(_ratio_table(ratios))
    pages = ["\n".join(_head(about)), table, *_tables(about, numbers), "\n".join(_plots(day))]
    (folder / f"{day}.md").write_text("\n\n".join(pages) + "\n")
    places = list(about.places)
    (folder / f"{day}-length.svg").write_text(plots.length(numbers, places))
    (folder / f"{day}-crowd.svg").write_text(plots.crowd(numbers, places))
    return f"\n{table}\n\nwritten to {folder.name}/{day}.md, .json and .svg"


def _head(about: About) -> Iterator[str]:
    yield f"# Measured on {about.date}"
    yield ""
    yield f"perdure {about.perdure}, Python {about.python}, {about.cores} cores shared with the"
    yield f"servers. Every value is a median of at least {about.repeats}; raw driver, perdure and"
    yield "other libraries were measured alternately. Compare only values of the same run."
    yield ""
    for name, version in {**about.places, **about.peers}.items():
        yield f"- {name}: {version}"
    if about.peers:
        yield ""
        yield "Other libraries run with their defaults, which are durable; LangGraph with"
        yield "durability=sync. Some run a smaller workload, where ours would take them minutes. A"
        yield "resumed step of DBOS is measured from the function's first line, ours from the call."


def _ratio_table(ratios: list[Ratio]) -> Iterator[str]:
    met_count = sum(ratio.holds for ratio in ratios)
    yield f"## Ratios: {met_count} of {len(ratios)} targets hold"
    yield ""
    yield "| what | measured | target | |"
    yield "|---|---|---|---|"
    for ratio in ratios:
        sign, verdict = "≥" if ratio.least else "≤", "holds" if ratio.holds else "**missed**"
        yield f"| {ratio.what} | {ratio.value:.2f} | {sign} {ratio.target:g} | {verdict} |"


def _tables(about: About, numbers: Numbers) -> Iterator[str]:
    for place in ("engine", "memory", *about.places):
        yield "\n".join(_table(place, numbers))


def _table(place: str, numbers: Numbers) -> Iterator[str]:
    columns = sorted(numbers.contenders(place), key=lambda who: (*OURS, who).index(who))
    yield f"## {place}"
    yield ""
    yield "| " + " | ".join(["", *columns]) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for work, size in numbers.rows(place):
        medians = [numbers.get(place, work, size, who) for who in columns]
        cells = ["" if value is None else format_value(work, value) for value in medians]
        yield "| " + " | ".join([WORKS[work].label.format(size=size), *cells]) + " |"


def _plots(day: str) -> Iterator[str]:
    yield "## Plots"
    yield ""
    yield f"![cost of a step against the length of the run]({day}-length.svg)"
    yield ""
    yield f"![throughput against concurrency]({day}-crowd.svg)"
