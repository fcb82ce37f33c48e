"""The workflow definitions that a runtime knows."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from perdure.errors import InvalidArgument, UnknownWorkflow, VersionMismatch
from perdure.limits import Queue
from perdure.runtime.definition import Definition
from perdure.runtime.maintenance import MAINTENANCE_WORKFLOW
from perdure.runtime.schedule_workflow import SCHEDULE_WORKFLOW
from perdure.snapshot import (
    Snapshot,
    assert_valid_snapshot,
    generation_of,
    set_generation,
    version_of,
)
from perdure.store import SupportedVersions

_SYSTEM: dict[str, dict[int, Definition[Any, Any]]] = {
    each.name: {each.version: each} for each in (SCHEDULE_WORKFLOW, MAINTENANCE_WORKFLOW)
}
"""The engine's own workflows, which every runtime executes and no list shows."""


class Registry:
    """The definitions that a runtime knows, by name and version.

    `queues` are the queues of all of them, by name. `supported_versions` are the versions of each
    workflow that can be executed here; `all_supported_versions` includes the engine's own
    workflows, `unqueued_versions` are those of workflows without a queue. They are kept, because a
    worker needs them for each claim.
    """

    def __init__(self, definitions: Iterable[Definition[Any, Any]] = ()) -> None:
        self._definitions: dict[str, dict[int, Definition[Any, Any]]] = {}
        self.queues: dict[str, Queue] = {}
        self.supported_versions: tuple[SupportedVersions, ...] = ()
        self.all_supported_versions = self.unqueued_versions = _supported_by(_SYSTEM)
        if not isinstance(definitions, Iterable):
            expected = "a list of functions decorated with @workflow"
            raise InvalidArgument("workflows", definitions, expected)
        for definition in definitions:
            self.add(definition)

    def add(self, definition: Definition[Any, Any]) -> None:
        """Register a definition."""
        if not isinstance(definition, Definition):
            raise InvalidArgument("workflows", definition, "functions decorated with @workflow")
        if definition.queue is not None:
            self._add_queue(definition.queue)
        versions = self._definitions.setdefault(definition.name, {})
        existing = versions.get(definition.version)
        if existing is not None and existing is not definition:
            expected = f"one definition of {definition.name!r} per version"
            hint = "Give one of the two functions another name, or another version="
            raise InvalidArgument("workflows", definition, expected, hint)
        versions[definition.version] = definition
        self.supported_versions = _supported_by(self._definitions)
        self.all_supported_versions = (*self.supported_versions, *_supported_by(_SYSTEM))
        queued = {each.name for each in self.definitions if each.queue is not None}
        self.unqueued_versions = tuple(
            each for each in self.all_supported_versions if each.workflow not in queued
        )

    def _add_queue(self, queue: Queue) -> None:
        if self.queues.setdefault(queue.name, queue) != queue:
            expected = f"one declaration of queue {queue.name!r}"
            raise InvalidArgument("queue", queue, expected, "Use the same Queue everywhere")

    @property
    def names(self) -> list[str]:
        """The names of all known workflows."""
        return list(self._definitions)

    @property
    def definitions(self) -> list[Definition[Any, Any]]:
        """All known definitions, of all versions."""
        return [each for versions in self._definitions.values() for each in versions.values()]

    def find(self, name: str) -> Definition[Any, Any] | None:
        """Return the user's definition with the highest version, or `None`."""
        versions = self._definitions.get(name)
        return versions[max(versions)] if versions else None

    def newest(self, name: str) -> Definition[Any, Any]:
        """Return the definition with the highest version, or raise `UnknownWorkflow`."""
        definition = self.find(name)
        if definition is None:
            names = ", ".join(sorted(self._definitions)) or "none"
            raise UnknownWorkflow(
                name,
                f"no workflow {name!r} is registered here (known: {names}); "
                "pass it in Runtime(store, workflows=[…])",
            )
        return definition

    def _versions(self, name: str) -> Mapping[int, Definition[Any, Any]]:
        return _SYSTEM.get(name) or self._definitions.get(name) or {}

    def for_run(self, run_id: str, snapshot: Snapshot) -> tuple[Definition[Any, Any], Snapshot]:
        """Return the definition that continues a run, and the snapshot it continues from.

        A run of a newer version than any known one is left to a process that knows it. A run that
        is not bound to a version is bound to the newest.
        """
        versions = self._versions(name := snapshot.get("workflowName") or "")
        newest = versions[max(versions)] if versions else self.newest(name)
        stored_version = version_of(snapshot.get("metadata"))
        if not stored_version:
            metadata = {**(snapshot.get("metadata") or {}), **newest.identity}
            bound_snapshot: Snapshot = {**snapshot, "metadata": metadata}
            return newest, bound_snapshot
        if stored_version in versions:
            return versions[stored_version], snapshot
        if stored_version > newest.version:
            hint = "A process with the newer definition continues it"
            raise VersionMismatch(run_id, stored_version, newest.version, hint)
        if newest.migrate is None:
            raise VersionMismatch(
                run_id,
                stored_version,
                newest.version,
                "Register the old definition beside the new one, or pass migrate= to the new one",
            )
        generation = generation_of(snapshot.get("metadata"))
        try:
            # Pass a copy, because the function may change it in place; the stored run must stay
            # old.
            new_snapshot = assert_valid_snapshot(newest.migrate(deepcopy(snapshot), stored_version))
        except Exception as error:  # the user's function
            hint = f"Its migrate= failed: {error!r}"
            raise VersionMismatch(run_id, stored_version, newest.version, hint) from error
        metadata = {**(new_snapshot.get("metadata") or {}), **newest.identity}
        # Restored whatever the migration did, because steps must keep their idempotency keys.
        set_generation(metadata, generation)
        new_snapshot["metadata"] = metadata
        return newest, new_snapshot


def _supported_by(
    definitions: Mapping[str, Mapping[int, Definition[Any, Any]]],
) -> tuple[SupportedVersions, ...]:
    return tuple(each for versions in definitions.values() for each in _supported_ranges(versions))


def _supported_ranges(versions: Mapping[int, Definition[Any, Any]]) -> list[SupportedVersions]:
    newest = versions[max(versions)]
    if newest.migrate is not None:
        return [SupportedVersions(newest.name, 1, newest.version)]
    return [SupportedVersions(newest.name, version, version) for version in sorted(versions)]
