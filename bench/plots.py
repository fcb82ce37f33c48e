"""Two plots as SVG: the cost of a step by length of the run, and the throughput by concurrency."""

from collections.abc import Iterator
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

from bench.numbers import BULK, PERDURE, RAW, SHARED, TURN, WORKS, Numbers

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")
DASHES = {PERDURE: "", SHARED: "1 4", "dbos": "9 4"}
OTHER_DASHES = "9 3 2 3"
WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 80, 610, 45, 400

SVG = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
    'font-family="sans-serif" font-size="12">'
)


class Line(NamedTuple):
    """One line of a plot: solid for perdure, dashed for another library, dotted for the limit."""

    name: str
    colour: str
    dashes: str
    points: list[tuple[float, float]]


def length(numbers: Numbers, places: list[str]) -> str:
    """Draw the cost of a step against the length of the run."""
    return _plot(
        "A step in longer runs (lower is better)",
        list(_lines(numbers, places, "A")),
        "steps in the run",
        "µs a step",
    )


def crowd(numbers: Numbers, places: list[str]) -> str:
    """Draw throughput against concurrency."""
    return _plot(
        "More runs at once (higher is better)",
        list(_lines(numbers, places, "B")),
        "runs at once",
        "steps a second",
    )


def _lines(numbers: Numbers, places: list[str], work: str) -> Iterator[Line]:
    for number, place in enumerate(places):
        for who in numbers.contenders(place):
            points = [
                (float(size), (numbers.get(place, work, size, who) or 0) * WORKS[work].scale)
                for size in numbers.sizes(place, work, who)
            ]
            if points and who not in (RAW, BULK, TURN):
                name = f"limit of {place}" if who == SHARED else f"{who} on {place}"
                dashes = DASHES.get(who, OTHER_DASHES)
                yield Line(name, COLOURS[number % len(COLOURS)], dashes, points)


class _Axis:
    """A logarithmic axis from pixel `first` to pixel `last`."""

    def __init__(self, values: list[float], first: int, last: int) -> None:
        self._low, high = log10(min(values)), log10(max(values))
        self._scale = (last - first) / ((high - self._low) or 1)
        self._first = first
        decades = range(floor(self._low), ceil(high) + 1)
        ticks = [digit * 10.0**n for n in decades for digit in (1, 2, 5)]
        self.ticks = [tick for tick in ticks if min(values) <= tick <= max(values)]

    def at(self, value: float) -> float:
        return self._first + (log10(value) - self._low) * self._scale


def _plot(title: str, lines: list[Line], x: str, y: str) -> str:
    """Draw lines on two logarithmic axes."""
    points = [point for line in lines for point in line.points]
    parts = [
        SVG,
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="25" font-size="15">{escape(title)}</text>',
        f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 18}" text-anchor="middle">{x}</text>',
        f'<text transform="rotate(-90 18 220)" x="18" y="220" text-anchor="middle">{y}</text>',
    ]
    if points:
        across = _Axis([point[0] for point in points], LEFT, RIGHT)
        # Some space above and below.
        heights = [point[1] * factor for point in points for factor in (0.8, 1.25)]
        up = _Axis(heights, BOTTOM, TOP)
        parts += _grid(across, up, sorted({point[0] for point in points}))
        for number, line in enumerate(lines):
            parts += _drawn(line, number, across, up)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(across: _Axis, up: _Axis, columns: list[float]) -> Iterator[str]:
    for value in up.ticks:
        height = f"{up.at(value):.1f}"
        yield f'<path d="M{LEFT} {height}H{RIGHT}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{height}" dy="4" text-anchor="end">{value:,.0f}</text>'
    for value in columns:
        place = f"{across.at(value):.1f}"
        yield f'<path d="M{place} {TOP}V{BOTTOM}" stroke="#eee"/>'
        yield f'<text x="{place}" y="{BOTTOM + 18}" text-anchor="middle">{value:,.0f}</text>'


def _drawn(line: Line, number: int, across: _Axis, up: _Axis) -> Iterator[str]:
    places = [(across.at(x), up.at(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    style = f'fill="none" stroke="{line.colour}" stroke-width="2" stroke-dasharray="{line.dashes}"'
    yield f'<polyline points="{path}" {style}/>'
    if line.dashes != DASHES[SHARED]:
        for x, y in places:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"/>'
    height = TOP + 8 + 20 * number
    yield f'<path d="M{RIGHT + 25} {height}h30" {style}/>'
    yield f'<text x="{RIGHT + 63}" y="{height}" dy="4">{escape(line.name)}</text>'
