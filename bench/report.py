"""The numbers as JSON, as a table of ratios with their targets, and as plots."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563")


_SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 380" '
    'font-family="sans-serif" font-size="12">'
)


class Ratio(NamedTuple):
    """One ratio with what it should be; `least` says whether more is better."""

    what: str
    value: float
    target: float
    least: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.target if self.least else self.value <= self.target


def write(results: dict[str, Any], folder: Path, say: Callable[[str], None]) -> int:
    """Write everything, print the table, and give 1 when a target is missed, else 0."""
    folder.mkdir(parents=True, exist_ok=True)
    day = results["date"][:10]
    ratios = list(_ratios(results))
    (folder / f"{day}.json").write_text(json.dumps(results, indent=1) + "\n")
    table = "\n".join(_table(results, ratios))
    (folder / f"{day}.md").write_text(table + "\n")
    (folder / f"{day}-length.svg").write_text(
        _plot(_lengths(results), "steps in one run", "µs a step")
    )
    (folder / f"{day}-crowd.svg").write_text(
        _plot(_crowds(results), "runs at once", "steps a second")
    )
    say("\n" + table)
    missed = [ratio for ratio in ratios if not ratio.holds]
    say(f"\n{len(ratios) - len(missed)} of {len(ratios)} targets hold (bench/results/{day}.*)")
    return 1 if missed else 0


def _ratios(results: dict[str, Any]) -> Iterator[Ratio]:
    engine = results["engine"]
    yield Ratio("engine: a step, in loop turns", engine["step"], 3)
    yield Ratio("engine: a replayed step, in loop turns", engine["replay"], 2)
    yield Ratio("engine: 5,000 steps against 10, per step", engine["5000 against 10"], 1.3)
    for name, numbers in results["stores"].items():
        yield from _store_ratios(name, numbers)
    for peer, numbers in results["peers"].items():
        store = results["stores"].get(peer.split(" on ")[1])
        if store is not None:
            yield from _peer_ratios(peer, numbers, store)


def _store_ratios(name: str, numbers: dict[str, Any]) -> Iterator[Ratio]:
    if name == "memory":
        for line in numbers["A"]:
            yield Ratio(
                f"memory: a step of {line['steps']}, in loop turns",
                line["perdure"] / numbers["turn"],
                8,
            )
        return
    limit = {"sqlite": 1.6}.get(name, 1.3)
    for line in numbers["A"]:
        if line["steps"] <= 1000:
            ratio = line["perdure"] / line["raw"]
            yield Ratio(f"{name}: a step of {line['steps']} against a raw write", ratio, limit)
    first, last = numbers["A"][0], numbers["A"][-1]
    flat = 1.5 if name == "mongo" else 1.3
    yield Ratio(
        f"{name}: a step of {last['steps']} against one of {first['steps']}",
        last["perdure"] / first["perdure"],
        flat,
    )
    crowd = numbers["B"]["perdure"]
    rate = crowd.get(200) or crowd.get("200")
    if rate:
        yield Ratio(
            f"{name}: 200 runs against the shared-commit limit",
            rate / numbers["B"]["raw"],
            0.5,
            True,
        )
    raw = numbers["A"][-1]["raw"]
    yield Ratio(f"{name}: start to first step against a raw write", numbers["start"] / raw, 2.5)
    if name in ("sqlite", "postgres"):
        yield Ratio(f"{name}: a resumed step, in loop turns", numbers["C"] / numbers["turn"], 3)
        yield Ratio(
            f"{name}: due runs against the shared-commit limit",
            numbers["E"] / numbers["B"]["raw"],
            0.08,
            True,
        )


def _peer_ratios(peer: str, numbers: dict[str, Any], store: dict[str, Any]) -> Iterator[Ratio]:
    least = 4 if peer.startswith("dbos") else 1
    ours = {line["steps"]: line["perdure"] for line in store["A"]}
    for steps, took in numbers["A"]:
        if steps in ours:
            yield Ratio(f"{steps} steps: times as fast as {peer}", took / ours[steps], least, True)
    crowd = store["B"]["perdure"]
    rate = crowd.get(200) or crowd.get("200")
    if rate:
        least = 50 if peer.startswith("dbos") else 3
        yield Ratio(f"many runs: times as fast as {peer}", rate / numbers["B"], least, True)


def _table(results: dict[str, Any], ratios: list[Ratio]) -> Iterator[str]:
    machine = f"Python {results['python']}, {results['cores']} cores"
    medians = f"medians of {results['repeats']}"
    yield f"perdure {results['perdure']}, {machine}, {medians}, {results['date']}"
    yield ""
    for name, numbers in {**results["stores"], **results["peers"]}.items():
        yield f"- {name}: {numbers['version']}"
    yield ""
    yield "| what | measured | target | |"
    yield "|---|---|---|---|"
    for ratio in ratios:
        sign, verdict = "≥" if ratio.least else "≤", "holds" if ratio.holds else "**missed**"
        yield f"| {ratio.what} | {ratio.value:.2f} | {sign} {ratio.target:g} | {verdict} |"


def _lengths(results: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    lines = {
        name: [(line["steps"], line["perdure"] * 1e6) for line in numbers["A"]]
        for name, numbers in results["stores"].items()
    }
    for peer, numbers in results["peers"].items():
        lines[peer] = [(steps, took * 1e6) for steps, took in numbers["A"]]
    return lines


def _crowds(results: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    return {
        name: [(float(runs), rate) for runs, rate in numbers["B"]["perdure"].items()]
        for name, numbers in results["stores"].items()
    }


def _plot(lines: dict[str, list[tuple[float, float]]], x: str, y: str) -> str:
    """Draw lines on two logarithmic axes."""
    from math import log10

    points = [point for line in lines.values() for point in line]
    left, right = log10(min(p[0] for p in points)), log10(max(p[0] for p in points)) + 1e-9
    low, high = log10(min(p[1] for p in points)), log10(max(p[1] for p in points)) + 1e-9

    def place(point: tuple[float, float]) -> str:
        across = 70 + 480 * (log10(point[0]) - left) / (right - left)
        up = 330 - 290 * (log10(point[1]) - low) / (high - low)
        return f"{across:.1f},{up:.1f}"

    parts = [
        _SVG,
        '<rect width="760" height="380" fill="white"/>',
        f'<text x="310" y="370" text-anchor="middle">{x}</text>',
        f'<text x="15" y="185" transform="rotate(-90 15 185)" text-anchor="middle">{y}</text>',
    ]
    for exponent in range(int(low), int(high) + 1):
        height = float(place((10**left, 10.0**exponent)).split(",")[1])
        parts.append(f'<line x1="70" x2="550" y1="{height}" y2="{height}" stroke="#ddd"/>')
        parts.append(f'<text x="64" y="{height + 4}" text-anchor="end">{10**exponent:,}</text>')
    for value in sorted({point[0] for point in points}):
        across = float(place((value, 10**low)).split(",")[0])
        parts.append(f'<text x="{across}" y="350" text-anchor="middle">{value:,.0f}</text>')
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(place(point) for point in sorted(line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="570" y="{50 + 18 * number}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"])
