"""Descriptions of workflows, for people who do not have the code."""

import inspect
from datetime import datetime
from typing import Any

import msgspec

from perdure.presence.documents import DefinitionDocument
from perdure.retention import Keep
from perdure.runtime.definition import Definition

_MAX_DOC = 4000


def describe_definition(
    definition: Definition[Any, Any], now: datetime, default: Keep | None = None
) -> DefinitionDocument:
    """Describe one version of a workflow; `default` is the runtime's `keep`."""
    keep = definition.keep or default
    return DefinitionDocument(
        workflow=definition.name,
        version=definition.version,
        seen_at=now,
        payload_schema=payload_schema(definition),
        doc=inspect.cleandoc(definition.__doc__ or "")[:_MAX_DOC],
        fingerprint=definition.definition_hash,
        keeps="run" if keep is None else keep.what,
    )


def payload_schema(definition: Definition[Any, Any]) -> Any:
    """Return the JSON Schema of a workflow's payload.

    `None` means that it takes no payload. The schema is empty if the type is unknown or has no
    schema.
    """
    if not definition.takes_payload:
        return None
    if definition.payload_type is None:
        return {}
    try:
        if (pydantic := getattr(definition.payload_type, "model_json_schema", None)) is not None:
            return pydantic()
        return _resolve_root(msgspec.json.schema(definition.payload_type))
    except Exception:  # noqa: BLE001  # the user's type may raise anything
        return {}


def _resolve_root(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace a schema that only refers to a definition with that definition, for readers."""
    reference: str = schema.get("$ref", "")
    definitions: dict[str, Any] = dict(schema.get("$defs", {}))
    name = reference.removeprefix("#/$defs/")
    if name not in definitions:
        return schema
    # A recursive type refers to itself.
    is_used = msgspec.json.encode(reference) in msgspec.json.encode(definitions)
    root = definitions[name] if is_used else definitions.pop(name)
    return {**root, "$defs": definitions} if definitions else root
