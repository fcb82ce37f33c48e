"""Draws the small flowcharts of the documentation as SVG: boxes in rows, with arrows downwards."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape

_EDGE = re.compile(r"(\w+)(?:\[\"([^\"]+)\"\])? --> (\w+)(?:\[\"([^\"]+)\"\])?")
_WIDTH, _HEIGHT, _GAP, _ROW = 104, 30, 18, 76


def edges_in(source: str) -> list[tuple[str, str]]:
    """Return the arrows of a Mermaid flowchart, from label to label."""
    labels: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    for start, start_label, end, end_label in _EDGE.findall(source):
        labels[start] = start_label or labels.get(start, start)
        labels[end] = end_label or labels.get(end, end)
        edges.append((start, end))
    return [(labels[start], labels[end]) for start, end in edges]


def draw(edges: Sequence[tuple[str, str]]) -> str:
    """Return the SVG of a graph without cycles."""
    rows = _ordered(_rows(edges), edges)
    width = max(len(row) for row in rows) * (_WIDTH + _GAP) + _GAP
    height = len(rows) * _ROW
    places = {
        node: (_x(index, len(row), width), level * _ROW + 6)
        for level, row in enumerate(rows)
        for index, node in enumerate(row)
    }
    lines = "".join(_arrow(places[start], places[end]) for start, end in edges)
    boxes = "".join(_box(node, place) for node, place in places.items())
    head = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" class="tip"/></marker></defs>'
    )
    return (
        f'<figure class="diagram"><svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Which package imports which">{head}{lines}{boxes}</svg></figure>'
    )


def _rows(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the nodes by level: each below everything that points to it."""
    below: dict[str, list[str]] = defaultdict(list)
    for start, end in edges:
        below[start].append(end)
        below[end] = below[end]
    depth: dict[str, int] = {}

    def measure(node: str) -> int:
        if node not in depth:
            depth[node] = 1 + max(map(measure, below[node]), default=-1)
        return depth[node]

    lowest = max(map(measure, list(below)))
    rows: list[list[str]] = [[] for _ in range(lowest + 1)]
    for node, level in depth.items():
        rows[lowest - level].append(node)
    return rows


def _ordered(rows: list[list[str]], edges: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Order each row by the middle of its neighbours, so that few arrows cross."""
    near: dict[str, list[str]] = defaultdict(list)
    for start, end in edges:
        near[start].append(end)
        near[end].append(start)
    for _ in range(12):
        place = {node: (index + 0.5) / len(row) for row in rows for index, node in enumerate(row)}
        rows = [sorted(row, key=lambda node: _middle(near[node], place)) for row in rows]
    return rows


def _middle(nodes: Sequence[str], place: Mapping[str, float]) -> float:
    return sum(place[node] for node in nodes) / len(nodes)


def _x(index: int, count: int, width: int) -> float:
    step = width / count
    return step * (index + 0.5)


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = start, end
    y1 += _HEIGHT
    bend = min(40.0, (y2 - y1) / 2)
    path = f"M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
    return f'<path d="{path}" marker-end="url(#tip)"/>'


def _box(node: str, place: tuple[float, float]) -> str:
    x, y = place
    return (
        f'<rect x="{x - _WIDTH / 2:.0f}" y="{y:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>'
        f'<text x="{x:.0f}" y="{y + _HEIGHT / 2 + 4:.0f}">{escape(node)}</text>'
    )
