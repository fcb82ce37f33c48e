"""Files with stored runs, which the current code must be able to continue."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from perdure import codec
from perdure.errors import PerdureError
from perdure.insights import read_bundle
from perdure.runtime.definition import Definition
from perdure.snapshot import Snapshot, assert_valid_snapshot
from perdure.testing.replays import replay_snapshot


async def problems_of(
    files: Iterable[Path], workflows: Sequence[Definition[Any, Any]], deps: object
) -> list[str]:
    """Replay the run in each file; return one line for each run that does not fit."""
    problems = [(file, await _problem_of(file, workflows, deps)) for file in sorted(files)]
    return [f"{file.name}: {problem}" for file, problem in problems if problem]


async def _problem_of(file: Path, workflows: Sequence[Definition[Any, Any]], deps: object) -> str:
    try:
        run_id, snapshot = _read(file)
        replay = await replay_snapshot(
            workflows[0], snapshot, run_id=run_id, deps=deps, workflows=workflows
        )
    except PerdureError as error:
        return str(error)
    return replay.problem


def _read(file: Path) -> tuple[str, Snapshot]:
    """Return the id and the snapshot in a file, which is an exported run or a plain snapshot."""
    data: Any = codec.loads(file.read_bytes())
    if not isinstance(data, dict) or "checksum" not in data:
        return file.stem, assert_valid_snapshot(data)
    bundle = read_bundle(data)
    if bundle.redacted:
        raise PerdureError("values are hidden; export the run with --reveal")
    return bundle.run_id, assert_valid_snapshot(bundle.snapshot)
