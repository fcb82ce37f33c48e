"""Peers, each in a virtual environment of its own; nothing of them enters our dependencies."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache" / "bench"
PACKAGES = {
    "dbos": ["dbos", "psycopg[binary]"],
    "langgraph": ["langgraph", "langgraph-checkpoint-sqlite", "aiosqlite"],
}
STORES = {"dbos": ("sqlite", "postgres"), "langgraph": ("sqlite",)}


def measure(
    places: Sequence[Any], say: Callable[[str], None], lengths: Sequence[int]
) -> dict[str, Any]:
    """Give the peers' numbers on the stores they know; a peer that cannot be had is left out."""
    urls = {place.name: place.url for place in places}
    found: dict[str, Any] = {}
    for peer, stores in STORES.items():
        python = _environment(peer, say)
        if python is None:
            continue
        for store in stores:
            if store in urls:
                say(f"{peer} on {store}")
                answer = _run(python, peer, store, urls[store], lengths, say)
                if answer is not None:
                    found[f"{peer} on {store}"] = answer
    return found


def _environment(peer: str, say: Callable[[str], None]) -> Path | None:
    folder = CACHE / peer
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        say(f"installing {peer}")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", *PACKAGES[peer]]
        if subprocess.run(install, check=False).returncode != 0:
            say(f"  {peer} cannot be installed here; left out")
            return None
        (folder / ".installed").touch()
    return python


def _run(
    python: Path,
    peer: str,
    store: str,
    url: str,
    lengths: Sequence[int],
    say: Callable[[str], None],
) -> Any:
    command = [str(python), str(HERE / f"{peer}_peer.py"), store, url, json.dumps(list(lengths))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode != 0 or not lines:
        say(f"  {peer} failed: {done.stderr.strip().splitlines()[-1:]}")
        return None
    answer = json.loads(lines[-1].removeprefix("RESULT "))
    say("  " + ", ".join(f"{n} steps: {took * 1e6:,.0f} µs" for n, took in answer["A"]))
    return answer
