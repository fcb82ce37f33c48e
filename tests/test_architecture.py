"""The layers of `src/perdure`: a module imports only from rows above its own in the table."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

import perdure

SOURCE = Path(__file__).parents[1] / "src" / "perdure"

# A unit is a module or package of `perdure`. It imports only from rows above its own.
ROWS: tuple[tuple[str, ...], ...] = (
    # Two modules stand apart from their package `engine`: they know asyncio and nothing of perdure,
    # and stores use them too.
    ("errors", "version", "engine.tasks"),
    ("validation", "clock", "result", "filenames", "urls", "engine.asyncio_internals"),
    ("retry", "codec", "limits", "retention", "schedules"),
    ("snapshot",),
    ("events", "keyvalue"),
    ("cache", "resume"),
    # Two halves that meet only in `durable`.
    ("engine", "store"),
    ("workflow",),
    ("durable",),
    ("runtime",),
    ("presence",),
    ("worker", "insights", "sync", "callbacks"),
    ("operations",),
    ("stores", "caches"),
    ("integrations", "dashboard", "testing"),
    ("demo",),
    ("cli",),
    ("__init__", "__main__"),
)
LEVEL = {unit: level for level, row in enumerate(ROWS) for unit in row}

# The same, among the modules of one package. A package's `__init__` comes last.
INSIDE: dict[str, tuple[tuple[str, ...], ...]] = {
    "errors": (("error",), ("values", "steps", "runs", "stores"), ("operators",)),
    "engine": (
        ("arguments", "fingerprint", "failures", "invoke", "paths", "target", "unwinding"),
        (
            "branches",
            "environment",
            "losses",
            "patient_task",
            "records",
            "tracked",
            "user_metadata",
        ),
        ("ahead", "started_runs", "task_factory", "user_metadata"),
        ("history",),
        ("call", "patches", "turns"),
        ("contexts", "host"),
        ("middleware",),
        ("active_run",),
        ("attempts", "recorded_calls", "unawaited"),
        ("execution",),
        ("sagas",),
        ("children", "joins", "transactions", "values", "waiting"),
        ("approvals", "map_runs", "parallel", "questions"),
        ("token_waits", "wait_steps"),
        ("approval_steps", "child_steps", "gates"),
        ("step",),
        ("current", "function"),
        ("decorator",),
        ("replay",),
    ),
    "durable": (
        (
            "committer",
            "in_flight",
            "inbox",
            "owners",
            "reports",
            "states",
            "store_errors",
            "timers",
        ),
        ("leases", "signals", "watchers"),
        ("handoff",),
        ("permits",),
        ("step_limits",),
        ("session", "suspension"),
        ("outbox",),
        ("asks",),
        ("host",),
        ("journaled_run", "outcome", "snapshot_run"),
        ("lifecycle",),
        ("rollback",),
        ("run",),
        ("idempotency",),
    ),
    "runtime": (
        ("deadlines", "deps", "priorities", "requests", "rounds", "versions"),
        ("acts", "answers", "asking", "definition", "ends", "failure_log", "run", "watching"),
        ("options",),
        ("edits",),
        ("rollbacks",),
        ("verbs", "system_workflow", "pruning"),
        ("schedule_workflow",),
        ("maintenance",),
        ("changes", "registry", "schedule_info", "transitions"),
        ("children",),
        ("delivery",),
        ("settlement",),
        ("driver", "reader"),
        ("starter", "sweeping"),
        ("schedules",),
        ("approvals",),
        ("client",),
        ("runtime",),
    ),
    "schedules": (("schedule",), ("timing",), ("decisions",)),
    "presence": (
        ("durations", "keys"),
        ("documents",),
        ("definitions", "switches", "tally"),
        ("heartbeat",),
    ),
    "sync": (("approvals", "portal"), ("client",)),
    "cli": (
        ("failures", "formatting", "garbage", "payloads", "terminal"),
        ("context",),
        ("discovery",),
        ("connections", "output", "serving", "working"),
        ("description", "runs", "show", "watching", "other", "demo", "dev"),
        ("approvals", "changes", "dev_child"),
        ("fleet", "starting", "storage"),
        ("app",),
    ),
    "integrations": (
        (
            "_agent_calls",
            "_messages",
            "_responses",
            "langgraph",
            "logging",
            "opentelemetry",
            "sqlalchemy",
        ),
        ("mcp", "openai_agents", "pydantic_ai", "starlette"),
        ("fastapi",),
    ),
    "operations": (
        ("outcome", "verbs"),
        ("bulk", "changes", "forks", "repairs"),
        ("starts",),
        ("copying", "runs"),
        ("approvals",),
        ("schedules",),
        ("views",),
        ("operations",),
    ),
    "worker": (
        ("claims", "context", "counters", "pace", "takeover"),
        ("runs",),
        ("handoffs",),
        ("worker",),
    ),
}

# Siblings here are alternatives to each other: what two of them share lives in a `_` file.
SEPARATE_SIBLINGS = {"stores", "caches"}
# The one backend that builds on another: a libSQL server has SQLite's schema and statements.
NEIGHBOURS = {("stores.libsql", "stores.sqlite")}
# Stores and caches see these and what is above `engine` in the table, nothing else.
CONTRACT = {"store", "cache"}
# Only here may an import wait until a function runs: what it brings is optional.
LAZY = {"keyvalue", "stores", "caches", "integrations", "testing", "dashboard", "cli"}
# The two imports that point up: the store that is used when the user names none, and the one that
# is opened when the user names a URL. Both are created when they are first needed, by their owner.
DEFAULTS = {("durable", "stores.memory"), ("runtime", "stores")}
# Only here may a package beyond the two dependencies be imported at all.
OPTIONAL = {"stores", "caches", "integrations", "testing", "dashboard", "cli"}
DEPENDENCIES = {"msgspec", "cronsim"}
# Known to type checkers without being installed; imported only under `TYPE_CHECKING`.
FOR_TYPE_CHECKERS = {"typing_extensions"}


@dataclass(frozen=True)
class Module:
    """A file of ours by its dotted name below `perdure`."""

    name: str
    path: Path

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@dataclass(frozen=True)
class Import:
    """One imported module, absolute; `target` has no `perdure.` before it when it is ours."""

    line: int
    target: str
    ours: bool
    inside_function: bool
    relative: bool = False


def modules() -> list[Module]:
    imports = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        imports.append(Module(".".join(parts), path))
    return imports


MODULES = modules()
NAMES = {module.name for module in MODULES}


def unit_of(name: str) -> str:
    """The row entry a module belongs to: itself if the table names it, else its package."""
    return name if name in LEVEL else name.split(".")[0]


def level_of(name: str) -> int:
    """How far down a module stands; one without a row has a test of its own to fail."""
    return LEVEL.get(unit_of(name), 0)


@cache
def imports_of(module: Module) -> Sequence[Import]:
    tree = ast.parse(module.path.read_text(), str(module.path))
    lazy = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    found: list[Import] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [resolve(node.lineno, each.name, None, node in lazy) for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                target = resolve(node.lineno, node.module or "", alias.name, node in lazy)
                found.append(replace(target, relative=node.level > 0))
    return found


def resolve(line: int, source: str, name: str | None, inside_function: bool) -> Import:
    top, _, rest = source.partition(".")
    if top != "perdure":
        return Import(line, source, ours=False, inside_function=inside_function)
    member = f"{rest}.{name}".lstrip(".") if name else rest
    target = member if member in NAMES else rest or "__init__"
    return Import(line, target, ours=True, inside_function=inside_function)


def all_imports() -> Iterator[tuple[Module, Import]]:
    return ((module, each) for module in MODULES for each in imports_of(module))


def our_imports() -> Iterator[tuple[Module, Import]]:
    return ((module, each) for module, each in all_imports() if each.ours)


def refuse(problems: Iterable[tuple[Module, Import, str]]) -> None:
    """Fail with all imports that break a rule."""
    lines = [
        f"{module.path.relative_to(SOURCE)}:{each.line} imports {each.target}{why}"
        for module, each, why in problems
    ]
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def test_every_module_has_a_row() -> None:
    """A new module must be added to the table."""
    missing = [module.name for module in MODULES if unit_of(module.name) not in LEVEL]
    assert missing == [], "add them to ROWS, each at its level"


def test_imports_point_down() -> None:
    """A file imports only from lower rows, or from its own unit."""
    refuse(
        (module, each, f", which is not below {unit}")
        for module, each in our_imports()
        if (unit := unit_of(module.name)) != unit_of(each.target)
        and level_of(each.target) >= level_of(module.name)
        and (unit, each.target) not in DEFAULTS
    )


@pytest.mark.parametrize("package", INSIDE)
def test_imports_inside_a_package_point_down(package: str) -> None:
    """Inside `engine`, `durable` and `runtime`, too, imports go one way."""
    levels = {
        f"{package}.{name}": level for level, row in enumerate(INSIDE[package]) for name in row
    }
    inside = {
        module.name
        for module in MODULES
        if unit_of(module.name) == package and not module.is_package
    }
    assert inside - levels.keys() == set(), f"add them to INSIDE[{package!r}], each at its level"
    refuse(
        (module, each, f", which is not above {module.name}")
        for module, each in our_imports()
        if module.name in inside and unit_of(each.target) == package
        if levels.get(each.target, len(levels)) >= levels[module.name]
    )


def test_stores_and_caches_see_only_the_contracts() -> None:
    """A store knows the contract and the values in it; it does not know the engine."""
    refuse(
        (module, each, "")
        for module, each in our_imports()
        if (unit := unit_of(module.name)) in SEPARATE_SIBLINGS
        and unit_of(each.target) not in {*CONTRACT, unit}
        and level_of(each.target) >= LEVEL["engine"]
    )


def test_alternatives_do_not_know_each_other() -> None:
    """A backend imports its own package and `_` files; only `stores/__init__` knows them all."""
    refuse(
        (module, each, ", its sibling")
        for module, each in our_imports()
        if is_foreign_sibling(module.name, each.target)
    )


def is_foreign_sibling(name: str, target: str) -> bool:
    package, _, own = name.partition(".")
    if package not in SEPARATE_SIBLINGS or not own or target.split(".")[0] != package:
        return False
    mine, sibling = own.split(".")[0], target.partition(".")[2].split(".")[0]
    if (f"{package}.{mine}", f"{package}.{sibling}") in NEIGHBOURS:
        return False
    return sibling != mine and not sibling.startswith("_")


def test_private_files_are_imported_only_from_beside_them() -> None:
    """A leading `_` means: only files of the same unit or folder import this."""
    refuse(
        (module, each, ", which is private")
        for module, each in our_imports()
        if not may_see(module, each.target)
    )


def may_see(module: Module, target: str) -> bool:
    parts = target.split(".")
    hidden = next((n for n, part in enumerate(parts) if is_private(part)), None)
    if hidden is None:
        return True
    folder = parts[:hidden]
    return module.name.split(".")[: len(folder)] == folder


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def test_imports_are_absolute() -> None:
    refuse((module, each, ", relatively") for module, each in all_imports() if each.relative)


def test_imports_wait_only_for_optional_packages() -> None:
    """Inside a function: a backend's driver, or a backend of ours from the place that names it."""
    refuse(
        (module, each, " inside a function")
        for module, each in all_imports()
        if each.inside_function
        and ((unit := unit_of(module.name)), each.target) not in DEFAULTS
        and (unit not in LAZY or each.target.split(".")[0] in sys.stdlib_module_names)
    )


def test_the_core_needs_only_its_two_dependencies() -> None:
    """What a bare install lacks is imported only by the parts that an extra brings."""
    installed = sys.stdlib_module_names | DEPENDENCIES | FOR_TYPE_CHECKERS
    refuse(
        (module, each, ", which a bare install lacks")
        for module, each in all_imports()
        if unit_of(module.name) not in OPTIONAL or module.name in OPTIONAL
        if not each.ours and not each.inside_function
        if each.target.split(".")[0] not in installed
    )


def test_functions_are_short() -> None:
    """None has more than 50 lines, and nine in ten have at most 15."""
    sizes = sorted(
        (node.end_lineno - node.lineno + 1, f"{module.name}.{node.name}")
        for module in MODULES
        for node in ast.walk(ast.parse(module.path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    )
    assert [name for size, name in sizes if size > 50] == []
    assert sizes[len(sizes) * 9 // 10][0] <= 15


BARE_IMPORT = """
import importlib.metadata, sys

EXTRA = importlib.metadata.packages_distributions().keys() - {"perdure", "msgspec", "cronsim"}

class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRA:
            raise ModuleNotFoundError(f"a bare install has no {name}", name=name)

sys.meta_path.insert(0, Bare())
import perdure, perdure.stores, perdure.caches, perdure.testing
for package in (perdure, perdure.stores, perdure.caches, perdure.testing):
    assert package.__all__ == sorted(package.__all__), package
"""


def test_a_bare_install_imports() -> None:
    """`import perdure` works where only its two dependencies are; public names are sorted."""
    process = subprocess.run(
        [sys.executable, "-c", BARE_IMPORT], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


def test_completion_shows_the_public_api_alone() -> None:
    """`dir(perdure)` lists no internal module."""
    assert dir(perdure) == sorted(perdure.__all__)


def test_the_check_sees_what_it_should(tmp_path: Path) -> None:
    """Each form of import is found, with where it leads and whether it waits."""
    path = tmp_path / "codec.py"
    path.write_text(
        "import msgspec.json\n"
        "from perdure import errors\n"
        "from perdure.stores.memory import MemoryStore\n"
        "from .result import Ok\n"
        "def late():\n    import asyncpg\n"
    )
    imports = [(each.target, each.ours) for each in imports_of(Module("codec", path))]
    late = [each.target for each in imports_of(Module("codec", path)) if each.inside_function]
    relative = [each.line for each in imports_of(Module("codec", path)) if each.relative]
    assert imports[:3] == [("msgspec.json", False), ("errors", True), ("stores.memory", True)]
    assert (late, relative) == (["asyncpg"], [4])
    assert (unit_of("codec.tags"), unit_of("engine.tasks")) == ("codec", "engine.tasks")
    assert level_of("stores.memory") > level_of("codec.tags")
