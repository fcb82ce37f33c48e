"""What a Redis server guarantees about its replies, according to its settings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.errors import StoreError
from perdure.stores.redis.server import Server

UNKNOWN = "unknown"

_SETTINGS = (
    "appendonly",
    "appendfsync",
    "no-appendfsync-on-rewrite",
    "save",
    "maxmemory",
    "maxmemory-policy",
    "min-replicas-to-write",
)
_REQUIRED_SETTINGS = {
    "appendonly": "yes",
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
}

_FSYNC = {
    "always": "a write is on the primary's disk before the reply; a power failure loses nothing",
    "everysec": "the disk is about a second behind; a power failure loses the writes of that time",
    "no": "the operating system decides when to write; a power failure loses up to half a minute",
}


@dataclass(frozen=True, slots=True)
class DurabilityReport:
    """The server, its settings, and what follows from them, one sentence each.

    A setting that this user may not read is "unknown"; where primaries of a cluster differ, it has
    all their values.
    """

    location: str
    version: str
    primaries: int
    replicas: int | None
    settings: Mapping[str, str]
    guarantees: tuple[str, ...]

    def __str__(self) -> str:
        servers = "one primary" if self.primaries == 1 else f"{self.primaries} primaries"
        head = f"Redis {self.version} at {self.location}: {servers}"
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return "\n".join([head, settings, *(f"- {guarantee}" for guarantee in self.guarantees)])


async def durability_report(server: Server) -> DurabilityReport:
    """Ask the server for its settings, and return what they guarantee."""
    settings = await _settings(server)
    servers = [_fields(reply) for reply in await server.send_everywhere(("INFO", "server"))]
    replication = [
        _fields(reply) for reply in await server.send_everywhere(("INFO", "replication"))
    ]
    replicas = _sum([fields.get("connected_slaves") for fields in replication])
    return DurabilityReport(
        location=server.link.location,
        version=_join([fields.get("redis_version", UNKNOWN) for fields in servers]),
        primaries=len(servers),
        replicas=replicas,
        settings=settings,
        guarantees=tuple(_guarantees(settings, replicas)),
    )


async def require_durability(server: Server) -> None:
    """Raise `StoreError` unless the server's replies survive a power failure."""
    settings = await _settings(server)
    wrong = [name for name, expected in _REQUIRED_SETTINGS.items() if settings[name] != expected]
    problems = [f"{name} is {settings[name]}" for name in wrong]
    remedies = [f"CONFIG SET {name} {_REQUIRED_SETTINGS[name]}" for name in wrong]
    if _may_evict(settings):
        problems.append(f"maxmemory-policy is {settings['maxmemory-policy']}, which evicts runs")
        remedies.append("CONFIG SET maxmemory-policy noeviction")
    if problems:
        raise StoreError(
            f"Redis at {server.link.location} does not guarantee that writes survive a power "
            f"failure: {'; '.join(problems)}. Run: {'; '.join(remedies)}; CONFIG REWRITE. Or pass "
            'durability="normal" to accept what the server guarantees'
        )


async def _settings(server: Server) -> dict[str, str]:
    return {
        name: _join(
            [_setting(reply) for reply in await server.send_everywhere(("CONFIG", "GET", name))]
        )
        for name in _SETTINGS
    }


def _setting(reply: Any) -> str:
    values = [*reply.values()] if isinstance(reply, Mapping) else reply
    if isinstance(values, Exception) or not values:
        return UNKNOWN
    value: bytes = values[-1]
    return value.decode() or '""'


def _fields(reply: Any) -> dict[str, str]:
    """Return the fields of INFO, which some clients parse; none if it was refused."""
    if isinstance(reply, Exception):
        return {}
    if isinstance(reply, Mapping):
        return {name: str(value) for name, value in reply.items()}
    lines = (line.partition(":") for line in reply.decode().splitlines())
    return {name: value for name, colon, value in lines if colon}


def _join(values: Sequence[str]) -> str:
    return " / ".join(sorted(set(values)))


def _sum(counts: Sequence[str | None]) -> int | None:
    return None if None in counts else sum(int(count or 0) for count in counts)


def _may_evict(settings: Mapping[str, str]) -> bool:
    return settings["maxmemory"] != "0" and settings["maxmemory-policy"].startswith("allkeys")


def _guarantees(settings: Mapping[str, str], replicas: int | None) -> Iterator[str]:
    yield _about_disk(settings)
    if settings["appendonly"] == "yes" and settings["no-appendfsync-on-rewrite"] == "yes":
        yield "no-appendfsync-on-rewrite yes: while the log is rewritten, the disk may be behind"
    yield _about_replicas(settings, replicas)
    if _may_evict(settings):
        yield f"maxmemory-policy {settings['maxmemory-policy']}: a full server evicts whole runs"


def _about_disk(settings: Mapping[str, str]) -> str:
    fsync = settings["appendfsync"]
    match settings["appendonly"]:
        case "yes":
            effect = _FSYNC.get(fsync, "what a power failure loses is unknown")
            return f"appendonly yes, appendfsync {fsync}: {effect}"
        case "no":
            return (
                f"appendonly no, save {settings['save']}: when the server process ends, all writes "
                "since its last dump are lost"
            )
        case other:
            return f"appendonly {other}: what a crash of the server loses is unknown"


def _about_replicas(settings: Mapping[str, str], replicas: int | None) -> str:
    if replicas is None:
        return "replication unknown: what a failover loses is unknown"
    if replicas == 0:
        return "no replicas: if the primary's disk is lost, so are the runs"
    minimum = settings["min-replicas-to-write"]
    return (
        f"{replicas} connected replicas (min-replicas-to-write {minimum}): they receive a write "
        "after the reply, so a failover loses the last writes; those steps run again"
    )
